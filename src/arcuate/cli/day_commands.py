"""Commands about new recording days: calibrate, drift."""

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
        list[str] | None, typer.Option("--set", help="key=value, such as rest=0 or like=mean.")
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
    from arcuate.cli.calibrate import Asked, calibrate_command

    asked = Asked(run, data, session, out, sentences, curve, tuple(setting or ()), checkpoint, dry_run)
    raise typer.Exit(calibrate_command(asked, as_json))


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
    from arcuate.cli.drift import Asked, drift_command

    drift_command(Asked(store, run, out, adapt, split, reference, trials), as_json)
