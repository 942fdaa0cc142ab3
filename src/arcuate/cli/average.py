"""`arcuate average`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, app


@app.command()
def average(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    last: Annotated[
        int | None, typer.Option(min=2, max=1_000_000, help="Only so many of the newest checkpoints.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The mean of a run's checkpoints, as checkpoints/average; they are kept by train.keep_checkpoints."""
    from arcuate.cli._average import average_command

    average_command(run, last, as_json)
