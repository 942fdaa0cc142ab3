"""Estimate of the error rate of trials without labels, from the frame log-probabilities of the model.

As recordings drift, error rates rise and frame posteriors change: they become flatter, their peaks lower, and the
number of decoded tokens shifts. `estimate_error` compares these measures of new trials with those of labelled trials of
the same model (the reference, usually the val split), and shifts the reference error rate on the logit scale by a
weighted sum of the differences. Estimates of this kind are known as average thresholded confidence and difference of
confidences (Guillory et al. 2021, Garg et al. 2022); here several measures are combined.

The weights and the width of the interval come from simulated later days, `python benchmarks/error_estimate.py fit`,
which prints them; docs/evaluation.md gives error and coverage on days that were not used.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from arcuate.decoding.hypothesis import token_spans
from arcuate.errors import UserError
from arcuate.files import fields_to_dict, read_json
from arcuate.progress import counted, percent
from arcuate.run import Run

MEASURES = ("entropy", "peak", "token_peak", "worst_token", "token_rate")
MIN_TRIALS = 3
# Written by `python benchmarks/error_estimate.py fit`.
WEIGHTS = (5.331, -4.018, -1.732, -1.516, -2.002)
LOWER, UPPER = 0.300, 0.281  # distances of the bounds from the estimate on the logit scale that cover 90 % of the days
_FLOOR = 0.002  # error rates are clipped to [this, 1 - this] before the logit


@dataclass(frozen=True)
class TrialEvidence:
    """Measures of one decoded trial that need no label."""

    entropy: float  # mean entropy of a frame in nats / log of the number of classes
    peak: float  # mean log-probability of the best class of a frame
    token_peak: float  # mean over decoded tokens of the highest log-probability of the token
    worst_token: float  # lowest decile of these
    token_rate: float  # log of decoded tokens per frame
    n_tokens: int  # decoded

    def to_dict(self) -> dict[str, Any]:
        return fields_to_dict(self)


@dataclass(frozen=True)
class ErrorReference:
    """Measures and error rate of labelled trials of a model, with which later trials are compared."""

    error_rate: float
    n_trials: int
    means: tuple[float, ...]  # of `MEASURES`

    def to_dict(self) -> dict[str, Any]:
        return fields_to_dict(self)


@dataclass(frozen=True)
class ErrorEstimate:
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

    def to_dict(self) -> dict[str, Any]:
        return fields_to_dict(self)


def measure_trial(log_probs: np.ndarray) -> TrialEvidence:
    """Measures of the frame log-probabilities (F, V) of one trial; F may be 0."""
    n_frames, n_classes = log_probs.shape
    if not n_frames:
        return TrialEvidence(1.0, -np.log(n_classes), -np.log(n_classes), -np.log(n_classes), np.log(0.01), 0)
    values = np.maximum(log_probs.astype(np.float64), -50.0)
    best = values.argmax(1)
    peaks = values[np.arange(n_frames), best]
    tokens = [peaks[span.first : span.first + span.n_frames].max() for span in token_spans(values)]
    certain = np.array(tokens) if tokens else np.array([-np.log(n_classes)])
    return TrialEvidence(
        float(-(np.exp(values) * values).sum(1).mean() / np.log(n_classes)),
        float(peaks.mean()),
        float(certain.mean()),
        float(np.quantile(certain, 0.1)),
        float(np.log((len(tokens) + 0.5) / n_frames)),
        len(tokens),
    )


def mean_evidence(trials: Collection[TrialEvidence]) -> tuple[float, ...]:
    """Means of `MEASURES` over trials."""
    return tuple(float(np.mean([getattr(t, name) for t in trials])) for name in MEASURES)


def make_reference(trials: Iterable[tuple[TrialEvidence, int, int]]) -> ErrorReference | None:
    """Reference of labelled trials (evidence, errors, reference length); None for too few of them."""
    rows = list(trials)
    length = sum(n for _, _, n in rows)
    if len(rows) < MIN_TRIALS or not length:
        return None
    rate = min(sum(errors for _, errors, _ in rows) / length, 1.0)
    return ErrorReference(rate, len(rows), mean_evidence([evidence for evidence, _, _ in rows]))


def estimate_error(trials: Collection[TrialEvidence], reference: ErrorReference) -> ErrorEstimate | None:
    """Error rate of trials without labels; None for fewer than `MIN_TRIALS`."""
    if len(trials) < MIN_TRIALS:
        return None
    change = np.subtract(mean_evidence(trials), reference.means) @ np.array(WEIGHTS)
    centre = logit(reference.error_rate) + float(change)
    rate, low, high = (float(1 / (1 + np.exp(-value))) for value in (centre, centre - LOWER, centre + UPPER))
    return ErrorEstimate(rate, low, high, len(trials), reference)


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
        numbers = [stored.get("error_rate"), stored.get("n_trials"), *(means if isinstance(means, list) else ())]
        finite = [float(n) for n in numbers if isinstance(n, int | float) and np.isfinite(n)]
        if len(finite) != len(numbers) or len(finite) != 2 + len(MEASURES):
            raise UserError(f"{file}: error_reference is damaged; evaluate the run again")
        return ErrorReference(finite[0], int(finite[1]), tuple(finite[2:]))
    return None


def logit(rate: float) -> float:
    """Log-odds of an error rate, which is kept away from 0 and 1."""
    rate = min(max(rate, _FLOOR), 1 - _FLOOR)
    return float(np.log(rate / (1 - rate)))
