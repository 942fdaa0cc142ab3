"""Tables with a header: exports of trackers and trainers' own files."""

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from arcuate.doctor.collect import METRICS, Collector
from arcuate.doctor.names import read_name

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
