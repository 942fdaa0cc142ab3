"""`arcuate demo`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, WithSettings, app


@app.command(cls=WithSettings)
def demo(
    run: Annotated[Path, typer.Option(help="Run folder; replaced if the demo made it.")] = Path("runs/demo"),
    data: Annotated[Path, typer.Option(help="Data folder; replaced if the demo made it.")] = Path(
        "data/demo"
    ),
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value, as for train.")] = None,
    as_json: Json = False,
) -> None:
    """Walk the whole path on simulated data: simulate, prepare, train, evaluate, report."""
    from arcuate.cli._demo import run_demo

    run_demo(run, data, overrides or [], as_json)
