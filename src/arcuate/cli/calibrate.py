"""`arcuate calibrate`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, app, complete_from


@app.command()
def calibrate(
    run: Annotated[Path, typer.Argument(help="The run to start from; it stays as it is.")],
    data: Annotated[Path, typer.Option("--data", help="A prepared store with the new day.")] = ...,  # type: ignore[assignment]
    session: Annotated[str, typer.Option("--session", help="The new day.")] = ...,  # type: ignore[assignment]
    sentences: Annotated[int, typer.Option(help="How many of its first sentences to use.")] = 20,
    out: Annotated[
        Path | None, typer.Option("--run", help="Run folder to write; left out: RUN-SESSION beside it.")
    ] = None,
    curve: Annotated[
        str | None, typer.Option(help="Where to measure the curve, such as 5,10,20; none for no curve.")
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, such as other_lr_factor=0 or init=mean.")
    ] = None,
    checkpoint: Annotated[
        str,
        typer.Option(help="best, last or step-NNNNNNNN.", autocompletion=complete_from("best", "last")),
    ] = "best",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, say what would be done; write nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Add a recording day to a trained model, from a few of its sentences."""
    from arcuate.cli._calibrate import Asked, calibrate_command

    asked = Asked(run, data, session, out, sentences, curve, tuple(setting or ()), checkpoint, dry_run)
    raise typer.Exit(calibrate_command(asked, as_json))
