"""`arcuate doctor`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, app


@app.command()
def doctor(
    path: Annotated[Path, typer.Argument(help="A run folder, or a log that any trainer or tracker wrote.")],
    dataset: Annotated[str | None, typer.Option(help="b2t24 or b2t25; left out: inferred.")] = None,
    planned_steps: Annotated[
        int | None, typer.Option(min=1, help="How long the run was meant to be; left out: inferred.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a page with the curves.")] = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read a pickle; nothing in it is executed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """What happened in a training run: a verdict, since when, the evidence, causes and what to try."""
    from arcuate.cli._doctor import doctor_command

    doctor_command(path, dataset, planned_steps, allow_pickle, html, as_json)
