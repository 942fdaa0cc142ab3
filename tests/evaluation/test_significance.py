"""Significance tests against simulated results with known error rates."""

import numpy as np
import pytest
from scipy import stats

from arcuate.evaluation.metrics import Score
from arcuate.evaluation.significance import Arm, bootstrap_interval, contrast, difference, holm

N_TRIALS, N_SESSIONS = 120, 12


def results(
    rng: np.random.Generator, rates: list[float], n_runs: int, seed_sd: float = 0.0, n_trials: int = N_TRIALS
) -> list[Arm]:
    """Arms on the same trials, with effects of trial, of recipe × trial and of seed."""
    lengths = rng.integers(10, 45, size=n_trials)
    difficulty = rng.normal(0, 0.5, size=n_trials)
    arms = []
    for rate in rates:
        own = rng.normal(0, 0.2, size=n_trials)  # recipe × trial
        seed_effect = rng.normal(0, seed_sd, size=(n_runs, 1))
        p = stats.logistic.cdf(stats.logistic.ppf(rate) + difficulty + own + seed_effect)  # (S, N)
        arms.append(Arm(rng.binomial(lengths, p).astype(float), lengths.astype(float)))
    return arms


def true_difference(rates: list[float], seed_sd: float) -> float:
    """The difference in the limit of many seeds and trials."""
    large = [results(np.random.default_rng(10_000 + i), rates, 40, seed_sd, 4000) for i in range(5)]
    return float(np.mean([b.rate - a.rate for a, b in large]))


def calibrate(n_runs: int, seed_sd: float, by_session: bool, n_repeats: int) -> tuple[float, float]:
    """Rate of false positives for equal recipes, and coverage of the interval for unequal ones."""
    groups = np.repeat(np.arange(N_SESSIONS), N_TRIALS // N_SESSIONS) if by_session else None
    positives, covered, unequal = 0, 0, [0.2, 0.26]
    truth = true_difference(unequal, seed_sd)
    for repeat in range(n_repeats):
        a, b = results(np.random.default_rng(repeat), [0.2, 0.2], n_runs, seed_sd)
        positives += contrast((a, b), (-1, 1), groups=groups, n_resamples=1000, seed=repeat).p < 0.05
        a, b = results(np.random.default_rng(repeat), unequal, n_runs, seed_sd)
        found = contrast((a, b), (-1, 1), groups=groups, n_resamples=1000, seed=repeat)
        covered += found.low <= truth <= found.high
    return positives / n_repeats, covered / n_repeats


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("n_runs", "seed_sd", "by_session"),
    [(1, 0.0, False), (3, 0.0, False), (3, 0.15, False), (3, 0.6, False), (5, 0.15, False), (3, 0.15, True)],
)
def test_type_1_error_and_coverage_are_nominal(n_runs: int, seed_sd: float, by_session: bool) -> None:
    """Bounds are four standard errors of 400 repetitions around 5 and 95 %."""
    positives, covered = calibrate(n_runs, seed_sd, by_session, 400)
    assert 0.005 < positives < 0.095
    assert 0.905 < covered < 0.995


def test_ignoring_the_variance_of_seeds_gives_false_positives() -> None:
    """One run per arm, seeds that differ, and the bootstrap over trials only."""
    positives, covered = calibrate(1, 0.3, False, 150)
    assert positives > 0.3 and covered < 0.7


def test_a_real_difference_is_found_and_has_its_sign() -> None:
    a, b = results(np.random.default_rng(0), [0.3, 0.2], 3, seed_sd=0.05)
    found = difference(a, b)
    assert found.high < 0 and found.p < 0.01 and found.seeds_counted
    back = difference(b, a)
    assert back.estimate == pytest.approx(-found.estimate) and back.p == pytest.approx(found.p)


def test_pairing_narrows_the_interval() -> None:
    a, b = results(np.random.default_rng(1), [0.2, 0.2], 1)
    paired = difference(a, b)
    shuffled = Arm(b.errors[:, ::-1], a.lengths)
    assert paired.high - paired.low < 0.8 * (difference(a, shuffled).high - difference(a, shuffled).low)


def test_the_estimate_is_a_ratio_of_sums_not_a_mean_of_ratios() -> None:
    lengths = np.array([1.0, 99.0])
    a, b = Arm(np.array([[1.0, 0.0]]), lengths), Arm(np.array([[0.0, 9.9]]), lengths)
    assert difference(a, b).estimate == pytest.approx(0.089)


def test_equal_results_have_difference_zero() -> None:
    (a,) = results(np.random.default_rng(2), [0.2], 1)
    same = difference(a, a)
    assert (same.estimate, same.low, same.high, same.p) == (0, 0, 0, 1)
    (three,) = results(np.random.default_rng(2), [0.2], 3)
    assert difference(three, three).p == 1


def test_a_single_run_uses_the_seed_variance_of_the_other_arm() -> None:
    a, b = results(np.random.default_rng(3), [0.2, 0.2], 4, seed_sd=0.3)
    single = Arm(b.errors[:1], b.lengths)
    found = difference(a, single)
    assert found.method == "components" and found.n_runs == (4, 1)
    assert found.high - found.low > difference(a, b).high - difference(a, b).low


def test_an_interaction_is_a_contrast_of_four() -> None:
    arms = results(np.random.default_rng(4), [0.2, 0.2, 0.2, 0.4], 3, seed_sd=0.05)
    assert contrast(arms, (1, -1, -1, 1)).low > 0.1


def test_arms_with_different_trials_are_rejected() -> None:
    a, b = results(np.random.default_rng(5), [0.2, 0.2], 1)
    with pytest.raises(ValueError, match="same trials"):
        difference(a, Arm(b.errors[:, 1:], b.lengths[1:]))


def test_holm_adjusts_for_the_number_of_comparisons() -> None:
    assert holm([0.01]) == [0.01]
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_interval_counts_trials_with_empty_references_as_the_rate_does() -> None:
    scores = [Score(0, 0, 0, 10)] * 8 + [Score(0, 80, 0, 0)]  # insertions into a trial without reference
    rate = sum(s.errors for s in scores) / sum(s.length for s in scores)
    low, high = bootstrap_interval(scores)
    assert low is not None and high is not None and low <= rate <= high and high > 0.9
    assert bootstrap_interval([Score(0, 1, 0, 0)] * 3) == (None, None)
