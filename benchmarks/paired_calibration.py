"""How often do the statistics of `arcuate compare` err? Simulated results whose truth is known.

    python benchmarks/paired_calibration.py [--repeats 1000]

Two recipes are scored on the same 120 trials of 12 sessions. Some trials are hard for every recipe, some for one of
them, and each seed raises or lowers all its trials. Printed as a Markdown table: how often equal recipes are called
different at 5 %, and how often the 95 % interval holds the true difference of two unequal ones.
"""

import argparse

import numpy as np
from scipy import stats

from arcuate.evaluation.significance import Arm, contrast

CASES = [  # runs a side, spread of seeds (in logits), by session
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


def true_difference(rates: list[float], seed_sd: float) -> float:
    """The difference over very many seeds and trials."""
    large = [results(np.random.default_rng(10_000 + i), rates, 40, seed_sd, 4000) for i in range(5)]
    return float(np.mean([b.rate - a.rate for a, b in large]))


def errs(n_runs: int, seed_sd: float, by_session: bool, n_repeats: int) -> tuple[float, float]:
    """How often equal recipes are called different, and how often the interval of unequal ones holds the truth."""
    groups = np.repeat(np.arange(N_SESSIONS), N_TRIALS // N_SESSIONS) if by_session else None
    called, held, unequal = 0, 0, [0.2, 0.26]
    truth = true_difference(unequal, seed_sd)
    for repeat in range(n_repeats):
        a, b = results(np.random.default_rng(repeat), [0.2, 0.2], n_runs, seed_sd)
        called += contrast((a, b), (-1, 1), groups=groups, n_resamples=1000, seed=repeat).p < 0.05
        a, b = results(np.random.default_rng(repeat), unequal, n_runs, seed_sd)
        found = contrast((a, b), (-1, 1), groups=groups, n_resamples=1000, seed=repeat)
        held += found.low <= truth <= found.high
    return called / n_repeats, held / n_repeats


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=1000)
    n_repeats = parser.parse_args().repeats
    print(
        "| runs a side | SD of seeds, points of PER | over | equal, called different | interval holds the truth |"
    )
    print("|---|---|---|---|---|")
    for n_runs, seed_sd, by_session in CASES:
        called, held = errs(n_runs, seed_sd, by_session, n_repeats)
        spread = results(np.random.default_rng(0), [0.2], 200, seed_sd, 2000)[0].seed_sd or 0.0
        over = "sessions" if by_session else "trials"
        print(
            f"| {n_runs} | {100 * spread:.1f} | {over} | {100 * called:.1f} % | {100 * held:.1f} % |",
            flush=True,
        )


if __name__ == "__main__":
    main()
