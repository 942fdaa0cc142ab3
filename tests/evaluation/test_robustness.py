"""Corrupted input: deterministic, of the same length, and renormalised by the statistics of its block."""

from pathlib import Path

import numpy as np
import pytest

from arcuate.data.store import ChangedStore, Store
from arcuate.errors import UserError
from arcuate.evaluation.corruption import CORRUPTIONS, SEVERITIES, corrupt
from arcuate.evaluation.robustness import bench_robustness
from arcuate.files import read_json


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corruption_is_deterministic_and_grows_with_its_severity(cohort_store: Path, name: str) -> None:
    store = Store.open(cohort_store)
    trial = store.trials[0]
    clean = store.read_bins(trial).copy()
    distances = []
    for severity in SEVERITIES:
        read = [corrupt(store, CORRUPTIONS[name], severity).read_bins(trial) for _ in range(2)]
        assert read[0].shape == clean.shape and read[0].dtype == np.float32
        np.testing.assert_array_equal(*read)
        distances.append(float(np.abs(read[0] - clean).mean()))
    assert distances[0] < distances[-1]
    np.testing.assert_array_equal(store.read_bins(trial), clean)
    other = corrupt(store, CORRUPTIONS[name], 5, seed=1).read_bins(trial)
    assert np.isfinite(other).all() and not np.array_equal(other, read[0])


def test_faults_of_the_hardware_are_the_same_in_all_trials_of_a_session(cohort_store: Path) -> None:
    store = Store.open(cohort_store)
    corrupted = corrupt(store, CORRUPTIONS["dead channels"], 4)
    session = [t for t in store.trials if t.session == store.trials[0].session]
    dead = [tuple(np.flatnonzero(~corrupted.read_bins(t).any(axis=0))) for t in session[:3]]
    assert dead[0] and len(set(dead)) == 1


def test_renormalising_uses_the_statistics_of_the_changed_block(cohort_store: Path) -> None:
    store = Store.open(cohort_store)
    trial = store.trials[1]
    kept = ChangedStore(store, lambda info: store.read_bins(info) + 5.0)
    np.testing.assert_array_equal(kept.block_statistics(trial).mean, store.block_statistics(trial).mean)
    moved = ChangedStore(store, lambda info: store.read_bins(info) + 5.0, renormalise=True).block_statistics(trial)
    block = [t for t in store.trials if (t.session, t.block, t.split) == (trial.session, trial.block, trial.split)]
    expected = np.concatenate([store.read_bins(t) for t in block]).mean(axis=0) + 5.0
    np.testing.assert_allclose(moved.mean, expected, rtol=1e-4, atol=1e-4)


def test_the_benchmark_writes_its_result_and_is_repeatable(short_run: Path) -> None:
    options = {"corruptions": ("packet loss", "permuted channels"), "severities": (1, 5), "n_trials": 4}
    first, second = (bench_robustness(short_run, **options) for _ in range(2))  # type: ignore[arg-type]
    assert first.to_dict() == second.to_dict() == read_json(short_run / "results" / "robustness" / "val.json")
    assert first.n_trials == 4 and set(first.mce) == {"undefended", "renormalised"}
    rates = [rate for e in first.corruptions for rate in e.per["undefended"] if rate is not None]
    assert first.mce["undefended"] == pytest.approx(np.mean(rates))
    assert "mean corruption error" in first.summary()
    with pytest.raises(UserError, match="'fire' is unknown; choose from dead array"):
        bench_robustness(short_run, corruptions=["fire"])
    with pytest.raises(UserError, match="from 1 to 5"):
        bench_robustness(short_run, severities=[6])
