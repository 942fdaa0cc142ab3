"""`arcuate prepare`."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from arcuate.cli.app import Force, Json, app
from arcuate.cli.console import counted, emit_json, out, percent, progress, say

if TYPE_CHECKING:
    from arcuate.data.prepare import PrepareReport
    from arcuate.data.quality import Leakage

_MAX_LISTED = 5  # skipped files listed one by one; quality.csv lists all
_ACTIONS = {
    "rejected": "excluded from training",
    "flagged": "validation or test: flagged and kept",
    "kept": "note; kept",
    "ignored": "not recognised; ignored",
    "missing": "could not be read",
}


@app.command()
def prepare(
    source: Annotated[Path, typer.Argument(help="A Brain-to-Text '24 or '25 release, or any parent folder.")],
    store: Annotated[Path, typer.Argument(help="Folder to write the store to.")],
    force: Force = False,
    features: Annotated[
        str, typer.Option(help="'24 layout only: features and area, such as tx1+spikePow:6v.")
    ] = "tx1+spikePow:6v",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be read; write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Convert recording files to a store: checked, hashed, with random access."""
    from arcuate.data.prepare import inspect_source, prepare_store

    with progress("scanning files") as report_progress:
        if dry_run:
            report = inspect_source(source, features=features, progress=report_progress)
        else:
            report = prepare_store(source, store, force=force, features=features, progress=report_progress)
    if as_json:
        emit_json(report.to_dict())
    else:
        print_report(report, store)
    raise typer.Exit(1 if report.unreadable else 0)


def print_report(report: "PrepareReport", store: Path) -> None:
    if not report.written:
        out.print(_files_table(report))
    out.print(_splits_table(report))
    if report.leakage is not None:
        out.print(_leakage_table(report.leakage))
    if cases := Counter((row.reason, row.action) for row in report.quality):
        table = Table("case", "trials", "action", box=None, header_style="bold", title="quality")
        table.title_justify, table.columns[1].justify = "left", "right"
        for (reason, action), n in cases.most_common():
            table.add_row(reason, str(n), _ACTIONS[action])
        out.print(table)
    print_summary(report, store)


def print_summary(report: "PrepareReport", store: Path) -> None:
    """Size of the store in one line, after notes and skipped files."""
    from arcuate.data.store import QUALITY_FILE

    for note in report.notes:
        say(note)
    for rows, verb in ((report.rows("ignored"), "ignored"), (report.unreadable, "could not read")):
        for row in rows[:_MAX_LISTED]:
            say(f"{verb} {row.trial}: {row.detail}")
        if len(rows) > _MAX_LISTED:
            say(f"{verb} {len(rows) - _MAX_LISTED} more")
    channels = counted(report.n_channels, "channel") if report.n_channels else "no channels"
    size = f"{counted(report.trials, 'trial')} in {counted(len(report.sessions), 'session')}, {channels}"
    if not report.written:
        out.print(f"{report.layout}: {size}; nothing was written", soft_wrap=True)
        return
    cases = f"; {counted(len(report.quality), 'case')} in {store / QUALITY_FILE}" if report.quality else ""
    out.print(f"{report.layout}: {size} → {store}{cases}", soft_wrap=True, markup=False)


def leakage_line(leakage: "Leakage") -> str:
    """Leakage between the splits in one line."""
    recordings = counted(sum(leakage["trials"].values()), "recording")
    texts = ", ".join(
        f"{overlap['n']} of {overlap['of']} {pair.replace(' in ', ' sentences in ')}"
        for pair, overlap in leakage["texts"].items()
        if overlap["share"] is not None
    )
    return f"leakage: {recordings} in two splits; {texts or 'no sentences to compare'}"


def _files_table(report: "PrepareReport") -> Table:
    from arcuate.data.trial import SPLITS

    table = _table("session", *SPLITS)
    for session in report.sessions:
        counts = (report.files.get(f"{session}/{split}") for split in SPLITS)
        table.add_row(escape(session), *("–" if n is None else str(n) for n in counts))
    return table


def _splits_table(report: "PrepareReport") -> Table:
    from arcuate.data.trial import BIN_SECONDS

    table = _table("split", "trials", "usable", "hours", "hash")
    table.columns[4].justify = "left"
    for split, counts in report.splits.items():
        hours = f"{counts['n_bins'] * BIN_SECONDS / 3600:.2f}" if "n_bins" in counts else "–"
        usable = str(counts.get("usable", "–"))
        table.add_row(split, str(counts["trials"]), usable, hours, report.hashes.get(split, "–")[:12])
    return table


def _leakage_table(leakage: "Leakage") -> Table:
    table = _table("leakage", "n", "share")
    for pair, n in leakage["trials"].items():
        table.add_row(f"same recording in {pair.replace('-', ' and ')}", str(n), "")
    for pair, overlap in leakage["texts"].items():
        share = percent(overlap["share"]) if overlap["share"] is not None else "no texts"
        table.add_row(f"sentences of {pair}", str(overlap["n"]), share)
    return table


def _table(first: str, *numbers: str) -> Table:
    table = Table(first, *numbers, box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    return table
