"""Tabular logs: CSV and similar tables, MLflow metric files, JSON lines and JSON documents."""

import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.errors import UserError
from arcuate.insight.doctor.columns import METRICS, Collector, ColumnMeaning, parse_column_name, parse_numbers
from arcuate.insight.doctor.metadata import scan_config
from arcuate.insight.doctor.read_text import line_blocks

# Tables with a header.

_DELIMITERS = ",\t;|"
_WANDB_COLUMN = re.compile(r"^(?P<run>.+) - (?P<metric>[^-]+)$")
_VALUE = re.compile(r"[:=]\s*[-+.]?\d|\d\.\d|^[-+]?\d+$|\b(?:nan|inf)\b", re.I)  # never part of a column name
_DECIMAL_COMMA = re.compile(r"[-+]?(?:0,\d+|\d+,(?:\d{1,2}|\d{4,}))(?:[eE][-+]?\d+)?\s?%?")  # 0,31, not 1,000
_DECIMAL_POINT = re.compile(r"[-+]?\d*\.\d+(?:[eE][-+]?\d+)?\s?%?")
_COMMA_NUMBER = re.compile(r"^(\s*[-+]?\d+),(\d+(?:[eE][-+]?\d+)?\s?%?\s*)$")


def find_delimiter(lines: Sequence[str]) -> str | None:
    """The delimiter of a table whose header has known column names; None if the lines are not such a table."""
    lines = [line for line in lines if line.strip() and not line.startswith("#")][:20]
    if len(lines) < 2:
        return None
    for delimiter in (*_DELIMITERS, " "):
        head = _split_cells(lines[0], delimiter)
        widths = {len(_split_cells(line, delimiter)) for line in lines[1:-1]}
        if len(head) < 2 or any(_VALUE.search(cell) for cell in head) or not widths <= {len(head)}:
            continue
        roles = {_role(name) for name in head}
        axes, metrics = roles & {"step", "epoch"}, roles & set(METRICS)
        has_values = (metrics or "value" in roles) and (axes or len(metrics) > 1)
        if has_values or (axes and "tag" in roles):
            return delimiter
    return None


def _role(name: str) -> str:
    match = _WANDB_COLUMN.match(name)
    return parse_column_name(match["metric"] if match else name).role


def _split_cells(line: str, delimiter: str) -> list[str]:
    if delimiter == " ":
        return line.split()
    row = next(csv.reader([line.replace("\0", "")], delimiter=delimiter), [])
    bordered = delimiter == "|" and line.lstrip().startswith("|")
    return [cell.strip() for cell in (row[1:-1] if bordered else row)]


def read_csv(blocks: Iterable[list[str]], delimiter: str, collector: Collector, stem: str) -> None:
    head: list[str] = []
    decimal_comma: bool | None = None  # determined by the first rows
    for lines in blocks:
        lines = [line for line in lines if line and not line.isspace() and not line.startswith("#")]
        rows = _parse_rows(lines, delimiter)
        if not head and rows:
            head = rows.pop(0)
        valid = [row for row in rows if len(row) == len(head) and row != head]
        collector.n_bad += sum(len(row) != len(head) for row in rows)
        if decimal_comma is None and valid:
            decimal_comma = _has_decimal_comma(valid)
        if decimal_comma:
            valid = [[_COMMA_NUMBER.sub(r"\1.\2", cell) for cell in row] for row in valid]
        if valid:
            _add_table(head, valid, collector, stem)


def _has_decimal_comma(rows: Sequence[Sequence[str]]) -> bool:
    """Whether some number is only valid with a decimal comma and none has a decimal point."""
    cells = [cell.strip() for row in rows[:1000] for cell in row]
    return any(map(_DECIMAL_COMMA.fullmatch, cells)) and not any(map(_DECIMAL_POINT.fullmatch, cells))


