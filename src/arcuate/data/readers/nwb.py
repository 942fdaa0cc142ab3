"""NWB files, read with pynwb: binned features or spike times, and a trials table.

A mapping names the time series and columns. Without one it is guessed from the first file, and
`arcuate prepare --dry-run` prints it. FALCON H2 (handwriting, DANDI 000950) is a fixed mapping of the same reader.
"""

import json
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
from pydantic import Field

from arcuate.config import Settings, parse_settings, read_yaml
from arcuate.data.alphabet import ALPHABETS, BLANK, FULL_STOP, SPACE, check_alphabet
from arcuate.data.readers.hdf5 import Budget, check_inside
from arcuate.data.readers.source import (
    MAX_VALUES,
    NO_LABEL,
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
from arcuate.data.trial import BIN_SECONDS, SPLITS, Layout, Split, Trial, session_date, session_order, trial_id
from arcuate.data.watched import call_watched
from arcuate.errors import UserError, check_resources

NOTES = "arcuate"  # key of the JSON object in general/notes of files that `arcuate export` wrote
_TOLERANCE_S = 1e-3  # between times of trials and of bins
_MAX_FILES = 20_000
_MAX_TEXT = 10_000
_HELD_OUT = 0.1  # without splits: fraction of the trials for validation, and of the last trials for the test
_TEXT_COLUMNS = ("cue", "sentence", "transcript", "text", "transcription", "prompt", "label")
_BLOCK_COLUMNS = ("block_num", "block", "block_number", "block_id", "blocks")
_CROSSINGS = ("crossing", "spike_count", "binned_spike", "spikes", "tx")  # names of features, crossings before power
_POWER = ("power", "sbp")


class NwbMapping(Settings):
    """Location of the data in a file: paths of time series, and columns of the trials table.

    Columns named number, corpus and mode are read if the table has them.
    """

    bins: tuple[str, ...] = Field(
        (),
        max_length=16,
        description="Time series (bins, channels), joined along the channels; empty: counts of the units.",
    )
    mask: str | None = Field(None, description="Time series of booleans; bins where it is false are left out.")
    stop_inclusive: bool = Field(False, description="The bin that starts at the end of a trial belongs to it.")
    text: str | None = Field(None, description="Column: sentence; null: none.")
    tokens: str | None = Field(None, description="Column: class indices of the label; null: derived from the text.")
    block: str | None = Field(None, description="Column: block number; null: all trials are in block 0.")
    split: str | None = Field(None, description="Column: train, val or test; null: by file name, else 80, 10 and 10 %.")
    targets: Literal["phonemes", "characters"] = Field("phonemes", description="Alphabet of labels from the text.")
    space: str = Field(" ", min_length=1, max_length=1, description="Character that stands for a space in the text.")


FALCON_H2 = NwbMapping(
    bins=("acquisition/binned_spikes",), mask="acquisition/eval_mask", text="cue", block="block_num",
    targets="characters", space=SPACE, stop_inclusive=True,
)  # fmt: skip


def read_mapping(path: Path) -> NwbMapping:
    return parse_settings(NwbMapping, read_yaml(path, "mapping "), str(path), noun="mapping")


def falcon_h2() -> "NwbReader":
    """Reader of FALCON H2: one file per session and part, tokens are characters."""
    return NwbReader(FALCON_H2, "falcon-h2", participant="t5")


class NwbReader:
    """Reader of NWB files, one session each."""

    def __init__(
        self, mapping: NwbMapping | None = None, layout: Layout = "nwb", participant: str | None = None
    ) -> None:
        self.layout, self.mapping, self._participant = layout, mapping, participant
        try:
            import_module("pynwb")  # before the first child process is forked
        except ImportError:
            raise UserError("NWB files need pynwb; install it with: pip install 'arcuate[data]'") from None

    def find_source(self, path: Path) -> Source:
        """All NWB files at or below `path`; every file may hold trials of every split."""
        paths = _list_files(path)
        about = _describe_first(paths)
        mapping = self.mapping = self.mapping or about.mapping
        files: dict[str, SourceFile] = {}
        skipped: list[ReadResult] = []
        for file in paths:
            named = _split_of_name(file.stem)
            for split in SPLITS if named is None else (named,):
                found = SourceFile(self._session(file), split, file)
                if found.id in files:  # its numbers would collide
                    detail = f"a second file of {found.id}; {files[found.id].path.name} is read"
                    skipped.append(ReadResult(file.name, None, (Problem("second file", None, detail, "ignored"),)))
                else:
                    files[found.id] = found
        ordered = sorted(files.values(), key=lambda f: (session_order(f.session), SPLITS.index(f.split)))
        return Source(
            about.layout or self.layout,
            path,
            tuple(ordered),
            classes=about.classes or ALPHABETS[mapping.targets],
            mapping=mapping.model_dump(mode="json"),
            skipped=tuple(skipped),
        )

    def _session(self, path: Path) -> str:
        if self._participant and (recorded := session_date(path.stem)):
            return f"{self._participant}.{recorded:%Y.%m.%d}"
        name = re.sub(r"[^\w .+\-]", "_", replace_surrogates(path.stem))[:100].strip(" .")
        return name if is_safe_name(name) else "session"

    def read_trials(self, file: SourceFile) -> Iterator[ReadResult]:
        """The trials of one split in the order of the table."""
        if self.mapping is None:
            raise ValueError("find_source is called before read_trials, because it finds the mapping")
        with _open(file.path) as nwb:
            try:
                recording = _Recording(nwb, self.mapping, file)
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                raise UnreadableFile(summarise_error(error)) from error
            yield from recording.read()


def _list_files(path: Path) -> list[Path]:
    """NWB files at or below `path`, sorted; UserError if there are none."""
    if not path.exists():
        raise UserError(f"no file or folder {path}; give the recordings")
    found = [path] if path.is_file() else []
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(folder, name) for name in sorted(names) if name.lower().endswith(".nwb")]
        if len(found) > _MAX_FILES:
            raise UserError(f"more than {_MAX_FILES} files below {path}; give the folder of the recordings")
    if not found:
        raise UserError(f"no .nwb file at {path}; give the folder of the recordings")
    return found


