"""When a trial teaches nothing, and when what was learned is taken back."""

from dataclasses import replace

import numpy as np

from arcuate.adapt.day import Day, Heard, Moments, Trust, confidence
from arcuate.adapt.settings import Safety
from arcuate.decode.greedy import greedy

FEWEST_TOKENS = 2  # a reading shorter than this says too little to learn from


def worth_learning(heard: Heard, settings: Safety) -> bool:
    """Whether a reading is sure enough, and long enough, to be taken for the truth; a flat trial never is."""
    long_enough = len(heard.tokens) >= FEWEST_TOKENS
    recorded = len(heard.bins) > 0 and bool((heard.bins.amax(0) > heard.bins.amin(0)).any())
    return long_enough and recorded and confidence(heard.log_probs) >= settings.min_confidence


def need(day: Day, settings: Safety) -> float:
    """How much of a step this day calls for: 0 where it is read as surely as known days are, 1 far from that.

    A day without drift has nothing to learn, and learning from one's own readings would only add their errors.
    """
    if day.expected is None or not day.trust.unadapted:
        return 1.0
    doubt = (1.0 - float(np.mean(day.trust.unadapted))) / max(1.0 - day.expected, 1e-6)
    return min(max((doubt - 1.0) / settings.full_doubt, 0.0), 1.0)


def gave_up(day: Day, settings: Safety) -> bool:
    return day.trust.n_falls > settings.max_falls


def compare(trust: Trust, adapted: np.ndarray, unadapted: np.ndarray, settings: Safety) -> Trust:
    """Trust after one more trial that both models have read: their frame scores (F, V)."""
    ours, theirs = len(greedy(adapted)), len(greedy(unadapted))
    lengths = ours / theirs if theirs else 1.0  # where nothing is said, nothing is missed
    keep = settings.window - 1
    return replace(
        trust,
        adapted=(*trust.adapted[-keep:], confidence(adapted)) if keep else (confidence(adapted),),
        unadapted=(*trust.unadapted[-keep:], confidence(unadapted)) if keep else (confidence(unadapted),),
        lengths=(*trust.lengths[-keep:], lengths) if keep else (lengths,),
    )


def must_fall_back(trust: Trust, settings: Safety) -> str | None:
    """Why the adapted model is no longer to be trusted; None where it is, or where it is too early to say."""
    if len(trust.adapted) < settings.window:
        return None
    adapted, unadapted = float(np.mean(trust.adapted)), float(np.mean(trust.unadapted))
    if adapted < unadapted - settings.max_drop:
        return f"confidence {adapted:.2f} fell below the {unadapted:.2f} of the unadapted model"
    if float(np.mean(trust.lengths)) < settings.min_length:
        return f"it reads {np.mean(trust.lengths):.2f} of the tokens that the unadapted model reads"
    return None


def fall_back(day: Day) -> Day:
    """The day with the layer it began with; what was remembered of its trials goes as well."""
    return replace(
        day,
        layer=day.start,
        moments=Moments.zero(day.start),
        memory=(),
        trust=Trust(n_falls=day.trust.n_falls + 1),
    )
