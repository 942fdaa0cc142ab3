"""The statistics of differences, held against simulated results whose truth is known."""

import numpy as np
import pytest
from scipy import stats

from arcuate.paired import Arm, contrast, difference, holm


def results(
    rng: np.random.Generator, rates: list[float], n_runs: int, n_trials: int = 120, seed_sd: float = 0.0
) -> list[Arm]:
    """Arms on the same trials: hard trials are hard for all, each seed raises or lowers all its trials."""
    lengths = rng.integers(10, 45, size=n_trials)
    hardness = rng.normal(0, 0.5, size=n_trials)
    arms = []
    for rate in rates:
        own = rng.normal(0, 0.2, size=n_trials)  # some trials suit this recipe
        luck = rng.normal(0, seed_sd, size=(n_runs, 1))
        chance = stats.logistic.cdf(stats.logistic.ppf(rate) + hardness + own + luck)  # (S, N)
        arms.append(Arm(rng.binomial(lengths, chance).astype(float), lengths.astype(float)))
    return arms


def rejections(n_runs: int, seed_sd: float, n_repeats: int, by_session: bool = False) -> float:
    """How often two equal recipes are called different at 5 %."""
    groups = np.repeat(np.arange(12), 10) if by_session else None
    found = 0
    for repeat in range(n_repeats):
        a, b = results(np.random.default_rng(repeat), [0.2, 0.2], n_runs, seed_sd=seed_sd)
        result = contrast((a, b), (-1, 1), groups=groups, n_resamples=500, seed=repeat)
        found += result.p < 0.05
    return found / n_repeats


@pytest.mark.parametrize(
    ("n_runs", "seed_sd", "by_session"),
    [(1, 0.0, False), (1, 0.0, True), (3, 0.0, False), (3, 0.15, False), (3, 0.6, False), (6, 0.3, True)],
)
def test_equal_recipes_are_rarely_called_different(n_runs: int, seed_sd: float, by_session: bool) -> None:
    rate = rejections(n_runs, seed_sd, 600, by_session)
    assert 0.005 < rate < 0.085, rate


def test_seeds_left_out_of_the_account_would_fool_us() -> None:
    """Why seeds are needed: one run each, seeds that differ, and the bootstrap over trials alone."""
    assert rejections(1, 0.3, 200) > 0.3


@pytest.mark.parametrize(("n_runs", "seed_sd"), [(1, 0.0), (3, 0.2), (5, 0.2)])
def test_intervals_hold_the_truth_as_often_as_they_say(n_runs: int, seed_sd: float) -> None:
    big = [results(np.random.default_rng(9_999 + i), [0.2, 0.26], 40, 4000, seed_sd) for i in range(5)]
    truth = float(np.mean([b.rate - a.rate for a, b in big]))
    held = 0
    for repeat in range(500):
        a, b = results(np.random.default_rng(repeat), [0.2, 0.26], n_runs, seed_sd=seed_sd)
        found = contrast((a, b), (-1, 1), n_resamples=500, seed=repeat)
        held += found.low <= truth <= found.high
    assert 0.91 < held / 500 < 0.99


def test_a_real_difference_is_found_and_has_its_sign() -> None:
    a, b = results(np.random.default_rng(0), [0.3, 0.2], 3, seed_sd=0.05)
    found = difference(a, b)
    assert found.high < 0 and found.p < 0.01 and found.seeds_counted
    back = difference(b, a)
    assert back.estimate == pytest.approx(-found.estimate) and back.p == pytest.approx(found.p)


def test_pairing_makes_the_interval_narrower_than_two_separate_ones() -> None:
    a, b = results(np.random.default_rng(1), [0.2, 0.2], 1)
    paired = difference(a, b)
    shuffled = Arm(b.errors[:, ::-1], a.lengths)
    assert paired.high - paired.low < 0.8 * (difference(a, shuffled).high - difference(a, shuffled).low)


def test_the_estimate_is_a_ratio_of_sums_not_a_mean_of_ratios() -> None:
    lengths = np.array([1.0, 99.0])
    a, b = Arm(np.array([[1.0, 0.0]]), lengths), Arm(np.array([[0.0, 9.9]]), lengths)
    assert difference(a, b).estimate == pytest.approx(0.089)


def test_the_same_results_differ_by_nothing() -> None:
    (a,) = results(np.random.default_rng(2), [0.2], 1)
    same = difference(a, a)
    assert (same.estimate, same.low, same.high, same.p) == (0, 0, 0, 1)
    (three,) = results(np.random.default_rng(2), [0.2], 3)
    assert difference(three, three).p == 1


def test_one_run_against_several_borrows_their_spread() -> None:
    a, b = results(np.random.default_rng(3), [0.2, 0.2], 4, seed_sd=0.3)
    single = Arm(b.errors[:1], b.lengths)
    found = difference(a, single)
    assert found.method == "components" and found.n_runs == (4, 1)
    assert found.high - found.low > difference(a, b).high - difference(a, b).low


def test_an_interaction_is_a_contrast_of_four() -> None:
    arms = results(np.random.default_rng(4), [0.2, 0.2, 0.2, 0.4], 3, seed_sd=0.05)
    assert contrast(arms, (1, -1, -1, 1)).low > 0.1


def test_arms_of_other_trials_are_no_arms() -> None:
    a, b = results(np.random.default_rng(5), [0.2, 0.2], 1)
    with pytest.raises(ValueError, match="same trials"):
        difference(a, Arm(b.errors[:, 1:], b.lengths[1:]))


def test_holm_is_stricter_the_more_was_asked() -> None:
    assert holm([0.01]) == [0.01]
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
