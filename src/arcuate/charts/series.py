"""Quantities over steps, thinned to what a screen can show."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arcuate.charts.formats import finite_int, finite_number

MAX_POINTS = 320  # of one line; more cannot be seen on a screen


@dataclass(frozen=True)
class Curve:
    """A quantity over steps, thinned: the median, minimum and maximum of each stretch of steps."""

    steps: tuple[float, ...]
    median: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    n_missing: int  # logged values that are not finite

    @property
    def values(self) -> list[float]:
        return [v for v in (*self.low, *self.high) if v is not None]


def curve_of(rows: Sequence[Mapping[str, Any]], key: str, peak: str | None = None) -> Curve:
    """One quantity of the log; `peak` names a second one with the maximum within the same steps."""
    rows = [row for row in rows if key in row]
    values = [finite_number(row[key]) for row in rows]
    peaks = [finite_number(row.get(peak)) for row in rows] if peak else ()
    return thin_curve([int(row["step"]) for row in rows], values, peaks)


def thin_curve(steps: Sequence[float], values: Sequence[float | None], peaks: Sequence[float | None] = ()) -> Curve:
    size = max(1, -(-len(steps) // MAX_POINTS))
    at, median, low, high = [], [], [], []
    for i in range(0, len(steps), size):
        kept = [v for v in values[i : i + size] if v is not None]
        tops = kept + [v for v in peaks[i : i + size] if v is not None]
        at.append(float(np.median(steps[i : i + size])))
        median.append(float(np.median(kept)) if kept else None)
        low.append(min(kept) if kept else None)
        high.append(max(tops) if tops else None)
    return Curve(tuple(at), tuple(median), tuple(low), tuple(high), sum(v is None for v in values))


def rows_by_step(rows: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Rows in the order of their step; of a step that was run twice the later row is kept."""
    kept = {step: {**row, "step": step} for row in rows if (step := finite_int(row.get("step"))) is not None}
    return tuple(kept[step] for step in sorted(kept))
