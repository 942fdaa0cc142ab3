"""The floor of a run without neural information."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arcuate.data.store import Store
from arcuate.evaluation.floor import FloorRates, read_floor
from arcuate.experiments.floor import measure_floor, uninformative
from arcuate.experiments.train import TrainResult, train
from arcuate.files import read_json
from arcuate.run import Run


def test_exchanged_and_silent_input_carry_no_neural_information(cohort_store: Path) -> None:
    cohort = Store.open(cohort_store)
    trial = cohort.trials[0]
    exchanged, silence = (uninformative(cohort, kind) for kind in ("exchanged", "silence"))
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
    floor = measure_floor(run)
    assert set(floor.per_floor) == {"exchanged", "silence"} and floor.lowest is not None
    kept = read_floor(Run(run), floor.split)
    assert kept == FloorRates(floor.lowest, min(rate for rate in floor.wer_floor.values() if rate is not None))
    assert read_floor(Run(run), "test") is None
    assert floor.wer is not None and set(floor.wer_floor) == {"exchanged", "silence", "language model"}
    assert "floor" in floor.summary() and "with the language model alone" in floor.summary()
    assert floor.to_dict() == read_json(run / "results" / "floor" / "val.json")
    assert len(guards) == 2  # training without information is stuck by design, so it is not rewound
    assert all((g.stuck.patience, g.collapse.action, g.enabled) == (10_000_000, "ignore", True) for g in guards)
