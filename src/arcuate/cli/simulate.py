"""`arcuate simulate`."""

from pathlib import Path
from typing import Any, cast

from arcuate.cli.console import counted, emit_json, progress, say
from arcuate.simulate import simulate
from arcuate.simulate.cohort import Layout, check_request


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
) -> None:
    summary = simulate_cohort(out, layout, sessions, trials, electrodes, difficulty, seed, force)
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
) -> dict[str, Any]:
    check_request(out, layout, sessions, trials, electrodes, difficulty, seed, force)  # before a bar appears
    with progress("simulating trials") as report:
        summary = simulate(
            out,
            layout=cast(Layout, layout),  # refused inside where it is unknown
            n_sessions=sessions,
            n_trials=trials,
            n_electrodes=electrodes,
            difficulty=difficulty,
            seed=seed,
            replace=force,
            progress=lambda done, total: report(done, total, "simulating trials"),
        )
    size = f"{counted(sessions, 'session')} of {trials} trials, {electrodes} electrodes"
    say(f"{size}, difficulty {difficulty}: {out}")
    return summary
