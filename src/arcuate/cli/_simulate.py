"""`arcuate simulate`."""

from pathlib import Path
from typing import Any, cast

from arcuate.cli.console import counted, emit_json, progress, say
from arcuate.data.simulation import simulate
from arcuate.data.simulation.cohort import Layout, check_request
from arcuate.errors import UserError


def simulate_command(
    out: Path,
    layout: str,
    sessions: int,
    trials: int,
    electrodes: int,
    difficulty: str,
    seed: int,
    force: bool,
    as_json: bool,
    later: str = "",
) -> None:
    days = later_days(later)
    summary = simulate_cohort(out, layout, sessions, trials, electrodes, difficulty, seed, force, days)
    if as_json:
        emit_json(summary)


def simulate_cohort(
    out: Path,
    layout: str,
    sessions: int,
    trials: int,
    electrodes: int,
    difficulty: str,
    seed: int,
    force: bool,
    later: tuple[int, ...] = (),
) -> dict[str, Any]:
    check_request(  # before a bar appears
        out, layout, sessions, trials, electrodes, difficulty, seed, force, later=later
    )
    with progress("simulating trials") as report:
        summary = simulate(
            out,
            layout=cast(Layout, layout),  # refused inside where it is unknown
            n_sessions=sessions,
            n_trials=trials,
            n_electrodes=electrodes,
            difficulty=difficulty,
            seed=seed,
            later=later,
            replace=force,
            progress=lambda done, total: report(done, total, "simulating trials"),
        )
    size = f"{counted(sessions + len(later), 'session')} of {trials} trials, {electrodes} electrodes"
    say(f"{size}, difficulty {difficulty}: {out}")
    return summary


def later_days(text: str) -> tuple[int, ...]:
    """Days after the last session, a comma between them."""
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise UserError(f"--later {text!r} should be days with a comma between them, such as 5,8") from None
