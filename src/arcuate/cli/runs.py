"""`arcuate runs`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import app


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(help="A folder that holds runs, at any depth.")] = Path("runs"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list on one line on stdout, all else on stderr.")
    ] = False,
) -> None:
    """List runs: verdict, best PER, steps, and what changed against the parent."""
    from arcuate.cli._ledger import runs_command

    runs_command(folder, as_json)
