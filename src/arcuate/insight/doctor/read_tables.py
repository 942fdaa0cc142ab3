"""Tables with a header: exports of trackers and trainers' own files."""

import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.errors import UserError
from arcuate.insight.doctor.columns import METRICS, Collector, line_blocks, look_at_config, numbers
from arcuate.insight.doctor.names import Name, read_name

_WANDB = re.compile(r"^(?P<run>.+) - (?P<metric>[^-]+)$")
_MLFLOW = re.compile(r"^\d{12,14} \S+ -?\d+$")
_VALUE = re.compile(
    r"[:=]\s*[-+.]?\d|\d\.\d|^[-+]?\d+$|\b(?:nan|inf)\b", re.I
)  # what no name of a column holds
_COMMA = re.compile(r"[-+]?(?:0,\d+|\d+,(?:\d{1,2}|\d{4,}))(?:[eE][-+]?\d+)?\s?%?")  # 0,31 but not 1,000
_POINT = re.compile(r"[-+]?\d*\.\d+(?:[eE][-+]?\d+)?\s?%?")
_POINTED = re.compile(r"^(\s*[-+]?\d+),(\d+(?:[eE][-+]?\d+)?\s?%?\s*)$")
DELIMITERS = ",\t;|"


def delimiter_of(lines: Sequence[str]) -> str | None:
    """What separates the columns; None where the lines are no table with names that mean something."""
    lines = [line for line in lines if line.strip() and not line.startswith("#")][:20]
    if len(lines) < 2:
        return None
    for mark in (*DELIMITERS, " "):
        head, widths = cells(lines[0], mark), {len(cells(line, mark)) for line in lines[1:-1]}
        if len(head) < 2 or any(_VALUE.search(cell) for cell in head) or not widths <= {len(head)}:
            continue
        roles = {_role(name) for name in head}
        axis = roles & {"step", "epoch"}
        if (roles & {*METRICS, "value"} and (axis or len(roles & set(METRICS)) > 1)) or (
            len(axis) and "tag" in roles
        ):
            return mark
    return None


def _role(name: str) -> str:
    match = _WANDB.match(name)
    return read_name(match["metric"] if match else name).role


def cells(line: str, mark: str) -> list[str]:
    if mark == " ":
        return line.split()
    row = next(csv.reader([line.replace("\0", "")], delimiter=mark), [])
    return [cell.strip() for cell in (row[1:-1] if mark == "|" and line.lstrip().startswith("|") else row)]


def read_csv(blocks: Iterable[list[str]], mark: str, collector: Collector, stem: str) -> None:
    head: list[str] = []
    commas: bool | None = None  # whether numbers are written as 0,31; the first rows decide
    for lines in blocks:
        lines = [line for line in lines if line and not line.isspace() and not line.startswith("#")]
        rows = _rows(lines, mark)
        if not head and rows:
            head = rows.pop(0)
        sound = [row for row in rows if len(row) == len(head) and row != head]
        collector.n_bad += sum(len(row) != len(head) for row in rows)
        if commas is None and sound:
            commas = decimal_commas(sound)
        if commas:
            sound = [[_POINTED.sub(r"\1.\2", cell) for cell in row] for row in sound]
        if sound:
            _add(head, sound, collector, stem)


def decimal_commas(rows: Sequence[Sequence[str]]) -> bool:
    """Whether a comma stands before the decimals: some number cannot be read otherwise, and none has a point."""
    cells = [cell for row in rows[:1000] for cell in row]
    return any(_COMMA.fullmatch(cell.strip()) for cell in cells) and not any(
        _POINT.fullmatch(cell.strip()) for cell in cells
    )


def _rows(lines: Sequence[str], mark: str) -> list[list[str]]:
    if mark in " |":
        return [cells(line, mark) for line in lines]
    try:
        return list(csv.reader(lines, delimiter=mark))
    except csv.Error:
        return [row for line in lines if (row := _row(line, mark))]


def _row(line: str, mark: str) -> list[str]:
    try:
        return next(csv.reader([line.replace("\0", "")[:100_000]], delimiter=mark), [])
    except csv.Error:
        return []


def _add(head: Sequence[str], rows: Sequence[Sequence[str]], collector: Collector, stem: str) -> None:
    numbers = np.arange(collector.n_rows, collector.n_rows + len(rows), dtype=float)
    collector.n_rows += len(rows)
    columns: dict[str, Sequence[Any]] = dict(zip(head, zip(*rows, strict=True), strict=True))
    for chosen in by_run(columns):
        if {"tag", "value"} & (roles := {read_name(name).role for name in chosen}) == {
            "value"
        } and not roles & set(METRICS):
            chosen = {**chosen, "tag": [stem] * len(rows)}  # an export of one curve, named by its file
        collector.add_columns(chosen, numbers)


def by_run(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Sequence[Any]]]:
    """An export of several runs side by side (`name - metric`) as one table per run."""
    named = {name: match for name in columns if (match := _WANDB.match(name))}
    if not named:
        return [dict(columns)]
    shared = {name: values for name, values in columns.items() if name not in named}
    runs: dict[str, dict[str, Sequence[Any]]] = {}
    for name, match in named.items():
        runs.setdefault(match["run"], {})[match["metric"].strip()] = columns[name]
    n = len(next(iter(columns.values())))
    return [{**shared, **metrics, "run": [run] * n} for run, metrics in runs.items()]


def is_mlflow(lines: Sequence[str]) -> bool:
    """A metric file of MLflow: time, value and step, without a header."""
    lines = [line for line in lines if line.strip()]
    return len(lines) > 0 and all(_MLFLOW.match(line.strip()) for line in lines[:20])


