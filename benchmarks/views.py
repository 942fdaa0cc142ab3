"""Pseudo-ensemble of one model: PER and cost of averaging the frame scores of k noisy or shifted views.

python benchmarks/views.py RUN [RUN …] [--split val]

Noisy views are those of `arcuate evaluate --views`. Shifted views are averages over k neighbouring shifts of the input:
by 0 to k − 1 bins later, which a stream can do, or by up to k / 2 bins earlier and later. Prints the mean PER over the
runs, the difference from one view with its 95 % interval (over runs by the t distribution; for a single run, over
trials by the paired bootstrap), and the decoding time relative to one view.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from arcuate.data.store import Store, TrialInfo
from arcuate.decoding.hypothesis import greedy
from arcuate.evaluation.evaluate import find_source, open_store, select_trials
from arcuate.evaluation.metrics import Score, score
from arcuate.evaluation.trials import decode_trials
from arcuate.models.io import load_model
from arcuate.run import open_run

VIEWS, NOISES = (2, 4, 8), (0.1, 0.2, 0.4)
SHIFTS: dict[str, Callable[[int], range]] = {
    "later": lambda k: range(k),
    "earlier and later": lambda k: range(-(k // 2), k - k // 2),
}


class ShiftedStore(Store):
    """A store whose trials start this many bins later (or earlier); edges repeat the first or last bin."""

    def __init__(self, store: Store, shift: int) -> None:
        vars(self).update(vars(store))
        self._shift = shift

    def read_bins(self, info: TrialInfo, out: np.ndarray | None = None) -> np.ndarray:
        bins = super().read_bins(info)
        shifted: np.ndarray = bins[np.clip(np.arange(len(bins)) - self._shift, 0, len(bins) - 1)]
        if out is None:
            return shifted
        out[...] = shifted
        return out


@dataclass(frozen=True, eq=False)
class Measured:
    """Errors and reference lengths by trial, and CPU seconds, of one way to average views."""

    errors: np.ndarray
    lengths: np.ndarray
    seconds: float

    @property
    def rate(self) -> float:
        return float(100 * self.errors.sum() / self.lengths.sum())


def measure(path: Path, split: str) -> dict[tuple[int, str], Measured]:
    """Results by number and kind of views."""
    source = find_source(open_run(path), "best")
    store, model = open_store(source, None), load_model(source.checkpoint)
    trials = [t for t in select_trials(source, store, split, model.config) if t.tokens is not None]
    found = {}
    for views, noise in [(1, 0.0), *((k, sd) for k in VIEWS for sd in NOISES)]:
        started = time.process_time()
        results = decode_trials(model, store, trials, views=views, view_noise=noise)
        scores = [r.score for r in results if r.score is not None]
        found[views, f"noise {noise}" if views > 1 else ""] = to_measured(scores, started)
    for name, shifts in SHIFTS.items():
        for views in VIEWS:
            started = time.process_time()
            decoded = [decode_trials(model, ShiftedStore(store, s), trials, keep_log_probs=True) for s in shifts(views)]
            scores = []
            for trial, *rows in zip(trials, *decoded, strict=True):
                summed = np.sum([r.log_probs for r in rows], axis=0)  # normalisation does not change the best class
                scores.append(score(trial.tokens or (), greedy(summed)))
            found[views, f"shifted {name}"] = to_measured(scores, started)
    return found


def to_measured(scores: Sequence[Score], started: float) -> Measured:
    seconds = time.process_time() - started
    return Measured(np.array([s.errors for s in scores]), np.array([s.length for s in scores]), seconds)


def interval_of(pairs: Sequence[tuple[Measured, Measured]]) -> tuple[float, float]:
    """95 % interval of the difference in PER, in points."""
    change = np.array([a.rate - b.rate for a, b in pairs])
    if len(pairs) > 1:
        half = float(stats.t.ppf(0.975, len(pairs) - 1) * change.std(ddof=1) / np.sqrt(len(pairs)))
        return float(change.mean() - half), float(change.mean() + half)
    a, b = pairs[0]
    chosen = np.random.default_rng(0).integers(0, len(a.errors), (10_000, len(a.errors)))
    drawn = 100 * (a.errors - b.errors)[chosen].sum(axis=1) / a.lengths[chosen].sum(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--split", default="val")
    args = parser.parse_args()
    runs = [measure(path, args.split) for path in args.runs]
    print("| views | kind | PER | difference (95 % interval) | time |")
    print("|---|---|---|---|---|")
    for key in runs[0]:
        pairs = [(run[key], run[1, ""]) for run in runs]
        low, high = interval_of(pairs)
        change = np.mean([a.rate - b.rate for a, b in pairs])
        ratio = np.median([a.seconds / b.seconds for a, b in pairs])
        interval = "" if key[0] == 1 else f"{change:+.2f} ({low:+.2f} to {high:+.2f})"
        print(f"| {key[0]} | {key[1]} | {np.mean([a.rate for a, _ in pairs]):.2f} % | {interval} | {ratio:.1f} × |")


if __name__ == "__main__":
    main()
