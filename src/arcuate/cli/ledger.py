"""`arcuate ledger`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import app
from arcuate.cli.console import out as console
from arcuate.cli.console import progress, say


@app.command()
def ledger(
    folder: Annotated[Path, typer.Argument(help="Folder that contains runs, at any depth.")] = Path("runs"),
    out: Annotated[Path | None, typer.Option("--out", help="Output file; default: print to stdout.")] = None,
) -> None:
    """Write the run diary from the run folders: purpose, changes, result, finding."""
    from arcuate.doctor import diagnose
    from arcuate.insight.ledger import write_ledger

    with progress("reading runs") as report:
        text = write_ledger(folder, out, diagnose=diagnose, progress=report)
    if out is None:
        console.print(text, markup=False, soft_wrap=True, end="")
    else:
        say(f"wrote {out}")
