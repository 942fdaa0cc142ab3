"""Is a difference between error rates real? The same trials on all sides, seeds where there are several.

Every rate is a sum of edits over a sum of lengths. Trials are what varies between one evaluation and another; where a
side has several runs that differ only in their seed, the seed varies as well, and both are accounted for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from arcuate.evaluation.metrics import Score, resampled_sums


@dataclass(frozen=True)
class Arm:
    """One side: edits of each of its runs in each trial, against references of these lengths."""

    errors: np.ndarray  # (S, N) runs × trials
    lengths: np.ndarray  # (N,)

    @property
    def rates(self) -> np.ndarray:
        return np.asarray(self.errors.sum(1) / self.lengths.sum())  # (S,)

    @property
    def rate(self) -> float:
        return float(self.rates.mean())

    @property
    def n_runs(self) -> int:
        return int(self.errors.shape[0])

    @property
    def seed_sd(self) -> float | None:
        """Spread of the rate between seeds; None where there is but one."""
        return float(self.rates.std(ddof=1)) if self.n_runs > 1 else None


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of error rates, such as B − A, with what the data say about its size."""

    estimate: float
    low: float
    high: float
    p: float  # two-sided, of the hypothesis that it is 0
    level: float
    n_trials: int
    n_runs: tuple[int, ...]
    method: str  # "bootstrap" (one run a side) or "components" (trials and seeds)
    over: str  # "trials" or "sessions": what would be drawn anew
    df: float | None = None

    @property
    def seeds_counted(self) -> bool:
        return max(self.n_runs) > 1


def difference(
    a: Arm, b: Arm, *, groups: np.ndarray | None = None, level: float = 0.95, seed: int = 0
) -> Contrast:
    """B − A: negative where B makes fewer errors. With `groups` (N,), whole groups (sessions) vary together."""
    return contrast((a, b), (-1.0, 1.0), groups=groups, level=level, seed=seed)


@dataclass(frozen=True)
class Difference:
    """Error rate of one system minus that of another on the same trials, as results state it."""

    rate: float  # negative: the first is better
    low: float
    high: float
    p: float


def score_difference(first: Sequence[Score], second: Sequence[Score]) -> Difference | None:
    """First − second; None where there are fewer than two trials to compare."""
    if [s.length for s in first] != [s.length for s in second]:
        raise ValueError("the two systems were not scored on the same trials")
    if sum(s.length > 0 for s in first) < 2:
        return None
    found = difference(_arm(second), _arm(first))
    return Difference(found.estimate, found.low, found.high, found.p)


def _arm(scores: Sequence[Score]) -> Arm:
    return Arm(np.array([[s.errors for s in scores]]), np.array([s.length for s in scores]))


def contrast(
    arms: Sequence[Arm],
    weights: Sequence[float],
    *,
    groups: np.ndarray | None = None,
    level: float = 0.95,
    n_resamples: int = 10_000,
    seed: int = 0,
) -> Contrast:
    """A weighted sum of the arms' rates with interval and p-value; all arms have the same trials in the same order.

    One run a side: paired bootstrap over trials. Several: the variance of trials and that of seeds are estimated
    apart and added, for three seeds drawn anew from three would look a third too much alike.
    """
    lengths = arms[0].lengths
    if len(lengths) < 2 or any(not np.array_equal(lengths, arm.lengths) for arm in arms):
        raise ValueError("arms need the same trials in the same order, two at least")
    deviations = sum(w * arm.errors.mean(0) for w, arm in zip(weights, arms, strict=True))  # (N,)
    assert isinstance(deviations, np.ndarray)
    estimate = float(deviations.sum() / lengths.sum())
    n_runs = tuple(arm.n_runs for arm in arms)
    if groups is None and max(n_runs) == 1:
        low, high, p = bootstrap(deviations, lengths, level, n_resamples, seed)
        return Contrast(estimate, low, high, p, level, len(lengths), n_runs, "bootstrap", "trials")
    variance, df = components(arms, weights, deviations - estimate * lengths, groups)
    low, high, p = student(estimate, variance, df, level)
    over = "trials" if groups is None else "sessions"
    return Contrast(estimate, low, high, p, level, len(lengths), n_runs, "components", over, df)


