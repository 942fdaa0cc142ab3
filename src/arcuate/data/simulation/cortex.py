"""Electrode model: movements to threshold crossings and spike-band power, with noise and drift across sessions."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from arcuate.data.simulation.articulation import ARTICULATORS, N_ARTICULATORS, Timing, articulate, draw_onsets, low_pass
from arcuate.data.simulation.sentences import make_sentence
from arcuate.data.text import pronounce
from arcuate.data.trial import BIN_SECONDS

_N_FEATURES = 2 * N_ARTICULATORS + 2  # positions, velocities, effort of speaking, sensory feedback
_N_FACTORS = 3  # shared fluctuations within an array; the first is common to all arrays
_FACTOR_SECONDS = np.array([0.35, 0.16, 0.25])  # time constants of the shared fluctuations
_DRIFT_DAYS = 20.0  # time constant of the tuning drift
_SPIKE_SIZE_SD = 0.65  # SD of the energy of a spike, relative to the mean
_BACKGROUND_SD = 0.2  # SD of the log power between spikes
_PRIVATE_SECONDS = 0.35  # time constant of the fluctuations of single electrodes
_FEEDBACK_BINS = 7  # delay of sensory feedback
_BURST_SD = 0.31  # SD of the log rate from bin to bin


@dataclass(frozen=True)
class SimulatedArray:
    """Parameters of one implanted electrode array."""

    n_electrodes: int
    depth: float  # tuning depth relative to the best array
    lead_bins: int  # by which neural activity precedes movement


@dataclass(frozen=True)
class SignalModel:
    """Signal and noise, set by the difficulty: tuning depth against fluctuations unrelated to speech."""

    depth: float = 0.5
    shared: float = 0.2  # SD of the log-rate fluctuations shared within an array
    private: float = 0.25  # SD of the log-rate fluctuations of single electrodes

    @classmethod
    def from_noise(cls, noise: float) -> "SignalModel":
        """Noise 1 resembles the real recordings; above 8 only the tuning depth falls further."""
        factor = min(noise, 8.0) ** 0.5
        return cls(cls.depth / noise**0.5, cls.shared * factor, cls.private * factor)


@dataclass(frozen=True)
class Electrodes:
    """The state of all electrodes in one session."""

    arrays: tuple[SimulatedArray, ...]
    tuning: np.ndarray  # (N, F) unit rows
    depth: np.ndarray  # (N,) SD of the log rate due to speech
    loading: np.ndarray  # (N, _N_FACTORS)
    log_rate: np.ndarray  # (N,) log of the mean count in a bin
    spike_fraction: np.ndarray  # (N,) fraction of the power due to detected spikes
    power_scale: np.ndarray  # (N,)
    dead: np.ndarray  # (N,) bool


@dataclass(frozen=True)
class Mode:
    """A speaking mode: its effect on gain and timing."""

    name: str
    gain: float
    tempo: float  # relative time per phoneme
    larynx: float  # gain of voicing and airflow
    feedback: float  # gain of sensory feedback
    lead_shift: int  # bins


MODES = {"vocalised": Mode("vocalised", 1.0, 1.05, 1.0, 1.0, 0), "silent": Mode("silent", 0.82, 0.9, 0.45, 0.15, -2)}


def implant_electrodes(arrays: tuple[SimulatedArray, ...], rng: np.random.Generator) -> Electrodes:
    """Electrodes in the first session."""
    n = sum(array.n_electrodes for array in arrays)
    array_depth = np.concatenate([np.full(array.n_electrodes, array.depth) for array in arrays])
    deviation = rng.standard_normal(n)
    log_rate = np.log(28.5 * BIN_SECONDS) + np.clip(deviation * np.where(deviation < 0, 1.0, 0.62), -2.6, 0.9)
    return Electrodes(
        arrays=arrays,
        tuning=_draw_tuning(n, rng),
        depth=array_depth * np.clip(rng.gamma(5.0, 0.2, n), 0.15, 1.8),
        loading=_draw_loading(n, rng),
        log_rate=log_rate,
        spike_fraction=np.clip(0.22 * rng.lognormal(0.0, 0.8, n), 0.03, 0.85),
        power_scale=rng.lognormal(np.log(300.0), 0.5, n),
        dead=rng.random(n) < 0.015,
    )


def _draw_tuning(n: int, rng: np.random.Generator) -> np.ndarray:
    """Sparse unit-norm tuning to articulators, with larger weights for position than for velocity."""
    scale = np.concatenate([np.full(N_ARTICULATORS, 1.0), np.full(N_ARTICULATORS, 0.6), [0.5, 0.5]])
    weights = rng.standard_normal((n, _N_FEATURES)) * scale * (rng.random((n, _N_FEATURES)) < 0.4)
    weights += 0.1 * scale * rng.standard_normal((n, _N_FEATURES))
    weights[:, -2] = np.abs(weights[:, -2])  # effort is mostly excitatory
    return weights / np.linalg.norm(weights, axis=1, keepdims=True)


def _draw_loading(n: int, rng: np.random.Generator) -> np.ndarray:
    loading = rng.standard_normal((n, _N_FACTORS)) * np.array([0.5, 0.5, 0.4])
    loading[:, 0] += 0.9
    return loading


def drift_electrodes(electrodes: Electrodes, gap_days: float, rng: np.random.Generator) -> Electrodes:
    """The same electrodes `gap_days` later: tuning, rates and gains drift, channels die or recover."""
    n = len(electrodes.log_rate)
    retained = np.exp(-gap_days / _DRIFT_DAYS)
    innovation = np.sqrt(1 - retained**2)
    tuning = retained * electrodes.tuning + innovation * _draw_tuning(n, rng)
    loading = retained * electrodes.loading + (1 - retained) * _draw_loading(n, rng)
    step = min(1.0, gap_days / 10) ** 0.5
    dead = np.where(electrodes.dead, rng.random(n) < 0.85, rng.random(n) < 0.006)
    return replace(
        electrodes,
        tuning=tuning / np.linalg.norm(tuning, axis=1, keepdims=True),
        loading=loading,
        depth=np.clip(electrodes.depth * rng.lognormal(0.0, 0.08 * step, n), 0.02, 1.9),
        log_rate=np.clip(electrodes.log_rate + 0.15 * step * rng.standard_normal(n), -3.3, 0.55),
        spike_fraction=np.clip(electrodes.spike_fraction * rng.lognormal(0.0, 0.1, n), 0.03, 0.9),
        power_scale=electrodes.power_scale * rng.lognormal(0.0, 0.1, n),
        dead=dead,
    )


def motor_features(positions: np.ndarray, mode: Mode) -> np.ndarray:
    """Features that electrodes are tuned to, (T, F): articulator positions and velocities, effort, feedback."""
    larynx = [ARTICULATORS.index("voicing"), ARTICULATORS.index("airflow")]
    rest = positions[0]
    path = positions - rest
    path[:, larynx] *= mode.larynx
    velocity = np.gradient(path, axis=0)
    effort = low_pass(np.minimum(np.abs(velocity).sum(axis=1, keepdims=True), 2.0), 0.75)
    voice = np.clip(path[:, larynx[0]], 0.0, None) * mode.feedback
    feedback = np.concatenate([np.zeros(_FEEDBACK_BINS), voice[:-_FEEDBACK_BINS]])
    return np.concatenate([path, velocity, effort, feedback[:, None]], axis=1)


@lru_cache(maxsize=1)
def _feature_scale() -> tuple[np.ndarray, np.ndarray]:
    """Mean and SD of the features over 40 vocalised sentences: one scale for all electrodes and sessions."""
    rng = np.random.default_rng(0)
    sentences = [pronounce(make_sentence("conversation", rng)).names for _ in range(40)]
    paths = [articulate(names, *draw_onsets(names, Timing(0.22, 0.3, 0.3), rng)) for names in sentences]
    all_features = np.concatenate([motor_features(path, MODES["vocalised"]) for path in paths])
    return all_features.mean(axis=0), all_features.std(axis=0)


def record_trial(
    electrodes: Electrodes,
    positions: np.ndarray,
    mode: Mode,
    signal: SignalModel,
    offset: np.ndarray,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Threshold crossings (T, N) uint8 and spike-band power (T, N) float32 of one trial.

    `offset` (N,) is the current baseline drift within the session, in log rate.
    """
    slow = _speech_drive(electrodes, positions, mode, signal)
    slow += _fluctuations(electrodes, len(slow), signal, rng)
    # Counts of neighbouring bins are anti-correlated, because of refractoriness and bin edges.
    burst = rng.standard_normal((len(slow) + 1, slow.shape[1]), dtype=np.float32)
    fast = _BURST_SD * (burst[1:] - burst[:-1])
    noise_variance = signal.shared**2 + signal.private**2 + 2 * _BURST_SD**2
    # An electrode with a high rate averages over many cells, so its log rate varies less.
    modulation = np.clip((np.exp(electrodes.log_rate) / 0.55) ** -0.35, 0.5, 1.05)
    mean_correction = 0.5 * modulation**2 * ((signal.depth * electrodes.depth) ** 2 + noise_variance)
    slow *= modulation.astype(np.float32)
    fast *= modulation.astype(np.float32)
    level = (electrodes.log_rate - mean_correction + offset).astype(np.float32)
    counts = rng.poisson(np.exp(np.minimum(slow + fast + level, 2.0))).astype(np.float32)
    counts[:, electrodes.dead] = 0
    power = _spike_band_power(electrodes, counts, slow + fast, offset, rng)
    return counts.astype(np.uint8), power


