"""How much a sentence is worth: error rate of the rest of the day over sentences of calibration."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from arcuate.evaluate import TrialResult
from arcuate.metrics import bootstrap_interval, total
from arcuate.paired import score_difference


@dataclass(frozen=True)
class Point:
    """One point of the curve, with its 95 % interval over the trials scored."""

    sentences: int
    per: float | None
    low: float | None
    high: float | None
    n_trials: int
    gain: float | None = None  # PER less than without calibration, on the same trials
    gain_low: float | None = None
    gain_high: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def curve_points(n_sentences: int) -> tuple[int, ...]:
    """None, a quarter, half and all of the sentences."""
    return tuple(sorted({0, max(n_sentences // 4, 1), max(n_sentences // 2, 1), n_sentences}))


def measure(
    sentences: int, results: Sequence[TrialResult], without: Sequence[TrialResult] | None = None
) -> Point:
    """A point from the trials held back; `without` are the same trials read without calibration."""
    scores = [r.score for r in results if r.score is not None]
    low, high = bootstrap_interval(scores)
    rate = total(scores).rate
    before = [r.score for r in without or () if r.score is not None]
    found = score_difference(before, scores) if before and scores else None
    gain = (found.rate, found.low, found.high) if found else (None, None, None)
    return Point(sentences, rate, low, high, len(scores), *gain)
