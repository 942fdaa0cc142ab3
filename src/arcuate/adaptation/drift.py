"""Drift of the recordings over sessions: level, spread and tuning of channels against a reference session."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.data.electrodes import ElectrodeArray, list_arrays
from arcuate.data.store import Store, TrialInfo
from arcuate.data.trial import days_since_first
from arcuate.errors import UserError
from arcuate.files import Result, to_frame
from arcuate.progress import Progress, counted, logger

SAME_ORDER = 0.4  # channel-order similarity below which channels are reported as re-ordered

_SMOOTHING_BINS = 9  # shorter fluctuations are noise of single spikes
_FLAT_FRACTION = 0.99  # a channel that is flat in this fraction of the trials is dead
_MIN_BINS = 300  # 6 s; shorter recordings do not characterise a channel
_MAX_TRIALS = 40  # per session
_WARNING_TRIALS = 20  # per session, examined by `warn_about_recording`


@dataclass(frozen=True)
class ArrayDrift:
    """Change of one array relative to the reference session; medians over its channels that are not flat."""

    profile_similarity: float | None
    mean_shift: float | None  # in SD of the reference session
    sd_ratio: float | None  # at least 1


@dataclass(frozen=True)
class SessionDrift:
    """One session compared with the reference session, and its channels with the previous session."""

    session: str
    n_trials: int
    flat: list[int]
    newly_flat: list[int]
    recovered: list[int]
    channel_order_similarity: float | None
    reordered: bool
    profile_similarity: float | None
    arrays: dict[str, ArrayDrift]
    mean_shift: list[float | None]  # of every channel; None if it is flat


@dataclass(frozen=True, eq=False)
class DriftResult(Result):
    """Drift of all sessions of a store."""

    store: Path
    reference: str
    n_channels: int
    simulated: bool
    sessions: tuple[SessionDrift, ...]

    @property
    def days_since_first(self) -> list[int | None]:
        """Days from the first dated session to each session; None for names without a date."""
        return days_since_first([row.session for row in self.sessions])

    def to_frame(self) -> Any:
        """One row per session and array, as a pandas DataFrame."""
        return to_frame(
            {"session": row.session, "array": name, **asdict(array)}
            for row in self.sessions
            for name, array in row.arrays.items()
        )


def measure_drift(
    store: str | Path | Store, *, reference: str | None = None, progress: Progress | None = None
) -> DriftResult:
    """Measure how the recordings of a store change over sessions, compared with `reference` (default: the first)."""
    store = store if isinstance(store, Store) else Store.open(Path(store))
    if reference is not None and reference not in store.sessions:
        known = ", ".join(store.sessions)
        raise UserError(f"{store.path.name} has no session {reference} to compare with; it contains {known}")
    sessions = measure_sessions(store, progress)
    if not sessions:
        raise UserError(f"{store.path} has no trial long enough to measure; prepare more recordings")
    chosen = next((s for s in sessions if s.session == reference), None if reference else sessions[0])
    if chosen is None:
        raise UserError(f"session {reference} has no trial long enough to compare with; choose another")
    arrays = list_arrays(store.layout, store.n_channels)
    rows = compare_sessions(sessions, arrays, chosen)
    return DriftResult(store.path, chosen.session, store.n_channels, store.simulated, tuple(rows))


def warn_about_recording(store: Store, session: str, reference: str) -> None:
    """Log flat channels of a new session, and channels ordered differently from the reference session."""
    new = _session_statistics(store, session, _some_trials(store, session))
    n_flat = int(new.flat.sum())
    if n_flat == len(new.flat):
        logger.warning(f"every channel of {session} is flat, so nothing can be learned; check the recording")
        return
    if n_flat:
        logger.info(f"{counted(n_flat, 'channel')} of {len(new.flat)} flat in {session}")
    if reference not in store.sessions:
        return
    known = _session_statistics(store, reference, _some_trials(store, reference))
    similarity = channel_order_similarity(known, new)
    if similarity is not None and similarity < SAME_ORDER:
        logger.warning(
            f"the channels of {session} look re-ordered relative to {reference} (similarity {similarity:.2f}); restore"
            " their order and prepare the session again, because adaptation cannot undo it"
        )


def _some_trials(store: Store, session: str) -> list[TrialInfo]:
    return _evenly_spaced([t for t in store.trials if t.session == session and t.n_bins > 1], _WARNING_TRIALS)


# --- statistics of one session -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SessionStatistics:
    """Statistics of every channel in one session, and which channels vary together."""

    session: str
    n_trials: int  # examined
    n_bins: int
    mean: np.ndarray  # (C,)
    sd: np.ndarray  # (C,)
    skew: np.ndarray  # (C,) falls as a firing rate rises, even in z-scored releases
    autocorrelation: np.ndarray  # (C,) of neighbouring bins
    flat: np.ndarray  # (C,) bool
    correlation: np.ndarray  # (C, C) of smoothed activity


def measure_sessions(store: Store, progress: Progress | None = None) -> list[SessionStatistics]:
    """Statistics of every session, from at most 40 trials spread evenly over it."""
    measured = []
    for i, session in enumerate(store.sessions, start=1):
        trials = [t for t in store.trials if t.session == session and t.n_bins > _SMOOTHING_BINS]
        measured.append(_session_statistics(store, session, _evenly_spaced(trials, _MAX_TRIALS)))
        if progress:
            progress(i, len(store.sessions), "measuring sessions")
    return [statistics for statistics in measured if statistics.n_trials]


def _session_statistics(store: Store, session: str, trials: Sequence[TrialInfo]) -> SessionStatistics:
    n = store.n_channels
    parts = [store.read_bins(t).astype(np.float64) for t in trials]
    if not parts:
        zero = np.zeros(n)
        return SessionStatistics(session, 0, 0, zero, zero, zero, zero, np.ones(n, dtype=bool), np.eye(n))
    flat = np.mean([np.ptp(p, axis=0) == 0 for p in parts], axis=0) >= _FLAT_FRACTION
    bins = np.concatenate(parts)
    mean, sd = bins.mean(0), bins.std(0)
    centred = [(p - mean) / np.maximum(sd, 1e-9) for p in parts]
    z = np.concatenate(centred)
    autocorrelation = sum((p[1:] * p[:-1]).sum(0) for p in centred) / max(sum(len(p) - 1 for p in centred), 1)
    smoothed = np.concatenate([_moving_average(p) for p in centred if len(p) >= _SMOOTHING_BINS] or [z])
    return SessionStatistics(
        session,
        len(parts),
        len(bins),
        mean,
        sd,
        (z**3).mean(0),
        np.asarray(autocorrelation),
        flat,
        _correlation(smoothed, flat),
    )


def _evenly_spaced(trials: Sequence[TrialInfo], n: int) -> list[TrialInfo]:
    if len(trials) <= n:
        return list(trials)
    return [trials[int(i)] for i in np.linspace(0, len(trials) - 1, n)]


def _moving_average(bins: np.ndarray) -> np.ndarray:
    """(T, C) -> (T - _SMOOTHING_BINS + 1, C)"""
    sums = np.cumsum(np.vstack([np.zeros(bins.shape[1]), bins]), axis=0)
    smoothed: np.ndarray = (sums[_SMOOTHING_BINS:] - sums[:-_SMOOTHING_BINS]) / _SMOOTHING_BINS
    return smoothed


def _correlation(bins: np.ndarray, flat: np.ndarray) -> np.ndarray:
    """Correlation of channels (C, C), 0 for flat ones."""
    sd = bins.std(0)
    z = (bins - bins.mean(0)) / np.where(sd > 0, sd, 1.0)
    correlation: np.ndarray = z.T @ z / max(len(z), 1)
    correlation[flat] = 0.0
    correlation[:, flat] = 0.0
    np.fill_diagonal(correlation, 1.0)
    return correlation


# --- comparison of two sessions ----------------------------------------------------------------------------------


def compare_sessions(
    sessions: Sequence[SessionStatistics], arrays: Sequence[ElectrodeArray], reference: SessionStatistics
) -> list[SessionDrift]:
    """Compare every session with the reference session, and its channels with the previous session."""
    rows = []
    for i, current in enumerate(sessions):
        before = sessions[i - 1] if i else current
        order, profile = channel_order_similarity(before, current), profile_similarity(reference, current)
        rows.append(
            SessionDrift(
                session=current.session,
                n_trials=current.n_trials,
                flat=np.flatnonzero(current.flat).tolist(),
                newly_flat=np.flatnonzero(current.flat & ~before.flat).tolist(),
                recovered=np.flatnonzero(before.flat & ~current.flat).tolist(),
                channel_order_similarity=order,
                reordered=order is not None and order < SAME_ORDER,
                profile_similarity=_median(profile),
                arrays={a.name: _array_drift(reference, current, profile, a.channels) for a in arrays},
                mean_shift=[round(float(v), 4) if np.isfinite(v) else None for v in _mean_shift(reference, current)],
            )
        )
    return rows


def _array_drift(
    reference: SessionStatistics, current: SessionStatistics, profile: np.ndarray, channels: np.ndarray
) -> ArrayDrift:
    ratio = (np.maximum(current.sd, 1e-9) / np.maximum(reference.sd, 1e-9))[channels]
    alive = ~(reference.flat | current.flat)[channels]
    spread = _median(np.abs(np.log(ratio[alive])))
    return ArrayDrift(
        profile_similarity=_median(profile[channels]),
        mean_shift=_median(np.abs(_mean_shift(reference, current)[channels])),
        sd_ratio=None if spread is None else float(np.exp(spread)),
    )


def profile_similarity(a: SessionStatistics, b: SessionStatistics) -> np.ndarray:
    """For every channel, similarity of its correlations with all others. (C,) in 0 … 1, NaN where flat"""
    n = len(a.flat)
    off_diagonal = ~np.eye(n, dtype=bool)
    rows = [s.correlation[off_diagonal].reshape(n, n - 1) for s in (a, b)]
    centred = [r - r.mean(1, keepdims=True) for r in rows]
    norms = np.linalg.norm(centred[0], axis=1) * np.linalg.norm(centred[1], axis=1)
    similarity = (centred[0] * centred[1]).sum(1) / np.maximum(norms, 1e-12)
    return np.where(a.flat | b.flat, np.nan, np.clip(similarity, 0.0, 1.0))


def channel_order_similarity(a: SessionStatistics, b: SessionStatistics) -> float | None:
    """Rank correlation over channels of skew and autocorrelation: low if channel i of `a` is not channel i of `b`."""
    alive = ~(a.flat | b.flat)
    if alive.sum() < 4 or min(a.n_bins, b.n_bins) < _MIN_BINS:
        return None
    found = []
    for x, y in ((a.skew, b.skew), (a.autocorrelation, b.autocorrelation)):
        ranks = [np.argsort(np.argsort(v[alive])) for v in (x, y)]
        found.append(float(np.corrcoef(ranks[0], ranks[1])[0, 1]))
    return float(np.mean(found))


def _mean_shift(reference: SessionStatistics, current: SessionStatistics) -> np.ndarray:
    """Shift of every channel's mean in SD of the reference session. (C,) NaN where flat"""
    shift = (current.mean - reference.mean) / np.maximum(reference.sd, 1e-9)
    return np.where(reference.flat | current.flat, np.nan, shift)


def _median(values: np.ndarray) -> float | None:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else None
