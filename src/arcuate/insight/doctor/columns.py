"""The text of a file in whatever encoding, as blocks of lines, so that no file is ever whole in memory."""

import codecs
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.errors import UserError
from arcuate.insight.doctor.names import HELD_OUT, TRAIN, Name, read_name, words

BLOCK = 1 << 20  # characters read at once
LONGEST = 1 << 26  # characters of one line
HEAD = 1 << 16  # bytes that decide what a file is
TORN = 0.1  # share of bytes that may be damage in what is still a text


def read_head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(HEAD)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def encoding_of(head: bytes) -> str | None:
    """The encoding of a text; None where the bytes are no text. Some zeros are left behind by a full disk."""
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    for encoding, zeros, others in (
        ("utf-16-le", head[1::2], head[::2]),
        ("utf-16-be", head[::2], head[1::2]),
    ):
        if zeros.count(0) > 0.7 * len(zeros) and others.count(0) < 0.02 * len(others) + 1:
            return encoding
    signs = head.replace(b"\0", b"")
    control = sum(signs.count(bytes([c])) for c in range(32) if c not in (8, 9, 10, 12, 13, 27))
    strange = signs.decode("utf-8", errors="replace").count("\ufffd")
    torn = len(head) - len(signs) > TORN * len(head)
    return None if torn or control > 0.02 * len(signs) + 2 or strange > TORN * len(signs) + 2 else "utf-8-sig"


def line_blocks(path: Path, encoding: str) -> Iterator[list[str]]:
    """Lines without their ends, many at a time; the last one may be half a line."""
    rest = ""
    with path.open("rb") as raw:
        text = io.TextIOWrapper(io.BufferedReader(raw, BLOCK), encoding=encoding, errors="replace")
        while block := text.read(BLOCK):
            rest += block.replace("\0", "")
            if len(rest) > LONGEST and "\n" not in rest:
                raise UserError(f"{path} has a line of more than {LONGEST:,} characters: it is no log")
            *lines, rest = rest.split("\n")
            if lines:
                yield lines
    if rest:
        yield [rest]


# Rows of any format, gathered into one growing column per thing that was logged.

LONG, KEPT = 1 << 20, 1 << 18  # a column longer than the first is thinned to about the second
MAX_COLUMNS = 400  # of interest; a file with more is no log of one training
DEPTH = 3  # of mappings within a row
METRICS = ("per", "wer", "loss", "grad", "lr")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
MISSING = frozenset({"", "none", "null", "-", "n/a", "na", "--", "missing"})


@dataclass(frozen=True)
class Key:
    """Which column: of which run of the file, under which tag and name, for which split."""

    group: str
    tag: str
    name: str
    split: str


@dataclass
class Column:
    """Values with their row numbers, counters and epochs; NaN where a row has no such counter."""

    meaning: Name
    parts: list[np.ndarray] = field(default_factory=list)  # each (4, N): row, step, epoch, value
    n: int = 0
    step_name: str = ""
    thinned: bool = False

    def add(self, part: np.ndarray) -> None:
        self.parts.append(part)
        self.n += part.shape[1]
        if self.n > LONG:
            self.parts = [thin(self.table())]
            self.n, self.thinned = self.parts[0].shape[1], True

    def table(self) -> np.ndarray:
        """All points in the order of the file, (4, N)."""
        whole = np.concatenate(self.parts, axis=1) if self.parts else np.empty((4, 0))
        return whole[:, np.argsort(whole[0], kind="stable")]