def _speech_drive(electrodes: Electrodes, positions: np.ndarray, mode: Mode, signal: SignalModel) -> np.ndarray:
    """Log-rate modulation by speech, (T, N) float32; each array leads the movement by its own number of bins."""
    mean, sd = _feature_scale()
    scaled = (motor_features(positions, mode) - mean) / sd
    gains = (electrodes.tuning * (mode.gain * signal.depth * electrodes.depth)[:, None]).astype(np.float32)
    drive = np.empty((len(scaled), len(gains)), dtype=np.float32)
    start = 0
    for array in electrodes.arrays:
        lead = max(array.lead_bins + mode.lead_shift, 0)
        ahead = np.concatenate([scaled[lead:], np.repeat(scaled[-1:], lead, axis=0)]).astype(np.float32)
        drive[:, start : start + array.n_electrodes] = ahead @ gains[start : start + array.n_electrodes].T
        start += array.n_electrodes
    return drive


def _fluctuations(electrodes: Electrodes, n_bins: int, signal: SignalModel, rng: np.random.Generator) -> np.ndarray:
    """Log-rate fluctuations unrelated to speech, private and shared within an array, (T, N) float32."""
    poles = np.exp(-BIN_SECONDS / _FACTOR_SECONDS)
    factors = _ar1_noise(n_bins, np.repeat(poles, [1] + [len(electrodes.arrays)] * (_N_FACTORS - 1)), rng)
    private_poles = np.full(len(electrodes.loading), np.exp(-BIN_SECONDS / _PRIVATE_SECONDS))
    out = signal.private * _ar1_noise(n_bins, private_poles, rng)
    start = 0
    for i, array in enumerate(electrodes.arrays):
        own_factors = factors[:, [0, *range(1 + i, factors.shape[1], len(electrodes.arrays))]]
        rows = slice(start, start + array.n_electrodes)
        out[:, rows] += own_factors @ (signal.shared * electrodes.loading[rows]).T.astype(np.float32)
        start += array.n_electrodes
    return out


