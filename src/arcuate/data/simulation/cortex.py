"""Movements to recordings: tuned electrodes, shared fluctuations, drift, threshold crossings and power."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from arcuate.data.pronunciation import pronounce
from arcuate.data.simulation.articulation import (
    ARTICULATORS,
    N_ARTICULATORS,
    Pace,
    follow,
    move,
    time_phonemes,
)
from arcuate.data.simulation.sentences import make_sentence
from arcuate.data.trial import BIN_SECONDS

N_FEATURES = 2 * N_ARTICULATORS + 2  # positions, velocities, effort of speaking, sensory feedback
N_FACTORS = 3  # shared fluctuations within an array; the first is common to all arrays
_SLOW_S = np.array([0.35, 0.16, 0.25])  # their time constants
_DRIFT_DAYS = 20.0  # days until the tuning has lost most of its likeness
_SIZE_SPREAD = 0.65  # of one spike's energy against the mean
_HUM = 0.2  # SD of the log of the power between spikes
_PRIVATE_S = 0.35
_FEEDBACK_BINS = 7
_BURST = 0.31  # SD of the log rate from bin to bin


@dataclass(frozen=True)
class Array:
    """One implanted electrode array."""

    n: int
    depth: float  # how strongly its electrodes follow speech, 1 = the best array
    lead_bins: int  # how long before the movement its electrodes speak


@dataclass(frozen=True)
class Signal:
    """What difficulty changes: depth of tuning against depth of fluctuations that carry no speech."""

    depth: float = 0.5
    shared: float = 0.2  # SD of the log rate that whole arrays share
    private: float = 0.25  # and that each electrode has to itself

    @classmethod
    def at(cls, noise: float) -> "Signal":
        """noise 1 is like the real recordings; beyond 8 only the tuning fades further."""
        louder = min(noise, 8.0) ** 0.5
        return cls(cls.depth / noise**0.5, cls.shared * louder, cls.private * louder)


@dataclass(frozen=True)
class Electrodes:
    """The state of all electrodes in one session."""

    arrays: tuple[Array, ...]
    tuning: np.ndarray  # (N, F) unit rows
    depth: np.ndarray  # (N,) SD of the log rate that speech causes
    loading: np.ndarray  # (N, N_FACTORS)
    log_rate: np.ndarray  # (N,) log of the mean count in a bin
    spike_share: np.ndarray  # (N,) share of the power that comes from detected spikes
    power_scale: np.ndarray  # (N,)
    dead: np.ndarray  # (N,) bool


@dataclass(frozen=True)
class Mode:
    """A speaking strategy: how it changes gain and timing."""

    name: str
    gain: float
    tempo: float  # relative time per phoneme
    larynx: float  # how much voice and airflow are left
    feedback: float
    lead_shift: int


MODES = {
    "vocalised": Mode("vocalised", 1.0, 1.05, 1.0, 1.0, 0),
    "silent": Mode("silent", 0.82, 0.9, 0.45, 0.15, -2),
}


def implant(arrays: tuple[Array, ...], rng: np.random.Generator) -> Electrodes:
    """The electrodes on the first day."""
    n = sum(array.n for array in arrays)
    reach = np.concatenate([np.full(array.n, array.depth) for array in arrays])
    louder = rng.standard_normal(n)
    log_rate = np.log(28.5 * BIN_SECONDS) + np.clip(louder * np.where(louder < 0, 1.0, 0.62), -2.6, 0.9)
    return Electrodes(
        arrays=arrays,
        tuning=_new_tuning(n, rng),
        depth=reach * np.clip(rng.gamma(5.0, 0.2, n), 0.15, 1.8),
        loading=_new_loading(n, rng),
        log_rate=log_rate,
        spike_share=np.clip(0.22 * rng.lognormal(0.0, 0.8, n), 0.03, 0.85),
        power_scale=rng.lognormal(np.log(300.0), 0.5, n),
        dead=rng.random(n) < 0.015,
    )


def _new_tuning(n: int, rng: np.random.Generator) -> np.ndarray:
    """Each electrode follows a handful of articulators, their position more than their speed."""
    scale = np.concatenate([np.full(N_ARTICULATORS, 1.0), np.full(N_ARTICULATORS, 0.6), [0.5, 0.5]])
    weights = rng.standard_normal((n, N_FEATURES)) * scale * (rng.random((n, N_FEATURES)) < 0.4)
    weights += 0.1 * scale * rng.standard_normal((n, N_FEATURES))
    weights[:, -2] = np.abs(weights[:, -2])  # effort mostly excites
    return weights / np.linalg.norm(weights, axis=1, keepdims=True)


def _new_loading(n: int, rng: np.random.Generator) -> np.ndarray:
    loading = rng.standard_normal((n, N_FACTORS)) * np.array([0.5, 0.5, 0.4])
    loading[:, 0] += 0.9
    return loading


def next_session(electrodes: Electrodes, gap_days: float, rng: np.random.Generator) -> Electrodes:
    """The same electrodes some days later: tuning, rates and gains wander, channels die or come back."""
    n = len(electrodes.log_rate)
    kept = np.exp(-gap_days / _DRIFT_DAYS)
    fresh = np.sqrt(1 - kept**2)
    tuning = kept * electrodes.tuning + fresh * _new_tuning(n, rng)
    loading = kept * electrodes.loading + (1 - kept) * _new_loading(n, rng)
    wander = min(1.0, gap_days / 10) ** 0.5
    dead = np.where(electrodes.dead, rng.random(n) < 0.85, rng.random(n) < 0.006)
    return replace(
        electrodes,
        tuning=tuning / np.linalg.norm(tuning, axis=1, keepdims=True),
        loading=loading,
        depth=np.clip(electrodes.depth * rng.lognormal(0.0, 0.08 * wander, n), 0.02, 1.9),
        log_rate=np.clip(electrodes.log_rate + 0.15 * wander * rng.standard_normal(n), -3.3, 0.55),
        spike_share=np.clip(electrodes.spike_share * rng.lognormal(0.0, 0.1, n), 0.03, 0.9),
        power_scale=electrodes.power_scale * rng.lognormal(0.0, 0.1, n),
        dead=dead,
    )


def features(positions: np.ndarray, mode: Mode) -> np.ndarray:
    """What the cortex could follow, (T, F): where the articulators are, how they move, effort, feedback."""
    larynx = [ARTICULATORS.index("voicing"), ARTICULATORS.index("airflow")]
    rest = positions[0]
    path = positions - rest
    path[:, larynx] *= mode.larynx
    speed = np.gradient(path, axis=0)
    effort = follow(np.minimum(np.abs(speed).sum(axis=1, keepdims=True), 2.0), 0.75)
    sound = np.clip(path[:, larynx[0]], 0.0, None) * mode.feedback
    feedback = np.concatenate([np.zeros(_FEEDBACK_BINS), sound[:-_FEEDBACK_BINS]])
    return np.concatenate([path, speed, effort, feedback[:, None]], axis=1)


@lru_cache(maxsize=1)
def _reference() -> tuple[np.ndarray, np.ndarray]:
    """Mean and SD of the features over some vocalised sentences: one scale for all electrodes and days."""
    rng = np.random.default_rng(0)
    said = [pronounce(make_sentence("conversation", rng)).names for _ in range(40)]
    paths = [move(names, *time_phonemes(names, Pace(0.22, 0.3, 0.3), rng)) for names in said]
    all_features = np.concatenate([features(path, MODES["vocalised"]) for path in paths])
    return all_features.mean(axis=0), all_features.std(axis=0)


def record(
    electrodes: Electrodes,
    positions: np.ndarray,
    mode: Mode,
    signal: Signal,
    offset: np.ndarray,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Threshold crossings (T, N) uint8 and spike-band power (T, N) float32 of one trial.

    `offset` (N,) is the drift of the baseline at this moment of the day, in log rate.
    """
    slow = _speech_drive(electrodes, positions, mode, signal)
    slow += _fluctuations(electrodes, len(slow), signal, rng)
    # Anti-correlated from bin to bin: what refractoriness and bin edges do to counts.
    burst = rng.standard_normal((len(slow) + 1, slow.shape[1]), dtype=np.float32)
    fast = _BURST * (burst[1:] - burst[:-1])
    quiet = signal.shared**2 + signal.private**2 + 2 * _BURST**2
    # An electrode that hears many cells hears their average, which swings less.
    swing = np.clip((np.exp(electrodes.log_rate) / 0.55) ** -0.35, 0.5, 1.05)
    spread = 0.5 * swing**2 * ((signal.depth * electrodes.depth) ** 2 + quiet)
    slow *= swing.astype(np.float32)
    fast *= swing.astype(np.float32)
    level = (electrodes.log_rate - spread + offset).astype(np.float32)
    counts = rng.poisson(np.exp(np.minimum(slow + fast + level, 2.0))).astype(np.float32)
    counts[:, electrodes.dead] = 0
    power = _power(electrodes, counts, slow + fast, offset, rng)
    return counts.astype(np.uint8), power


