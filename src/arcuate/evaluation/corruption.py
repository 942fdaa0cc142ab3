"""Corruption of stored trials for the robustness benchmark, and a store that changes trials when they are read.

Each corruption has five severities and is a function of (seed, corruption, session, trial). Faults of the hardware
(dead or permuted channels, gains, thresholds, drift) are the same in all trials of a session; transient faults (lost
packets, jitter, bursts) differ between trials. Normalisation statistics are those of the clean bins, as if measured
before the fault, unless the store is renormalised.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from arcuate.data.seeds import derive_seed
from arcuate.data.statistics import Statistics
from arcuate.data.store import ChangedStore, Store, TrialInfo

SEVERITIES = (1, 2, 3, 4, 5)
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


def corrupt(
    store: Store, corruption: Corruption, severity: int, *, renormalise: bool = False, seed: int = 0
) -> ChangedStore:
    """The store with a fault of one of the `SEVERITIES` in every trial."""
    n_kinds = 1 + str(store.features).split(":")[0].count("+")
    n_electrodes = store.n_channels // n_kinds if store.n_channels % n_kinds == 0 else store.n_channels

    def change(info: TrialInfo) -> np.ndarray:
        bins = store.read_bins(info)
        fault = _Fault(
            corruption.levels[severity - 1],
            store.block_statistics(info),
            np.random.default_rng(derive_seed(seed, corruption.name, info.session)),
            np.random.default_rng(derive_seed(seed, corruption.name, info.id)),
            np.arange(bins.shape[1]) % n_electrodes,
        )
        return corruption.apply(bins, fault)

    return ChangedStore(store, change, renormalise)
