"""State of online adaptation in one session, and the rules for skipping an update or discarding the adapted layer.

All types are immutable: a step returns a new state.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from arcuate.data.alphabet import BLANK
from arcuate.decoding.hypothesis import greedy

MIN_CONFIDENCE = 0.35  # confidence below which a trial causes no update
MAX_DISAGREEMENT = 0.4  # edits per greedy phoneme above which a pseudo-label from words causes no update
MAX_DISTANCE = 0.5  # of a layer from its initial value, relative to the norm of the initial layer
WINDOW = 8  # trials over which the adapted and the unadapted model are compared
MAX_FALLBACKS = 3  # one more ends adaptation of the session
LR_FACTOR = 0.5  # factor on the learning rate after each fall-back
_MAX_CONFIDENCE_DROP = 0.02  # relative to the unadapted model; a larger one causes a fall-back
_MIN_LENGTH_RATIO = 0.7  # of decoded tokens, adapted to unadapted; a lower one causes a fall-back
_MIN_STANDARD_ERRORS = 1.0  # by which confidence must lie below that on known sessions before any update
_KNOWN_SESSION_FACTOR = 3.0  # factor on these for a session the model was trained on
_FULL_STEP_UNCERTAINTY = 0.5  # relative increase of uncertainty at which steps have full length
_CONFIDENCE_TRIALS = 40  # trials from which the drift of a session is estimated
_MIN_TOKENS = 2  # shorter outputs are not used as pseudo-labels


@dataclass(frozen=True, eq=False)
class AffineLayer:
    """Weight and bias of one session's input layer."""

    weight: Tensor  # (C, C)
    bias: Tensor  # (C,)

    def distance(self, other: "AffineLayer") -> float:
        """Euclidean distance to another layer, relative to the norm of that layer."""
        moved = torch.cat([(self.weight - other.weight).flatten(), self.bias - other.bias]).norm()
        return float(moved / torch.cat([other.weight.flatten(), other.bias]).norm().clamp(min=1e-12))

    def lerp(self, other: "AffineLayer", fraction: float) -> "AffineLayer":
        """Interpolate from this layer (0) to another (1)."""
        weight = torch.lerp(self.weight, other.weight, fraction)
        return AffineLayer(weight, torch.lerp(self.bias, other.bias, fraction))


@dataclass(frozen=True, eq=False)
class AdamMoments:
    """Running means of gradients and of squared gradients for weight and bias."""

    mean: tuple[Tensor, Tensor]
    square: tuple[Tensor, Tensor]
    n: int = 0

    @classmethod
    def zero(cls, layer: AffineLayer) -> "AdamMoments":
        zeros = (torch.zeros_like(layer.weight), torch.zeros_like(layer.bias))
        return cls(zeros, zeros)


@dataclass(frozen=True, eq=False)
class DecodedTrial:
    """One decoded trial with its pseudo-label."""

    bins: Tensor  # (T, C) normalised
    log_probs: np.ndarray  # (F, V)
    pseudo_label: tuple[int, ...]  # decoded tokens, from a word search if there is a language model


@dataclass(frozen=True)
class ModelComparison:
    """Confidence and number of decoded tokens of the adapted and the unadapted model on the last trials."""

    confidence: tuple[tuple[float, float], ...] = ()  # (adapted, unadapted) of each trial
    n_tokens: tuple[tuple[int, int], ...] = ()
    n_fallbacks: int = 0


@dataclass(frozen=True)
class ExpectedConfidence:
    """Confidence of the model on known sessions."""

    mean: float  # mean of session means
    session_sd: float = 0.0  # SD of session means
    trial_sd: float = 0.0  # SD of trials within a session


@dataclass(frozen=True, eq=False)
class SessionState:
    """Adaptation of one session so far."""

    session: str
    init_session: str  # known session whose layer it started with
    initial: AffineLayer
    layer: AffineLayer
    moments: AdamMoments
    expected: ExpectedConfidence | None = None  # None: no recordings of known sessions
    unadapted_confidence: tuple[float, ...] = ()  # confidence on the last trials, excluding all-blank ones
    comparison: ModelComparison = field(default_factory=ModelComparison)
    n_trials: int = 0
    n_steps: int = 0


