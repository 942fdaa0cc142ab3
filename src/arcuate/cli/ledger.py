"""`arcuate ledger`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import app


@app.command()
def ledger(
    folder: Annotated[Path, typer.Argument(help="A folder that holds runs, at any depth.")] = Path("runs"),
    out: Annotated[Path | None, typer.Option("--out", help="File to write; left out: printed.")] = None,
) -> None:
    """Write the run diary from the run folders: purpose, changes, result, finding."""
    from arcuate.cli._ledger import ledger_command

    ledger_command(folder, out)
