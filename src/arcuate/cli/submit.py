"""`arcuate submit`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, app


@app.command()
def submit(
    run: Annotated[Path, typer.Argument(help="A run folder with word decodings, or a file of them.")],
    out: Annotated[Path, typer.Option(help="File to write: CSV for '25, text for '24.")] = ...,  # type: ignore[assignment]
    split: Annotated[str, typer.Option(help="test, or another to try out.")] = "test",
    label: Annotated[str | None, typer.Option(help="Of results/<split>.<label>.jsonl.")] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="b2t25 or b2t24; else by the session names.")
    ] = None,
    allow_empty: Annotated[bool, typer.Option("--allow-empty", help="Hand in empty texts too.")] = False,
    as_json: Json = False,
) -> None:
    """Write decoded texts as the benchmarks want them handed in."""
    from arcuate.cli._submit import submit_command

    submit_command(run, out, split, label, format_, allow_empty, as_json)
