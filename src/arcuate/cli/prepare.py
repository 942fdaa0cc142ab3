"""`arcuate prepare`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Force, Json, app


@app.command()
def prepare(
    source: Annotated[Path, typer.Argument(help="A Brain-to-Text '24 or '25 release, or any parent folder.")],
    store: Annotated[Path, typer.Argument(help="Folder to write the canonical store to.")],
    force: Force = False,
    features: Annotated[
        str, typer.Option(help="'24 only: which recordings of which area, such as tx1+spikePow:6v.")
    ] = "tx1+spikePow:6v",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be read; write nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Turn recording files into the canonical store: checked, hashed, ready for random access."""
    from arcuate.cli._prepare import prepare_command

    raise typer.Exit(
        prepare_command(source, store, force=force, dry_run=dry_run, as_json=as_json, features=features)
    )
