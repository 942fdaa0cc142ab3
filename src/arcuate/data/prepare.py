"""Prepare: foreign recordings to a canonical store, one trial in memory at a time."""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arcuate.data.quality import QualityRow, exclusion_flags, find_problems, quality_rows
from arcuate.data.readers import (
    Problem,
    ReadResult,
    Source,
    SourceFile,
    UnreadableFile,
    count_channels,
    find_source,
    read_trials,
    summarise_file,
)
from arcuate.data.readers.b2t24 import DEFAULT_FEATURES, parse_features
from arcuate.data.readers.source import replace_surrogates
from arcuate.data.splits import find_leakage, hash_bins, hash_split
from arcuate.data.store import TrialInfo, trial_info
from arcuate.data.store_writer import StoreWriter, check_store_target, create_store
from arcuate.data.trial import SPLITS, Trial
from arcuate.errors import UserError
from arcuate.progress import Progress


@dataclass(frozen=True)
class PrepareReport:
    """What `prepare` found and did."""

    layout: str
    n_channels: int | None
    sessions: tuple[str, ...]
    trials: int
    splits: dict[str, dict[str, int]]  # trials, usable ones and bins of each
    hashes: dict[str, str]  # content hash of each split; empty when nothing was written
    quality: tuple[QualityRow, ...]
    leakage: dict[str, Any] | None
    files: dict[str, int]  # source file, as session/split -> trials in it
    notes: tuple[str, ...]
    written: bool

    def rows(self, *actions: str) -> list[QualityRow]:
        return [row for row in self.quality if row.action in actions]

    @property
    def exit_code(self) -> int:
        """Bad trials are the gate's business; what could not be read_trials at all is the caller's."""
        return 1 if self.rows("missing") else 0

    def to_json(self) -> dict[str, Any]:
        """`rejected` is what training will not see: bad training trials, and what could not be read_trials."""
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
            "unreadable": [asdict(row) for row in self.rows("missing")],
            "leakage": self.leakage,
            "files": self.files,
            "notes": list(self.notes),
            "written": self.written,
        }


@dataclass(frozen=True)
class _Scan:
    """A look at all files before anything is written."""

    n_trials: dict[SourceFile, int]
    rows: tuple[QualityRow, ...]  # what is no file to read_trials, and what cannot be read_trials at all

    @property
    def files(self) -> list[SourceFile]:
        return list(self.n_trials)

    @property
    def counts(self) -> dict[str, int]:
        return {file.id: n for file, n in self.n_trials.items()}


def prepare(
    source: Path,
    store: Path,
    *,
    force: bool = False,
    features: str = DEFAULT_FEATURES,
    progress: Progress | None = None,
) -> PrepareReport:
    """Read the recordings under `source` and write them to `store`; unreadable files do not stop it."""
    store = Path(os.path.abspath(store))
    parse_features(features)
    found = check_places(source, store, force)
    scan, n_channels = _look(found, features, progress)
    if n_channels is None:
        return _nothing_read(found, scan)
    job = _Job(found, scan, n_channels, features, progress)
    job.quality.extend(scan.rows)
    with create_store(store, n_channels, force) as writer:
        for session in dict.fromkeys(file.session for file in scan.files):
            job.write_session(writer, session, [file for file in scan.files if file.session == session])
        if not job.trials:
            why = next((row.detail for row in job.quality if row.action == "missing"), "the files hold none")
            raise UserError(f"no trial in {found.root} could be read_trials: {why}")
        report = job.report(written=True)
        about = {
            "layout": found.layout,
            "features": features if found.layout == "b2t24" else None,
            "splits": report.splits,
            "hashes": report.hashes,
            "leakage": report.leakage,
        }
        writer.write_manifest(about, job.trials, report.quality)
    return report


def check_places(source: Path, store: Path, force: bool) -> Source:
    """Refuse a source without recordings and a store that must not be replaced, before any work is done."""
    check_store_target(Path(store), force)
    return find_source(Path(source))


def look(
    source: Path, *, features: str = DEFAULT_FEATURES, progress: Progress | None = None
) -> PrepareReport:
    """What `prepare` would read_trials, without writing anything (the dry run)."""
    parse_features(features)
    found = find_source(Path(source))
    scan, n_channels = _look(found, features, progress)
    counts: Counter[str] = Counter()
    for file, n_trials in scan.n_trials.items():
        counts[file.split] += n_trials
    return PrepareReport(
        layout=found.layout,
        n_channels=n_channels,
        sessions=found.sessions,
        trials=sum(counts.values()),
        splits={split: {"trials": counts[split]} for split in SPLITS},
        hashes={},
        quality=scan.rows,
        leakage=None,
        files=scan.counts,
        notes=found.notes,
        written=False,
    )


