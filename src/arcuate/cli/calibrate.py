"""`arcuate calibrate`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, StorePath, app, split_commas
from arcuate.cli.console import counted, emit_json, percent, print_table, progress, say


@app.command()
def calibrate(
    run: Annotated[Path, typer.Argument(help="RUN or RUN@CHECKPOINT to start from; it is not changed.")],
    data: StorePath = ...,  # type: ignore[assignment]
    session: Annotated[str, typer.Option("--session", help="Session to add.")] = ...,  # type: ignore[assignment]
    sentences: Annotated[
        int, typer.Option(help="Number of labelled sentences of the session to use, from the first.")
    ] = 20,
    target: Annotated[
        Path | None, typer.Option("--run", help="Run folder to write; default: RUN-SESSION beside RUN.")
    ] = None,
    curve: Annotated[
        str | None,
        typer.Option(
            help="Points of the calibration curve, as numbers of sentences, such as 5,10,20; none = no curve."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Add a recording session to a trained model, using a few labelled sentences from it."""
    from arcuate.data.alphabet import error_rate_name
    from arcuate.experiments.calibrate import calibrate as calibrate_run

    points: list[int] | None = [] if curve == "none" else None
    if curve is not None and curve != "none":
        points = split_commas(curve, int, "--curve", "numbers of sentences, such as 5,10,20")
    with progress("calibrating") as report:
        result = calibrate_run(
            *(run, data, session),
            out=target,
            sentences=sentences,
            curve=points,
            progress=report,
        )
    if result.interrupted:
        say(f"stopped by {result.signal.name if result.signal else 'request'}: nothing was written")
        raise typer.Exit(128 + result.signal if result.signal else 1)
    if as_json:
        emit_json(result.to_dict())
        return
    rows = []
    for point in result.curve:
        interval = "–" if point.low is None else f"{percent(point.low)} to {percent(point.high)}"
        rows.append((str(point.sentences), percent(point.per), interval))
    if result.n_held_out:
        name = error_rate_name(result.classes)
        headings = ("sentences", name, "95 % interval")
        title = f"{name} on the {counted(result.n_held_out, 'later sentence')} of the session"
        print_table(headings, rows, title=title, right=headings)
    say(f"wrote {result.path} with session {result.session}; its parent {result.parent} is unchanged")
    say(f"next: arcuate report {result.path}, arcuate evaluate {result.path}")
