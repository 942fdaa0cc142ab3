"""When a trial causes no update, and when the adapted layer is discarded."""

import math
from dataclasses import replace

import numpy as np
from torch import Tensor

from arcuate.adaptation.config import Safety
from arcuate.adaptation.state import AdamMoments, DecodedTrial, ModelComparison, SessionState, confidence
from arcuate.decoding.hypothesis import greedy
from arcuate.evaluation.metrics import score

_CONFIDENCE_TRIALS = 40  # trials from which the drift of a session is estimated
_KNOWN_SESSION_FACTOR = 3.0  # on the standard errors required for a session the model was trained on
_MIN_TOKENS = 2  # shorter outputs are not used as pseudo-labels


def is_usable(trial: DecodedTrial, settings: Safety) -> bool:
    """Whether a trial's pseudo-label is confident and long enough to train on; flat trials never are.

    A pseudo-label from a word search must be close to the greedy phonemes: where the language model changed many of
    them, its sentence has little acoustic support.
    """
    phonemes = greedy(trial.log_probs)
    agrees = score(phonemes, trial.pseudo_label).errors <= settings.max_disagreement * len(phonemes)
    confident = confidence(trial.log_probs) >= settings.min_confidence
    return len(trial.pseudo_label) >= _MIN_TOKENS and has_signal(trial.bins) and agrees and confident


def has_signal(bins: Tensor) -> bool:
    """Whether any channel of a trial (T, C) varies."""
    return len(bins) > 0 and bool((bins.amax(0) > bins.amin(0)).any())


def step_factor(state: SessionState, settings: Safety) -> float:
    """Fraction of a full step that the drift of a session justifies, from 0 (no drift detected) to 1.

    A session without drift has nothing to gain, and training on pseudo-labels would only add their errors. Confidence
    also varies between known sessions and between trials, so it must fall below the expected value by a number of
    standard errors; by three times as many if the session has its own layer, which was trained with labels.
    """
    if state.expected is None or not state.unadapted_confidence:
        return 1.0
    expected, n = state.expected, len(state.unadapted_confidence)
    deficit = expected.mean - float(np.mean(state.unadapted_confidence))
    is_known = state.init_session == state.session
    required = settings.min_standard_errors * (_KNOWN_SESSION_FACTOR if is_known else 1.0)
    if deficit <= required * math.hypot(expected.session_sd, expected.trial_sd / math.sqrt(n)):
        return 0.0
    return min(deficit / (settings.full_step_uncertainty * max(1.0 - expected.mean, 1e-6)), 1.0)


def track_confidence(state: SessionState, unadapted: np.ndarray) -> SessionState:
    """Add the unadapted model's confidence on one trial (F, V); all-blank trials are left out."""
    value = confidence(unadapted)
    if not value:
        return state
    return replace(state, unadapted_confidence=(*state.unadapted_confidence, value)[-_CONFIDENCE_TRIALS:])


def is_disabled(state: SessionState, settings: Safety) -> bool:
    """Whether a session fell back too often to be adapted any further."""
    return state.comparison.n_fallbacks > settings.max_fallbacks


def compare(
    comparison: ModelComparison, adapted: np.ndarray, unadapted: np.ndarray, settings: Safety
) -> ModelComparison:
    """Add one trial's log-probabilities (F, V) from both models, keeping the last `window` trials."""
    confidences = (*comparison.confidence, (confidence(adapted), confidence(unadapted)))
    n_tokens = (*comparison.n_tokens, (len(greedy(adapted)), len(greedy(unadapted))))
    last = slice(-settings.window, None)
    return replace(comparison, confidence=confidences[last], n_tokens=n_tokens[last])


def fallback_reason(comparison: ModelComparison, settings: Safety) -> str | None:
    """Why the adapted model must be discarded; None if it performs well or the window is not full yet."""
    if len(comparison.confidence) < settings.window:
        return None
    adapted, unadapted = (float(np.mean(values)) for values in zip(*comparison.confidence, strict=True))
    if adapted < unadapted - settings.max_confidence_drop:
        return f"confidence fell to {adapted:.2f}, below {unadapted:.2f} of the unadapted model"
    n_adapted, n_unadapted = map(sum, zip(*comparison.n_tokens, strict=True))
    if n_adapted < settings.min_length_ratio * n_unadapted:
        return f"output shrank to {n_adapted / n_unadapted:.2f} of the tokens of the unadapted model"
    return None


def fall_back(state: SessionState) -> SessionState:
    """Restore the initial layer; discard the replay buffer and the input statistics with it."""
    return replace(
        state,
        layer=state.initial,
        moments=AdamMoments.zero(state.initial),
        buffer=(),
        observed=None,
        comparison=ModelComparison(n_fallbacks=state.comparison.n_fallbacks + 1),
    )
