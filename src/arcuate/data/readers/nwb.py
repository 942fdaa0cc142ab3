"""NWB files: binned features or spike times with a trials table; a mapping file assigns the columns.

NWB is HDF5, and files are read with h5py under the rules of `readers.hdf5`: no other package is needed, and nothing in
a file is executed. `arcuate prepare --describe FILE` prints a mapping to start from. FALCON H2 (handwriting, DANDI
000950) is a fixed mapping of the same reader.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
from pydantic import Field, model_validator

from arcuate.config import Settings, parse_settings
from arcuate.data.alphabet import ALPHABETS, BLANK, FULL_STOP, SPACE, check_alphabet
from arcuate.data.readers.hdf5 import Budget, has_entry, open_dataset, read_attribute
from arcuate.data.readers.source import (
    FILE_ERRORS,
    MAX_VALUES,
    FileSummary,
    Problem,
    ReadResult,
    Source,
    SourceFile,
    UnreadableFile,
    is_safe_name,
    replace_surrogates,
    summarise_error,
    unreadable,
)
from arcuate.data.text import sentence_tokens
from arcuate.data.trial import BIN_SECONDS, SPLITS, Split, Trial, session_date, session_order, trial_id
from arcuate.errors import UserError, check_resources

NOTES = "arcuate"  # key of the JSON object in general/notes of files that `arcuate export-data` wrote
_SUFFIXES = (".nwb", ".h5", ".hdf5")
_MAX_TRIALS = 1_000_000
_MAX_TEXT = 10_000
_TOLERANCE_S = 1e-3  # between times of trials and of bins
_MAX_FILES = 20_000
_MAX_LISTED = 30  # columns in a message
_OPTIONAL_COLUMNS = ("text", "tokens", "block", "split", "number", "corpus", "mode")  # of a mapping; null: none


class NwbMapping(Settings):
    """Location of the data in a file: paths within the file, and columns of the trials table."""

    bins: tuple[str, ...] = Field(
        (), max_length=16, description="Time series (bins, channels), joined along the channels; empty: bin `units`."
    )
    units: str | None = Field(None, description="Table of units, whose spike times are counted in bins of 20 ms.")
    mask: str | None = Field(None, description="Time series of booleans; bins where it is false are left out.")
    trials: str = Field("intervals/trials", description="Trials table.")
    start: str = Field("start_time", description="Column: start of a trial in s.")
    stop: str = Field("stop_time", description="Column: end of a trial in s.")
    stop_inclusive: bool = Field(False, description="The bin that starts at the end of a trial belongs to it.")
    text: str | None = Field(None, description="Column: sentence; null: none.")
    tokens: str | None = Field(None, description="Column: class indices of the label; null: derived from the text.")
    block: str | None = Field(None, description="Column: block number; null: all trials are in block 0.")
    split: str | None = Field(None, description="Column: train, val or test; null: by file name or fraction.")
    number: str | None = Field(None, description="Column: position of the trial in its split; null: counted.")
    corpus: str | None = Field(None, description="Column: corpus; null: none.")
    mode: str | None = Field(None, description="Column: speaking mode; null: none.")
    targets: Literal["phonemes", "characters"] = Field("phonemes", description="Alphabet of labels from the text.")
    space: str = Field(" ", min_length=1, max_length=1, description="Character that stands for a space in the text.")
    session: str | None = Field(None, max_length=100, description="Name of the session; null: that of the file.")
    val_fraction: float = Field(0.1, ge=0.0, le=0.9, description="Without a split: fraction of trials for validation.")
    test_fraction: float = Field(0.1, ge=0.0, le=0.9, description="Without a split: last fraction of trials (test).")

    @model_validator(mode="after")
    def _has_data(self) -> "NwbMapping":
        if not self.bins and self.units is None:
            raise ValueError("bins or units must name a data set, such as bins: [acquisition/binned_spikes]")
        if self.bins and self.units is not None:
            raise ValueError("bins and units are both given; keep one of them")
        return self


# As `arcuate export-data --to nwb` writes it.
EXPORTED = NwbMapping(
    bins=("acquisition/bins",), text="text", tokens="tokens", block="block", split="split", number="number",
    corpus="corpus", mode="mode",
)  # fmt: skip
FALCON_H2 = NwbMapping(
    bins=("acquisition/binned_spikes",), mask="acquisition/eval_mask", text="cue", block="block_num",
    targets="characters", space=SPACE, stop_inclusive=True,
)  # fmt: skip


class NwbReader:
    """Reader of NWB files, one session each."""

    layout = "nwb"

    def __init__(self, mapping: Mapping[str, Any] | None = None) -> None:
        self.mapping = EXPORTED if mapping is None else parse_settings(NwbMapping, mapping, "given", noun="mapping")
        self.columns_required = mapping is not None  # the fixed mappings name columns that a file may lack

    def find_source(self, path: Path) -> Source:
        """All NWB files at or below `path`; every file may hold trials of every split."""
        paths = list_data_files(path, _SUFFIXES)
        files = []
        for file in paths:
            named = split_of_name(file.stem)
            files += [SourceFile(self._session(file), s, file) for s in (SPLITS if named is None else (named,))]
        return _make_source(self, path, files, ALPHABETS[self.mapping.targets])

    def _session(self, path: Path) -> str:
        return self.mapping.session or session_of_name(path.stem)

    def summarise_file(self, file: SourceFile) -> FileSummary:
        """Number of trials of the split, and the number of channels."""
        with _open(file.path) as data:
            table = self._open_recording(data, file)
            n_trials = len(table.rows(file.split))
            channels = Counter({table.n_channels: n_trials}) if n_trials else Counter()
            return FileSummary(n_trials, channels, *_exported_notes(data))

    def read_trials(self, file: SourceFile) -> Iterator[ReadResult]:
        """The trials of one split in the order of the table."""
        with _open(file.path) as data:
            yield from self._open_recording(data, file).read(file.split)

    def _open_recording(self, data: h5py.File, file: SourceFile) -> "_Recording":
        recording = _Recording(data, self.mapping, file)
        if self.columns_required:
            recording.check_columns()
        return recording


class FalconH2Reader(NwbReader):
    """Reader of FALCON H2: one file per session and part, tokens are characters."""

    layout = "falcon-h2"

    def __init__(self, mapping: Mapping[str, Any] | None = None) -> None:
        if mapping is not None:
            raise UserError("--mapping applies to --layout nwb only; falcon-h2 has a fixed mapping")
        self.mapping = FALCON_H2
        self.columns_required = False

    def find_source(self, path: Path) -> Source:
        files = []
        for file in list_data_files(path, (".nwb",)):
            files.append(SourceFile(self._session(file), split_of_name(file.stem) or "train", file))
        return _make_source(self, path, files, ALPHABETS["characters"])

    def _session(self, path: Path) -> str:
        recorded = session_date(path.stem)
        return f"t5.{recorded:%Y.%m.%d}" if recorded else session_of_name(path.stem)


def _make_source(reader: NwbReader, root: Path, files: list[SourceFile], classes: tuple[str, ...]) -> Source:
    """The files in order; a second file of the same session and split is skipped, because its numbers would collide."""
    chosen: dict[str, SourceFile] = {}
    skipped: list[ReadResult] = []
    for file in sorted(files, key=lambda f: (session_order(f.session), SPLITS.index(f.split), f.path.name)):
        if file.id in chosen:
            detail = f"a second file of {file.id}; {chosen[file.id].path.name} is read"
            skipped.append(ReadResult(file.path.name, None, (Problem("second file", None, detail, "ignored"),)))
        else:
            chosen[file.id] = file
    return Source(reader.layout, root, tuple(chosen.values()), classes=classes, skipped=tuple(skipped))


def list_data_files(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Files with these endings at or below `path`, sorted; UserError if there are none."""
    if path.is_file():
        found = [path] if path.name.lower().endswith(suffixes) else []
    elif path.is_dir():
        found = []
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            found += [Path(folder, name) for name in sorted(names) if name.lower().endswith(suffixes)]
            if len(found) > _MAX_FILES:
                raise UserError(f"more than {_MAX_FILES} files below {path}; give the folder of the recordings")
    else:
        raise UserError(f"no file or folder {path}; give the recordings")
    if not found:
        raise UserError(f"no {', '.join(suffixes)} file at {path}; give the folder of the recordings")
    return [Path(replace_surrogates(str(p))) if not p.exists() else p for p in found]


