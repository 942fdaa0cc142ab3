"""`arcuate prepare`."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from arcuate.cli.console import counted, emit_json, out, percent, progress, say
from arcuate.data.prepare import PrepareReport, check_places, look, prepare
from arcuate.data.readers import find_source
from arcuate.data.readers.b2t24 import DEFAULT_FEATURES
from arcuate.data.store import QUALITY_FILE
from arcuate.data.trial import BIN_SECONDS, SPLITS

_SHOWN = 5  # unread files named one by one; the table has them all


def prepare_command(
    source: Path,
    store: Path,
    *,
    force: bool = False,
    dry_run: bool = False,
    as_json: bool = False,
    features: str = DEFAULT_FEATURES,
) -> int:
    """Everything `arcuate prepare` does; returns its exit code: 1 if something could not be read."""
    if dry_run:
        find_source(source)
        with progress("looking at files") as tell:
            report = look(source, features=features, progress=tell)
    else:
        report = prepare_store(source, store, force=force, features=features, quiet=True)
    if as_json:
        emit_json(report.to_json())
    else:
        show(report, store)
    return report.exit_code


def prepare_store(
    source: Path, store: Path, *, force: bool = False, features: str = DEFAULT_FEATURES, quiet: bool = False
) -> PrepareReport:
    """Prepare with a progress bar; tells in a line what became of it unless quiet."""
    check_places(source, store, force)  # a mistake is told before a progress bar appears
    with progress("preparing") as tell:
        report = prepare(source, store, force=force, features=features, progress=tell)
    if not quiet:
        show_summary(report, store)
        if report.leakage is not None:
            say(leakage_line(report.leakage))
    return report


def show(report: PrepareReport, store: Path) -> None:
    """The result for a person."""
    if not report.written:
        out.print(_files_table(report))
    out.print(_splits_table(report))
    if report.leakage is not None:
        out.print(_leakage_table(report))
    if cases := Counter((row.reason, row.action) for row in report.quality):
        table = Table("case", "trials", "what was done", box=None, header_style="bold", title="quality")
        table.title_justify, table.columns[1].justify = "left", "right"
        for (reason, action), n in cases.most_common():
            table.add_row(reason, str(n), _ACTIONS[action])
        out.print(table)
    show_summary(report, store)


_ACTIONS = {
    "rejected": "kept out of training",
    "flagged": "validation or test: flagged and kept",
    "kept": "a remark; kept",
    "ignored": "not recognised; left alone",
    "missing": "could not be read",
}


def show_summary(report: PrepareReport, store: Path) -> None:
    for note in report.notes:
        say(f"note: {note}")
    for action, told in (("ignored", "left alone"), ("missing", "could not read")):
        rows = report.rows(action)
        for row in rows[:_SHOWN]:
            say(f"{told} {row.trial}: {row.detail}")
        if len(rows) > _SHOWN:
            say(f"{told} {len(rows) - _SHOWN} more")
    channels = counted(report.n_channels, "channel") if report.n_channels else "no channels"
    size = f"{counted(report.trials, 'trial')} in {counted(len(report.sessions), 'session')}, {channels}"
    if report.written:
        n_cases = len(report.quality)
        cases = f"; {counted(n_cases, 'case')} in {store / QUALITY_FILE}" if n_cases else ""
        out.print(f"{report.layout}: {size} → {store}{cases}", soft_wrap=True, markup=False)
    else:
        out.print(f"{report.layout}: {size}; nothing was written", soft_wrap=True)


def leakage_line(leakage: Mapping[str, Any]) -> str:
    """What the splits share, in a line."""
    recordings = counted(sum(leakage["trials"].values()), "recording")
    texts = ", ".join(
        f"{found['n']} of {found['of']} {pair.replace(' in ', ' sentences in ')}"
        for pair, found in leakage["texts"].items()
        if found["share"] is not None
    )
    return f"leakage: {recordings} in two splits; {texts or 'no sentences to compare'}"


def _files_table(report: PrepareReport) -> Table:
    table = Table("session", *SPLITS, box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for session in report.sessions:
        counts = (report.files.get(f"{session}/{split}") for split in SPLITS)
        table.add_row(escape(session), *("–" if n is None else str(n) for n in counts))
    return table


def _splits_table(report: PrepareReport) -> Table:
    table = Table("split", "trials", "usable", "hours", "hash", box=None, header_style="bold")
    for column in table.columns[1:4]:
        column.justify = "right"
    for split, counts in report.splits.items():
        hours = f"{counts['n_bins'] * BIN_SECONDS / 3600:.2f}" if "n_bins" in counts else "–"
        usable = str(counts.get("usable", "–"))
        table.add_row(split, str(counts["trials"]), usable, hours, report.hashes.get(split, "–")[:12])
    return table


def _leakage_table(report: PrepareReport) -> Table:
    leakage = report.leakage or {}
    table = Table("leakage", "n", "share", box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for pair, n in leakage["trials"].items():
        table.add_row(f"same recording in {pair.replace('-', ' and ')}", str(n), "")
    for pair, found in leakage["texts"].items():
        share = percent(found["share"]) if found["share"] is not None else "no texts"
        table.add_row(f"sentences of {pair}", str(found["n"]), share)
    return table