def _describe_first(paths: Sequence[Path]) -> "_About":
    """What the first readable file says about all of them."""
    problem = ""
    for path in paths:
        try:
            return call_watched(path, _describe, path)
        except UnreadableFile as error:
            problem = problem or f"{path}: {error}"
    raise UserError(f"no NWB file can be read: {problem}")


def _split_of_name(stem: str) -> Split | None:
    """The split that a file name states, such as held-in-calib, minival or test."""
    words = set(re.split(r"[^a-z]+", stem.lower()))
    if words & {"calib", "train", "oracle"}:
        return "train"
    if words & {"minival", "val", "validation", "dev"}:
        return "val"
    return "test" if words & {"eval", "test", "holdout"} else None


# --- one file, in the child ----------------------------------------------------------------------------------------


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """The NWBFile at a path, whose values are all in the file itself."""
    from pynwb import NWBHDF5IO

    try:
        with h5py.File(path, "r") as data:
            check_inside(data)
        io = NWBHDF5IO(path, "r", load_namespaces=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nwb = io.read()
    except Exception as error:  # pynwb and hdmf raise anything at a damaged file
        check_resources(error, path)
        raise UnreadableFile(summarise_error(error)) from error
    with io:
        yield nwb


@dataclass(frozen=True)
class _About:
    """What a file says about the recordings: names, and the alphabet and original layout of an exported file."""

    mapping: NwbMapping
    classes: tuple[str, ...] | None
    layout: Layout | None


def _describe(path: Path) -> _About:
    with _open(path) as nwb:
        classes, layout = _exported_notes(nwb)
        return _About(_guess_mapping(nwb), classes, layout)


def _exported_notes(nwb: Any) -> tuple[tuple[str, ...] | None, Layout | None]:
    """Alphabet and layout in general/notes of an exported file."""
    try:
        tree = json.loads(nwb.notes or "{}")[NOTES]
        layout = tree["layout"]
        return check_alphabet([str(name) for name in tree["classes"]]), layout if is_safe_name(str(layout)) else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None, None


def _guess_mapping(nwb: Any) -> NwbMapping:
    """The time series in bins, else the units, and likely columns of the trials table."""
    if nwb.trials is None:
        raise UnreadableFile("it has no trials table")
    columns = nwb.trials.colnames
    first = lambda names: next((name for name in names if name in columns), None)
    text = first(_TEXT_COLUMNS)
    sample = str(nwb.trials[text][0]) if text is not None and len(nwb.trials) else ""
    handwriting = SPACE in sample or FULL_STOP in sample
    return NwbMapping(
        bins=_guess_series(nwb),
        mask="acquisition/eval_mask" if "eval_mask" in nwb.acquisition else None,
        text=text,
        tokens=first(["tokens"]),
        block=first(_BLOCK_COLUMNS),
        split=first(["split"]),
        targets="characters" if handwriting else "phonemes",
        space=SPACE if handwriting else " ",
    )


def _guess_series(nwb: Any) -> tuple[str, ...]:
    """Time series of threshold crossings, then of power, as long as the widest of them; else the widest time series."""
    shapes = {name: series.data.shape for name, series in _list_series(nwb).items() if series.data.ndim == 2}
    if not shapes and nwb.units is None:
        raise UnreadableFile("it has neither a time series (bins, channels) nor a table of units")
    ranks = {name: rank for name in shapes if (rank := _feature_rank(name)) is not None}
    widest = max(ranks or shapes, key=lambda name: shapes[name][1], default=None)
    if not ranks:
        return () if widest is None else (widest,)
    equal = [name for name in ranks if shapes[name][0] == shapes[str(widest)][0]]
    return tuple(sorted(equal, key=lambda name: (ranks[name], name)))


def _feature_rank(path: str) -> int | None:
    """0 for a name like threshold crossings, 1 for one like power, None for another."""
    name = path.rpartition("/")[2].lower()
    return next((rank for rank, parts in enumerate((_CROSSINGS, _POWER)) if any(p in name for p in parts)), None)


def _list_series(nwb: Any) -> dict[str, Any]:
    """Time series of numbers by their path in the file."""
    found = {}
    for item in nwb.objects.values():
        data = getattr(item, "data", None)
        if isinstance(data, h5py.Dataset) and data.dtype.kind in "fiub" and hasattr(item, "timestamps"):
            found[data.name.strip("/").removesuffix("/data")] = item
    return found


class _Recording:
    """The trials of one split of an open file."""

    def __init__(self, nwb: Any, mapping: NwbMapping, file: SourceFile) -> None:
        if nwb.trials is None:
            raise ValueError("it has no trials table")
        self.mapping, self.file = mapping, file
        self.classes = _exported_notes(nwb)[0] or ALPHABETS[mapping.targets]
        self.budget = Budget(file.path.stat().st_size)
        self._find_signals(nwb)
        self.table = nwb.trials.to_dataframe(exclude={"timeseries"})
        self.bounds = self.table[["start_time", "stop_time"]].to_numpy(np.float64)
        if not np.isfinite(self.bounds).all():
            raise ValueError("the trials table has times that are not numbers")
        self.texts = self._texts(mapping.text)
        if "has_text" in self.table:
            self.texts = [text if known else None for text, known in zip(self.texts, self.table.has_text, strict=True)]
        self.corpora, self.modes = self._texts("corpus"), self._texts("mode")
        self.blocks = [_to_integer(value) for value in self._column(mapping.block)]
        self.numbers = [_to_integer(value) for value in self._column("number")]
        self.labels = self._labels()
        self.rows = self._rows()

    def read(self) -> Iterator[ReadResult]:
        """The trials of the split; a trial that cannot be read is reported."""
        session, split, space = self.file.session, self.file.split, self.mapping.space
        seen: set[int] = set()
        for position, row in enumerate(self.rows):
            stated, block, text = self.numbers[row], self.blocks[row], self.texts[row]
            number = position if stated is None or not 0 <= stated < 10**9 else stated
            identity = trial_id(session, split, number)
            if number in seen:
                yield unreadable(identity, f"duplicate trial number {number}")
                continue
            seen.add(number)
            if text is not None and space != " ":
                text = text.replace(space, " ").replace(FULL_STOP, ".")
            try:
                bins = self._read_bins(*self.bounds[row])
            except (OSError, ValueError, RuntimeError) as error:
                yield unreadable(identity, summarise_error(error))
                continue
            label, problems = self._label(text, row)
            if block is None and self.mapping.block is not None:
                problems = (*problems, Problem("no block number", None, "block 0 is assumed", "note"))
            corpus, mode = self.corpora[row] or None, self.modes[row] or None
            yield ReadResult(
                identity, Trial(session, split, number, block or 0, bins, label, text, corpus, mode), problems
            )

    # --- columns ----------------------------------------------------------------------------------------------

    def _column(self, name: str | None) -> list[Any]:
        """The values of a column; None in every row where no column is named, or an optional one is absent."""
        if name is None or (name in ("number", "corpus", "mode") and name not in self.table):
            return [None] * len(self.table)
        if name not in self.table:
            listed = ", ".join(map(str, self.table.columns))
            raise KeyError(f"the trials table has no column {name}, only {listed}; change the mapping")
        return list(self.table[name])

    def _texts(self, name: str | None) -> list[str | None]:
        """A column of texts."""
        values = self._column(name)
        if wrong := [value for value in values if not isinstance(value, str | bytes | None)]:
            raise ValueError(f"column {name} holds {type(wrong[0]).__name__}, expected texts")
        texts = [value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value for value in values]
        return [None if text is None else replace_surrogates(text)[:_MAX_TEXT].replace("\0", "") for text in texts]

    def _labels(self) -> list[np.ndarray | None] | None:
        """The stored labels; None if the file has none."""
        if self.mapping.tokens is None:
            return None
        labels = [np.asarray(value) for value in self._column(self.mapping.tokens)]
        if any(label.ndim != 1 or (label.size and label.dtype.kind not in "iu") for label in labels):
            raise ValueError(f"column {self.mapping.tokens} is not a list of integers for every trial")
        known = self.table.get("has_label", [True] * len(labels))
        return [label if is_known else None for label, is_known in zip(labels, known, strict=True)]

    def _rows(self) -> list[int]:
        """Rows of the table that belong to the split."""
        n = len(self.table)
        if self.mapping.split is not None:
            return [i for i, name in enumerate(self._texts(self.mapping.split)) if name == self.file.split]
        if _split_of_name(self.file.path.stem) is not None:
            return list(range(n))
        n_test = round(n * _HELD_OUT)
        n_train = n - n_test - min(n_test, n - n_test)
        bounds = {"train": (0, n_train), "val": (n_train, n - n_test), "test": (n - n_test, n)}
        return list(range(*bounds[self.file.split]))

    def _label(self, text: str | None, row: int) -> tuple[np.ndarray | None, tuple[Problem, ...]]:
        """The stored label, or one derived from the text if the file has no labels."""
        label = None if self.labels is None else self.labels[row]
        if label is None and self.labels is None and text:
            derived = sentence_tokens(text, self.classes)
            label = None if derived is None else np.array(derived)
        if label is None:
            missing = Problem(NO_LABEL, None, "the trial has neither a label nor a sentence to derive it from")
            return None, () if self.file.split == "test" else (missing,)
        if label.size and (label.min() <= BLANK or label.max() >= len(self.classes)):
            return None, (Problem("label out of range", None, f"tokens are outside 1…{len(self.classes) - 1}"),)
        return label.astype(np.int32), ()

    # --- bins -------------------------------------------------------------------------------------------------

    def _find_signals(self, nwb: Any) -> None:
        """Find the time series that the mapping names, or the spike times."""
        mapping, known = self.mapping, _list_series(nwb)
        named = (*mapping.bins, *([mapping.mask] if mapping.mask else []))
        if missing := [name for name in named if name not in known]:
            raise ValueError(f"{missing[0]} is missing; its time series are {', '.join(known) or 'none'}")
        self.series = [known[name].data for name in mapping.bins]
        self.times = [_times(known[name], name) for name in mapping.bins]
        if any(len(times) != len(self.times[0]) for times in self.times):
            raise ValueError(f"the time series have different lengths: {sorted(map(len, self.times))}")
        self.mask = np.asarray(known[mapping.mask].data[:], bool) if mapping.mask else None
        if self.mask is not None and self.series and self.mask.shape != self.times[0].shape:
            raise ValueError(f"{mapping.mask} has shape {self.mask.shape}, the bins {self.times[0].shape}")
        units = nwb.units if not mapping.bins else None
        self.spikes = [] if units is None else [np.sort(units.get_unit_spike_times(i)) for i in range(len(units))]
        if not self.series and not self.spikes:
            raise ValueError("it has no units, and the mapping names no time series in `bins`")

    def _read_bins(self, start: float, stop: float) -> np.ndarray:
        if not self.series:
            return self._count_spikes(start, stop)
        edge = stop + _TOLERANCE_S if self.mapping.stop_inclusive else stop - _TOLERANCE_S
        first, last = (int(np.searchsorted(self.times[0], at)) for at in (start - _TOLERANCE_S, edge))
        last = max(first, last)
        parts = []
        for data in self.series:
            shape = last - first, int(np.prod(data.shape[1:]))
            if shape[0] * shape[1] > MAX_VALUES or data.ndim > 2:
                raise ValueError(f"a trial of {last - first} bins of shape {data.shape[1:]} is too large")
            self.budget.spend(4 * shape[0] * shape[1])
            with np.errstate(over="ignore"):  # a float64 beyond float32 becomes inf, which the quality checks report
                parts.append(np.asarray(data[first:last]).astype(np.float32).reshape(shape))
        bins = np.concatenate(parts, axis=1)
        return bins if self.mask is None else bins[self.mask[first:last]]

    def _count_spikes(self, start: float, stop: float) -> np.ndarray:
        """Spike counts in bins of 20 ms. (T, units)"""
        n_bins = max(0, int((stop - start) / BIN_SECONDS + 1e-6))
        if n_bins * len(self.spikes) > MAX_VALUES:
            raise ValueError(f"a trial of {n_bins} bins is too long")
        edges = start + BIN_SECONDS * np.arange(n_bins + 1)
        return np.stack([np.diff(np.searchsorted(times, edges)) for times in self.spikes], axis=1).astype(np.float32)


def _times(series: Any, path: str) -> np.ndarray:
    """Time of every row of a time series in bins of 20 ms. (T,)"""
    n = len(series.data)
    if series.timestamps is not None:
        times = np.asarray(series.timestamps[:], np.float64)
    elif n > MAX_VALUES:
        raise ValueError(f"{path} has {n} rows, too many")
    else:
        times = float(series.starting_time) + np.arange(n) / float(series.rate)
    if times.shape != (n,) or not np.isfinite(times).all() or np.any(np.diff(times) <= 0):
        raise ValueError(f"the timestamps of {path} do not increase, or are not one per row")
    step = float(np.median(np.diff(times))) if n > 1 else BIN_SECONDS
    if abs(step - BIN_SECONDS) > 1e-3:
        raise ValueError(f"{path} has one row every {1000 * step:g} ms, expected bins of 20 ms; use the units instead")
    return times


def _to_integer(value: Any) -> int | None:
    if isinstance(value, str | bytes):
        text = value.decode("ascii", errors="replace") if isinstance(value, bytes) else value
        found = re.fullmatch(r"\s*(\d{1,9})\s*", text)
        return int(found[1]) if found else None
    if value is None or not np.isfinite(value) or abs(value) >= 2**53 or value != int(value):
        return None
    return int(value)