def session_of_name(stem: str) -> str:
    """A session name from a file name: characters that are not allowed become _."""
    name = re.sub(r"[^\w .+\-]", "_", replace_surrogates(stem))[:100].strip(" .")
    return name if is_safe_name(name) else "session"


def split_of_name(stem: str) -> Split | None:
    """The split that a file name states, such as held-in-calib, minival or test."""
    words = set(re.split(r"[^a-z]+", stem.lower()))
    if words & {"calib", "train", "oracle"}:
        return "train"
    if words & {"minival", "val", "validation", "dev"}:
        return "val"
    return "test" if words & {"eval", "test", "holdout"} else None


def _open(path: Path) -> h5py.File:
    try:
        return h5py.File(path, "r")
    except FILE_ERRORS as error:
        check_resources(error, path)
        raise UnreadableFile(summarise_error(error)) from error


def open_path(data: h5py.File, path: str) -> Any:
    """The group or array at a path; every link on the way must be a plain one."""
    place: Any = data
    for name in path.strip("/").split("/"):
        if not isinstance(place, h5py.Group) or not has_entry(place, name):
            raise ValueError(f"{path} is missing")
        if place.id.links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
            raise ValueError(f"{path} is a link, which is not allowed")
        place = place[name]
    return place


def _exported_notes(data: h5py.File) -> tuple[tuple[str, ...] | None, str | None]:
    """Alphabet and layout in general/notes of an exported file."""
    try:
        notes = open_dataset(open_path(data, "general"), "notes")
        text = notes[()] if notes.shape == () else None
        if not isinstance(text, bytes | str) or len(text) > 1_000_000:
            return None, None
        tree = json.loads(text)[NOTES]
        layout = tree["layout"]
        known = layout if isinstance(layout, str) and is_safe_name(layout) else None
        return check_alphabet([str(name) for name in tree["classes"]]), known
    except (*FILE_ERRORS, AttributeError, RecursionError):
        return None, None