def _speech_drive(
    electrodes: Electrodes, positions: np.ndarray, mode: Mode, signal: Signal
) -> np.ndarray:  # (T, N) float32
    mean, sd = _reference()
    seen = (features(positions, mode) - mean) / sd
    gains = (electrodes.tuning * (mode.gain * signal.depth * electrodes.depth)[:, None]).astype(np.float32)
    drive = np.empty((len(seen), len(gains)), dtype=np.float32)
    at = 0
    for array in electrodes.arrays:
        lead = max(array.lead_bins + mode.lead_shift, 0)
        ahead = np.concatenate([seen[lead:], np.repeat(seen[-1:], lead, axis=0)]).astype(np.float32)
        drive[:, at : at + array.n] = ahead @ gains[at : at + array.n].T
        at += array.n
    return drive


def _fluctuations(
    electrodes: Electrodes, n_bins: int, signal: Signal, rng: np.random.Generator
) -> np.ndarray:  # (T, N) float32
    poles = np.exp(-BIN_SECONDS / _SLOW_S)
    factors = _wander(n_bins, np.repeat(poles, [1] + [len(electrodes.arrays)] * (N_FACTORS - 1)), rng)
    out = signal.private * _wander(
        n_bins, np.full(len(electrodes.loading), np.exp(-BIN_SECONDS / _PRIVATE_S)), rng
    )
    at = 0
    for i, array in enumerate(electrodes.arrays):
        own = factors[:, [0, *range(1 + i, factors.shape[1], len(electrodes.arrays))]]
        rows = slice(at, at + array.n)
        out[:, rows] += own @ (signal.shared * electrodes.loading[rows]).T.astype(np.float32)
        at += array.n
    return out