def confidence(log_probs: np.ndarray) -> float:
    """Geometric mean probability of the best class over non-blank frames; 0 if all frames are blank."""
    best = log_probs.max(-1)
    nonblank = log_probs.argmax(-1) != BLANK
    return float(np.exp(best[nonblank].mean())) if nonblank.any() else 0.0


def is_usable(trial: DecodedTrial) -> bool:
    """Whether a trial's pseudo-label is confident and long enough to train on; flat trials never are.

    A pseudo-label from a word search must be close to the greedy phonemes: where the language model changed many of
    them, its sentence has little acoustic support.
    """
    phonemes = greedy(trial.log_probs)
    agrees = Levenshtein.distance(phonemes, trial.pseudo_label) <= MAX_DISAGREEMENT * len(phonemes)
    confident = confidence(trial.log_probs) >= MIN_CONFIDENCE
    has_signal = len(trial.bins) > 0 and bool((trial.bins.amax(0) > trial.bins.amin(0)).any())
    return len(trial.pseudo_label) >= _MIN_TOKENS and has_signal and agrees and confident


def step_factor(state: SessionState) -> float:
    """Fraction of a full step that the drift of a session justifies, from 0 (no drift detected) to 1.

    Without drift there is nothing to correct, and training on pseudo-labels would only add their errors. Confidence
    also varies between known sessions and between trials, so it must fall below the expected value by a number of
    standard errors; by three times as many if the session has its own layer, which was trained with labels.
    """
    if state.expected is None or not state.unadapted_confidence:
        return 1.0
    expected, n = state.expected, len(state.unadapted_confidence)
    deficit = expected.mean - float(np.mean(state.unadapted_confidence))
    is_known = state.init_session == state.session
    required = _MIN_STANDARD_ERRORS * (_KNOWN_SESSION_FACTOR if is_known else 1.0)
    if deficit <= required * math.hypot(expected.session_sd, expected.trial_sd / math.sqrt(n)):
        return 0.0
    return min(deficit / (_FULL_STEP_UNCERTAINTY * max(1.0 - expected.mean, 1e-6)), 1.0)


def track_confidence(state: SessionState, unadapted: np.ndarray) -> SessionState:
    """Add the unadapted model's confidence on one trial (F, V); all-blank trials are left out."""
    value = confidence(unadapted)
    if not value:
        return state
    return replace(state, unadapted_confidence=(*state.unadapted_confidence, value)[-_CONFIDENCE_TRIALS:])


def is_disabled(state: SessionState) -> bool:
    """Whether a session fell back too often to be adapted any further."""
    return state.comparison.n_fallbacks > MAX_FALLBACKS


def compare(comparison: ModelComparison, adapted: np.ndarray, unadapted: np.ndarray) -> ModelComparison:
    """Add one trial's log-probabilities (F, V) from both models, keeping the last `WINDOW` trials."""
    confidences = (*comparison.confidence, (confidence(adapted), confidence(unadapted)))
    n_tokens = (*comparison.n_tokens, (len(greedy(adapted)), len(greedy(unadapted))))
    return replace(comparison, confidence=confidences[-WINDOW:], n_tokens=n_tokens[-WINDOW:])


def fallback_reason(comparison: ModelComparison) -> str | None:
    """Why the adapted model must be discarded; None if it performs well or the window is not full yet."""
    if len(comparison.confidence) < WINDOW:
        return None
    adapted, unadapted = (float(np.mean(values)) for values in zip(*comparison.confidence, strict=True))
    if adapted < unadapted - _MAX_CONFIDENCE_DROP:
        return f"confidence fell to {adapted:.2f}, below that of the unadapted model ({unadapted:.2f})"
    n_adapted, n_unadapted = map(sum, zip(*comparison.n_tokens, strict=True))
    if n_adapted < _MIN_LENGTH_RATIO * n_unadapted:
        return f"output shrank to {n_adapted / n_unadapted:.2f} of the tokens of the unadapted model"
    return None


def fall_back(state: SessionState) -> SessionState:
    """Restore the initial layer."""
    return replace(
        state,
        layer=state.initial,
        moments=AdamMoments.zero(state.initial),
        comparison=ModelComparison(n_fallbacks=state.comparison.n_fallbacks + 1),
    )
