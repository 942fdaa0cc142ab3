"""`arcuate drift`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arcuate.cli.app import Json, app, complete_from

if TYPE_CHECKING:
    from arcuate.adaptation.drift import DriftResult


@app.command()
def drift(
    store: Annotated[Path, typer.Argument(help="Prepared store.")],
    run: Annotated[Path | None, typer.Option("--run", help="Run to evaluate; adds its error rate by session.")] = None,
    out: Annotated[Path, typer.Option("--out", help="HTML page to write.")] = Path("drift.html"),
    adapt: Annotated[
        str,
        typer.Option(
            help="With --run: adaptation method.",
            autocompletion=complete_from("none", "statistics", "one-step", "replay", "entropy"),
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
    from arcuate.adaptation.drift import measure_drift
    from arcuate.cli.console import check_output, emit_json, progress
    from arcuate.insight.drift import write_drift_page

    check_output(out, "<!doctype html>", "drift.html")
    with progress("measuring sessions") as report:
        result = measure_drift(
            store, run, adapt=adapt, split=split, reference=reference, max_trials=trials, progress=report
        )
    write_drift_page(result, out)
    emit_json({**result.to_dict(), "page": str(out)}) if as_json else print_drift(result, out)


def print_drift(result: "DriftResult", page: Path) -> None:
    """Print the similarity of all sessions to the reference session."""
    from rich.table import Table

    from arcuate.cli.console import counted, percent, say
    from arcuate.cli.console import out as console

    table = Table(box=None, header_style="bold", title=f"similarity to {result.reference}", title_justify="left")
    table.add_column("session")
    for name in ("channels", *result.sessions[0].arrays, "flat"):
        table.add_column(name, justify="right")
    for row in result.sessions:
        arrays = [percent(array.subspace_similarity) for array in row.arrays.values()]
        table.add_row(row.session, percent(row.profile_similarity), *arrays, str(len(row.flat)))
    console.print(table)
    for row in result.sessions:
        if row.reordered:
            say(f"warning: the channels of {row.session} look re-ordered relative to the previous session")
        if row.newly_flat:
            say(f"{row.session}: {counted(len(row.newly_flat), 'channel')} became flat")
    say(f"wrote {page}")
