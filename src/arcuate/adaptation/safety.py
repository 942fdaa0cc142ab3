"""When a trial teaches nothing, and when what was learned is taken back."""

import math
from dataclasses import replace

import numpy as np
from torch import Tensor

from arcuate.adaptation.config import Safety
from arcuate.adaptation.state import Day, Heard, Moments, Trust, confidence
from arcuate.decoding.greedy import greedy
from arcuate.evaluation.metrics import score

N_JUDGED = 40  # trials by which the drift of a day is judged
OWN_LAYER = 3.0  # times the evidence that a day needs which the model knows
FEWEST_TOKENS = 2  # a reading shorter than this says too little to learn from


def worth_learning(heard: Heard, settings: Safety) -> bool:
    """Whether a reading is sure enough, and long enough, to be taken for the truth; a flat trial never is.

    A label through words must be near the phonemes that were heard: where a language model had to change much, it
    has mostly made something up.
    """
    long_enough = len(heard.tokens) >= FEWEST_TOKENS
    phonemes = greedy(heard.log_probs)
    agrees = score(phonemes, heard.tokens).errors <= settings.max_disagreement * len(phonemes)
    sure = confidence(heard.log_probs) >= settings.min_confidence
    return long_enough and recorded(heard.bins) and agrees and sure


def recorded(bins: Tensor) -> bool:
    """Whether anything moves in a trial (T, C) at all."""
    return len(bins) > 0 and bool((bins.amax(0) > bins.amin(0)).any())


def need(day: Day, settings: Safety) -> float:
    """How much of a step this day calls for: 0 where it is read as surely as known days are, 1 far from that.

    A day without drift has nothing to learn, and learning from one's own readings would only add their errors. Known
    days differ too, and a few trials say little: what either explains is no reason to learn. A known day has a layer of
    its own that was learned with labels; it takes more to doubt it.
    """
    if day.expected is None or not day.plain:
        return 1.0
    usual = day.expected
    short = usual.confidence - float(np.mean(day.plain))
    evidence = settings.evidence * (OWN_LAYER if day.like == day.session else 1.0)
    if short <= evidence * math.hypot(usual.day_sd, usual.trial_sd / math.sqrt(len(day.plain))):
        return 0.0
    return min(short / (settings.full_doubt * max(1.0 - usual.confidence, 1e-6)), 1.0)


def judged(day: Day, unadapted: np.ndarray) -> Day:
    """The day after one more reading (F, V) of the unadapted model; one in which it reads nothing says nothing."""
    sure = confidence(unadapted)
    return replace(day, plain=(*day.plain, sure)[-N_JUDGED:]) if sure else day


def gave_up(day: Day, settings: Safety) -> bool:
    return day.trust.n_falls > settings.max_falls


def compare(trust: Trust, adapted: np.ndarray, unadapted: np.ndarray, settings: Safety) -> Trust:
    """Trust after one more trial that both models have read: their frame scores (F, V)."""
    last = slice(-settings.window, None)
    return replace(
        trust,
        adapted=(*trust.adapted, confidence(adapted))[last],
        unadapted=(*trust.unadapted, confidence(unadapted))[last],
        n_adapted=(*trust.n_adapted, len(greedy(adapted)))[last],
        n_unadapted=(*trust.n_unadapted, len(greedy(unadapted)))[last],
    )


def must_fall_back(trust: Trust, settings: Safety) -> str | None:
    """Why the adapted model is no longer to be trusted; None where it is, or where it is too early to say."""
    if len(trust.adapted) < settings.window:
        return None
    adapted, unadapted = float(np.mean(trust.adapted)), float(np.mean(trust.unadapted))
    if adapted < unadapted - settings.max_drop:
        return f"confidence {adapted:.2f} fell below the {unadapted:.2f} of the unadapted model"
    n_adapted, n_unadapted = sum(trust.n_adapted), sum(trust.n_unadapted)
    if n_adapted < settings.min_length * n_unadapted:
        return f"it reads {n_adapted / n_unadapted:.2f} of the tokens that the unadapted model reads"
    return None


def fall_back(day: Day) -> Day:
    """The day with the layer it began with; what was remembered of its trials and of its input goes as well."""
    return replace(
        day,
        layer=day.start,
        moments=Moments.zero(day.start),
        memory=(),
        seen=None,
        trust=Trust(n_falls=day.trust.n_falls + 1),
    )