def _parse_rows(lines: Sequence[str], delimiter: str) -> list[list[str]]:
    if delimiter in " |":
        return [_split_cells(line, delimiter) for line in lines]
    try:
        return list(csv.reader(lines, delimiter=delimiter))
    except csv.Error:
        return [row for line in lines if (row := _parse_row(line, delimiter))]


def _parse_row(line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line.replace("\0", "")[:100_000]], delimiter=delimiter), [])
    except csv.Error:
        return []


def _add_table(head: Sequence[str], rows: Sequence[Sequence[str]], collector: Collector, stem: str) -> None:
    row_numbers = np.arange(collector.n_rows, collector.n_rows + len(rows), dtype=float)
    collector.n_rows += len(rows)
    columns: dict[str, Sequence[Any]] = dict(zip(head, zip(*rows, strict=True), strict=True))
    for table in _split_runs(columns):
        roles = {parse_column_name(name).role for name in table}
        if "value" in roles and "tag" not in roles and not roles & set(METRICS):
            table = {**table, "tag": [stem] * len(rows)}  # an export of one curve, named after its file
        collector.add_columns(table, row_numbers)


def _split_runs(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Sequence[Any]]]:
    """Split a Weights & Biases export of several runs (columns `run - metric`) into one table per run."""
    matches = {name: match for name in columns if (match := _WANDB_COLUMN.match(name))}
    if not matches:
        return [dict(columns)]
    shared = {name: values for name, values in columns.items() if name not in matches}
    runs: dict[str, dict[str, Sequence[Any]]] = {}
    for name, match in matches.items():
        runs.setdefault(match["run"], {})[match["metric"].strip()] = columns[name]
    n = len(next(iter(columns.values())))
    return [{**shared, **metrics, "run": [run] * n} for run, metrics in runs.items()]


# MLflow metric files: time stamp, value and step, without a header.

_MLFLOW_LINE = re.compile(r"^\d{12,14} \S+ -?\d+$")


def is_mlflow(lines: Sequence[str]) -> bool:
    lines = [line for line in lines if line.strip()]
    return len(lines) > 0 and all(_MLFLOW_LINE.match(line.strip()) for line in lines[:20])


def read_mlflow(blocks: Iterable[list[str]], collector: Collector, stem: str) -> None:
    for lines in blocks:
        rows = [line.split() for line in lines if _MLFLOW_LINE.match(line.strip())]
        if rows:
            _, values, steps = zip(*rows, strict=True)
            _add_table(["step", "value"], list(zip(steps, values, strict=True)), collector, stem)


# JSON lines.


def read_jsonl(
    blocks: Iterable[list[str]], collector: Collector, on_rows: Callable[[list[Any]], None] | None = None
) -> None:
    """Parse a block at once if all of its lines are valid, else line by line; NaN and Infinity are accepted."""
    for lines in blocks:
        try:
            rows = json.loads(f"[{','.join(line for line in lines if line and not line.isspace())}]")
        except (ValueError, RecursionError):
            rows = [row for line in lines if (row := _parse_line(line, collector)) is not None]
        objects = [row for row in rows if type(row) is dict]
        collector.n_bad += len(rows) - len(objects)
        if on_rows is not None:
            on_rows(objects)
        collector.add_rows(objects)


def _parse_line(line: str, collector: Collector) -> Any:
    if not line or line.isspace():
        return None
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        collector.n_bad += 1
        return None


# JSON documents, and the plain contents of pickles: nested rows, or columns of equal length.

_MAX_DOCUMENT = 1 << 28  # characters
_MAX_COLUMN = 50_000_000
_AXES = ("step", "epoch", "group", "split", "tag", "value")
_B2T24_KEYS = {"testloss", "testcer", "testper"}
_B2T24_INTERVAL = 100  # the '24 trainer evaluates every hundred batches and stores no counter
_COUNTER = re.compile(r"\d{1,15}(?:\.0*)?")
_ZERO_FRACTION = 0.5  # minimum fraction of exact zeros in a column of evaluations for them to mean "not evaluated"


