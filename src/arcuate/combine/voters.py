"""How much each candidate's vote weighs."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from arcuate.combine.lists import CandidateList
from arcuate.combine.risk import minimum_risk, softmax
from arcuate.metrics import score, total

Voters = Literal["equal", "agreement"]


def n_seats(lists: Sequence[CandidateList]) -> int | None:
    """How many voters there are, where every trial has one candidate of each and none are scored; else None."""
    sizes = {len(c.texts) for c in lists}
    if len(sizes) != 1 or any(c.scores is not None for c in lists):
        return None
    return sizes.pop() or None


def agreement(lists: Sequence[CandidateList]) -> np.ndarray:
    """A weight per seat from how often it agrees with all seats together; no reference is looked at. (seats,)

    The log odds of being right, as an expert's vote is weighed if experts err independently.
    """
    together = [minimum_risk(c.texts).split() for c in lists]
    rates = []
    for seat in range(len(lists[0].texts)):
        counted = total(score(t, c.texts[seat].split()) for t, c in zip(together, lists, strict=True))
        rates.append(counted.rate or 0.0)
    p = np.clip(np.array(rates), 1e-4, 0.5 - 1e-4)
    return np.log((1 - p) / p)


def vote_weights(
    lists: Sequence[CandidateList], voters: Voters = "equal", scale: float = 1.0
) -> list[np.ndarray]:
    """Weights of every trial's candidates: by score where there are scores, else by seat."""
    seats = agreement(lists) if voters == "agreement" and n_seats(lists) else None
    weights = []
    for found in lists:
        if found.scores is not None:
            weights.append(softmax(found.scores, scale))
        else:
            weights.append(seats if seats is not None else np.ones(len(found.texts)))
    return weights
