"""`arcuate cite`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, app
from arcuate.cli.console import emit_json, out, say


@app.command()
def cite(run: Annotated[Path, typer.Argument(help="Run folder.")], as_json: Json = False) -> None:
    """Print what to cite for a run: software, data set and methods."""
    from arcuate.evaluation.cite import cite as find_references

    result = find_references(run)
    if as_json:
        emit_json(result.to_dict())
        return
    for reference in result.references:
        out.print(f"{reference.reason}: {reference.reference}", soft_wrap=True, markup=False, highlight=False)
    if result.note:
        say(result.note)