def bootstrap(
    deviations: np.ndarray, lengths: np.ndarray, level: float, n_resamples: int, seed: int
) -> tuple[float, float, float]:
    """Percentile interval and two-sided p-value of sum / sum when trials are drawn anew with replacement."""
    if not deviations.any():
        return 0.0, 0.0, 1.0
    both = np.stack([deviations, lengths], axis=1).astype(np.float64)  # (N, 2)
    sums, totals = resampled_sums(both, n_resamples, seed).T
    values = sums / np.maximum(totals, 1)  # a draw may hold nothing but empty references
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    below, above = np.count_nonzero(values <= 0), np.count_nonzero(values >= 0)
    p = min(1.0, 2 * (int(min(below, above)) + 1) / (n_resamples + 1))
    return float(low), float(high), p


def components(
    arms: Sequence[Arm], weights: Sequence[float], residuals: np.ndarray, groups: np.ndarray | None
) -> tuple[float, float]:
    """Variance of the contrast and its degrees of freedom (Welch–Satterthwaite).

    Runs are nested in arms and crossed with trials. What a seed does to single trials is part of both the spread over
    trials and the spread over seeds, so it is taken off once; the sum never falls below either part.
    """
    length = arms[0].lengths.sum()
    of_trials, df_trials = trial_variance(residuals, length, groups)
    of_seeds, square = seed_variances(arms, weights)
    shared = interaction_variance(arms, weights)
    variance = max(of_trials + of_seeds - shared, of_trials, of_seeds)
    square += of_trials**2 / df_trials
    return variance, variance**2 / square if square > 0 else float(df_trials)


def trial_variance(residuals: np.ndarray, length: float, groups: np.ndarray | None) -> tuple[float, int]:
    """Of a ratio of sums, by its linear part: each trial's, or each group's, share of the deviation."""
    shares = residuals if groups is None else np.bincount(groups, weights=residuals)
    n = len(shares)
    if n < 2:
        raise ValueError("two groups at least are needed to see how they vary")
    return float(n / (n - 1) * np.sum(shares**2) / length**2), n - 1


def seed_variances(arms: Sequence[Arm], weights: Sequence[float]) -> tuple[float, float]:
    """Variance due to seeds, and the sum of (part² / df). An arm with a single run borrows from those with several."""
    several = [arm for arm in arms if arm.n_runs > 1]
    if not several:
        return 0.0, 0.0
    df = sum(arm.n_runs - 1 for arm in several)
    pooled = sum((arm.n_runs - 1) * arm.rates.var(ddof=1) for arm in several) / df
    variance, square, borrowed = 0.0, 0.0, 0.0
    for arm, weight in zip(arms, weights, strict=True):
        if arm.n_runs > 1:
            part = weight**2 * float(arm.rates.var(ddof=1)) / arm.n_runs
            variance, square = variance + part, square + part**2 / (arm.n_runs - 1)
        else:
            borrowed += weight**2 * float(pooled)
    return variance + borrowed, square + borrowed**2 / df


def interaction_variance(arms: Sequence[Arm], weights: Sequence[float]) -> float:
    """What seeds do to single trials beyond raising or lowering all of them."""
    total = 0.0
    for arm, weight in zip(arms, weights, strict=True):
        if arm.n_runs > 1:
            n_runs, n_trials = arm.errors.shape
            own = arm.errors - arm.errors.mean(0) - np.outer(arm.rates - arm.rate, arm.lengths)
            variance = float(np.sum(own**2) / ((n_runs - 1) * (n_trials - 1)))
            total += weight**2 * n_trials * variance / (n_runs * float(arm.lengths.sum()) ** 2)
    return total


def student(estimate: float, variance: float, df: float, level: float) -> tuple[float, float, float]:
    if variance <= 0 or not math.isfinite(variance):
        return estimate, estimate, 1.0 if estimate == 0 else 0.0
    error = math.sqrt(variance)
    reach = float(stats.t.ppf((1 + level) / 2, df)) * error
    return estimate - reach, estimate + reach, float(2 * stats.t.sf(abs(estimate) / error, df))


def holm(values: Sequence[float]) -> list[float]:
    """P-values adjusted for how many questions were asked (Holm)."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - rank) * values[i]))
        adjusted[i] = highest
    return adjusted
