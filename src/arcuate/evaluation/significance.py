"""Confidence intervals and significance tests for error rates; all other packages use these.

Every rate is a sum of edits over a sum of reference lengths. Comparisons are paired: all systems are scored on the
same trials. Trials are a random factor, and so are seeds where a system has several runs that differ only in their
seed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from arcuate.evaluation.metrics import Score

_CHUNK = 500  # resamples drawn at a time; bounds the memory


@dataclass(frozen=True)
class Arm:
    """One system: edits of each of its runs in each trial, and the reference lengths."""

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
        """Standard deviation of the rate over seeds; None for a single run."""
        return float(self.rates.std(ddof=1)) if self.n_runs > 1 else None


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of error rates, such as B − A, with confidence interval and p-value."""

    estimate: float
    low: float
    high: float
    p: float  # two-sided, null hypothesis: the contrast is 0
    level: float
    n_trials: int
    n_runs: tuple[int, ...]
    method: str  # "bootstrap" (one run per arm) or "components" (variance components of trials and seeds)
    over: str  # sampling unit: "trials" or "sessions"
    df: float | None = None

    @property
    def seeds_counted(self) -> bool:
        """Whether the variance between seeds is included."""
        return max(self.n_runs) > 1


@dataclass(frozen=True)
class Difference:
    """Error rate of one system minus that of another on the same trials."""

    rate: float  # negative: the first is better
    low: float
    high: float
    p: float


