"""Columns and metadata of a log: the meaning of names, and `Collector`, which accumulates rows of any format."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def _word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


TRAIN = _word_set("train training tr")
HELD_OUT = _word_set("val valid validation eval evaluation evaluate test dev heldout held")
# Words that mark a derived number, not the value of one evaluation.
_DERIVED = _word_set(
    "ma ema moving smooth smoothed best min max std sd sample target delta improvement patience threshold count"
    " weight scale prev previous lowest bias day session sessions low high ci var variance timestamp scaler"
)
_RESOURCE = _word_set("time sec secs second seconds s ms hour memory mem gb mb")
_COUNTER = _word_set("step steps batch batches iteration iterations iter iters it update updates")
_COUNTER_PREFIX = _word_set("global trainer train training num n idx index number current total optimizer")
_GROUP = frozenset({"seed", "run", "run id", "run name", "runid", "experiment", "fold", "trial id", "run uuid", "exp"})
_SPLIT = _word_set("split phase mode set stage subset partition kind type event")
_TAG = frozenset({"tag", "metric", "metric name", "key", "name", "variable"})
_LOSSES = _word_set("loss losses nll")
_UNITS = _word_set("phoneme phone phonemes character char token label unit")


@dataclass(frozen=True)
class ColumnMeaning:
    """The role of a column, its split, and the distance of its name from the plainest name for that role."""

    role: str  # per, wer, loss, grad, lr, step, epoch, group, split, tag, value, skipped, or "" if irrelevant
    split: str = ""  # train, val, or "" if the name does not show it
    rank: int = 0
    percent: bool = False  # the name states that values are per cent


def split_words(text: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in _WORDS.findall(text))


def split_from_words(words: "frozenset[str] | set[str]") -> str:
    return "train" if words & TRAIN else "val" if words & HELD_OUT else ""


@lru_cache(maxsize=4096)
def parse_column_name(text: str) -> ColumnMeaning:
    parts = split_words(text.replace("%", " percent "))
    words = frozenset(parts)
    if not words or len(parts) > 12:
        return ColumnMeaning("")
    if meaning := _axis_or_label(text, parts, words):
        return meaning
    split = split_from_words(words)
    rank = len(parts)
    if "skipped" in words:
        return ColumnMeaning("skipped")
    if words & {"grad", "gradient", "gradients", "gradnorm", "gnorm"} or words == {"total", "norm"}:
        is_norm = words & {"norm", "gradnorm", "norms", "gnorm"}
        rank += 5 * bool(words & {"max", "clipped"})
        return ColumnMeaning("grad", split, rank) if is_norm else ColumnMeaning("")
    if "lr" in words or {"learning", "rate"} <= words:
        partial = words & {"bias", "day", "session", "min", "max", "start", "end"}
        return ColumnMeaning("") if partial else ColumnMeaning("lr", split, rank)
    if words & _DERIVED:
        return ColumnMeaning("")
    if words == {"vloss"}:
        return ColumnMeaning("loss", "val", rank)
    if words & _LOSSES or words - TRAIN - HELD_OUT == {"ctc"}:
        special = words - _LOSSES - TRAIN - HELD_OUT - {"ctc", "avg", "mean", "total"}
        return ColumnMeaning("loss", split, rank + 3 * bool(special))
    return _error_rate(parts, words, split)


def _axis_or_label(text: str, parts: tuple[str, ...], words: frozenset[str]) -> ColumnMeaning | None:
    plain = " ".join(parts)
    if "epoch" in words and words <= {"epoch", "current", "num", "idx", "trainer"}:
        return ColumnMeaning("epoch", "", len(parts))
    if words & _COUNTER and words <= _COUNTER | _COUNTER_PREFIX:
        rank = len(parts) + 10 * text.startswith("_") + 2 * ("batch" in words) - 3 * ("global" in words)
        return ColumnMeaning("step", "", rank)
    if plain in _GROUP:
        return ColumnMeaning("group")
    if plain in _SPLIT:
        return ColumnMeaning("split")
    if plain in _TAG:
        return ColumnMeaning("tag")
    return ColumnMeaning("value") if plain == "value" else None


def _error_rate(parts: tuple[str, ...], words: frozenset[str], split: str) -> ColumnMeaning:
    rank = len(parts) + 4 * ("beam" in words)
    percent = bool(words & {"percent", "pct", "percentage"})
    if {"error", "rate"} <= words and words & _UNITS:
        return ColumnMeaning("per", split, rank + 1, percent)
    if "per" in words and not _is_preposition(parts):
        return ColumnMeaning("per", split, rank, percent)
    if words & {"cer", "ter", "ler", "uer"}:
        return ColumnMeaning("per", split, rank + 6, percent)
    return ColumnMeaning("wer", split, rank, percent) if "wer" in words else ColumnMeaning("")


def _is_preposition(parts: tuple[str, ...]) -> bool:
    """Whether `per` means "for each", as in time_per_batch or samples_per_second."""
    i = parts.index("per")
    before, after = set(parts[:i]), set(parts[i + 1 :])
    per_what = _RESOURCE | _COUNTER | _word_set("epoch sample token word gpu device trial sentence")
    return bool(after & per_what or before & (_RESOURCE | _word_set("samples steps tokens batches examples trials")))


# Metadata of a log apart from its numbers: data set, planned length, end of training.

_B2T25 = re.compile(r"t15[._]?20\d\d|t15[._ ]copytask|hdf5_data_final|b2t[_-]?25|brain-to-text-25|\bt15\b", re.I)
_B2T24 = re.compile(r"t12[._]20\d\d|ptdecoder_ctc|competitiondata|b2t[_-]?24|brain-to-text-24|\bt12\b|willett", re.I)
SESSION = re.compile(r"\bt1[25]\.20\d\d\.\d\d\.\d\d")
_PLANNED = re.compile(
    r"(?:total[ _](?:batches|steps|iterations)|num[ _]training[ _](?:batches|steps)|n_?batch(?:es)?|max[ _]steps"
    r"|num[ _]train[ _]steps|training[ _]steps|planned[ _]steps)\W{1,4}(\d[\d,_]{1,11})\b",
    re.I,
)
_FINISHED = re.compile(
    r"training (?:is )?(?:complete|finished|done)|finished training|best avg val per achieved|total training time"
    r"|training completed|={3,} *(?:fin|end|done) *={3,}",
    re.I,
)
_RUN_NAME = re.compile(r"={2,} *(?:RUN|EXPERIMENT) +([^=\s][^=]{0,80}?) *={2,}", re.I)
_KEYWORDS = re.compile(r"train|best avg|=== *|finished|total|max.steps|num.train|n_?batch", re.I)
_PLANNED_KEYS = frozenset(
    "nbatch nbatches n_batches num_training_batches max_steps total_batches total_steps num_train_steps"
    " planned_steps steps max_iters n_steps".split()
)
_MAX_TEXT = 10_000
_MAX_DEPTH = 3  # levels of mappings within a row or a configuration


@dataclass
class Metadata:
    """Facts found so far, with their evidence."""

    dataset: tuple[str, str] | None = None  # name, evidence
    planned: tuple[int, str] | None = None  # steps, evidence
    sessions: set[str] = field(default_factory=set)  # sessions of a published release that the file names
    n_finished: int = 0  # messages that training is complete
    run_names: list[str] = field(default_factory=list)
    implausible: list[str] = field(default_factory=list)  # columns that cannot be what their names state


def scan_line(line: str, metadata: Metadata, early: bool) -> bool:
    """Extract metadata from a line without metrics; return whether a new run or the end of one was found."""
    if not _KEYWORDS.search(line) and not early:
        return False
    finished, named = _FINISHED.search(line), _RUN_NAME.search(line)
    if finished:
        metadata.n_finished += 1
    if named:
        metadata.run_names.append(named[1].strip())
    if metadata.planned is None and (planned := _PLANNED.search(line)):
        _set_planned(metadata, planned[1].replace(",", "").replace("_", ""), "stated in the log")
    if early and metadata.dataset is None:
        detect_dataset(line, metadata, "file names in the log")
    return bool(finished or named)


def detect_dataset(text: str, metadata: Metadata, because: str) -> None:
    newer, older = _B2T25.search(text), _B2T24.search(text)
    match = newer or older
    if match and not (newer and older) and metadata.dataset is None:
        metadata.dataset = "b2t25" if newer else "b2t24", f"{because} ({match[0]})"


def scan_config(config: Any, metadata: Metadata, because: str) -> None:
    """Extract planned length and data set from a configuration stored with a log."""
    if not isinstance(config, dict):
        return
    flat = flatten(config)
    for name, value in flat.items():
        if name.rsplit("/", 1)[-1].lower() in _PLANNED_KEYS and metadata.planned is None:
            _set_planned(metadata, value, because)
    strings = " ".join(v for v in flat.values() if isinstance(v, str))
    detect_dataset(strings[:_MAX_TEXT], metadata, because)


def _set_planned(metadata: Metadata, value: Any, because: str) -> None:
    try:
        steps = int(value)
    except (TypeError, ValueError, OverflowError):
        return
    if 10 <= steps <= 100_000_000:
        metadata.planned = steps, because


def flatten(row: Mapping[Any, Any], depth: int = _MAX_DEPTH, prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by slashes, to a limited depth; lists are omitted."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            if depth > 0:
                flat |= flatten(value, depth - 1, f"{prefix}{name}/")
        elif not isinstance(value, (list, tuple)):
            flat[f"{prefix}{name}"] = value
    return flat


# Accumulation of rows.

METRICS = ("per", "wer", "loss", "grad", "lr")
_MAX_LENGTH, _THINNED_LENGTH = 1 << 20, 1 << 18  # a longer column is thinned to about the second length
_MAX_COLUMNS = 400  # a file with more metric columns is not the log of one training
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_MISSING_VALUES = frozenset({"", "none", "null", "-", "n/a", "na", "--", "missing"})


@dataclass(frozen=True)
class ColumnKey:
    """Identifies a column: run within the file, tag, name and split."""

    group: str
    tag: str
    name: str
    split: str


@dataclass
class Column:
    """Values with their row numbers, steps and epochs; NaN where a row has no such counter."""

    meaning: ColumnMeaning
    parts: list[np.ndarray] = field(default_factory=list)  # each (4, N): row, step, epoch, value
    n: int = 0
    step_name: str = ""

    def append(self, part: np.ndarray) -> None:
        self.parts.append(part)
        self.n += part.shape[1]
        if self.n > _MAX_LENGTH:
            self.parts = [_thin(self.table())]
            self.n = self.parts[0].shape[1]

    def table(self) -> np.ndarray:
        """All points in file order, (4, N)."""
        points = np.concatenate(self.parts, axis=1) if self.parts else np.empty((4, 0))
        return points[:, np.argsort(points[0], kind="stable")]


def _thin(table: np.ndarray) -> np.ndarray:
    """Keep the minimum and maximum of each stretch, points where counters restart, and non-finite values."""
    _, step, epoch, value = table
    n = table.shape[1]
    size = -(-n // (_THINNED_LENGTH // 2))
    n_full = n - n % size
    blocks = np.nan_to_num(value[:n_full], nan=0.0, posinf=0.0, neginf=0.0).reshape(-1, size)
    start = np.arange(len(blocks)) * size
    kept = np.zeros(n, dtype=bool)
    kept[start + blocks.argmin(1)] = kept[start + blocks.argmax(1)] = True
    kept[n_full:] = kept[0] = True
    falls = np.flatnonzero((np.diff(step) < 0) | (np.diff(epoch) < 0))[: _THINNED_LENGTH // 4]
    kept[falls] = kept[falls + 1] = True
    broken = np.flatnonzero(~np.isfinite(value))
    kept[broken[:1000]] = True
    kept[broken[:: max(1, len(broken) // 1000)]] = True
    return table[:, kept]


@dataclass
class Collector:
    """Accumulates rows in chunks and keeps the columns that a diagnosis can use."""

    columns: dict[ColumnKey, Column] = field(default_factory=dict)
    n_rows: int = 0
    n_bad: int = 0  # lines that should have been rows
    n_skipped: float = 0.0  # updates that the trainer reports as skipped
    metadata: Metadata = field(default_factory=Metadata)

    def add_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows given as dictionaries; rows with the same keys are converted together."""
        by_keys: dict[tuple[str, ...], tuple[list[range], list[Mapping[str, Any]]]] = {}
        for names, run in groupby(rows, key=tuple):
            ranges, kept = by_keys.setdefault(names, ([], []))
            before = len(kept)
            kept.extend(run)
            ranges.append(range(self.n_rows, self.n_rows + len(kept) - before))
            self.n_rows += len(kept) - before
        for names, (ranges, kept) in by_keys.items():
            if names:
                row_numbers = np.concatenate([np.array(r, dtype=float) for r in ranges])
                values = zip(*(row.values() for row in kept), strict=True)
                self._add_nested(dict(zip(names, values, strict=True)), row_numbers)

    def _add_nested(
        self, columns: Mapping[Any, Sequence[Any]], row_numbers: np.ndarray, depth: int = _MAX_DEPTH
    ) -> None:
        """Expand columns of mappings into one column per key, named `outer/inner`, by rows with the same keys."""
        nested = [name for name, values in columns.items() if _is_nested(values)]
        if not nested:
            self.add_columns(columns, row_numbers)
            return
        by_keys: dict[tuple[Any, ...], list[int]] = {}
        key_sets = [[tuple(v) if type(v) is dict else None for v in columns[name]] for name in nested]
        for i, keys in enumerate(zip(*key_sets, strict=True)):
            by_keys.setdefault(keys, []).append(i)
        for combination, indices in by_keys.items():
            if len(by_keys) > 1:
                chosen = {name: [values[i] for i in indices] for name, values in columns.items()}
            else:
                chosen = dict(columns)
            for name, keys in zip(nested, combination, strict=True):
                if keys is not None:
                    inner = chosen.pop(name)
                    chosen |= {f"{name}/{key}": [v[key] for v in inner] for key in keys if depth}
            if chosen:
                self._add_nested(chosen, row_numbers[indices] if len(by_keys) > 1 else row_numbers, depth - 1)

    def add_columns(self, columns: Mapping[str, Sequence[Any]], row_numbers: np.ndarray) -> None:
        meanings = {name: parse_column_name(name) for name in columns if isinstance(name, str)}
        metrics = [name for name, meaning in meanings.items() if meaning.role in METRICS]
        tags = _labels(columns, meanings, "tag")
        if tags is not None and "value" in {m.role for m in meanings.values()}:
            metrics = [name for name, meaning in meanings.items() if meaning.role == "value"]
        for name, meaning in meanings.items():
            if meaning.role == "skipped":
                self._count_skipped(columns[name])
        if not metrics:
            return
        step_name, epoch_name = _best_name(meanings, "step"), _best_name(meanings, "epoch")
        unknown = np.full(len(row_numbers), np.nan)
        step = parse_numbers(columns[step_name])[0] if step_name else unknown
        epoch = parse_numbers(columns[epoch_name])[0] if epoch_name else unknown
        groups, splits = _labels(columns, meanings, "group"), _labels(columns, meanings, "split")
        parsed = {name: parse_numbers(columns[name]) for name in metrics}
        for (group, tag, split), selected in _label_combinations(groups, tags, splits, len(row_numbers)):
            for name, (values, present) in parsed.items():
                kept = present & selected
                if kept.any():
                    key = ColumnKey(group, tag, name, split_from_words(set(split_words(split))))
                    part = np.stack([row_numbers[kept], step[kept], epoch[kept], values[kept]])
                    self._append(key, meanings[name], part, step_name or "")

    def _append(self, key: ColumnKey, meaning: ColumnMeaning, part: np.ndarray, step_name: str) -> None:
        if meaning.role == "value":
            meaning = parse_column_name(key.tag)
            if meaning.role not in METRICS:
                return
        if key not in self.columns:
            if len(self.columns) >= _MAX_COLUMNS:
                return
            self.columns[key] = Column(meaning, step_name=step_name)
        self.columns[key].append(part)

    def _count_skipped(self, values: Sequence[Any]) -> None:
        counts = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v)]
        self.n_skipped = max(self.n_skipped, *counts, 0.0)


