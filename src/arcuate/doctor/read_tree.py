"""Nested values: a JSON document or the plain content of a pickle, as rows or as columns of equal length."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.doctor.collect import Collector, numbers
from arcuate.doctor.hints import look_at_config
from arcuate.doctor.lines import line_blocks
from arcuate.doctor.names import Name, read_name
from arcuate.errors import UserError

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