def _wander(n_bins: int, poles: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Stationary first-order noise of unit variance, (n_bins, len(poles)) float32."""
    poles = poles.astype(np.float32)
    shocks = rng.standard_normal((n_bins, len(poles)), dtype=np.float32)
    shocks[0] /= np.sqrt(1 - poles**2)  # the first bin is already at full variance
    return follow(shocks * np.sqrt((1 + poles) / (1 - poles)), poles)


def _power(
    electrodes: Electrodes,
    counts: np.ndarray,
    drive: np.ndarray,
    offset: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Detected spikes of varying size, over a hum of distant cells that follows the same drive."""
    share = np.where(electrodes.dead, 0.0, electrodes.spike_share).astype(np.float32)
    sizes = rng.standard_normal(counts.shape, dtype=np.float32)
    hum = rng.standard_normal(counts.shape, dtype=np.float32)
    spikes = np.maximum(counts + _SIZE_SPREAD * np.sqrt(counts) * sizes, 0) / np.exp(
        electrodes.log_rate
    ).astype(np.float32)
    alive = np.where(electrodes.dead, 0.0, 0.55).astype(np.float32)
    background = np.exp(alive * (drive + offset.astype(np.float32)) + _HUM * hum)
    scale = electrodes.power_scale.astype(np.float32)
    return scale * (share * spikes + (1 - share) * background)
