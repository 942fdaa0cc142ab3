"""`arcuate simulate`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from arcuate.cli.app import Json, app, complete_from, split_commas
from arcuate.cli.console import counted, emit_json, progress, say


@app.command()
def simulate(
    out: Annotated[Path, typer.Argument(help="Folder to write the recordings to.")],
    layout: Annotated[
        str,
        typer.Option(
            help="b2t25 (HDF5, T15), b2t24 (.mat, T12) or falcon-h2 (handwriting, NWB).",
            autocompletion=complete_from("b2t25", "b2t24", "falcon-h2"),
        ),
    ] = "b2t25",
    sessions: Annotated[int, typer.Option(min=1, max=1000, help="Number of sessions.")] = 6,
    trials: Annotated[int, typer.Option(min=4, max=100_000, help="Trials per session, over all splits.")] = 250,
    electrodes: Annotated[int, typer.Option(min=4, max=4096, help="Number of electrodes.")] = 128,
    difficulty: Annotated[
        str,
        typer.Option(
            help="easy, real, hard, or a noise level (1 = real).",
            autocompletion=complete_from("easy", "real", "hard"),
        ),
    ] = "real",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of all random draws.")] = 0,
    later: Annotated[
        str,
        typer.Option(
            help="Additional sessions: for each, the number of days after the last regular session, such as 5,8.",
            metavar="DAYS",
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Simulate recordings and write them as files in the layout of a release."""
    from arcuate.data.simulation import simulate as simulate_cohort

    form = "numbers of days separated by commas, as in 5,8"
    days = split_commas(later, int, "--later", form) if later else []
    counts = {"n_sessions": sessions, "n_trials": trials, "n_electrodes": electrodes}
    options: dict[str, Any] = {"layout": layout, "difficulty": difficulty, "seed": seed, "later": days, **counts}
    with progress("simulating trials") as report:
        result = simulate_cohort(out, **options, progress=report)
    size = f"{counted(len(result.sessions), 'session')} of {counted(trials, 'trial')}, {electrodes} electrodes"
    say(f"{size}, difficulty {difficulty}: {out}")
    if as_json:
        emit_json(result.to_dict())