def thin(table: np.ndarray) -> np.ndarray:
    """Real points only: the lowest and highest of each stretch, where counters fall, and what is not finite first."""
    _, step, epoch, value = table
    n = table.shape[1]
    size = -(-n // (KEPT // 2))
    whole = n - n % size
    blocks = np.nan_to_num(value[:whole], nan=0.0, posinf=0.0, neginf=0.0).reshape(-1, size)
    start = np.arange(len(blocks)) * size
    kept = np.zeros(n, dtype=bool)
    kept[start + blocks.argmin(1)] = kept[start + blocks.argmax(1)] = True
    kept[whole:] = kept[0] = True
    falls = np.flatnonzero((np.diff(step) < 0) | (np.diff(epoch) < 0))[: KEPT // 4]
    kept[falls] = kept[falls + 1] = True
    broken = np.flatnonzero(~np.isfinite(value))
    kept[broken[:1000]] = True
    kept[broken[:: max(1, len(broken) // 1000)]] = True
    return table[:, kept]


@dataclass
class Collector:
    """Takes rows in chunks, keeps what a diagnosis can use."""

    columns: dict[Key, Column] = field(default_factory=dict)
    n_rows: int = 0
    n_bad: int = 0  # lines that should have been rows
    n_skipped: float = 0.0  # updates that the trainer says it skipped
    facts: dict[str, Any] = field(default_factory=dict)  # settings found on the way

    def add_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows as dictionaries; those with the same keys are turned into columns together."""
        alike: dict[tuple[str, ...], tuple[list[range], list[Mapping[str, Any]]]] = {}
        for names, run in groupby(rows, key=tuple):
            numbers, kept = alike.setdefault(names, ([], []))
            before = len(kept)
            kept.extend(run)
            numbers.append(range(self.n_rows, self.n_rows + len(kept) - before))
            self.n_rows += len(kept) - before
        for names, (numbers, kept) in alike.items():
            if names:
                self._add_alike(names, np.concatenate([np.array(n, dtype=float) for n in numbers]), kept)

    def _add_alike(self, names: tuple[str, ...], numbers: np.ndarray, rows: list[Mapping[str, Any]]) -> None:
        columns = dict(zip(names, zip(*(row.values() for row in rows), strict=True), strict=True))
        self._add_nested(columns, numbers)

    def _add_nested(
        self, columns: Mapping[Any, Sequence[Any]], numbers: np.ndarray, depth: int = DEPTH
    ) -> None:
        """Columns of mappings become one column per key, named `outer/inner`, for the rows that have the same keys."""
        nested = [name for name, values in columns.items() if _nested(values)]
        if not nested:
            self.add_columns(columns, numbers)
            return
        alike: dict[tuple[Any, ...], list[int]] = {}
        for i, keys in enumerate(zip(*(map(_keys, columns[name]) for name in nested), strict=True)):
            alike.setdefault(keys, []).append(i)
        for shape, places in alike.items():
            if len(alike) > 1:
                chosen = {name: [values[i] for i in places] for name, values in columns.items()}
            else:
                chosen = dict(columns)
            for name, keys in zip(nested, shape, strict=True):
                if keys is not None:
                    inner = chosen.pop(name)
                    chosen |= {f"{name}/{key}": [v[key] for v in inner] for key in keys if depth}
            if chosen:
                self._add_nested(chosen, numbers[places] if len(alike) > 1 else numbers, depth - 1)

    def add_columns(self, columns: Mapping[str, Sequence[Any]], rows: np.ndarray) -> None:
        meanings = {name: read_name(name) for name in columns if isinstance(name, str)}
        metrics = [name for name, meaning in meanings.items() if meaning.role in METRICS]
        tags = _labels(columns, meanings, "tag")
        if tags is not None and "value" in {m.role for m in meanings.values()}:
            metrics = [name for name, meaning in meanings.items() if meaning.role == "value"]
        for name, meaning in meanings.items():
            if meaning.role == "skipped":
                self._count_skipped(columns[name])
        if not metrics:
            return
        step_name = _first(meanings, "step")
        step = numbers(columns[step_name])[0] if step_name else np.full(len(rows), np.nan)
        epoch_name = _first(meanings, "epoch")
        epoch = numbers(columns[epoch_name])[0] if epoch_name else np.full(len(rows), np.nan)
        groups, splits = _labels(columns, meanings, "group"), _labels(columns, meanings, "split")
        read = {name: numbers(columns[name]) for name in metrics}
        for (group, tag, split), chosen in _combinations(groups, tags, splits, len(rows)):
            for name, (values, present) in read.items():
                there = present & chosen
                if there.any():
                    key = Key(group, tag, name, _split(split))
                    part = np.stack([rows[there], step[there], epoch[there], values[there]])
                    self._add(key, meanings[name], part, step_name or "")

    def _add(self, key: Key, meaning: Name, part: np.ndarray, step_name: str) -> None:
        if meaning.role == "value":
            meaning = read_name(key.tag)
            if meaning.role not in METRICS:
                return
        if key not in self.columns:
            if len(self.columns) >= MAX_COLUMNS:
                return
            self.columns[key] = Column(meaning, step_name=step_name)
        self.columns[key].add(part)

    def _count_skipped(self, values: Sequence[Any]) -> None:
        plain = [
            v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v)
        ]
        if plain:
            self.n_skipped = max(self.n_skipped, max(plain))


def _first(meanings: Mapping[str, Name], role: str) -> str | None:
    found = [(meaning.rank, name) for name, meaning in meanings.items() if meaning.role == role]
    return min(found)[1] if found else None


def _nested(values: Sequence[Any]) -> bool:
    """Whether a column holds mappings; where its ends are empty, all of it is looked at."""
    ends = {type(values[0]), type(values[-1])}
    return dict in ends or (type(None) in ends and dict in set(map(type, values)))


def _keys(value: Any) -> tuple[Any, ...] | None:
    return tuple(value) if type(value) is dict else None


def _labels(
    columns: Mapping[str, Sequence[Any]], meanings: Mapping[str, Name], role: str
) -> Sequence[Any] | None:
    """The first column with that role; None where there is none, or it holds no plain labels."""
    name = next((name for name, meaning in meanings.items() if meaning.role == role), None)
    if name is None:
        return None
    if role in ("tag", "split") and not any(isinstance(v, str) for v in columns[name]):
        return None
    return columns[name]


def _combinations(
    groups: Sequence[Any] | None, tags: Sequence[Any] | None, splits: Sequence[Any] | None, n: int
) -> list[tuple[tuple[str, str, str], np.ndarray]]:
    """The labels that occur together, each with the rows it holds for."""
    coded = [_codes(labels, n) for labels in (groups, tags, splits)]
    whole = sum(codes * factor for (codes, _), factor in zip(coded, (1, 1 << 20, 1 << 40), strict=True))
    found = []
    for code in np.unique(whole)[:MAX_COLUMNS].tolist():
        places = (code & 0xFFFFF, code >> 20 & 0xFFFFF, code >> 40)
        group, tag, split = (names[place] for (_, names), place in zip(coded, places, strict=True))
        found.append(((group, tag, split), whole == code))
    return found


def _codes(labels: Sequence[Any] | None, n: int) -> tuple[np.ndarray, list[str]]:
    """A number for each label, and the labels by number."""
    if labels is None:
        return np.zeros(n, dtype=np.int64), [""]
    try:
        if labels.count(labels[0]) == n:
            return np.zeros(n, dtype=np.int64), [_label(labels[0])]
        known = {label: i for i, label in enumerate(dict.fromkeys(labels))}
        return np.array([known[label] for label in labels], dtype=np.int64), list(map(_label, known))
    except TypeError:  # a label that cannot be compared, such as a list
        return _codes([_label(label) for label in labels], n)


def _label(value: Any) -> str:
    return "" if value is None or isinstance(value, (dict, list)) else str(value)[:120]


def _split(label: str) -> str:
    found = set(words(label))
    return "train" if found & TRAIN else "val" if found & HELD_OUT else ""


def numbers(values: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Values as floats, and which of them were there at all; NaN that was logged is there."""
    try:
        if None not in values:
            plain = np.array(values, dtype=float)
            if plain.ndim == 1:
                return plain, np.ones(len(plain), dtype=bool)
    except (TypeError, ValueError, OverflowError):
        pass
    try:
        if "" in values and None not in values:  # empty cells of a table
            plain = np.array([value or "nan" for value in values], dtype=float)
            return plain, np.array([value != "" for value in values], dtype=bool)
    except (TypeError, ValueError, OverflowError):
        pass
    read = [number(v) for v in values]
    there = np.array([v is not None for v in read], dtype=bool)
    return np.array([math.nan if v is None else v for v in read], dtype=float), there


def number(value: Any) -> float | None:
    """One number, from a number or a text such as `0.31`, `31 %`, `NaN` or `-Infinity`; None for everything else."""
    if isinstance(value, (bool, dict, list, tuple)) or value is None:
        return None
    if isinstance(value, str):
        value = value.strip()
        if value.lower() in MISSING or len(value) > 60:
            return None
        if value.endswith("%"):
            inner = number(value[:-1])
            return None if inner is None else inner / 100
        if _THOUSANDS.fullmatch(value):
            value = value.replace(",", "")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def flatten(row: Mapping[Any, Any], depth: int = DEPTH, before: str = "") -> dict[str, Any]:
    """Nested keys joined by a slash, a few levels deep; values that are lists are left out."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            if depth > 0:
                flat |= flatten(value, depth - 1, f"{before}{name}/")
        elif not isinstance(value, (list, tuple)):
            flat[f"{before}{name}"] = value
    return flat


# What a log says about itself beside its numbers: data set, planned length, that it came to its end.

_25 = re.compile(r"t15[._]?20\d\d|t15[._ ]copytask|hdf5_data_final|b2t[_-]?25|brain-to-text-25|\bt15\b", re.I)
_24 = re.compile(
    r"t12[._]20\d\d|ptdecoder_ctc|competitiondata|b2t[_-]?24|brain-to-text-24|\bt12\b|willett", re.I
)
_PLAN = re.compile(
    r"(?:total[ _](?:batches|steps|iterations)|num[ _]training[ _](?:batches|steps)|n_?batch(?:es)?|max[ _]steps"
    r"|num[ _]train[ _]steps|training[ _]steps|planned[ _]steps)\W{1,4}(\d[\d,_]{1,11})\b",
    re.I,
)
_DONE = re.compile(
    r"training (?:is )?(?:complete|finished|done)|finished training|best avg val per achieved|total training time"
    r"|training completed|={3,} *(?:fin|end|done) *={3,}",
    re.I,
)
_RUN = re.compile(r"={2,} *(?:RUN|EXPERIMENT) +([^=\s][^=]{0,80}?) *={2,}", re.I)
_MARK = re.compile(r"train|best avg|=== *|finished|total|max.steps|num.train|n_?batch", re.I)
PLAN_KEYS = frozenset(
    {"nbatch", "nbatches", "n_batches", "num_training_batches", "max_steps", "total_batches", "total_steps"}
    | {"num_train_steps", "planned_steps", "steps", "max_iters", "n_steps"}
)
_MANY = 10_000


def look_at(line: str, collector: Collector, early: bool) -> bool:
    """Take note of a line that holds no numbers of the training itself; whether there was anything to note."""
    facts = collector.facts
    if not _MARK.search(line) and not early:
        return False
    done, named = _DONE.search(line), _RUN.search(line)
    if done:
        facts.setdefault("finished", []).append(collector.n_rows)
    if named:
        facts.setdefault("names", []).append((collector.n_rows, named[1].strip()))
    if "planned" not in facts and (plan := _PLAN.search(line)):
        _plan(facts, plan[1].replace(",", "").replace("_", ""), "the log names it")
    if early and "dataset" not in facts:
        name_dataset(line, collector, "the log names its files")
    return bool(done or named)


def name_dataset(text: str, collector: Collector, because: str) -> None:
    newer, older = _25.search(text), _24.search(text)
    if newer and not older:
        collector.facts.setdefault("dataset", ("b2t25", f"{because} ({newer[0]})"))
    elif older and not newer:
        collector.facts.setdefault("dataset", ("b2t24", f"{because} ({older[0]})"))


def look_at_config(config: Any, collector: Collector, because: str) -> None:
    """A configuration beside a history: its length and its data."""
    if not isinstance(config, dict):
        return
    flat = flatten(config)
    for name, value in flat.items():
        if name.rsplit("/", 1)[-1].lower() in PLAN_KEYS and "planned" not in collector.facts:
            _plan(collector.facts, value, because)
    texts = " ".join(v for v in flat.values() if isinstance(v, str))
    name_dataset(texts[:_MANY], collector, because)


def _plan(facts: dict[str, Any], value: Any, because: str) -> None:
    try:
        steps = int(value)
    except (TypeError, ValueError, OverflowError):
        return
    if 10 <= steps <= 100_000_000:
        facts["planned"] = (steps, because)
