"""The numbers of all days against a reference day, as one tree for JSON and for the page."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from arcuate.drift.arrays import Group
from arcuate.drift.measure import (
    SAME_MAPPING,
    DayNumbers,
    came_back,
    died,
    fingerprint_likeness,
    group_change,
    level_change,
    profile_likeness,
    spread_factor,
    subspace_likeness,
)


def summarise(
    days: Sequence[DayNumbers], groups: Sequence[Group], reference: DayNumbers
) -> list[dict[str, Any]]:
    """A row per day: likeness to the reference day by array, dead channels, and whether channels look re-ordered."""
    rows = []
    for i, day in enumerate(days):
        before = days[i - 1] if i else day
        same = fingerprint_likeness(before, day)
        rows.append(
            {
                "session": day.session,
                "n_trials": day.n_trials,
                "flat": np.flatnonzero(day.flat).tolist(),
                "died": died(before, day).tolist(),
                "came_back": came_back(before, day).tolist(),
                "mapping_likeness": same,
                "reordered": same is not None and same < SAME_MAPPING,
                "profile_likeness": median(profile_likeness(reference, day)),
                "arrays": {g.name: array_row(reference, day, g) for g in groups},
                "channels": channel_rows(reference, day),
            }
        )
    return rows


def array_row(reference: DayNumbers, day: DayNumbers, group: Group) -> dict[str, float | int | None]:
    level, factor = group_change(reference, day, group)
    return {
        "subspace_likeness": subspace_likeness(reference, day, group.channels),
        "profile_likeness": median(profile_likeness(reference, day)[group.channels]),
        "level_change": level,
        "spread_factor": factor,
        "flat": int(day.flat[group.channels].sum()),
        "channels": len(group.channels),
    }


def channel_rows(reference: DayNumbers, day: DayNumbers) -> dict[str, list[float | None]]:
    """Every channel: its mean in a bin (of crossings, the rate), and how it changed against the reference day."""
    return {
        "mean": listed(day.mean),
        "level_change": listed(level_change(reference, day)),
        "spread_factor": listed(spread_factor(reference, day)),
        "profile_likeness": listed(profile_likeness(reference, day)),
    }


def listed(values: np.ndarray) -> list[float | None]:
    return [round(float(v), 4) if np.isfinite(v) else None for v in values]


def likeness_table(days: Sequence[DayNumbers], channels: np.ndarray) -> np.ndarray:
    """Of every day with every other: likeness of their subspaces. (days, days)"""
    table = np.ones((len(days), len(days)))
    for i, a in enumerate(days):
        for j in range(i):
            found = subspace_likeness(a, days[j], channels)
            table[i, j] = table[j, i] = np.nan if found is None else found
    return table


def median(values: np.ndarray) -> float | None:
    kept = values[np.isfinite(values)]
    return float(np.median(kept)) if len(kept) else None