def _ar1_noise(n_bins: int, poles: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Stationary AR(1) noise of unit variance, (n_bins, len(poles)) float32."""
    poles = poles.astype(np.float32)
    innovations = rng.standard_normal((n_bins, len(poles)), dtype=np.float32)
    innovations[0] /= np.sqrt(1 - poles**2)  # start at the stationary variance
    return low_pass(innovations * np.sqrt((1 + poles) / (1 - poles)), poles)


def _spike_band_power(
    electrodes: Electrodes, counts: np.ndarray, drive: np.ndarray, offset: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Detected spikes of varying size plus a background of distant cells with the same drive."""
    fraction = np.where(electrodes.dead, 0.0, electrodes.spike_fraction).astype(np.float32)
    sizes = rng.standard_normal(counts.shape, dtype=np.float32)
    background_noise = rng.standard_normal(counts.shape, dtype=np.float32)
    mean_counts = np.exp(electrodes.log_rate).astype(np.float32)
    spikes = np.maximum(counts + _SPIKE_SIZE_SD * np.sqrt(counts) * sizes, 0) / mean_counts
    alive = np.where(electrodes.dead, 0.0, 0.55).astype(np.float32)
    background = np.exp(alive * (drive + offset.astype(np.float32)) + _BACKGROUND_SD * background_noise)
    scale = electrodes.power_scale.astype(np.float32)
    return scale * (fraction * spikes + (1 - fraction) * background)
