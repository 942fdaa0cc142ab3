"""`arcuate report`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arcuate.cli.app import SPLITS, Json, app, complete_from
from arcuate.cli.console import counted, emit_json, out, percent, print_table, progress, say

if TYPE_CHECKING:
    from arcuate.adaptation.drift import DriftResult


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run folder, or prepared store.")],
    split: Annotated[
        str | None,
        typer.Option(
            help="Split whose results are shown; default: the first evaluated of val, test, dev, train.",
            autocompletion=complete_from(*SPLITS),
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML page about a run, or about the changes of a store's recordings over sessions."""
    from arcuate.insight.report.drift import is_store, report_file, write_drift
    from arcuate.insight.report.page import write_report

    if is_store(run):
        with progress("measuring sessions") as measuring:
            drift = write_drift(run, progress=measuring)
        written, measured = report_file(drift.store), drift.to_dict()
        if not as_json:
            _print_drift(drift)
    else:
        written, measured = write_report(run, split), {}
    if as_json:
        emit_json({"report": str(written), **measured})
    else:
        out.print(f"{written}", soft_wrap=True, markup=False)


def _print_drift(result: "DriftResult") -> None:
    columns = ("channels", *result.sessions[0].arrays, "flat")
    rows = []
    for row in result.sessions:
        arrays = [percent(array.profile_similarity) for array in row.arrays.values()]
        rows.append((row.session, percent(row.profile_similarity), *arrays, str(len(row.flat))))
    print_table(("session", *columns), rows, title=f"similarity to {result.reference}", right=columns)
    for row in result.sessions:
        if row.reordered:
            say(f"warning: the channels of {row.session} look re-ordered relative to the previous session")
        if row.newly_flat:
            say(f"{row.session}: {counted(len(row.newly_flat), 'channel')} became flat")
