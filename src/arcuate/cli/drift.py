"""`arcuate drift`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, app, complete_from


@app.command()
def drift(
    store: Annotated[Path, typer.Argument(help="A prepared store.")],
    run: Annotated[Path | None, typer.Option("--run", help="A run, for its error rate by day.")] = None,
    out: Annotated[Path, typer.Option("--out", help="HTML page to write.")] = Path("drift.html"),
    adapt: Annotated[
        str,
        typer.Option(
            help="With --run: how days are followed.",
            autocompletion=complete_from("none", "statistics", "one-step", "replay", "entropy"),
        ),
    ] = "one-step",
    split: Annotated[str, typer.Option(help="With --run: val, test, dev or train.")] = "val",
    reference: Annotated[
        str | None, typer.Option(help="Session to compare with; left out: the last known one, or the first.")
    ] = None,
    trials: Annotated[int, typer.Option(min=2, max=100_000, help="Trials to look at, of each day.")] = 40,
    as_json: Json = False,
) -> None:
    """See how recordings change over days: tuning, dead channels, error rates."""
    from arcuate.cli._drift import Asked, drift_command

    drift_command(Asked(store, run, out, adapt, split, reference, trials), as_json)
