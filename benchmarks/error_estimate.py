"""Estimate of the error rate without labels: fit of its weights, and judgement on simulated later days.

python benchmarks/simulated_days.py --out runs/simulated-days --seeds 20
python benchmarks/error_estimate.py fit --scores runs/simulated-days     # the constants of evaluation/unlabelled.py
python benchmarks/error_estimate.py judge --scores runs/simulated-days   # leave one cohort out

One row per cohort (seed) and later day: the error rate of the day, the measures of its trials minus those of the val
and test trials of the known sessions, drift measures of the bins, and the days since the last known session. All
estimates start from the error rate of the known sessions and move it on the logit scale; weights are fitted by ridge
regression on the other cohorts. Compared by mean absolute error, and by how often and how wide the 90 % interval covers
the day: the reference alone ("as on the known sessions"), days since training (the baseline), drift measures of the
bins, measures of the posteriors (as in arcuate), and all of them.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import percent, table

from arcuate.data.alphabet import CLASSES
from arcuate.decoding.frame_files import read_frames
from arcuate.decoding.hypothesis import greedy
from arcuate.evaluation.metrics import Score, score, total
from arcuate.evaluation.unlabelled import (
    MEASURES,
    ErrorReference,
    logit,
    make_reference,
    measure_trial,
)
from arcuate.files import read_json, read_jsonl

RIDGE = 1.0  # penalty of standardised weights, in units of one row
DRIFT = ("profile_similarity", "mean_shift", "sd_ratio")
METHODS: dict[str, tuple[str, ...]] = {
    "as on the known sessions": (),
    "days since training": ("days",),
    "drift of the bins": DRIFT,
    "posteriors": MEASURES,
    "posteriors and drift": (*MEASURES, *DRIFT),
}


@dataclass(frozen=True)
class Day:
    """One later day of one cohort."""

    seed: int
    rate: float
    reference: ErrorReference
    features: dict[str, float]


def read_scored(stem: Path) -> list[tuple[str, np.ndarray, Score]]:
    """Session, measures and errors of every trial of one file."""
    frames = read_frames(stem.with_suffix(".npz"))
    rows = list(read_jsonl(stem.with_suffix(".jsonl")))
    found = []
    for row, log_probs in zip(rows, frames.trials, strict=True):
        reference = [CLASSES.index(name) for name in row["phonemes"]]
        found.append((row["session"], measure_trial(log_probs), score(reference, greedy(log_probs))))
    return found


def read_days(folder: Path) -> list[Day]:
    days = []
    for path in sorted(folder.glob("drift-*.json")):
        seed = int(path.stem.split("-")[1])
        if not (folder / f"known-{seed}.npz").exists():
            continue
        drift = read_json(path)
        known = read_scored(folder / f"known-{seed}")
        reference = make_reference([e for _, e, _ in known], total(s for _, _, s in known))
        assert reference is not None
        last = max(row["day"] for row in drift.values() if row["known"])
        later = read_scored(folder / f"later-{seed}")
        for session in sorted({s for s, _, _ in later}):
            own = [(e, s) for name, e, s in later if name == session]
            change = np.subtract(np.mean([e for e, _ in own], axis=0), reference.means)
            row = drift[session]
            features = dict(zip(MEASURES, map(float, change), strict=True)) | {name: row[name] for name in DRIFT}
            features["days"] = float(np.log1p(row["day"] - last))
            days.append(Day(seed, total(s for _, s in own).rate or 0.0, reference, features))
    return days


@dataclass(frozen=True)
class Fit:
    """Weights of features and quantiles of the residuals on the logit scale."""

    names: tuple[str, ...]
    weights: np.ndarray
    offset: float
    low: float
    high: float

    def estimate(self, day: Day) -> tuple[float, float, float]:
        x = np.array([day.features[name] for name in self.names])
        centre = logit(day.reference.error_rate) + self.offset + float(x @ self.weights)
        return tuple(float(1 / (1 + np.exp(-v))) for v in (centre, centre + self.low, centre + self.high))  # type: ignore[return-value]


def fit(days: Sequence[Day], names: tuple[str, ...], intercept: bool) -> Fit:
    """Ridge regression of the change in logits; the interval holds 90 % of residuals of cohorts left out."""
    residuals = []
    for seed in {d.seed for d in days}:
        weights, offset = _regress([d for d in days if d.seed != seed], names, intercept)
        residuals += [_target(d) - offset - float(_x([d], names)[0] @ weights) for d in days if d.seed == seed]
    weights, offset = _regress(days, names, intercept)
    n = len(residuals)
    level = min(1.0, 0.95 * (n + 1) / n)
    return Fit(names, weights, offset, float(np.quantile(residuals, 1 - level)), float(np.quantile(residuals, level)))


def _x(days: Sequence[Day], names: tuple[str, ...]) -> np.ndarray:
    return np.array([[d.features[name] for name in names] for d in days]).reshape(len(days), len(names))


def _target(day: Day) -> float:
    return logit(day.rate) - logit(day.reference.error_rate)


def _regress(days: Sequence[Day], names: tuple[str, ...], intercept: bool) -> tuple[np.ndarray, float]:
    x, y = _x(days, names), np.array([_target(d) for d in days])
    scale = np.maximum(np.sqrt((x**2).mean(0)), 1e-9) if len(names) else np.ones(0)
    design = x / scale
    if intercept:
        design = np.column_stack([design, np.ones(len(days))])
    penalty = np.diag([RIDGE] * len(names) + [1e-9] * intercept)
    solved = np.linalg.solve(design.T @ design + penalty, design.T @ y) if design.shape[1] else np.zeros(0)
    return solved[: len(names)] / scale, float(solved[-1]) if intercept else 0.0


def judge(days: Sequence[Day]) -> str:
    """Every method on every day, with the weights of the other cohorts."""
    rates = np.array([d.rate for d in days])
    print(f"{len(days)} later days, error rates {percent(rates.min())} to {percent(rates.max())}")
    errors, rows = {}, []
    for method, names in METHODS.items():
        offset = not set(names) & set(MEASURES)
        others = [[other for other in days if other.seed != d.seed] for d in days]
        found = [fit(kept, names, offset).estimate(d) for kept, d in zip(others, days, strict=True)]
        centre, low, high = np.array(found).T
        errors[method] = np.abs(centre - rates)
        covered = percent(((low <= rates) & (rates <= high)).mean(), 0)
        cells = [f"{100 * errors[method].mean():.2f} points", percent(np.mean(errors[method] / rates), 0), covered]
        rows.append([method, *cells, f"{100 * (high - low).mean():.1f} points"])
    better = errors["days since training"] - errors["posteriors"]
    by_seed = np.array([better[[d.seed == seed for d in days]].mean() for seed in sorted({d.seed for d in days})])
    half = 1.96 * by_seed.std(ddof=1) / np.sqrt(len(by_seed)) if len(by_seed) > 1 else np.nan
    head = ["estimate", "mean absolute error", "of it relative", "90 % interval covers", "mean width"]
    gain = f"posteriors against days since training: error smaller by {100 * by_seed.mean():.2f} points"
    return f"{table(head, rows)}\n\n{gain} (95 % interval ± {100 * half:.2f}, over cohorts)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("fit", "judge"))
    parser.add_argument("--scores", type=Path, required=True)
    args = parser.parse_args()
    days = read_days(args.scores)
    if args.command == "judge":
        print(judge(days))
        return
    model = fit(days, MEASURES, intercept=False)
    print(f"WEIGHTS = ({', '.join(f'{w:.3f}' for w in model.weights)})")
    print(f"LOWER, UPPER = {-model.low:.3f}, {model.high:.3f}")


if __name__ == "__main__":
    main()