def _best_name(meanings: Mapping[str, ColumnMeaning], role: str) -> str | None:
    found = [(meaning.rank, name) for name, meaning in meanings.items() if meaning.role == role]
    return min(found)[1] if found else None


def _is_nested(values: Sequence[Any]) -> bool:
    """Whether a column holds mappings; all of it is checked only if its ends are empty."""
    ends = {type(values[0]), type(values[-1])}
    return dict in ends or (type(None) in ends and dict in set(map(type, values)))


def _labels(
    columns: Mapping[str, Sequence[Any]], meanings: Mapping[str, ColumnMeaning], role: str
) -> Sequence[Any] | None:
    """The first column with that role; None if there is none or it holds no strings."""
    name = next((name for name, meaning in meanings.items() if meaning.role == role), None)
    if name is None:
        return None
    if role in ("tag", "split") and not any(isinstance(v, str) for v in columns[name]):
        return None
    return columns[name]


def _label_combinations(
    groups: Sequence[Any] | None, tags: Sequence[Any] | None, splits: Sequence[Any] | None, n: int
) -> list[tuple[tuple[str, str, str], np.ndarray]]:
    """The combinations of labels that occur, each with a mask of its rows."""
    coded = [_label_codes(labels, n) for labels in (groups, tags, splits)]
    combined = sum(codes * factor for (codes, _), factor in zip(coded, (1, 1 << 20, 1 << 40), strict=True))
    found = []
    for code in np.unique(combined)[:_MAX_COLUMNS].tolist():
        indices = (code & 0xFFFFF, code >> 20 & 0xFFFFF, code >> 40)
        group, tag, split = (names[i] for (_, names), i in zip(coded, indices, strict=True))
        found.append(((group, tag, split), combined == code))
    return found


