"""Shortcuts in data, and the floor of a run without neural information."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arcuate.data.store import Store
from arcuate.evaluation.shortcuts import FloorRates, find_shortcuts, read_floor
from arcuate.experiments.floor import UninformativeStore, measure_floor
from arcuate.experiments.train import TrainResult, train
from arcuate.files import read_json
from arcuate.run import Run
from support.benchmarks import load

GOLDEN = Path(__file__).parents[1] / "golden"


def flags(store: Store) -> dict[str, bool]:
    training = [t for t in store.trials if t.split == "train"]
    others = [t for t in store.trials if t.split != "train"]
    return {s.name: s.flagged for s in find_shortcuts(store, training, others)}


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return load("shortcuts").cohort(3, tmp_path_factory.mktemp("shortcuts"))


def test_a_simulated_cohort_has_no_shortcut(cohort: Store) -> None:
    assert flags(cohort) == {"repeated sentences": False, "length": False, "baseline": False}


@pytest.mark.parametrize("kind", ["repeated sentences", "length", "baseline"])
def test_planted_shortcuts_are_flagged(cohort: Store, kind: str) -> None:
    assert flags(load("shortcuts").plant(cohort, kind, 0))[kind]


def test_recurring_sentences_alone_do_not_flag_length_or_baseline(cohort: Store) -> None:
    found = flags(load("shortcuts").plant(cohort, "recurring", 0))
    assert found["repeated sentences"] and not found["length"] and not found["baseline"]


def test_too_few_trials_are_not_tested(cohort: Store) -> None:
    trials = cohort.trials
    found = find_shortcuts(cohort, trials[:20], [replace(trials[0], text=None)])
    assert [s.share for s in found] == [None, None, None]
    assert "not tested" in found[0].summary()


def test_exchanged_and_silent_input_carry_no_neural_information(cohort: Store) -> None:
    trial = cohort.trials[0]
    exchanged, silence = (UninformativeStore(cohort, kind) for kind in ("exchanged", "silence"))
    original, other = cohort.read_bins(trial), exchanged.read_bins(trial)
    assert other.shape == original.shape and not np.array_equal(other, original)
    sources = [t for t in cohort.trials if t.text != trial.text and t.session == trial.session]
    assert any(np.array_equal(other[:5], cohort.read_bins(t)[:5]) for t in sources)
    statistics = cohort.block_statistics(trial)
    signal = (silence.read_bins(trial) - statistics.mean) / np.maximum(statistics.sd, 1e-3)
    assert np.unique(signal.round(3)).tolist() == [0.0, 1.0]
    assert np.allclose(signal, signal[:, :1], atol=1e-3)  # the same in all channels


def test_the_floor_is_trained_scored_and_kept(
    cohort_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    guards = []

    def train_and_note(*args: Any, **options: Any) -> TrainResult:
        result = train(*args, **options)
        guards.append(result.recipe.guard)
        return result

    monkeypatch.setattr("arcuate.experiments.floor.train", train_and_note)
    train("tiny", cohort_store, run, overrides=["train.steps=2", "train.validate_every=2", "encoder.width=16"])
    floor = measure_floor(run, lm=str(GOLDEN / "words.alm"), lexicon=str(GOLDEN / "lexicon.txt"))
    assert set(floor.per_floor) == {"exchanged", "silence"} and floor.lowest is not None
    kept = read_floor(Run(run), floor.split)
    assert kept == FloorRates(floor.lowest, min(rate for rate in floor.wer_floor.values() if rate is not None))
    assert read_floor(Run(run), "test") is None
    assert floor.wer is not None and set(floor.wer_floor) == {"exchanged", "silence", "language model"}
    assert "floor" in floor.summary() and "with the language model alone" in floor.summary()
    assert floor.to_dict() == read_json(run / "results" / "floor" / "val.json")
    assert len(floor.shortcuts) == 3
    assert len(guards) == 2  # training without information is stuck by design, so it is not rewound
    assert all((g.stuck.action, g.collapse.action, g.enabled) == ("ignore", "ignore", True) for g in guards)
