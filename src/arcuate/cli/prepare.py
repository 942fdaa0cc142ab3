"""`arcuate prepare`."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arcuate.cli.app import Force, Json, app, complete_from
from arcuate.cli.console import counted, emit_json, out, percent, print_table, progress, say
from arcuate.errors import UserError

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
    source: Annotated[Path, typer.Argument(help="A Brain-to-Text '24 or '25 release, or a folder that contains it.")],
    store: Annotated[
        Path | None, typer.Argument(help="Folder to write the store to; not needed with --describe.")
    ] = None,
    force: Force = False,
    features: Annotated[
        str, typer.Option(help="'24 layout only: features and area, such as tx1+spikePow:6v.")
    ] = "tx1+spikePow:6v",
    layout: Annotated[
        str | None,
        typer.Option(
            help="Reader: nwb, falcon-h2, corp, handwriting, the name of an installed reader, or an import path;"
            " default: detected ('24 or '25 release).",
        ),
    ] = None,
    mapping: Annotated[
        Path | None, typer.Option(help="YAML file that maps the columns of an NWB file; see --describe.")
    ] = None,
    describe: Annotated[
        bool,
        typer.Option("--describe", help="Print the contents of one HDF5, NWB or MATLAB file, and a suggested mapping."),
    ] = False,
    targets: Annotated[
        str | None,
        typer.Option(
            help="Derive the labels from the texts: characters or phonemes; default: the labels of the recordings.",
            autocompletion=complete_from("characters", "phonemes"),
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be read; write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Check recordings and convert them to a store: one array of bins per session, with random access to trials."""
    from arcuate.data.prepare import inspect_source, prepare_store

    if describe:
        if store is not None:
            raise UserError(f"--describe takes one file and writes nothing; remove {store}")
        print_description(source, as_json)
        return
    if store is None:
        raise UserError("STORE is missing; give the folder to write: arcuate prepare SOURCE STORE")
    with progress("scanning files") as report_progress:
        if dry_run:
            report = inspect_source(source, features=features, layout=layout, mapping=mapping, progress=report_progress)
        else:
            report = prepare_store(
                source,
                store,
                force=force,
                features=features,
                targets=targets,
                layout=layout,
                mapping=mapping,
                progress=report_progress,
            )
            report.check_written(source)
    if as_json:
        emit_json(report.to_dict())
    else:
        print_report(report, store)
    raise typer.Exit(1 if report.unreadable else 0)


def print_description(file: Path, as_json: bool) -> None:
    """Contents of a file as a table, and the guessed mapping as YAML."""
    from arcuate.data.describe import describe_file

    found = describe_file(file)
    if as_json:
        emit_json(found.to_dict())
        return
    shapes = ["" if e.shape is None else " × ".join(map(str, e.shape)) or "scalar" for e in found.entries]
    line = lambda text: text.replace("\n", "\\n")  # a name with a line break must not leave its comment
    rows = [(line(entry.path), line(entry.kind), shape) for entry, shape in zip(found.entries, shapes, strict=True)]
    if found.mapping is None:
        print_table(("entry", "kind", "shape"), rows)
    else:  # the output is a mapping file, with the contents as comments
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"# {path:<{widths[0]}}  {kind:<{widths[1]}}  {shape}".rstrip() for path, kind, shape in rows]
        out.print("\n".join([*lines, found.mapping_text()]), soft_wrap=True, markup=False, highlight=False)
        say("this output is a mapping: save it as a file, check it, and pass it with --layout nwb --mapping FILE")
    for note in found.notes:
        say(note)


def print_report(report: "PrepareReport", store: Path) -> None:
    if not report.written:
        _print_files(report)
    _print_splits(report)
    if report.leakage is not None:
        _print_leakage(report.leakage)
    if cases := Counter((row.reason, row.action) for row in report.quality):
        rows = [(reason, str(n), _ACTIONS[action]) for (reason, action), n in cases.most_common()]
        print_table(("case", "trials", "action"), rows, title="quality", right=("trials",))
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
