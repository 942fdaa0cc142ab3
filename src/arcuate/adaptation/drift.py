"""Which channels belong to which array, as far as the layout of a release says."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arcuate.data.arrays import ElectrodeArray
from arcuate.data.store import Store, TrialInfo
from arcuate.progress import Progress

# Numbers about each day: level, spread and shape of every channel, and which channels move together.

SMOOTH = 9  # bins: shorter is noise of single spikes
DIMENSIONS = 10  # of the subspace in which tuned activity lies
SHARE = 3  # at most a third of the channels: crossings and power of an electrode go together, so half of them say all
FLAT_SHARE = 0.99  # a channel that is flat in this share of the trials is dead
SAME_MAPPING = 0.4  # likeness of channel fingerprints below which channels look re-ordered
FEWEST_BINS = 300  # six seconds; of less no channel has a fingerprint


@dataclass(frozen=True, eq=False)
class DayNumbers:
    """One session."""

    session: str
    n_trials: int  # looked at
    n_bins: int
    mean: np.ndarray  # (C,)
    sd: np.ndarray  # (C,)
    skew: np.ndarray  # (C,) falls as a rate rises, even where a release is z-scored
    memory: np.ndarray  # (C,) correlation of neighbouring bins
    flat: np.ndarray  # (C,) bool
    correlation: np.ndarray  # (C, C) of smoothed activity


def measure_days(store: Store, max_trials: int = 40, progress: Progress | None = None) -> list[DayNumbers]:
    """Every session of the store, from some of its trials spread over the day."""
    days = []
    for i, session in enumerate(store.sessions, start=1):
        trials = [t for t in store.trials if t.session == session and t.n_bins > SMOOTH]
        days.append(measure_day(store, session, spread(trials, max_trials)))
        if progress:
            progress(i, len(store.sessions), "measuring days")
    return [day for day in days if day.n_trials]


def spread(trials: Sequence[TrialInfo], n: int) -> list[TrialInfo]:
    """At most n of them, evenly over the list."""
    if len(trials) <= n:
        return list(trials)
    return [trials[int(i)] for i in np.linspace(0, len(trials) - 1, n)]


def measure_day(store: Store, session: str, trials: Sequence[TrialInfo]) -> DayNumbers:
    n = store.n_channels
    parts = [store.read_bins(t).astype(np.float64) for t in trials]
    if not parts:
        zero = np.zeros(n)
        return DayNumbers(session, 0, 0, zero, zero, zero, zero, np.ones(n, dtype=bool), np.eye(n))
    flat = np.mean([np.ptp(p, axis=0) == 0 for p in parts], axis=0) >= FLAT_SHARE
    bins = np.concatenate(parts)
    mean, sd = bins.mean(0), bins.std(0)
    centred = [(p - mean) / np.maximum(sd, 1e-9) for p in parts]
    z = np.concatenate(centred)
    memory = sum((p[1:] * p[:-1]).sum(0) for p in centred) / max(sum(len(p) - 1 for p in centred), 1)
    smooth = np.concatenate([boxcar(p) for p in centred if len(p) >= SMOOTH] or [z])
    return DayNumbers(
        session,
        len(parts),
        len(bins),
        mean,
        sd,
        (z**3).mean(0),
        np.asarray(memory),
        flat,
        correlations(smooth, flat),
    )


def boxcar(bins: np.ndarray) -> np.ndarray:
    """Running means over SMOOTH bins. (T, C) -> (T - SMOOTH + 1, C)"""
    sums = np.cumsum(np.vstack([np.zeros(bins.shape[1]), bins]), axis=0)
    smoothed: np.ndarray = (sums[SMOOTH:] - sums[:-SMOOTH]) / SMOOTH
    return smoothed


def correlations(bins: np.ndarray, flat: np.ndarray) -> np.ndarray:
    """Between channels (C, C); flat ones are like no other."""
    sd = bins.std(0)
    z = (bins - bins.mean(0)) / np.where(sd > 0, sd, 1.0)
    found: np.ndarray = z.T @ z / max(len(z), 1)
    found[flat] = 0.0
    found[:, flat] = 0.0
    np.fill_diagonal(found, 1.0)
    return found


def subspace_likeness(a: DayNumbers, b: DayNumbers, channels: np.ndarray) -> float | None:
    """Overlap of the two days' main directions, 1 = the same, corrected for what chance would give."""
    alive = channels[~(a.flat[channels] | b.flat[channels])]
    k = min(DIMENSIONS, len(alive) // SHARE)
    if k < 1:
        return None
    bases = [main_directions(day.correlation[np.ix_(alive, alive)], k) for day in (a, b)]
    overlap = float(np.square(bases[0].T @ bases[1]).sum() / k)
    chance = k / len(alive)
    return max((overlap - chance) / (1 - chance), 0.0)


def main_directions(correlation: np.ndarray, k: int) -> np.ndarray:
    """The k directions of most variance, as columns."""
    vectors: np.ndarray = np.linalg.eigh(correlation)[1][:, -k:]
    return vectors


def profile_likeness(a: DayNumbers, b: DayNumbers) -> np.ndarray:
    """Of every channel: how alike its correlations with all others are on two days. (C,) in 0 … 1, NaN where flat"""
    n = len(a.flat)
    off = ~np.eye(n, dtype=bool)
    rows = [day.correlation[off].reshape(n, n - 1) for day in (a, b)]
    centred = [r - r.mean(1, keepdims=True) for r in rows]
    norms = np.linalg.norm(centred[0], axis=1) * np.linalg.norm(centred[1], axis=1)
    likeness = (centred[0] * centred[1]).sum(1) / np.maximum(norms, 1e-12)
    return np.where(a.flat | b.flat, np.nan, np.clip(likeness, 0.0, 1.0))


def fingerprint_likeness(a: DayNumbers, b: DayNumbers) -> float | None:
    """Whether channel i of one day is channel i of the other: correlation over channels of skew and memory."""
    alive = ~(a.flat | b.flat)
    if alive.sum() < 4 or min(a.n_bins, b.n_bins) < FEWEST_BINS:
        return None
    found = []
    for x, y in ((a.skew, b.skew), (a.memory, b.memory)):
        ranks = [np.argsort(np.argsort(v[alive])) for v in (x, y)]
        found.append(float(np.corrcoef(ranks[0], ranks[1])[0, 1]))
    return float(np.mean(found))


def died(before: DayNumbers, after: DayNumbers) -> np.ndarray:
    """Channels that were alive and are flat now."""
    return np.flatnonzero(after.flat & ~before.flat)


def came_back(before: DayNumbers, after: DayNumbers) -> np.ndarray:
    return np.flatnonzero(before.flat & ~after.flat)


def level_change(before: DayNumbers, after: DayNumbers) -> np.ndarray:
    """How far the mean of every channel moved, in SD of the first day. (C,) NaN where flat"""
    moved = (after.mean - before.mean) / np.maximum(before.sd, 1e-9)
    return np.where(before.flat | after.flat, np.nan, moved)


def spread_factor(before: DayNumbers, after: DayNumbers) -> np.ndarray:
    """By how much the SD of every channel grew. (C,) NaN where flat"""
    factor = np.maximum(after.sd, 1e-9) / np.maximum(before.sd, 1e-9)
    return np.where(before.flat | after.flat, np.nan, factor)


def group_change(
    before: DayNumbers, after: DayNumbers, group: ElectrodeArray
) -> tuple[float | None, float | None]:
    """Median change of level (in SD of the first day) and of spread (as a factor) over an array's living channels."""
    alive = group.channels[~(before.flat | after.flat)[group.channels]]
    if not len(alive):
        return None, None
    level, factor = level_change(before, after)[alive], spread_factor(before, after)[alive]
    return float(np.median(np.abs(level))), float(np.exp(np.median(np.abs(np.log(factor)))))


# The numbers of all days against a reference day, as one tree for JSON and for the page.


def summarise(
    days: Sequence[DayNumbers], groups: Sequence[ElectrodeArray], reference: DayNumbers
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


def array_row(reference: DayNumbers, day: DayNumbers, group: ElectrodeArray) -> dict[str, float | int | None]:
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
