"""`arcuate drift`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, app, complete_method
from arcuate.cli.console import counted, emit_json, percent, print_table, progress, say


@app.command()
def drift(
    store: Annotated[Path, typer.Argument(help="Prepared store.")],
    run: Annotated[Path | None, typer.Option("--run", help="Run to evaluate; adds its error rate by session.")] = None,
    out: Annotated[Path, typer.Option("--out", help="HTML page to write.")] = Path("drift.html"),
    adapt: Annotated[
        str,
        typer.Option(
            help="With --run: adaptation method.",
            autocompletion=complete_method,
        ),
    ] = "one-step",
    split: Annotated[str, typer.Option(help="With --run: val, test, dev or train.")] = "val",
    reference: Annotated[
        str | None,
        typer.Option(
            help="Session to compare with; default: last session the run was trained on, or the first in the store."
        ),
    ] = None,
    trials: Annotated[int, typer.Option(min=2, max=100_000, help="Trials to examine per session.")] = 40,
    as_json: Json = False,
) -> None:
    """Measure how recordings change over sessions: tuning, dead channels, error rates."""
    from arcuate.insight.drift import write_drift

    with progress("measuring sessions") as report:
        result = write_drift(
            *(store, run),
            out=out,
            adapt=adapt,
            split=split,
            reference=reference,
            max_trials=trials,
            progress=report,
        )
    if as_json:
        emit_json({**result.to_dict(), "page": str(out)})
        return
    columns = ("channels", *result.sessions[0].arrays, "flat")
    rows = []
    for row in result.sessions:
        arrays = [percent(array.subspace_similarity) for array in row.arrays.values()]
        rows.append((row.session, percent(row.profile_similarity), *arrays, str(len(row.flat))))
    print_table(("session", *columns), rows, title=f"similarity to {result.reference}", right=columns)
    for row in result.sessions:
        if row.reordered:
            say(f"warning: the channels of {row.session} look re-ordered relative to the previous session")
        if row.newly_flat:
            say(f"{row.session}: {counted(len(row.newly_flat), 'channel')} became flat")
    say(f"wrote {out}")