def bootstrap_interval(
    scores: Sequence["Score"], *, level: float = 0.95, n_resamples: int = 2000, seed: int = 0
) -> tuple[float | None, float | None]:
    """Percentile bootstrap interval (Efron & Tibshirani 1993) of the error rate, resampling trials.

    (None, None) for fewer than two trials: a single trial carries no information on the variance between trials, and
    its bootstrap interval would have width 0.
    """
    scored = [s for s in scores if s.length or s.errors]
    if sum(s.length > 0 for s in scored) < 2 or not n_resamples:
        return None, None
    counts = np.array([(s.errors, s.length) for s in scored], dtype=np.float64)
    errors, lengths = _resample_sums(counts, n_resamples, seed).T
    drawn = lengths > 0  # a sample of empty references alone has no rate
    low, high = np.quantile(errors[drawn] / lengths[drawn], [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def score_difference(first: Sequence["Score"], second: Sequence["Score"]) -> Difference | None:
    """Paired difference first − second of two systems; None for fewer than two trials."""
    if [s.length for s in first] != [s.length for s in second]:
        raise ValueError("the two systems were not scored on the same trials")
    if sum(s.length > 0 for s in first) < 2:
        return None
    found = difference(_single_run(second), _single_run(first))
    return Difference(found.estimate, found.low, found.high, found.p)


def difference(a: Arm, b: Arm, *, groups: np.ndarray | None = None, level: float = 0.95, seed: int = 0) -> Contrast:
    """B − A; negative if B makes fewer errors. `groups` (N,) makes groups (sessions) the sampling unit."""
    return contrast((a, b), (-1.0, 1.0), groups=groups, level=level, seed=seed)


def contrast(
    arms: Sequence[Arm],
    weights: Sequence[float],
    *,
    groups: np.ndarray | None = None,
    level: float = 0.95,
    n_resamples: int = 10_000,
    seed: int = 0,
) -> Contrast:
    """Weighted sum of the arms' rates with interval and p-value; all arms hold the same trials in the same order.

    One run per arm: paired bootstrap over trials (Bisani & Ney 2004). Several: variance components of trials and
    seeds are estimated separately and added, because resampling three seeds from three underestimates their variance
    by a third.
    """
    lengths = arms[0].lengths
    if len(lengths) < 2 or any(not np.array_equal(lengths, arm.lengths) for arm in arms):
        raise ValueError("arms need the same trials in the same order, at least two")
    deviations = sum(w * arm.errors.mean(0) for w, arm in zip(weights, arms, strict=True))  # (N,)
    assert isinstance(deviations, np.ndarray)
    estimate = float(deviations.sum() / lengths.sum())
    n_runs = tuple(arm.n_runs for arm in arms)
    if groups is None and max(n_runs) == 1:
        low, high, p = _paired_bootstrap(deviations, lengths, level, n_resamples, seed)
        return Contrast(estimate, low, high, p, level, len(lengths), n_runs, "bootstrap", "trials")
    variance, df = _variance(arms, weights, deviations - estimate * lengths, groups)
    low, high, p = _t_interval(estimate, variance, df, level)
    over = "trials" if groups is None else "sessions"
    return Contrast(estimate, low, high, p, level, len(lengths), n_runs, "components", over, df)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for multiple comparisons by the step-down procedure of Holm (1979)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = highest
    return adjusted


def _single_run(scores: Sequence["Score"]) -> Arm:
    return Arm(np.array([[s.errors for s in scores]]), np.array([s.length for s in scores]))


def _resample_sums(values: np.ndarray, n_resamples: int, seed: int) -> np.ndarray:
    """Column sums (R, K) of bootstrap resamples of the rows (N, K), as multinomial counts times values."""
    rng, n_rows = np.random.default_rng(seed), len(values)
    uniform = np.full(n_rows, 1 / n_rows)
    sizes = [min(_CHUNK, n_resamples - start) for start in range(0, n_resamples, _CHUNK)]
    return np.concatenate([rng.multinomial(n_rows, uniform, size=size) @ values for size in sizes])


def _paired_bootstrap(
    deviations: np.ndarray, lengths: np.ndarray, level: float, n_resamples: int, seed: int
) -> tuple[float, float, float]:
    """Percentile interval and two-sided p-value of sum(deviations) / sum(lengths), resampling trials."""
    if not deviations.any():
        return 0.0, 0.0, 1.0
    both = np.stack([deviations, lengths], axis=1).astype(np.float64)  # (N, 2)
    sums, totals = _resample_sums(both, n_resamples, seed).T
    values = sums / np.maximum(totals, 1)  # a resample may hold empty references only
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    below, above = np.count_nonzero(values <= 0), np.count_nonzero(values >= 0)
    p = min(1.0, 2 * (int(min(below, above)) + 1) / (n_resamples + 1))
    return float(low), float(high), p


def _variance(
    arms: Sequence[Arm], weights: Sequence[float], residuals: np.ndarray, groups: np.ndarray | None
) -> tuple[float, float]:
    """Variance of the contrast and its degrees of freedom (Welch 1947, Satterthwaite 1946).

    Runs are nested in arms and crossed with trials. The seed × trial interaction is contained in the variance over
    trials and in the variance over seeds, so it is subtracted once; the sum is never less than either component.
    """
    length = arms[0].lengths.sum()
    of_trials, df_trials = _trial_variance(residuals, length, groups)
    of_seeds, square = _seed_variance(arms, weights)
    shared = _interaction_variance(arms, weights)
    variance = max(of_trials + of_seeds - shared, of_trials, of_seeds)
    square += of_trials**2 / df_trials
    return variance, variance**2 / square if square > 0 else float(df_trials)


def _trial_variance(residuals: np.ndarray, length: float, groups: np.ndarray | None) -> tuple[float, int]:
    """Linearised variance of a ratio of sums, over trials or over groups of trials, and its degrees of freedom."""
    sums = residuals if groups is None else np.bincount(groups, weights=residuals)
    n = len(sums)
    if n < 2:
        raise ValueError("estimating the variance between groups needs at least two groups")
    return float(n / (n - 1) * np.sum(sums**2) / length**2), n - 1


def _seed_variance(arms: Sequence[Arm], weights: Sequence[float]) -> tuple[float, float]:
    """Variance due to seeds and the sum of (component² / df). A single-run arm uses the pooled variance."""
    several = [arm for arm in arms if arm.n_runs > 1]
    if not several:
        return 0.0, 0.0
    df = sum(arm.n_runs - 1 for arm in several)
    pooled = sum((arm.n_runs - 1) * arm.rates.var(ddof=1) for arm in several) / df
    variance, square, borrowed = 0.0, 0.0, 0.0
    for arm, weight in zip(arms, weights, strict=True):
        if arm.n_runs > 1:
            component = weight**2 * float(arm.rates.var(ddof=1)) / arm.n_runs
            variance, square = variance + component, square + component**2 / (arm.n_runs - 1)
        else:
            borrowed += weight**2 * float(pooled)
    return variance + borrowed, square + borrowed**2 / df


def _interaction_variance(arms: Sequence[Arm], weights: Sequence[float]) -> float:
    """Seed × trial interaction: effect of a seed on single trials beyond its effect on the mean."""
    variance = 0.0
    for arm, weight in zip(arms, weights, strict=True):
        if arm.n_runs > 1:
            n_runs, n_trials = arm.errors.shape
            effects = arm.errors - arm.errors.mean(0) - np.outer(arm.rates - arm.rate, arm.lengths)
            mean_square = float(np.sum(effects**2) / ((n_runs - 1) * (n_trials - 1)))
            variance += weight**2 * n_trials * mean_square / (n_runs * float(arm.lengths.sum()) ** 2)
    return variance


def _t_interval(estimate: float, variance: float, df: float, level: float) -> tuple[float, float, float]:
    """Interval and two-sided p-value from Student's t distribution."""
    if variance <= 0 or not math.isfinite(variance):
        return estimate, estimate, 1.0 if estimate == 0 else 0.0
    from scipy import stats  # 40 MB that bootstrap intervals alone do not need

    error = math.sqrt(variance)
    reach = float(stats.t.ppf((1 + level) / 2, df)) * error
    return estimate - reach, estimate + reach, float(2 * stats.t.sf(abs(estimate) / error, df))