def read_json_document(path: Path, encoding: str, collector: Collector) -> bool:
    """Read a file as one JSON document; return whether it was valid."""
    parts, size = [], 0
    for lines in line_blocks(path, encoding):
        parts.append("\n".join(lines))
        size += len(parts[-1])
        if size > _MAX_DOCUMENT:
            raise UserError(
                f"{path} is one JSON document of more than {_MAX_DOCUMENT:,} characters; write one row per line"
            )
    try:
        tree = json.loads("\n".join(parts))
    except (ValueError, RecursionError):
        return False
    read_tree(tree, collector)
    return True


def read_tree(tree: Any, collector: Collector, prefix: str = "", depth: int = 6) -> None:
    """Collect everything that looks like rows or columns, down to a limited depth."""
    if depth == 0:
        return
    if isinstance(tree, list):
        rows = [row for row in tree if isinstance(row, Mapping)]
        if rows:
            collector.add_rows({_prefixed(str(k), prefix): v for k, v in row.items()} for row in rows)
        return
    if not isinstance(tree, Mapping):
        return
    plain = {k: v for k, v in tree.items() if not isinstance(v, (Mapping, list))}
    scan_config(plain, collector.metadata, "stated in the file")
    if is_keyed_by_step(tree):
        collector.add_rows({"step": step, **row} for step, row in tree.items())
        return
    lists = {str(k): values for k, v in tree.items() if (values := _flat_list(v)) is not None}
    if lists:
        _add_lists(lists, collector, prefix)
    for name, value in tree.items():
        if str(name) not in lists and isinstance(value, (Mapping, list)):
            extend = isinstance(value, Mapping) or parse_column_name(str(name)).split
            read_tree(value, collector, f"{prefix}{name}/" if extend else prefix, depth - 1)


def _prefixed(name: str, prefix: str) -> str:
    return name if parse_column_name(name).role in _AXES else f"{prefix}{name}"


def is_keyed_by_step(tree: Mapping[Any, Any]) -> bool:
    """Whether the keys of a mapping are counters, as in {"100": {"per": 0.8}, …}."""
    return len(tree) > 1 and all(_COUNTER.fullmatch(str(k)) and isinstance(v, Mapping) for k, v in tree.items())


def _flat_list(value: Any) -> list[Any] | None:
    if isinstance(value, np.ndarray):
        value = value.reshape(-1).tolist() if value.ndim <= 1 or 1 in value.shape else None
    if not isinstance(value, (list, tuple)) or not value or len(value) > _MAX_COLUMN:
        return None
    return list(value) if not isinstance(value[0], (Mapping, list, tuple, str)) else None


def _add_lists(lists: Mapping[str, list[Any]], collector: Collector, prefix: str) -> None:
    """Add columns, those of equal length together; without a counter the position in the list is used."""
    for length in sorted({len(v) for v in lists.values()}):
        columns = {
            _prefixed(name, prefix): _without_placeholders(values, parse_column_name(name))
            for name, values in lists.items()
            if len(values) == length
        }
        if {name.lower() for name, values in lists.items() if len(values) == length} & _B2T24_KEYS:
            columns["batch"] = [_B2T24_INTERVAL * i for i in range(length)]
        row_numbers = np.arange(collector.n_rows, collector.n_rows + length, dtype=float)
        collector.n_rows += length
        collector.add_columns(columns, row_numbers)


def _without_placeholders(values: list[Any], meaning: ColumnMeaning) -> list[Any]:
    """Replace zeros that fill rows without an evaluation by None."""
    if meaning.role not in ("per", "wer", "loss") or meaning.split == "train":
        return values
    numbers, present = parse_numbers(values)
    zero = present & (numbers == 0)
    if not zero.any() or zero.mean() < _ZERO_FRACTION or not (numbers[present] > 0).any():
        return values
    return [None if z else v for z, v in zip(zero, values, strict=True)]
