"""`arcuate report`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import SPLITS, Json, app, complete_from
from arcuate.cli.console import emit_json, out


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    split: Annotated[
        str | None,
        typer.Option(
            help="Split whose results are shown; default: the first evaluated of val, test, dev, train.",
            autocompletion=complete_from(*SPLITS),
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML page about a run."""
    from arcuate.insight.report import write_report

    written = write_report(run, split)
    if as_json:
        emit_json({"report": str(written)})
    else:
        out.print(f"{written}", soft_wrap=True, markup=False)
