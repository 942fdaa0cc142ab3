"""`arcuate prepare`."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arcuate.cli.app import Force, Json, app, complete_from
from arcuate.cli.console import counted, emit_json, out, percent, print_table, progress, say

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
    source: Annotated[Path, typer.Argument(help="Recordings: a release, a folder that contains it, or NWB files.")],
    store: Annotated[
        Path | None, typer.Argument(help="Folder to write the store to; not needed with --dry-run.")
    ] = None,
    force: Force = False,
    layout: Annotated[
        str | None,
        typer.Option(
            help="b2t25, b2t24, nwb, falcon-h2, an NWB mapping file (.yaml), or the name or import path of your reader;"
            " default: the release found.",
        ),
    ] = None,
    features: Annotated[
        str | None, typer.Option(help="'24 layout only: features and area; default: tx1+spikePow:6v.")
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(
            help="Derive the labels from the texts: characters or phonemes; default: the labels of the recordings.",
            autocompletion=complete_from("characters", "phonemes"),
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse labels that contradict their sentences.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Read and check everything, compare a release with its published numbers."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Check recordings and convert them to a store: one array of bins per session, with random access to trials."""
    from arcuate.data.prepare import prepare as prepare_data

    options: dict[str, Any] = {"layout": layout, "features": features, "targets": targets, "strict": strict}
    with progress("reading files") as report_progress:
        prepared = prepare_data(source, store, force=force, dry_run=dry_run, progress=report_progress, **options)
    report = prepared.report
    if as_json:
        emit_json(report.to_dict())
    else:
        print_report(report, store)
    raise typer.Exit(1 if report.unreadable else 0)


def print_report(report: "PrepareReport", store: Path | None) -> None:
    if not report.written:
        _print_files(report)
    _print_splits(report)
    _print_leakage(report.leakage)
    if cases := Counter((row.reason, row.action) for row in report.quality):
        rows = [(reason, str(n), _ACTIONS[action]) for (reason, action), n in cases.most_common()]
        print_table(("case", "trials", "action"), rows, title="quality", right=("trials",))
    if not report.written:
        if report.release:
            checks = [(c.what, c.found, c.expected, "differs" if c.differs else "ok") for c in report.release]
            print_table(("property", "found", "published", "status"), checks, title="release")
        if report.mapping is not None:
            _print_mapping(report.mapping)
    print_summary(report, store)


def print_summary(report: "PrepareReport", store: Path | None) -> None:
    """Size of the store in one line, after notes and skipped files."""
    from arcuate.data.store import QUALITY_FILE

    for note in report.notes:
        say(note)
    for rows, verb in ((report.rows("ignored"), "ignored"), (report.unreadable, "could not read")):
        for row in rows[:_MAX_LISTED]:
            say(f"{verb} {row.trial}: {row.detail}")
        if len(rows) > _MAX_LISTED:
            say(f"{verb} {len(rows) - _MAX_LISTED} more")
    channels = counted(report.n_channels, "channel")
    size = f"{counted(report.trials, 'trial')} in {counted(len(report.sessions), 'session')}, {channels}"
    if not report.written or store is None:
        out.print(f"{report.layout}: {size}; nothing was written", soft_wrap=True)
        return
    cases = f"; {counted(len(report.quality), 'case')} in {store / QUALITY_FILE}" if report.quality else ""
    out.print(f"{report.layout}: {size} → {store}{cases}", soft_wrap=True, markup=False)


def _print_mapping(mapping: Mapping[str, Any]) -> None:
    """The mapping of NWB files as YAML, to save, edit and pass as --layout FILE.yaml."""
    import yaml

    lines = yaml.safe_dump(dict(mapping), sort_keys=False, allow_unicode=True).splitlines()
    out.print("\n".join(["mapping (save it as a .yaml file, edit it, and pass it as --layout)", *lines]), markup=False)


def leakage_line(leakage: "Leakage") -> str:
    """Leakage between the splits in one line."""
    recordings = counted(sum(leakage["trials"].values()), "recording")
    texts = ", ".join(
        f"{overlap['n']} of {overlap['of']} {pair.replace(' in ', ' sentences in ')}"
        for pair, overlap in leakage["texts"].items()
        if overlap["share"] is not None
    )
    return f"leakage: {recordings} in two splits; {texts or 'no sentences to compare'}"


def _print_files(report: "PrepareReport") -> None:
    from arcuate.data.trial import SPLITS

    rows = []
    for session in report.sessions:
        counts = (report.files.get(f"{session}/{split}") for split in SPLITS)
        rows.append((session, *("–" if n is None else str(n) for n in counts)))
    print_table(("session", *SPLITS), rows, right=SPLITS)


def _print_splits(report: "PrepareReport") -> None:
    from arcuate.data.trial import BIN_SECONDS

    rows = []
    for split, counts in report.splits.items():
        hours = f"{counts['n_bins'] * BIN_SECONDS / 3600:.2f}" if "n_bins" in counts else "–"
        usable = str(counts.get("usable", "–"))
        rows.append((split, str(counts["trials"]), usable, hours, report.hashes.get(split, "–")[:12]))
    print_table(("split", "trials", "usable", "hours", "hash"), rows, right=("trials", "usable", "hours"))


def _print_leakage(leakage: "Leakage") -> None:
    rows = [(f"same recording in {pair.replace('-', ' and ')}", str(n), "") for pair, n in leakage["trials"].items()]
    for pair, overlap in leakage["texts"].items():
        share = percent(overlap["share"]) if overlap["share"] is not None else "no texts"
        rows.append((f"sentences of {pair}", str(overlap["n"]), share))
    print_table(("leakage", "n", "share"), rows, right=("n", "share"))
