"""Estimate of the error rate of trials without labels, from the frame log-probabilities of the model.

As recordings drift, error rates rise and frame posteriors change: they become flatter, their peaks lower, and the
number of decoded tokens shifts. `estimate_error` compares these measures of new trials with those of labelled trials of
the same model (the reference, usually the val split), and shifts the reference error rate on the logit scale by a
weighted sum of the differences. Estimates of this kind are known as average thresholded confidence and difference of
confidences (Guillory et al. 2021, Garg et al. 2022); here several measures are combined.

The weights and the width of the interval come from simulated later days, `python benchmarks/error_estimate.py fit`,
which prints them; docs/evaluation.md gives error and coverage on days that were not used.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from arcuate.decoding.hypothesis import token_spans
from arcuate.errors import UserError
from arcuate.evaluation.metrics import Score
from arcuate.files import Result, finite_number, read_json
from arcuate.progress import counted, percent
from arcuate.run import Run

MEASURES = (
    "entropy",  # mean entropy of a frame in nats / log of the number of classes
    "peak",  # mean log-probability of the best class of a frame
    "token_peak",  # mean over decoded tokens of the highest log-probability of the token
    "worst_token",  # lowest decile of these
    "token_rate",  # log of decoded tokens per frame
)
MIN_TRIALS = 3
# Written by `python benchmarks/error_estimate.py fit`.
WEIGHTS = (5.331, -4.018, -1.732, -1.516, -2.002)
LOWER, UPPER = 0.300, 0.281  # distances of the bounds from the estimate on the logit scale that cover 90 % of the days
_FLOOR = 0.002  # error rates are clipped to [this, 1 - this] before the logit


@dataclass(frozen=True)
class ErrorReference(Result):
    """Measures and error rate of labelled trials of a model, with which later trials are compared."""

    error_rate: float
    n_trials: int
    means: tuple[float, ...]  # of `MEASURES`


@dataclass(frozen=True)
class ErrorEstimate(Result):
    """Estimated error rate of trials without labels, with a 90 % interval."""

    error_rate: float
    low: float
    high: float
    n_trials: int
    reference: ErrorReference

    def summary(self, name: str = "PER") -> str:
        return (
            f"estimated {name} without labels {percent(self.error_rate)} (90 % interval {percent(self.low)} to"
            f" {percent(self.high)}, calibrated on simulated sessions) on {counted(self.n_trials, 'trial')};"
            f" {percent(self.reference.error_rate)} on {counted(self.reference.n_trials, 'labelled trial')}"
        )


def measure_trial(log_probs: np.ndarray) -> np.ndarray:
    """`MEASURES` of the frame log-probabilities (F, V) of one trial; F may be 0."""
    n_frames, n_classes = log_probs.shape
    chance = -np.log(n_classes)
    if not n_frames:
        return np.array([1.0, chance, chance, chance, np.log(0.01)])
    values = np.maximum(log_probs.astype(np.float64), -50.0)
    peaks = values.max(1)
    tokens = [peaks[span.first : span.first + span.n_frames].max() for span in token_spans(values)]
    certain = np.array(tokens or [chance])
    entropy = (np.exp(values) * values).sum(1).mean() / chance
    rate = np.log((len(tokens) + 0.5) / n_frames)
    return np.array([entropy, peaks.mean(), certain.mean(), np.quantile(certain, 0.1), rate])


def make_reference(evidence: Collection[np.ndarray], errors: Score) -> ErrorReference | None:
    """Reference of labelled trials, from their `MEASURES` and summed errors; None for too few of them."""
    if len(evidence) < MIN_TRIALS or errors.rate is None:
        return None
    means = np.mean(list(evidence), axis=0)
    return ErrorReference(min(errors.rate, 1.0), len(evidence), tuple(means.tolist()))


def estimate_error(evidence: Collection[np.ndarray], reference: ErrorReference) -> ErrorEstimate | None:
    """Error rate of trials without labels from their `MEASURES`; None for fewer than `MIN_TRIALS`."""
    if len(evidence) < MIN_TRIALS:
        return None
    change = np.subtract(np.mean(list(evidence), axis=0), reference.means) @ np.array(WEIGHTS)
    centre = logit(reference.error_rate) + float(change)
    rate, low, high = (float(1 / (1 + np.exp(-value))) for value in (centre, centre - LOWER, centre + UPPER))
    return ErrorEstimate(rate, low, high, len(evidence), reference)


def read_reference(run: Run) -> ErrorReference | None:
    """The reference of the latest evaluation of a run on its labelled val or dev trials; None if there is none."""
    for split in ("val", "dev"):
        file = run.results_file(split, ending="json")
        if not file.is_file():
            continue
        stored = read_json(file).get("error_reference")
        if not isinstance(stored, dict):
            continue
        means = stored.get("means")
        given = (stored.get("error_rate"), stored.get("n_trials"), *(means if isinstance(means, list) else ()))
        numbers = [number for value in given if (number := finite_number(value)) is not None]
        if len(numbers) != len(given) or len(numbers) != 2 + len(MEASURES):
            raise UserError(f"{file}: error_reference is damaged; evaluate the run again")
        return ErrorReference(numbers[0], int(numbers[1]), tuple(numbers[2:]))
    return None


def logit(rate: float) -> float:
    """Log-odds of an error rate, which is kept away from 0 and 1."""
    rate = min(max(rate, _FLOOR), 1 - _FLOOR)
    return float(np.log(rate / (1 - rate)))
