"""`arcuate simulate`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Force, Json, app, complete_from


@app.command()
def simulate(
    out: Annotated[Path, typer.Argument(help="Folder to write, in the layout of a release.")],
    layout: Annotated[
        str,
        typer.Option(
            help="b2t25 (HDF5, T15) or b2t24 (.mat, T12).", autocompletion=complete_from("b2t25", "b2t24")
        ),
    ] = "b2t25",
    sessions: Annotated[int, typer.Option(min=1, max=1000)] = 6,
    trials: Annotated[int, typer.Option(min=4, max=100_000, help="Per session, all splits together.")] = 250,
    electrodes: Annotated[int, typer.Option(min=4, max=4096)] = 128,
    difficulty: Annotated[
        str,
        typer.Option(
            help="easy, real, hard, or a number (1 = real).",
            autocompletion=complete_from("easy", "real", "hard"),
        ),
    ] = "real",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    later: Annotated[
        str, typer.Option(help="More sessions so many days after the last, such as 5,8.", metavar="DAYS")
    ] = "",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Simulate a cohort of recordings, as files in exactly the layout of a release."""
    from arcuate.cli._simulate import simulate_command

    simulate_command(out, layout, sessions, trials, electrodes, difficulty, seed, force, as_json, later)
