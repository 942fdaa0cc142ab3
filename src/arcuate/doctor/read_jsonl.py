"""One JSON object per line: metrics files and the histories of trackers."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from arcuate.doctor.collect import Collector

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