def _label_codes(labels: Sequence[Any] | None, n: int) -> tuple[np.ndarray, list[str]]:
    """An integer for each label, and the labels by integer."""
    if labels is None:
        return np.zeros(n, dtype=np.int64), [""]
    try:
        if labels.count(labels[0]) == n:
            return np.zeros(n, dtype=np.int64), [_label_text(labels[0])]
        known = {label: i for i, label in enumerate(dict.fromkeys(labels))}
        return np.array([known[label] for label in labels], dtype=np.int64), list(map(_label_text, known))
    except TypeError:  # unhashable labels such as lists
        return _label_codes([_label_text(label) for label in labels], n)


def _label_text(value: Any) -> str:
    return "" if value is None or isinstance(value, (dict, list)) else str(value)[:120]


def parse_numbers(values: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Values as floats, and a mask of those present; a logged NaN counts as present."""
    try:
        if None not in values:
            numbers = np.array(values, dtype=float)
            if numbers.ndim == 1:
                return numbers, np.ones(len(numbers), dtype=bool)
    except (TypeError, ValueError, OverflowError):
        pass
    try:
        if "" in values and None not in values:  # empty cells of a table
            numbers = np.array([value or "nan" for value in values], dtype=float)
            return numbers, np.array([value != "" for value in values], dtype=bool)
    except (TypeError, ValueError, OverflowError):
        pass
    parsed = [parse_number(v) for v in values]
    present = np.array([v is not None for v in parsed], dtype=bool)
    return np.array([math.nan if v is None else v for v in parsed], dtype=float), present


def parse_number(value: Any) -> float | None:
    """A number, or a string such as `0.31`, `31 %`, `NaN` or `-Infinity`; None for anything else."""
    if isinstance(value, (bool, dict, list, tuple)) or value is None:
        return None
    if isinstance(value, str):
        value = value.strip()
        if value.lower() in _MISSING_VALUES or len(value) > 60:
            return None
        if value.endswith("%"):
            inner = parse_number(value[:-1])
            return None if inner is None else inner / 100
        if _THOUSANDS.fullmatch(value):
            value = value.replace(",", "")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None
