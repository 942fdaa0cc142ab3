"""Prepare: read recordings of a release, check them and write a store, one trial in memory at a time."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from arcuate.data.alphabet import ALPHABETS, token_unit
from arcuate.data.quality import (
    LABEL_DIFFERS,
    Leakage,
    QualityRow,
    compare_label,
    exclusion_flags,
    find_problems,
    quality_rows,
)
from arcuate.data.readers.b2t24 import B2T24, DEFAULT_FEATURES
from arcuate.data.readers.source import Problem, ReadResult, SourceFile, UnreadableFile, replace_surrogates
from arcuate.data.readers.table import open_source
from arcuate.data.releases import Check, check_release
from arcuate.data.store import Manifest, Store
from arcuate.data.store_writer import StoreWriter, check_store_target, create_store
from arcuate.data.text import sentence_tokens, text_to_characters
from arcuate.data.trial import SPLITS, Layout, Trial
from arcuate.data.watched import watched
from arcuate.errors import UserError
from arcuate.progress import Progress, logger, percent

_MANY_LABELS = 0.05  # fraction of labels that contradict their sentence above which something is wrong


@dataclass(frozen=True)
class PrepareReport:
    """What was read, checked and written."""

    layout: str
    simulated: bool
    n_channels: int
    sessions: tuple[str, ...]
    trials: int
    splits: dict[str, dict[str, int]]  # by split: number of trials, usable trials and bins
    quality: tuple[QualityRow, ...]
    files: dict[str, int]  # source file, as session/split -> number of trials
    notes: tuple[str, ...]
    hashes: dict[str, str]  # content hash of each split
    leakage: Leakage
    mapping: Mapping[str, Any] | None  # of NWB files
    written: bool

    def rows(self, *actions: str) -> list[QualityRow]:
        """Quality rows with one of these actions."""
        return [row for row in self.quality if row.action in actions]

    @property
    def unreadable(self) -> list[QualityRow]:
        """Files and trials that could not be read."""
        return self.rows("missing")

    @property
    def exit_code(self) -> int:
        return int(bool(self.unreadable))

    @property
    def release(self) -> tuple[Check, ...]:
        """Comparison with the published numbers of the release; empty for other data."""
        return check_release(self)

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
            "release": [check.to_dict() for check in self.release],
            "files": self.files,
            "notes": list(self.notes),
            "mapping": self.mapping,
            "written": self.written,
        }


def prepare(
    source: Path | str,
    store: Path | str | None = None,
    *,
    layout: Layout | None = None,
    features: str | None = None,
    targets: Literal["phonemes", "characters"] | None = None,
    force: bool = False,
    strict: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Store:
    """Check recordings and convert them to a store; `Store.report` says what was found.

    Unreadable files are skipped and reported; UserError is raised if nothing could be read.

    Args:
        source: Recordings: a release, a folder that contains it, or NWB files.
        store: Folder to write the store to; not needed with `dry_run`.
        layout: b2t25, b2t24, nwb, falcon-h2, an NWB mapping file (.yaml), or the name or import path of your reader;
            default: the release found.
        features: '24 layout only: features and area; default: tx1+spikePow:6v.
        targets: Derive the labels from the texts; default: the labels of the recordings.
        force: Replace an existing store.
        strict: Refuse labels that contradict their sentences.
        dry_run: Read and check everything, compare a release with its published numbers, and write nothing.
        progress: Called with the number of files read so far.
    """
    if targets is not None and targets not in ALPHABETS:
        raise UserError(f"targets {targets!r} is unknown; choose {' or '.join(ALPHABETS)}")
    if store is None and not dry_run:
        raise UserError("STORE is missing; give the folder to write: arcuate prepare SOURCE STORE")
    target = Path(os.path.abspath(store or source))
    if not dry_run:
        check_store_target(target, force)
    preparation = _Preparation(Path(source), layout, features, targets)
    if dry_run:
        manifest = preparation.run(StoreWriter(target, preparation.n_channels, dry_run=True), strict, progress)
    else:
        with create_store(target, preparation.n_channels, force) as writer:
            manifest = preparation.run(writer, strict, progress)
    opened = Store(target, manifest)
    opened.report = preparation.report(opened, written=not dry_run)
    return opened


class _Preparation:
    """One pass over the files of a source."""

    def __init__(self, path: Path, layout: Layout | None, features: str | None, targets: str | None) -> None:
        chosen = B2T24(DEFAULT_FEATURES if features is None else features)  # a mistake is found before the search
        self.reader, self.source = open_source(path, layout)
        if isinstance(self.reader, B2T24):
            self.reader = chosen
        elif features is not None:
            raise UserError(f"{path} has the layout {self.source.layout}, but features are of the '24 layout")
        self.classes = ALPHABETS[targets] if targets else self.source.classes
        self.relabel = self.classes != self.source.classes
        self.quality = [row for result in self.source.skipped for row in quality_rows(result, ())]
        self.files: dict[str, int] = {}
        self.n_labels = 0
        self.n_channels = self._count_channels()

    def run(self, writer: StoreWriter, strict: bool, progress: Progress | None) -> Manifest:
        """Read, check and add all trials, session by session."""
        files = self.source.files
        ordered = [file for session in self.source.sessions for file in files if file.session == session]
        for i, file in enumerate(ordered):
            if progress:
                progress(i, len(files), file.id)
            for trial, flags in self._read_file(file):
                writer.add(trial, flags)
        if progress:
            progress(len(files), len(files), "reading files")
        if not writer.trials:
            raise self._nothing_readable([])
        self._check_labels(strict)
        features = self.reader.features.text if isinstance(self.reader, B2T24) else None
        return writer.finish(
            self.source.layout, self.classes, self.quality, features=features, simulated=self.source.simulated
        )

    def _count_channels(self) -> int:
        """The most common number of channels in the first file with a readable trial."""
        failed: list[QualityRow] = []
        for file in self.source.files:
            counts: Counter[int] = Counter()
            try:
                for result in self._results(file):
                    if result.trial is not None:
                        counts[result.trial.bins.shape[1]] += 1
                    elif not counts:
                        failed += quality_rows(result, ())
            except UnreadableFile as error:
                failed.append(_unreadable_row(file, error))
            if counts:
                return max(counts, key=lambda n: (counts[n], n))
        raise self._nothing_readable(failed)

    def _nothing_readable(self, rows: list[QualityRow]) -> UserError:
        missing = [row.detail for row in (*rows, *self.quality) if row.action == "missing"]
        more = f" ({len(missing) - 1} more could not be read)" if len(missing) > 1 else ""
        detail = f"{missing[0]}{more}" if missing else "the files contain no trials"
        return UserError(f"no trial in {self.source.root} could be read: {detail}")

    def _results(self, file: SourceFile) -> Iterator[ReadResult]:
        return watched(file.path, self.reader.read_trials, file)

    def _read_file(self, file: SourceFile) -> Iterator[tuple[Trial, tuple[str, ...]]]:
        """The readable trials of a file with their flags; every trial is checked and its findings are recorded."""
        try:
            for result in self._results(file):
                self.files[file.id] = self.files.get(file.id, 0) + (result.id != file.id)
                if result.trial is not None and result.trial.bins.shape[1] != self.n_channels:
                    result = self._wrong_channel_count(result, result.trial.bins.shape[1])
                if result.trial is None:
                    self.quality.extend(quality_rows(result, ()))
                    continue
                trial = self.source.annotate(result.trial)
                if self.relabel:
                    trial, result = _relabel(result, trial, self.classes)
                problems = find_problems(trial)
                if trial.tokens is not None and trial.text and not self.relabel:
                    self.n_labels += 1
                    problems += compare_label(trial, self.classes)
                rows = quality_rows(result, problems)
                self.quality.extend(rows)
                yield trial, exclusion_flags(rows)
        except UnreadableFile as error:
            self.quality.append(_unreadable_row(file, error))

    def _wrong_channel_count(self, result: ReadResult, n_channels: int) -> ReadResult:
        detail = f"{n_channels} channels, but the other trials have {self.n_channels}"
        return ReadResult(result.id, None, (Problem("channel count", n_channels, detail, "unreadable"),))

    def _check_labels(self, strict: bool) -> None:
        """Warn about labels that contradict their sentence, or refuse them."""
        wrong = [row for row in self.quality if row.reason == LABEL_DIFFERS]
        if not wrong:
            return
        found = f"{len(wrong)} of {self.n_labels} labels contradict their sentence"
        message = f"{found}, the first in {wrong[0].trial}: {wrong[0].detail}"
        if strict:
            raise UserError(f"{message}; correct them, or derive labels from the texts: targets=phonemes")
        if len(wrong) > _MANY_LABELS * self.n_labels:
            logger.warning(f"{message} ({percent(len(wrong) / self.n_labels)}); a model would learn other sentences")

    def report(self, store: Store, written: bool) -> PrepareReport:
        by_split = {split: [t for t in store.trials if t.split == split] for split in SPLITS}
        return PrepareReport(
            layout=store.layout,
            simulated=store.simulated,
            n_channels=store.n_channels,
            sessions=store.sessions,
            trials=len(store.trials),
            splits={
                split: {
                    "trials": len(trials),
                    "usable": sum(t.usable for t in trials),
                    "n_bins": sum(t.n_bins for t in trials),
                }
                for split, trials in by_split.items()
            },
            quality=tuple(self.quality),
            files=self.files,
            notes=self.source.notes,
            hashes=store.hashes,
            leakage=store.leakage,
            mapping=self.source.mapping,
            written=written,
        )


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
