"""Shortcut checks on simulated cohorts: planted shortcuts found, and false alarms on clean cohorts.

python benchmarks/shortcuts.py --planted 40 --clean 50

Cohorts of two sessions with 60 trials and 8 electrodes. Planted, in turn: sentences of the training split in half of
the other trials; lengths that identify twelve sentences; an offset of all channels that identifies twelve sentences.
Clean, in turn: cohorts as simulated; and cohorts in which twelve sentences recur in all splits with lengths and offsets
that do not depend on them (there, only `length` and `baseline` are counted as alarms).
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from arcuate.data.prepare import prepare_store
from arcuate.data.simulation import simulate
from arcuate.data.store import Store, TrialInfo
from arcuate.evaluation.shortcuts import Shortcut, find_shortcuts

N_SENTENCES = 12


class Planted(Store):
    """A store with other texts, lengths and offsets."""

    def __init__(self, store: Store, trials: list[TrialInfo], offsets: dict[str, np.ndarray]) -> None:
        vars(self).update(vars(store))
        self._source, self._offsets = store, offsets
        self.trials = tuple(trials)

    def read_bins(self, info: TrialInfo, out: np.ndarray | None = None) -> np.ndarray:
        original = next(t for t in self._source.trials if t.id == info.id)
        bins = self._source.read_bins(original)
        bins = bins[np.arange(info.n_bins) % len(bins)]
        return bins + self._offsets.get(info.id, np.float32(0.0))


def cohort(seed: int, folder: Path) -> Store:
    simulate(folder / "source", n_sessions=2, n_trials=60, n_electrodes=8, seed=seed)
    prepare_store(folder / "source", folder / "store")
    return Store.open(folder / "store")


def plant(store: Store, kind: str, seed: int) -> Store:
    """A copy of a cohort with one kind of shortcut, or with recurring sentences and none (`recurring`)."""
    rng = np.random.default_rng(seed)
    train = [t for t in store.trials if t.split == "train" and t.text and len(t.text.split()) >= 4]
    trials = list(store.trials)
    offsets: dict[str, np.ndarray] = {}
    if kind == "repeated sentences":
        for i, trial in enumerate(trials):
            if trial.split != "train" and rng.random() < 0.5:
                chosen = train[int(rng.integers(len(train)))]
                trials[i] = replace(trial, text=chosen.text, tokens=chosen.tokens)
        return Planted(store, trials, offsets)
    sentences = [train[int(k)] for k in rng.choice(len(train), N_SENTENCES, replace=False)]
    patterns = rng.normal(scale=1.0, size=(N_SENTENCES, store.n_channels)).astype(np.float32)
    for i, trial in enumerate(trials):
        k = int(rng.integers(N_SENTENCES))
        n_bins = 120 + 9 * k if kind == "length" else trial.n_bins
        trials[i] = replace(trial, text=sentences[k].text, tokens=sentences[k].tokens, n_bins=n_bins)
        if kind == "baseline":
            offsets[trial.id] = patterns[k] * store.block_statistics(trial).sd
    return Planted(store, trials, offsets)


def check(store: Store) -> dict[str, Shortcut]:
    train = [t for t in store.trials if t.split == "train"]
    others = [t for t in store.trials if t.split != "train"]
    return {s.name: s for s in find_shortcuts(store, train, others)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--planted", type=int, default=40)
    parser.add_argument("--clean", type=int, default=50)
    args = parser.parse_args()
    kinds = ("repeated sentences", "length", "baseline")
    found: dict[str, list[bool]] = {kind: [] for kind in kinds}
    alarms: list[bool] = []
    for seed in range(max(args.planted, args.clean)):
        with tempfile.TemporaryDirectory() as folder:
            store = cohort(seed, Path(folder))
            if seed < args.planted:
                kind = kinds[seed % 3]
                found[kind].append(check(plant(store, kind, seed))[kind].flagged)
            if seed < args.clean:
                recurring = seed % 2 == 1
                checks = check(plant(store, "recurring", seed) if recurring else store)
                counted = [s for name, s in checks.items() if not (recurring and name == "repeated sentences")]
                alarms.append(any(s.flagged for s in counted))
                if alarms[-1]:
                    print(f"seed {seed}, recurring {recurring}: {[s.summary() for s in counted if s.flagged]}")
    for kind, flags in found.items():
        print(f"{kind}: {sum(flags)} of {len(flags)} found")
    n_found, n_planted = sum(map(sum, found.values())), sum(map(len, found.values()))
    print(f"all: {n_found} of {n_planted} found; {sum(alarms)} false alarms in {len(alarms)} clean cohorts")


if __name__ == "__main__":
    main()
