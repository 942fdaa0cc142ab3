"""`arcuate compare`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, app


@app.command()
def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, or folders of runs; the first is the reference.")
    ],
    split: Annotated[
        str, typer.Option(help="val, test, dev or train; evaluated where that is missing.")
    ] = "val",
    label: Annotated[str | None, typer.Option(help="Compare results/<split>.<label>.jsonl.")] = None,
    over: Annotated[
        str, typer.Option(help="trials: further trials of these sessions; sessions: further sessions.")
    ] = "trials",
    html: Annotated[
        Path | None, typer.Option("--html", help="Also draw curves and differences on a page.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Is the difference real? Same trials, paired; runs that differ only in their seed count as one."""
    from arcuate.cli._compare import compare_command

    compare_command(runs, split, label, over, html, as_json)
