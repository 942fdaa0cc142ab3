"""`arcuate report`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import SPLITS, Json, app, complete_from


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    split: Annotated[
        str | None, typer.Option(help="Which results to show.", autocompletion=complete_from(*SPLITS))
    ] = None,
    as_json: Json = False,
) -> None:
    """One self-contained HTML page about a run."""
    from arcuate.cli._report import report_command

    report_command(run, split, as_json)