@dataclass(frozen=True)
class _Series:
    """One time series: its data set and the time of each row."""

    data: h5py.Dataset
    times: np.ndarray  # (T,) float64, increasing


class _Recording:
    """The trials table and the time series of one open file."""

    def __init__(self, data: h5py.File, mapping: NwbMapping, file: SourceFile) -> None:
        self.data, self.mapping, self.file = data, mapping, file
        self.budget = Budget(file.path.stat().st_size)
        try:
            self.table = open_path(data, mapping.trials)
            if not isinstance(self.table, h5py.Group):
                raise ValueError(f"{mapping.trials} is not a table")
            self.start, self.stop = (self._numbers(name) for name in (mapping.start, mapping.stop))
            self.series = tuple(self._open_series(name) for name in mapping.bins)
            self.mask = None if mapping.mask is None else self._read_mask(mapping.mask)
            self.classes = _exported_notes(data)[0] or ALPHABETS[mapping.targets]
            self._check()
        except FILE_ERRORS as error:
            check_resources(error, file.path)
            raise UnreadableFile(summarise_error(error)) from error

    def _check(self) -> None:
        n_rows = len(self.start)
        if n_rows > _MAX_TRIALS or len(self.stop) != n_rows:
            raise ValueError(f"the trials table has {n_rows} starts and {len(self.stop)} ends")
        if not np.isfinite(self.start).all() or not np.isfinite(self.stop).all():
            raise ValueError("the trials table has times that are not numbers")
        lengths = {len(series.times) for series in self.series}
        if len(lengths) > 1:
            raise ValueError(f"the time series have different lengths: {sorted(lengths)}")
        if self.mask is not None and self.series and len(self.mask) != len(self.series[0].times):
            raise ValueError(f"{self.mapping.mask} has {len(self.mask)} rows, the bins {len(self.series[0].times)}")

    # --- columns ---------------------------------------------------------------------------------------------

    def check_columns(self) -> None:
        """Raise UserError for a column that the mapping names and the file lacks."""
        found = [name.decode("utf-8", errors="replace") for name in self.table.id]
        for field in _OPTIONAL_COLUMNS:
            name = getattr(self.mapping, field)
            if name is None or name in found:
                continue
            listed = ", ".join(found[:_MAX_LISTED]) + (", …" if len(found) > _MAX_LISTED else "")
            raise UserError(
                f"the mapping has {field}: {name}, but the table {self.mapping.trials} of {self.file.path} has no"
                f" column {name}, only {listed}; correct the name, or set {field}: null"
            )

    def _column(self, name: str) -> h5py.Dataset:
        return open_dataset(self.table, name)

    def _numbers(self, name: str) -> np.ndarray:
        column = self._column(name)
        if column.ndim != 1 or column.dtype.kind not in "fiub" or column.shape[0] > _MAX_TRIALS:
            raise ValueError(f"column {name} is {column.dtype} with shape {column.shape}, expected numbers")
        self.budget.spend(column.shape[0] * 8)
        return np.asarray(column[:], dtype=np.float64)

    def _integers(self, name: str | None) -> list[int | None]:
        """A column of integers; None where a value is not one."""
        if name is None:
            return [None] * len(self.start)
        column = self._column(name)
        if column.dtype.kind in "fiub":
            return [int(v) if np.isfinite(v) and abs(v) < 2**53 and v == int(v) else None for v in self._numbers(name)]
        found = [re.fullmatch(r"\s*(\d{1,9})\s*", text or "") for text in self._texts(name)]
        return [None if match is None else int(match[1]) for match in found]

    def _texts(self, name: str | None) -> list[str | None]:
        if name is None:
            return [None] * len(self.start)
        column = self._column(name)
        is_text = h5py.check_string_dtype(column.dtype) is not None or column.dtype.kind == "S"
        if column.ndim != 1 or not is_text or column.shape[0] > _MAX_TRIALS:
            raise ValueError(f"column {name} is {column.dtype} with shape {column.shape}, expected texts")
        self.budget.spend(column.shape[0] * max(column.dtype.itemsize, 8))
        texts: list[str | None] = []
        for value in column[:]:
            text = value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)
            texts.append(replace_surrogates(text)[:_MAX_TEXT].replace("\0", ""))
        return texts

    def _ragged(self, name: str) -> list[np.ndarray]:
        """A ragged column of integers: values, and the end of each row in `<name>_index`."""
        values, index = self._column(name), self._column(f"{name}_index")
        if values.ndim != 1 or values.dtype.kind not in "iu" or index.ndim != 1 or index.dtype.kind not in "iu":
            raise ValueError(f"column {name} is not a list of integers for every trial")
        self.budget.spend((values.shape[0] + index.shape[0]) * 8)
        ends = np.asarray(index[:], dtype=np.int64)
        if len(ends) and (np.any(np.diff(ends) < 0) or ends[0] < 0 or ends[-1] > values.shape[0]):
            raise ValueError(f"{name}_index points outside of {name}")
        return np.split(np.asarray(values[:], dtype=np.int64), ends[:-1]) if len(ends) else []

    def _optional(self, name: str | None) -> str | None:
        """A column that may be absent in an exported or older file, or in one of FALCON H2."""
        return name if name is not None and has_entry(self.table, name) else None

    # --- time series -----------------------------------------------------------------------------------------

    def _open_series(self, path: str) -> _Series:
        group = open_path(self.data, path)
        if not isinstance(group, h5py.Group):
            raise ValueError(f"{path} is not a time series (a group with data and timestamps)")
        data = open_dataset(group, "data")
        if data.ndim not in (1, 2) or data.dtype.kind not in "fiub":
            raise ValueError(f"{path}/data is {data.dtype} with shape {data.shape}, expected numbers (bins, channels)")
        return _Series(data, self._times(group, path, data.shape[0]))

    def _times(self, group: h5py.Group, path: str, n: int) -> np.ndarray:
        if has_entry(group, "timestamps"):
            stored = open_dataset(group, "timestamps")
            if stored.shape != (n,) or stored.dtype.kind != "f":
                raise ValueError(f"{path}/timestamps is {stored.dtype} with shape {stored.shape}, expected ({n},)")
            self.budget.spend(8 * n)
            times = np.asarray(stored[:], dtype=np.float64)
        else:
            begin = open_dataset(group, "starting_time")
            rate = read_attribute(begin, "rate")
            if begin.shape != () or not isinstance(rate, float | int | np.floating | np.integer) or not rate > 0:
                raise ValueError(f"{path} has neither timestamps nor a rate")
            if n > MAX_VALUES:
                raise ValueError(f"{path} has {n} rows, too many")
            times = float(begin[()]) + np.arange(n) / float(rate)
        if not np.isfinite(times).all() or np.any(np.diff(times) <= 0):
            raise ValueError(f"the timestamps of {path} do not increase")
        step = float(np.median(np.diff(times))) if n > 1 else BIN_SECONDS
        if abs(step - BIN_SECONDS) > 1e-3 and path != self.mapping.mask:
            raise ValueError(f"{path} has one row every {1000 * step:g} ms, expected bins of 20 ms; use units instead")
        return times

    def _read_mask(self, path: str) -> np.ndarray:
        series = self._open_series(path)
        if series.data.ndim != 1:
            raise ValueError(f"{path} has shape {series.data.shape}, expected one value per bin")
        self.budget.spend(series.data.shape[0])
        return np.asarray(series.data[:]).astype(bool)

    @cached_property
    def _spikes(self) -> list[np.ndarray]:
        """Sorted spike times of every unit."""
        table = open_path(self.data, str(self.mapping.units))
        times, index = open_dataset(table, "spike_times"), open_dataset(table, "spike_times_index")
        if times.ndim != 1 or times.dtype.kind != "f" or index.ndim != 1 or index.dtype.kind not in "iu":
            raise ValueError(f"{self.mapping.units} has no spike times")
        self.budget.spend((times.shape[0] + index.shape[0]) * 8)
        ends = np.asarray(index[:], dtype=np.int64)
        if len(ends) > 65536 or (len(ends) and (np.any(np.diff(ends) < 0) or ends[0] < 0 or ends[-1] > len(times))):
            raise ValueError("spike_times_index points outside of spike_times")
        return [np.sort(part) for part in np.split(np.asarray(times[:], dtype=np.float64), ends)[: len(ends)]]

    @property
    def n_channels(self) -> int:
        if not self.series:
            try:
                return len(self._spikes)
            except FILE_ERRORS as error:
                raise UnreadableFile(summarise_error(error)) from error
        return sum(1 if s.data.ndim == 1 else int(s.data.shape[1]) for s in self.series)

    # --- trials ----------------------------------------------------------------------------------------------

    def rows(self, split: str) -> list[int]:
        """Rows of the table that belong to a split."""
        n, mapping = len(self.start), self.mapping
        if split_of_name(self.file.path.stem) is not None and self._optional(mapping.split) is None:
            return list(range(n))
        try:
            if (column := self._optional(mapping.split)) is not None:
                return [i for i, name in enumerate(self._texts(column)) if name == split]
        except FILE_ERRORS as error:
            raise UnreadableFile(summarise_error(error)) from error
        n_test = round(n * mapping.test_fraction)
        n_val = min(round(n * mapping.val_fraction), n - n_test)
        first = {"train": 0, "val": n - n_test - n_val, "test": n - n_test}
        last = {"train": n - n_test - n_val, "val": n - n_test, "test": n}
        return list(range(first[split], last[split]))

    def read(self, split: Split) -> Iterator[ReadResult]:
        """The trials of a split; a trial that cannot be read is reported."""
        mapping, rows = self.mapping, self.rows(split)
        try:
            texts = self._texts(mapping.text)
            has_text = self._numbers("has_text").astype(bool) if has_entry(self.table, "has_text") else None
            tokens = None if self._optional(mapping.tokens) is None else self._ragged(str(mapping.tokens))
            has_label = self._numbers("has_label").astype(bool) if has_entry(self.table, "has_label") else None
            blocks, numbers = (self._integers(self._optional(name)) for name in (mapping.block, mapping.number))
            corpora, modes = (self._texts(self._optional(name)) for name in (mapping.corpus, mapping.mode))
            columns = [
                texts,
                blocks,
                numbers,
                corpora,
                modes,
                *(c for c in (tokens, has_text, has_label) if c is not None),
            ]
            if any(len(column) != len(self.start) for column in columns):
                raise ValueError("the columns of the trials table have different lengths")
        except FILE_ERRORS as error:
            raise UnreadableFile(summarise_error(error)) from error
        seen: set[int] = set()
        for position, row in enumerate(rows):
            stated = numbers[row]
            number = position if stated is None or not 0 <= stated < 10**9 else stated
            identity = trial_id(self.file.session, split, number)
            if number in seen:
                yield unreadable(identity, f"duplicate trial number {number}")
                continue
            seen.add(number)
            text = texts[row] if has_text is None or has_text[row] else None
            if text is not None and mapping.space != " ":
                text = text.replace(mapping.space, " ").replace(FULL_STOP, ".")
            try:
                bins = self._read_bins(row)
            except FILE_ERRORS as error:
                yield unreadable(identity, summarise_error(error))
                continue
            stored = None if tokens is None or (has_label is not None and not has_label[row]) else tokens[row]
            label, problems = self._label(text, stored, tokens is not None)
            if blocks[row] is None and mapping.block is not None:
                problems = (*problems, Problem("no block number", None, "block 0 is assumed", "note"))
            trial = Trial(
                *(self.file.session, split, number, blocks[row] or 0, bins, label, text),
                *(corpora[row] or None, modes[row] or None),
            )
            yield ReadResult(identity, trial, problems)

    def _label(
        self, text: str | None, stored: np.ndarray | None, has_column: bool
    ) -> tuple[np.ndarray | None, tuple[Problem, ...]]:
        """The stored label, or one derived from the text if the file has no labels."""
        if has_column:
            if stored is None:
                return None, ()
            if stored.size and (stored.min() <= BLANK or stored.max() >= len(self.classes)):
                detail = f"tokens are outside 1…{len(self.classes) - 1}"
                return None, (Problem("label out of range", None, detail),)
            return stored.astype(np.int32), ()
        tokens = None if not text else sentence_tokens(text, self.classes)
        return (None if tokens is None else np.array(tokens, np.int32)), ()

    def _read_bins(self, row: int) -> np.ndarray:
        start, stop = float(self.start[row]), float(self.stop[row])
        if not self.series:
            return self._count_spikes(start, stop)
        times = self.series[0].times
        first = int(np.searchsorted(times, start - _TOLERANCE_S))
        edge = stop + _TOLERANCE_S if self.mapping.stop_inclusive else stop - _TOLERANCE_S
        last = max(first, int(np.searchsorted(times, edge)))
        if (last - first) * self.n_channels > MAX_VALUES:
            raise ValueError(f"a trial of {last - first} bins is too long")
        parts = []
        for series in self.series:
            self.budget.spend((last - first) * (1 if series.data.ndim == 1 else series.data.shape[1]) * 4)
            with np.errstate(over="ignore"):  # a float64 beyond float32 becomes inf, which the quality checks report
                part = np.asarray(series.data[first:last]).astype(np.float32)
            parts.append(part[:, None] if part.ndim == 1 else part)
        bins = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        return np.ascontiguousarray(bins if self.mask is None else bins[self.mask[first:last]])

    def _count_spikes(self, start: float, stop: float) -> np.ndarray:
        """Spike counts in bins of 20 ms. (T, units)"""
        n_bins = max(0, int((stop - start) / BIN_SECONDS + 1e-6))
        if n_bins * max(len(self._spikes), 1) > MAX_VALUES:
            raise ValueError(f"a trial of {n_bins} bins is too long")
        edges = start + BIN_SECONDS * np.arange(n_bins + 1)
        counts = [np.diff(np.searchsorted(times, edges)) for times in self._spikes]
        return np.stack(counts, axis=1).astype(np.float32) if counts else np.zeros((n_bins, 0), np.float32)