def _look(found: Source, features: str, progress: Progress | None) -> tuple[_Scan, int | None]:
    """Survey all files; the channel count is the commonest one, and None if no file can be read_trials."""
    n_trials: dict[SourceFile, int] = {}
    channels: Counter[int] = Counter()
    rows = [row for reading in found.passed for row in quality_rows(reading, ())]
    for i, file in enumerate(found.files):
        if progress:
            progress(i, len(found.files), "looking at files")
        try:
            seen = summarise_file(found, file)
        except UnreadableFile as error:
            rows.append(_unreadable_row(file, error))
            continue
        n_trials[file] = seen.n_trials
        channels.update(seen.n_channels)
    if progress:
        progress(len(found.files), len(found.files), "looking at files")
    if not channels:
        channels.update(_first_channels(found, list(n_trials), features))
    commonest = max(channels, key=lambda n: (channels[n], n)) if channels else None
    return _Scan(n_trials, tuple(rows)), commonest


def _first_channels(found: Source, files: list[SourceFile], features: str) -> dict[int, int]:
    for file in files:
        try:
            if counted := count_channels(found, file, features):
                return counted
        except UnreadableFile:
            continue  # reading proper reports it
    return {}


def _nothing_read(found: Source, scan: _Scan) -> PrepareReport:
    quality = list(scan.rows)
    for file in scan.files:
        problem = Problem("unreadable", None, "no trial in it can be read_trials", "unreadable")
        quality.extend(quality_rows(ReadResult(file.id, None, (problem,)), ()))
    return PrepareReport(
        layout=found.layout,
        n_channels=None,
        sessions=(),
        trials=0,
        splits={split: {"trials": 0} for split in SPLITS},
        hashes={},
        quality=tuple(quality),
        leakage=None,
        files=scan.counts,
        notes=found.notes,
        written=False,
    )


def _unreadable_row(file: SourceFile, error: UnreadableFile) -> QualityRow:
    return QualityRow(
        file.id, "unreadable", None, "missing", replace_surrogates(f"{file.path.name}: {error}")
    )


class _Job:
    """What accumulates while a store is written: everything but bins."""

    def __init__(
        self,
        source: Source,
        scan: _Scan,
        n_channels: int,
        features: str,
        progress: Progress | None,
    ) -> None:
        self.scan = scan
        self.source, self.n_channels, self.features = source, n_channels, features
        self.progress, self.n_expected, self.n_done = progress, sum(scan.n_trials.values()), 0
        self.trials: list[TrialInfo] = []
        self.quality: list[QualityRow] = []
        self.recordings: dict[str, list[bytes]] = {split: [] for split in SPLITS}

    def write_session(self, writer: StoreWriter, session: str, files: list[SourceFile]) -> None:
        with writer.session(session) as out:
            for file in files:
                for trial in self._trials_of(file):
                    out.add(trial)

    def _trials_of(self, file: SourceFile) -> Iterator[Trial]:
        """Readable trials of a file, each judged and noted on its way to the store."""
        try:
            for reading in read_trials(self.source, file, self.features):
                self._tell(file)
                if reading.trial is not None and reading.trial.bins.shape[1] != self.n_channels:
                    reading = self._odd_channels(reading, reading.trial.bins.shape[1])
                if reading.trial is None:
                    self.quality.extend(quality_rows(reading, ()))
                    continue
                self._note(reading, reading.trial)
                yield reading.trial
        except UnreadableFile as error:
            self.quality.append(_unreadable_row(file, error))

    def _tell(self, file: SourceFile) -> None:
        self.n_done += 1
        if self.progress:
            self.progress(min(self.n_done, self.n_expected), self.n_expected, file.id)

    def _odd_channels(self, reading: ReadResult, n_channels: int) -> ReadResult:
        detail = f"{n_channels} channels where the other trials have {self.n_channels}"
        return ReadResult(reading.id, None, (Problem("channel count", n_channels, detail, "unreadable"),))

    def _note(self, reading: ReadResult, trial: Trial) -> None:
        rows = quality_rows(reading, find_problems(trial))
        bins_hash = hash_bins(trial.bins)
        if len(trial.bins):
            self.recordings[trial.split].append(bins_hash)
        self.quality.extend(rows)
        self.trials.append(trial_info(trial, exclusion_flags(rows), bins_hash))

    def report(self, written: bool) -> PrepareReport:
        texts: dict[str, list[str]] = {split: [] for split in SPLITS}
        for t in self.trials:
            if t.text:
                texts[t.split].append(t.text)
        return PrepareReport(
            layout=self.source.layout,
            n_channels=self.n_channels,
            sessions=tuple(dict.fromkeys(t.session for t in self.trials)),
            trials=len(self.trials),
            splits={split: self._split(split) for split in SPLITS},
            hashes={s: hash_split(t.sha256 for t in self.trials if t.split == s) for s in SPLITS},
            quality=tuple(self.quality),
            leakage=find_leakage(self.recordings, texts),
            files=self.scan.counts,
            notes=self.source.notes,
            written=written,
        )

    def _split(self, split: str) -> dict[str, int]:
        trials = [t for t in self.trials if t.split == split]
        return {
            "trials": len(trials),
            "usable": sum(t.usable for t in trials),
            "n_bins": sum(t.n_bins for t in trials),
        }
