"""`arcuate import`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, app, complete_from, split_commas
from arcuate.cli.console import counted, emit_json, out, say


@app.command("import")
def import_(
    checkpoint: Annotated[Path, typer.Argument(help="Official PyTorch checkpoint, file or folder.")],
    out_path: Annotated[Path, typer.Argument(metavar="OUT", help="Model folder to write.")],
    kind: Annotated[
        str,
        typer.Option(help="nejm ('25) or cffan ('24).", autocompletion=complete_from("nejm", "cffan")),
    ] = ...,  # type: ignore[assignment]
    sessions: Annotated[
        str | None,
        typer.Option(help="Comma-separated session names, if the checkpoint does not store them."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert an official checkpoint into a model folder; nothing in the checkpoint is executed."""
    from arcuate.models.import_checkpoint import import_checkpoint

    names = split_commas(sessions, str, "--sessions", "session names") if sessions else None
    result = import_checkpoint(checkpoint, out_path, kind, names)
    if as_json:
        emit_json(result.to_dict())
        return
    if result.ignored:
        say(f"ignored {counted(len(result.ignored), 'unused tensor')}, such as {result.ignored[0]}")
    sizes = {"parameter": result.n_parameters, "channel": result.n_channels, "session": len(result.sessions)}
    size = ", ".join(counted(n, noun) for noun, n in sizes.items())
    out.print(f"{result.model}: {size}", soft_wrap=True, markup=False)
