"""`arcuate average`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, app
from arcuate.cli.console import emit_json, progress, say


@app.command()
def average(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    last: Annotated[
        int | None, typer.Option(min=2, max=1_000_000, help="Number of newest checkpoints to average.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Average the kept checkpoints of a run (train.keep_checkpoints) into checkpoints/average."""
    from arcuate.experiments.average import NAME
    from arcuate.experiments.average import average as average_checkpoints

    with progress("averaging") as report:
        averaged = average_checkpoints(run, last=last, progress=report)
    if as_json:
        emit_json(averaged.to_dict())
        return
    say(f"wrote the mean of {', '.join(averaged.checkpoints)} to {averaged.path}")
    say(f"next: arcuate evaluate {run} --checkpoint {NAME} --label {NAME}")