def read_mlflow(blocks: Iterable[list[str]], collector: Collector, stem: str) -> None:
    for lines in blocks:
        rows = [line.split() for line in lines if _MLFLOW.match(line.strip())]
        if rows:
            _, values, steps = zip(*rows, strict=True)
            _add(["step", "value"], list(zip(steps, values, strict=True)), collector, stem)


# One JSON object per line: metrics files and the histories of trackers.

_FAILS = (json.JSONDecodeError, RecursionError, ValueError)


def read_jsonl(
    blocks: Iterable[list[str]], collector: Collector, watch: Callable[[list[Any]], None] | None = None
) -> None:
    """A block at once where all of its lines are sound, otherwise line by line; NaN and Infinity are read as such."""
    for lines in blocks:
        try:
            rows = json.loads(f"[{','.join(line for line in lines if line and not line.isspace())}]")
        except _FAILS:
            rows = [row for line in lines if (row := read_line(line, collector)) is not None]
        sound = [row for row in rows if type(row) is dict]
        collector.n_bad += len(rows) - len(sound)
        if watch is not None:
            watch(sound)
        collector.add_rows(sound)


def read_line(line: str, collector: Collector) -> Any:
    if not line or line.isspace():
        return None
    try:
        return json.loads(line)
    except _FAILS:
        collector.n_bad += 1
        return None


# Nested values: a JSON document or the plain content of a pickle, as rows or as columns of equal length.

LARGEST = 1 << 28  # characters of one document
EVERY = 100  # the '24 trainer evaluates every hundred batches and keeps no counter
_OFFICIAL_24 = {"testloss", "testcer", "testper"}
_COUNT = re.compile(r"\d{1,15}(?:\.0*)?")
ZEROS = 0.5  # share of exact zeros from which on a zero in a column of evaluations means `not evaluated`


def read_json(path: Path, encoding: str, collector: Collector) -> bool:
    """Read a whole document; whether it was one."""
    parts, size = [], 0
    for lines in line_blocks(path, encoding):
        parts.append("\n".join(lines))
        size += len(parts[-1])
        if size > LARGEST:
            raise UserError(
                f"{path} is one JSON document of more than {LARGEST:,} characters; write one row per line"
            )
    try:
        tree = json.loads("\n".join(parts))
    except (ValueError, RecursionError):
        return False
    read_tree(tree, collector)
    return True


def read_tree(tree: Any, collector: Collector, before: str = "", depth: int = 6) -> None:
    """Take whatever looks like rows or columns, at any depth of a few levels."""
    if depth == 0:
        return
    if isinstance(tree, list):
        rows = [row for row in tree if isinstance(row, Mapping)]
        if rows:
            collector.add_rows(
                {f"{before}{k}" if read_name(str(k)).role not in _AXES else str(k): v for k, v in row.items()}
                for row in rows
            )
        return
    if not isinstance(tree, Mapping):
        return
    look_at_config(
        {k: v for k, v in tree.items() if not isinstance(v, (Mapping, list))}, collector, "the file names it"
    )
    if by_step(tree):
        collector.add_rows({"step": step, **row} for step, row in tree.items())
        return
    lists = {str(k): plain for k, v in tree.items() if (plain := _plain(v)) is not None}
    if lists:
        _add_columns(lists, collector, before)
    for name, value in tree.items():
        if str(name) not in lists and isinstance(value, (Mapping, list)):
            inner = f"{before}{name}/" if isinstance(value, Mapping) or read_name(str(name)).split else before
            read_tree(value, collector, inner, depth - 1)


_AXES = ("step", "epoch", "group", "split", "tag", "value")


def by_step(tree: Mapping[Any, Any]) -> bool:
    """Whether the keys of a mapping are counters, as in {"100": {"per": 0.8}, …}."""
    return len(tree) > 1 and all(_COUNT.fullmatch(str(k)) and isinstance(v, Mapping) for k, v in tree.items())


def _plain(value: Any) -> list[Any] | None:
    """A flat list of numbers, or pairs of (step, value)."""
    if isinstance(value, np.ndarray):
        value = value.reshape(-1).tolist() if value.ndim <= 1 or 1 in value.shape else None
    if not isinstance(value, (list, tuple)) or not value or len(value) > 50_000_000:
        return None
    return list(value) if not isinstance(value[0], (Mapping, list, tuple, str)) else None


def _add_columns(lists: Mapping[str, list[Any]], collector: Collector, before: str) -> None:
    """Columns of one length belong together; without a counter among them, the place in the list counts."""
    for length in sorted({len(v) for v in lists.values()}):
        alike = {name: values for name, values in lists.items() if len(values) == length}
        meanings = {name: read_name(name) for name in alike}
        if {name.lower() for name in alike} & _OFFICIAL_24:
            alike["batch"] = [EVERY * i for i in range(length)]
        named = {
            name if name == "batch" or meanings[name].role in _AXES else f"{before}{name}": _unfilled(
                values, meanings.get(name)
            )
            for name, values in alike.items()
        }
        rows = np.arange(collector.n_rows, collector.n_rows + length, dtype=float)
        collector.n_rows += length
        collector.add_columns(named, rows)


def _unfilled(values: list[Any], meaning: Name | None) -> list[Any]:
    """Zeros that fill the rows without an evaluation become what they are: missing."""
    if meaning is None or meaning.role not in ("per", "wer", "loss") or meaning.split == "train":
        return values
    plain, there = numbers(values)
    zero = there & (plain == 0)
    if not zero.any() or zero.mean() < ZEROS or not (plain[there] > 0).any():
        return values
    return [None if z else v for z, v in zip(zero, values, strict=True)]
