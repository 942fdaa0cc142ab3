"""`arcuate import`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, app, complete_from


@app.command("import")
def import_(
    checkpoint: Annotated[Path, typer.Argument(help="An official PyTorch checkpoint, file or folder.")],
    out: Annotated[Path, typer.Argument(help="Model folder to write.")],
    kind: Annotated[
        str,
        typer.Option(help="nejm ('25) or cffan ('24).", autocompletion=complete_from("nejm", "cffan")),
    ] = ...,  # type: ignore[assignment]
    sessions: Annotated[
        str | None, typer.Option(help="Session names, comma between them, where the checkpoint has none.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert an official checkpoint; nothing in it is executed."""
    from arcuate.cli._import import import_command

    import_command(checkpoint, out, kind, sessions, as_json)
