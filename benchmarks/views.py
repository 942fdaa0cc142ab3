"""Pseudo-ensemble of one model: PER and cost of averaging the frame scores of k noisy views.

python benchmarks/views.py RUN [RUN …] [--split val]

Prints the mean PER over the runs by number of views and SD of the noise, the difference from one view with its 95 %
interval over runs (t distribution), and the decoding time relative to one view.
"""

import argparse
import time
from pathlib import Path

import numpy as np
from scipy import stats

from arcuate.evaluation.evaluate import find_source, open_store, select_trials
from arcuate.evaluation.metrics import total
from arcuate.evaluation.trials import decode_trials
from arcuate.models.io import load_model
from arcuate.run import open_run

VIEWS, NOISES = (2, 4, 8), (0.1, 0.2, 0.4)


def measure(path: Path, split: str) -> dict[tuple[int, float], tuple[float, float]]:
    """PER and CPU seconds by (views, noise)."""
    source = find_source(open_run(path), "best")
    store, model = open_store(source, None), load_model(source.checkpoint)
    trials = [t for t in select_trials(source, store, split, model.config) if t.tokens is not None]
    found = {}
    for views, noise in [(1, 0.0), *((k, sd) for k in VIEWS for sd in NOISES)]:
        started = time.process_time()
        results = decode_trials(model, store, trials, views=views, view_noise=noise)
        rate = total(r.score for r in results if r.score is not None).rate
        found[views, noise] = (rate or 0.0, time.process_time() - started)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--split", default="val")
    args = parser.parse_args()
    runs = [measure(path, args.split) for path in args.runs]
    print("| views | noise | PER | difference (95 % interval) | time |")
    print("|---|---|---|---|---|")
    for views, noise in runs[0]:
        rates = 100 * np.array([run[views, noise][0] for run in runs])
        change = rates - 100 * np.array([run[1, 0.0][0] for run in runs])
        ratio = np.median([run[views, noise][1] / run[1, 0.0][1] for run in runs])
        half = stats.t.ppf(0.975, len(runs) - 1) * change.std(ddof=1) / np.sqrt(len(runs)) if len(runs) > 1 else np.nan
        interval = f"{change.mean():+.2f} ({change.mean() - half:+.2f} to {change.mean() + half:+.2f})"
        print(f"| {views} | {noise} | {rates.mean():.2f} % | {'' if views == 1 else interval} | {ratio:.1f} × |")


if __name__ == "__main__":
    main()
