"""Corruption of stored trials for the robustness benchmark, and defences that repair the input at test time.

Each corruption has five severities and is a function of (seed, corruption, session, trial). Faults of the hardware
(dead or permuted channels, gains, thresholds, drift) are the same in all trials of a session; transient faults (lost
packets, jitter, bursts) differ between trials. Normalisation statistics are those of the clean bins, as if measured
before the fault; the defence `renormalise` replaces them by those of the corrupted bins.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from arcuate.data.seeds import derive_seed
from arcuate.data.statistics import RunningStatistics, Statistics, signed_log
from arcuate.data.store import Store, TrialInfo

SEVERITIES = (1, 2, 3, 4, 5)
DEFENCES = ("interpolate", "gate", "remap", "renormalise")
_BURST = 5.0  # a bin is noise if its activity exceeds the usual level by this many times the spread of quiet bins
_EXPLAINED = 0.3  # largest fraction of the distance between statistics that may remain after channels are moved
_LINE_HZ, _BINS_PER_SECOND = 60.0, 50.0  # in bins of 20 ms, 60 Hz is aliased to 10 Hz


@dataclass(frozen=True, eq=False)
class _Fault:
    """Parameters of one fault: its level, statistics, random generators and the electrode of each channel."""

    level: float
    statistics: Statistics  # of the trial's block, before the fault
    session_rng: np.random.Generator  # the same for all trials of a session
    trial_rng: np.random.Generator
    electrode: np.ndarray  # (C,) number of each channel's electrode

    @property
    def sd(self) -> np.ndarray:
        return np.maximum(self.statistics.sd, 1e-3)

    @property
    def n_electrodes(self) -> int:
        return int(self.electrode.max()) + 1

    def choose(self, share: float) -> np.ndarray:
        """A random share of the electrodes."""
        return self.session_rng.permutation(self.n_electrodes)[: round(share * self.n_electrodes)]


def _dead_array(bins: np.ndarray, fault: _Fault) -> np.ndarray:
    """Neighbouring electrodes are silent."""
    n = fault.n_electrodes
    dead = (int(fault.session_rng.integers(n)) + np.arange(round(fault.level * n))) % n
    return np.where(np.isin(fault.electrode, dead), np.float32(0.0), bins)


def _dead_channels(bins: np.ndarray, fault: _Fault) -> np.ndarray:
    """Random electrodes are silent."""
    return np.where(np.isin(fault.electrode, fault.choose(fault.level)), np.float32(0.0), bins)


def _permuted_channels(bins: np.ndarray, fault: _Fault) -> np.ndarray:
    """Some electrodes swap positions, as after a connector was plugged in differently."""
    order, moved = np.arange(fault.n_electrodes), fault.choose(fault.level)
    order[moved] = np.roll(moved, 1)
    columns = np.arange(bins.shape[1])
    for k in np.flatnonzero(order[fault.electrode] != fault.electrode):
        same_kind = columns // fault.n_electrodes == k // fault.n_electrodes
        columns[k] = np.flatnonzero(same_kind & (fault.electrode == order[fault.electrode[k]]))[0]
    return bins[:, columns]


def _gain_jump(bins: np.ndarray, fault: _Fault) -> np.ndarray:
    """The gain of each electrode goes up or down by a factor."""
    up = fault.session_rng.random(fault.n_electrodes) < 0.5
    factor = np.where(up, 1 + fault.level, 1 / (1 + fault.level))[fault.electrode]
    return bins * factor


def _baseline_drift(bins: np.ndarray, fault: _Fault) -> np.ndarray:
    """A random offset per electrode, in units of its SD."""
    offset = fault.level * fault.session_rng.normal(size=fault.n_electrodes)[fault.electrode]
    return bins + offset * fault.sd


def _threshold_change(bins: np.ndarray, fault: _Fault) -> np.ndarray:
    """Threshold crossings are lost: each count is kept with probability 1 - level (binomial thinning)."""
    keep = 1 - fault.level
    whole = np.floor(np.abs(bins))
    kept = fault.trial_rng.binomial(np.minimum(whole, 1e6).astype(np.int64), keep) + (np.abs(bins) - whole) * keep
    return np.sign(bins) * kept


def _packet_loss(bins: np.ndarray, fault: _Fault) -> np.ndarray:
    """Bursts of one to five bins are lost and arrive as zeros."""
    lost = np.zeros(len(bins), bool)
    while lost.mean() < fault.level:
        start = int(fault.trial_rng.integers(len(bins)))
        lost[start : start + int(fault.trial_rng.integers(1, 6))] = True
    return np.where(lost[:, None], np.float32(0.0), bins)


def _clock_jitter(bins: np.ndarray, fault: _Fault) -> np.ndarray:
    """Bins are repeated or skipped; the length stays the same."""
    steps = fault.trial_rng.choice([0, 1, 2], size=len(bins), p=[fault.level / 2, 1 - fault.level, fault.level / 2])
    return bins[np.clip(np.cumsum(steps) - steps[0], 0, len(bins) - 1)]


def _noise_bursts(bins: np.ndarray, fault: _Fault) -> np.ndarray:
    """Stretches of half a second with strong noise on all channels, such as from movement."""
    noisy = np.zeros(len(bins), bool)
    while noisy.mean() < fault.level:
        start = int(fault.trial_rng.integers(len(bins)))
        noisy[start : start + 25] = True
    noise = np.abs(fault.trial_rng.normal(scale=4.0, size=bins.shape)) * fault.sd
    return bins + np.where(noisy[:, None], noise, 0.0)


def _line_noise(bins: np.ndarray, fault: _Fault) -> np.ndarray:
    """A sinusoid with the same phase on all channels; its amplitude is in units of the SD."""
    phase = 2 * np.pi * fault.trial_rng.random()
    wave = np.sin(2 * np.pi * _LINE_HZ * np.arange(len(bins)) / _BINS_PER_SECOND + phase)
    return bins + fault.level * wave[:, None] * fault.sd


@dataclass(frozen=True)
class Corruption:
    """A kind of fault with a level per severity."""

    name: str
    apply: Callable[[np.ndarray, _Fault], np.ndarray]
    levels: tuple[float, float, float, float, float]


CORRUPTIONS: Mapping[str, Corruption] = {
    c.name: c
    for c in (
        Corruption("dead array", _dead_array, (0.06, 0.12, 0.25, 0.38, 0.5)),
        Corruption("dead channels", _dead_channels, (0.05, 0.1, 0.2, 0.35, 0.5)),
        Corruption("permuted channels", _permuted_channels, (0.05, 0.1, 0.2, 0.35, 0.5)),
        Corruption("gain jump", _gain_jump, (0.1, 0.25, 0.5, 1.0, 2.0)),
        Corruption("baseline drift", _baseline_drift, (0.1, 0.25, 0.5, 1.0, 2.0)),
        Corruption("threshold change", _threshold_change, (0.1, 0.2, 0.3, 0.45, 0.6)),
        Corruption("packet loss", _packet_loss, (0.02, 0.05, 0.1, 0.2, 0.4)),
        Corruption("clock jitter", _clock_jitter, (0.02, 0.05, 0.1, 0.2, 0.4)),
        Corruption("noise bursts", _noise_bursts, (0.05, 0.1, 0.2, 0.3, 0.5)),
        Corruption("line noise", _line_noise, (0.1, 0.25, 0.5, 1.0, 2.0)),
    )
}


class CorruptedStore(Store):
    """A store that corrupts trials, and repairs them by defences, when they are read."""

    def __init__(
        self, store: Store, corruption: Corruption | None, severity: int, defences: Sequence[str] = (), seed: int = 0
    ) -> None:
        vars(self).update(vars(store))  # the same files and manifest; nothing is written
        self._source, self._corruption, self._severity = store, corruption, severity
        self._defences, self._seed = tuple(defences), seed
        self._of_block: dict[tuple[str, int, str, bool], Statistics] = {}
        n_kinds = 1 + str(store.manifest.get("features", "")).split(":")[0].count("+")
        self._n_electrodes = store.n_channels // n_kinds if store.n_channels % n_kinds == 0 else store.n_channels
        self._orders: dict[str, np.ndarray] = {}

    def read_bins(self, info: TrialInfo, out: np.ndarray | None = None) -> np.ndarray:
        bins = self._corrupted(info)
        missing, lost = ~bins.any(axis=1), np.zeros(len(bins), bool)
        if "gate" in self._defences:
            lost[~missing] = find_bursts(bins[~missing])
        if "interpolate" in self._defences:
            lost |= missing
        bins = interpolate(bins, lost)
        if "remap" in self._defences:
            bins = bins[:, self._remapping(info.session)]
        bins = bins.astype(np.float32)
        if out is None:
            return bins
        out[...] = bins
        return out

    def block_statistics(self, info: TrialInfo, log: bool = False) -> Statistics:
        return self._renormalised(info, log) or self._source.block_statistics(info, log)

    def past_statistics(self, info: TrialInfo, log: bool = False) -> Statistics:
        return self._renormalised(info, log) or self._source.past_statistics(info, log)

    def _corrupted(self, info: TrialInfo) -> np.ndarray:
        bins = self._source.read_bins(info)
        if self._corruption is None:
            return bins
        fault = _Fault(
            self._corruption.levels[self._severity - 1],
            self._source.block_statistics(info),
            np.random.default_rng(derive_seed(self._seed, self._corruption.name, info.session)),
            np.random.default_rng(derive_seed(self._seed, self._corruption.name, info.id)),
            np.arange(bins.shape[1]) % self._n_electrodes,
        )
        return self._corruption.apply(bins, fault)

    def _block(self, info: TrialInfo) -> list[TrialInfo]:
        return [t for t in self.trials if (t.session, t.block, t.split) == (info.session, info.block, info.split)]

    def _renormalised(self, info: TrialInfo, log: bool) -> Statistics | None:
        """Statistics of the corrupted trials of the same block and split; None without this defence."""
        if "renormalise" not in self._defences:
            return None
        key = (info.session, info.block, info.split, log)
        if key not in self._of_block:
            total = RunningStatistics.empty(self.n_channels)
            for trial in self._block(info):
                bins = self.read_bins(trial)
                total = total.merge(RunningStatistics.from_bins(signed_log(bins) if log else bins))
            self._of_block[key] = total.statistics()
        return self._of_block[key]

    def _remapping(self, session: str) -> np.ndarray:
        """Channel order of a session that best matches its stored statistics."""
        if session not in self._orders:
            trials = [t for t in self.trials if t.session == session][:8]
            observed = RunningStatistics.empty(self.n_channels)
            for trial in trials:
                observed = observed.merge(RunningStatistics.from_bins(self._corrupted(trial)))
            known = [self._source.block_statistics(t) for t in trials]
            mean, sd = (np.mean([getattr(s, name) for s in known], axis=0) for name in ("mean", "sd"))
            reference = Statistics(mean, sd, sum(s.n_bins for s in known))
            self._orders[session] = match_channels(observed.statistics(), reference, self._n_electrodes)
        return self._orders[session]


def find_bursts(bins: np.ndarray) -> np.ndarray:
    """Mark bins whose activity over all channels is far above the usual level of the trial. (T,) bool"""
    if not len(bins):
        return np.zeros(0, bool)
    low, high = np.quantile(bins, (0.2, 0.5), axis=0)
    scale = np.maximum(high - low, 0.1 * bins.std(axis=0) + 1e-3)
    activity = ((bins - low) / scale).mean(axis=1)
    quiet, usual = np.quantile(activity, (0.1, 0.35))
    return activity > usual + _BURST * (usual - quiet) + 1.0


def interpolate(bins: np.ndarray, lost: np.ndarray) -> np.ndarray:
    """Replace the marked bins by linear interpolation between their neighbours; (T, C), (T,) bool."""
    if not lost.any() or lost.all():
        return bins
    known, at = np.flatnonzero(~lost), np.flatnonzero(lost)
    after = np.minimum(np.searchsorted(known, at), len(known) - 1)
    before = np.maximum(np.searchsorted(known, at) - 1, 0)
    left, right = known[before], known[after]
    share = np.clip((at - left) / np.maximum(right - left, 1), 0.0, 1.0)[:, None]
    repaired = bins.copy()
    repaired[at] = (1 - share) * bins[left] + share * bins[right]
    return repaired


def match_channels(observed: Statistics, reference: Statistics, n_electrodes: int) -> np.ndarray:
    """Order of the observed channels that matches the reference, by an optimal assignment of electrodes.

    Electrodes are compared by mean and SD of all their features, relative to the SD over electrodes. A cycle of the
    assignment is applied only if it removes most of the distance (`_EXPLAINED`): drift changes the statistics too, but
    no permutation restores them. Silent electrodes are not moved.
    """
    silent = (observed.sd.reshape(-1, n_electrodes) < 1e-6).all(axis=0)
    features = np.stack([observed.mean, observed.sd]).astype(np.float64).reshape(-1, n_electrodes)
    target = np.stack([reference.mean, reference.sd]).astype(np.float64).reshape(-1, n_electrodes)
    scale = np.maximum(target.std(axis=1, keepdims=True), 1e-6)
    # (observed, reference)
    distance = np.abs((features / scale)[:, :, None] - (target / scale)[:, None, :]).mean(axis=0)
    live = np.flatnonzero(~silent)
    order = np.arange(n_electrodes)  # observed electrode for each reference electrode
    if len(live):
        rows, columns = linear_sum_assignment(distance[np.ix_(live, live)])
        order[live[columns]] = live[rows]
    done = order == np.arange(n_electrodes)
    for first in range(n_electrodes):
        cycle, at = [], first
        while not done[at]:
            cycle.append(at)
            done[at] = True
            at = int(order[at])
        before, after = distance[cycle, cycle].sum(), distance[order[cycle], cycle].sum()
        if after > _EXPLAINED * before:
            order[cycle] = cycle
    n_kinds = len(observed.mean) // n_electrodes
    return np.concatenate([order + kind * n_electrodes for kind in range(n_kinds)])
