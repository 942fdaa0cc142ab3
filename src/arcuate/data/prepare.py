"""Prepare: read recordings of a release, check them and write a store, one trial in memory at a time."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.config import read_yaml
from arcuate.data.alphabet import ALPHABETS, token_unit
from arcuate.data.quality import Leakage, QualityRow, exclusion_flags, find_problems, quality_rows
from arcuate.data.readers.b2t24 import DEFAULT_FEATURES, parse_features
from arcuate.data.readers.process import ReaderProcess
from arcuate.data.readers.release import find_source
from arcuate.data.readers.source import Problem, ReadResult, Source, SourceFile, UnreadableFile, replace_surrogates
from arcuate.data.store import Manifest, Store
from arcuate.data.store_writer import StoreWriter, check_store_target, create_store
from arcuate.data.text import sentence_tokens, text_to_characters
from arcuate.data.trial import SPLITS, Trial
from arcuate.errors import UserError
from arcuate.progress import Progress


@dataclass(frozen=True)
class PrepareReport:
    """What was read, checked and written."""

    layout: str
    n_channels: int | None
    sessions: tuple[str, ...]
    trials: int
    splits: dict[str, dict[str, int]]  # by split: number of trials and, if written, of usable trials and bins
    quality: tuple[QualityRow, ...]
    files: dict[str, int]  # source file, as session/split -> number of trials
    notes: tuple[str, ...]
    hashes: dict[str, str]  # content hash of each split; empty if nothing was written
    leakage: Leakage | None = None
    written: bool = False

    def rows(self, *actions: str) -> list[QualityRow]:
        """Quality rows with one of these actions."""
        return [row for row in self.quality if row.action in actions]

    @property
    def unreadable(self) -> list[QualityRow]:
        """Files and trials that could not be read."""
        return self.rows("missing")

    def check_written(self, source: str | Path) -> None:
        """Raise UserError if no store was written because nothing could be read."""
        if self.written:
            return
        files = self.unreadable
        more = f" ({len(files) - 1} more could not be read)" if len(files) > 1 else ""
        detail = f"{files[0].detail}{more}" if files else "it contains no trials"
        raise UserError(f"no trial in {source} could be read: {detail}")

    def to_dict(self) -> dict[str, Any]:
        """`rejected` lists everything excluded from training: bad training trials, and what could not be read."""
        return {
            "layout": self.layout,
            "n_channels": self.n_channels,
            "trials": self.trials,
            "sessions": len(self.sessions),
            "session_names": list(self.sessions),
            "splits": self.splits,
            "hashes": self.hashes,
            "rejected": [asdict(row) for row in self.rows("rejected", "missing")],
            "flagged": [asdict(row) for row in self.rows("flagged")],
            "remarks": [asdict(row) for row in self.rows("kept")],
            "ignored": [asdict(row) for row in self.rows("ignored")],
            "unreadable": [asdict(row) for row in self.unreadable],
            "leakage": self.leakage,
            "files": self.files,
            "notes": list(self.notes),
            "written": self.written,
        }


def prepare(
    source: str | Path,
    store: str | Path,
    *,
    force: bool = False,
    features: str = DEFAULT_FEATURES,
    targets: str | None = None,
    layout: str | None = None,
    mapping: str | Path | Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Store:
    """Read the recordings below `source`, write them to `store` and open it; `Store.report` describes the result.

    `force` replaces an existing store. `features` selects features and area of the '24 layout. `targets` derives the
    labels from the texts, as "characters" or "phonemes"; by default they are those of the recordings. `layout` names a
    reader, by default that of the release found, and `mapping` (a file, or its content) assigns the columns of an
    NWB file. Unreadable files are skipped and reported; UserError is raised if nothing could be read.
    """
    options: dict[str, Any] = {"features": features, "targets": targets, "layout": layout, "mapping": mapping}
    report = prepare_store(source, store, force=force, **options, progress=progress)
    report.check_written(source)
    opened = Store.open(store)
    opened.report = report
    return opened


def prepare_store(
    source: str | Path,
    store: str | Path,
    *,
    force: bool = False,
    features: str = DEFAULT_FEATURES,
    targets: str | None = None,
    layout: str | None = None,
    mapping: str | Path | Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> PrepareReport:
    """Like `prepare`, but return the report only; `written` is False if nothing could be read."""
    parse_features(features)
    if targets is not None and targets not in ALPHABETS:
        raise UserError(f"--targets {targets!r} is unknown; choose {' or '.join(ALPHABETS)}")
    target = Path(os.path.abspath(store))
    check_store_target(target, force)
    found = find_source(Path(source), layout, _read_mapping(mapping))
    with ReaderProcess(found, features) as reader:
        return _write_store(target, found, reader, force, features, targets, progress)


def _write_store(
    target: Path,
    found: Source,
    reader: ReaderProcess,
    force: bool,
    features: str,
    targets: str | None,
    progress: Progress | None,
) -> PrepareReport:
    scan = _scan_source(found, reader, progress)
    if scan.n_channels is None:
        return _nothing_readable(found, scan)
    found = replace(found, classes=scan.classes or found.classes, layout=scan.layout or found.layout)
    if targets is not None:
        found = replace(found, classes=ALPHABETS[targets], relabel=ALPHABETS[targets] != found.classes)
    preparation = _Preparation(found, scan, scan.n_channels, reader, progress)
    with create_store(target, scan.n_channels, force) as writer:
        preparation.write(writer)
        if not writer.trials:
            rows = (row.detail for row in preparation.quality if row.action == "missing")
            raise UserError(f"no trial in {found.root} could be read: {next(rows, 'the files are empty')}")
        chosen = features if found.layout == "b2t24" else None
        manifest = writer.finish(
            found.layout, found.classes, preparation.quality, features=chosen, simulated=found.simulated
        )
    report = preparation.report(manifest)
    return replace(report, hashes=Store.open(target).hashes)


def inspect_source(
    source: str | Path,
    *,
    features: str = DEFAULT_FEATURES,
    layout: str | None = None,
    mapping: str | Path | Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> PrepareReport:
    """Dry run: what `prepare` would read, without writing anything."""
    parse_features(features)
    found = find_source(Path(source), layout, _read_mapping(mapping))
    with ReaderProcess(found, features) as reader:
        return _report_scan(found, _scan_source(found, reader, progress))


def _read_mapping(mapping: str | Path | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if mapping is None or isinstance(mapping, Mapping):
        return mapping
    tree = read_yaml(Path(mapping), "mapping ")
    if not isinstance(tree, dict):
        raise UserError(f"mapping {mapping} must be a mapping of names, such as 'text: cue'")
    return tree


def _report_scan(found: Source, scan: "_Scan") -> PrepareReport:
    """Report on files that were counted but not read."""
    counts: Counter[str] = Counter()
    for file, n_trials in scan.n_trials.items():
        counts[file.split] += n_trials
    return PrepareReport(
        layout=found.layout,
        n_channels=scan.n_channels,
        sessions=found.sessions,
        trials=sum(counts.values()),
        splits={split: {"trials": counts[split]} for split in SPLITS},
        quality=scan.rows,
        files=scan.trials_by_file,
        notes=found.notes,
        hashes={},
    )


@dataclass(frozen=True)
class _Scan:
    """Trial counts of all files, before anything is written."""

    n_trials: dict[SourceFile, int]
    n_channels: int | None  # the most common count; None if no file can be read
    rows: tuple[QualityRow, ...]  # ignored and unreadable files
    classes: tuple[str, ...] | None = None  # alphabet stated in the files
    layout: str | None = None  # layout that the files were exported from

    @property
    def trials_by_file(self) -> dict[str, int]:
        return {file.id: n for file, n in self.n_trials.items()}


def _scan_source(source: Source, reader: ReaderProcess, progress: Progress | None) -> _Scan:
    n_trials: dict[SourceFile, int] = {}
    channels: Counter[int] = Counter()
    stated: tuple[tuple[str, ...] | None, str | None] = None, None
    rows = [row for result in source.skipped for row in quality_rows(result, ())]
    for i, file in enumerate(source.files):
        if progress:
            progress(i, len(source.files), "scanning files")
        try:
            summary = reader.summarise(file)
        except UnreadableFile as error:
            rows.append(_unreadable_row(file, error))
            continue
        if not n_trials:
            stated = summary.classes, summary.layout
        elif stated != (summary.classes, summary.layout):
            raise UserError(
                f"{file.path.name} differs from the other files in alphabet or original layout; prepare it separately"
            )
        n_trials[file] = summary.n_trials
        channels.update(summary.n_channels)
    if progress:
        progress(len(source.files), len(source.files), "scanning files")
    if not channels:
        channels.update(_count_first_channels(reader, n_trials, rows))
    most_common = max(channels, key=lambda n: (channels[n], n)) if channels else None
    return _Scan(n_trials, most_common, tuple(rows), *stated)


def _count_first_channels(
    reader: ReaderProcess, n_trials: dict[SourceFile, int], rows: list[QualityRow]
) -> Counter[int]:
    """Trials by channel count in the first readable file; unreadable files become rows and are left out."""
    for file in list(n_trials):
        try:
            trials = (result.trial for result in reader.read(file))
            if counts := Counter(trial.bins.shape[1] for trial in trials if trial is not None):
                return counts
        except UnreadableFile as error:
            rows.append(_unreadable_row(file, error))
            del n_trials[file]
    return Counter()


def _nothing_readable(source: Source, scan: _Scan) -> PrepareReport:
    rows = list(scan.rows)
    for file in scan.n_trials:
        problem = Problem("unreadable", None, "none of its trials can be read", "unreadable")
        rows.extend(quality_rows(ReadResult(file.id, None, (problem,)), ()))
    splits: dict[str, dict[str, int]] = {split: {"trials": 0} for split in SPLITS}
    return replace(_report_scan(source, scan), sessions=(), trials=0, splits=splits, quality=tuple(rows))


def _unreadable_row(file: SourceFile, error: UnreadableFile) -> QualityRow:
    detail = replace_surrogates(f"{file.path.name}: {error}")
    return QualityRow(file.id, "unreadable", None, "missing", detail)


def _relabel(result: ReadResult, trial: Trial, classes: tuple[str, ...]) -> tuple[Trial, ReadResult]:
    """The same trial with a label derived from its text, or without a label if it has no text."""
    if trial.text is None:
        trial = replace(trial, tokens=None)
        return trial, replace(result, trial=trial)
    trial = replace(trial, tokens=np.asarray(sentence_tokens(trial.text, classes), dtype=np.int32))
    missing = text_to_characters(trial.text or "", classes)[1] if token_unit(classes) == "character" else ()
    problems = result.problems
    if missing:
        detail = f"left out of the label, because the alphabet lacks them: {' '.join(missing)}"
        problems = (*problems, Problem("unknown characters", len(missing), detail, "note"))
    return trial, ReadResult(result.id, trial, problems)


class _Preparation:
    """State of a store being written: everything but the bins."""

    def __init__(
        self, source: Source, scan: _Scan, n_channels: int, reader: ReaderProcess, progress: Progress | None
    ) -> None:
        self.source, self.scan, self.n_channels, self.reader = source, scan, n_channels, reader
        self.progress, self.n_expected, self.n_done = progress, sum(scan.n_trials.values()), 0
        self.quality: list[QualityRow] = list(scan.rows)

    def write(self, writer: StoreWriter) -> None:
        for session in dict.fromkeys(file.session for file in self.scan.n_trials):
            for file in self.scan.n_trials:
                if file.session == session:
                    for trial, flags in self._read_file(file):
                        writer.add(trial, flags)

    def _read_file(self, file: SourceFile) -> Iterator[tuple[Trial, tuple[str, ...]]]:
        """The readable trials of a file with their flags; every trial is checked and its findings are recorded."""
        try:
            for result in self.reader.read(file):
                self.n_done += 1
                if self.progress:
                    self.progress(min(self.n_done, self.n_expected), self.n_expected, file.id)
                if result.trial is not None and result.trial.bins.shape[1] != self.n_channels:
                    result = self._wrong_channel_count(result, result.trial.bins.shape[1])
                if result.trial is None:
                    self.quality.extend(quality_rows(result, ()))
                    continue
                trial = result.trial
                if self.source.relabel:
                    trial, result = _relabel(result, trial, self.source.classes)
                rows = quality_rows(result, find_problems(trial))
                self.quality.extend(rows)
                yield trial, exclusion_flags(rows)
        except UnreadableFile as error:
            self.quality.append(_unreadable_row(file, error))

    def _wrong_channel_count(self, result: ReadResult, n_channels: int) -> ReadResult:
        detail = f"{n_channels} channels, but the other trials have {self.n_channels}"
        return ReadResult(result.id, None, (Problem("channel count", n_channels, detail, "unreadable"),))

    def report(self, manifest: Manifest) -> PrepareReport:
        by_split = {split: [t for t in manifest.trials if t.split == split] for split in SPLITS}
        return PrepareReport(
            layout=self.source.layout,
            n_channels=self.n_channels,
            sessions=tuple(manifest.statistics),
            trials=len(manifest.trials),
            splits={
                split: {
                    "trials": len(trials),
                    "usable": sum(t.usable for t in trials),
                    "n_bins": sum(t.n_bins for t in trials),
                }
                for split, trials in by_split.items()
            },
            quality=tuple(self.quality),
            files=self.scan.trials_by_file,
            notes=self.source.notes,
            hashes={},
            leakage=manifest.leakage,
            written=True,
        )
