"""Type-1 error and coverage of the tests behind `arcuate compare`, on simulated results with known error rates.

    python benchmarks/paired_calibration.py [--repeats 1000]

Two recipes are scored on the same 120 trials of 12 sessions. Trials differ in difficulty, by recipe too, and each seed
raises or lowers the errors of all its trials. Prints a Markdown table: the rate of false positives at 5 % for equal
recipes, and the coverage of the 95 % interval for unequal ones.
"""

import argparse

import numpy as np
from scipy import stats

from arcuate.evaluation.significance import Arm, contrast

CASES = [  # runs per arm, SD over seeds (in logits), sessions as sampling unit
    (1, 0.0, False),
    (1, 0.3, False),
    (2, 0.15, False),
    (3, 0.0, False),
    (3, 0.15, False),
    (3, 0.6, False),
    (5, 0.15, False),
    (3, 0.15, True),
]
N_TRIALS, N_SESSIONS = 120, 12


def results(
    rng: np.random.Generator, rates: list[float], n_runs: int, seed_sd: float, n_trials: int = N_TRIALS
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1000)
    n_repeats = parser.parse_args().repeats
    print("| runs per arm | SD over seeds, points of PER | over | false positives | coverage |")
    print("|---|---|---|---|---|")
    for n_runs, seed_sd, by_session in CASES:
        positives, covered = calibrate(n_runs, seed_sd, by_session, n_repeats)
        spread = results(np.random.default_rng(0), [0.2], 200, seed_sd, 2000)[0].seed_sd or 0.0
        over = "sessions" if by_session else "trials"
        print(
            f"| {n_runs} | {100 * spread:.1f} | {over} | {100 * positives:.1f} % | {100 * covered:.1f} % |",
            flush=True,
        )


if __name__ == "__main__":
    main()
