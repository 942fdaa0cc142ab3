"""`arcuate board`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import app


@app.command()
def board(
    folder: Annotated[Path, typer.Argument(help="Folder that contains runs, at any depth.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8766,
    host: Annotated[
        str, typer.Option(help="Address to listen on; non-loopback addresses require a token.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(help="Access token for clients; default: none on loopback, random otherwise.")
    ] = None,
) -> None:
    """Serve one page for all runs, updated while they train (extra: live)."""
    from arcuate.doctor import diagnose
    from arcuate.doctor.page import diagnosis_page
    from arcuate.insight.board import prepare_board

    prepared = prepare_board(
        folder,
        host=host,
        port=port,
        token=token,
        diagnose=diagnose,
        diagnosis_page=lambda run: diagnosis_page(diagnose(run)),
    )
    prepared.run()
