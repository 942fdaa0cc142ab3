"""Corrupted input: deterministic, of the same length, and repaired by the defences that are made for it."""

from pathlib import Path

import numpy as np
import pytest

from arcuate.data.statistics import RunningStatistics
from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.evaluation.corruption import (
    CORRUPTIONS,
    SEVERITIES,
    CorruptedStore,
    find_bursts,
    interpolate,
    match_channels,
)
from arcuate.evaluation.robustness import bench_robustness
from arcuate.experiments.train import train
from arcuate.files import read_json


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corruption_is_deterministic_and_grows_with_its_severity(cohort_store: Path, name: str) -> None:
    store = Store.open(cohort_store)
    trial = store.trials[0]
    clean = store.read_bins(trial)
    distances = []
    for severity in SEVERITIES:
        read = [CorruptedStore(store, CORRUPTIONS[name], severity).read_bins(trial) for _ in range(2)]
        assert read[0].shape == clean.shape and read[0].dtype == np.float32
        np.testing.assert_array_equal(*read)
        distances.append(float(np.abs(read[0] - clean).mean()))
    assert distances[0] < distances[-1]
    np.testing.assert_array_equal(store.read_bins(trial), clean)
    other = CorruptedStore(store, CORRUPTIONS[name], 5, seed=1).read_bins(trial)
    assert np.isfinite(other).all() and not np.array_equal(other, read[0])


def test_faults_of_the_hardware_are_the_same_in_all_trials_of_a_session(cohort_store: Path) -> None:
    store = Store.open(cohort_store)
    corrupted = CorruptedStore(store, CORRUPTIONS["dead channels"], 4)
    session = [t for t in store.trials if t.session == store.trials[0].session]
    dead = [tuple(np.flatnonzero(~corrupted.read_bins(t).any(axis=0))) for t in session[:3]]
    assert dead[0] and len(set(dead)) == 1


def test_without_a_corruption_or_defence_the_store_reads_as_it_is(cohort_store: Path) -> None:
    store = Store.open(cohort_store)
    same, trial = CorruptedStore(store, None, 1), store.trials[1]
    np.testing.assert_array_equal(same.read_bins(trial), store.read_bins(trial))
    np.testing.assert_array_equal(same.block_statistics(trial).mean, store.block_statistics(trial).mean)


def test_lost_bins_are_interpolated() -> None:
    bins = np.array([[1.0, 2.0], [0.0, 0.0], [0.0, 0.0], [4.0, 8.0], [0.0, 0.0]])
    expected = [[1.0, 2.0], [2.0, 4.0], [3.0, 6.0], [4.0, 8.0], [4.0, 8.0]]
    lost = ~bins.any(axis=1)
    np.testing.assert_allclose(interpolate(bins, lost), expected)
    np.testing.assert_array_equal(interpolate(bins[:0], lost[:0]), bins[:0])
    np.testing.assert_array_equal(interpolate(0 * bins, lost | True), 0 * bins)


def test_bursts_of_noise_are_found_and_speech_is_not_taken_for_them(cohort_store: Path) -> None:
    store = Store.open(cohort_store)
    clean = np.concatenate([find_bursts(store.read_bins(t)) for t in store.trials[:8]])
    noisy = CorruptedStore(store, CORRUPTIONS["noise bursts"], 3)
    changed = np.concatenate([(noisy.read_bins(t) != store.read_bins(t)).any(axis=1) for t in store.trials[:8]])
    found = np.concatenate([find_bursts(noisy.read_bins(t)) for t in store.trials[:8]])
    assert clean.mean() < 0.03
    assert found[changed].mean() > 0.9 and found[~changed].mean() < 0.03
    assert not find_bursts(np.zeros((0, 4))).size


def test_permuted_channels_are_found_by_their_statistics_and_drift_is_left_alone() -> None:
    rng = np.random.default_rng(0)
    bins = rng.normal(rng.uniform(-3, 3, 16), rng.uniform(0.5, 3, 16), (4000, 16))
    reference = RunningStatistics.from_bins(bins).statistics()
    order = np.arange(8)
    order[[1, 4, 6]] = order[[6, 1, 4]]
    columns = np.concatenate([order, order + 8])
    seen = RunningStatistics.from_bins(bins[:2000][:, columns]).statistics()
    found = match_channels(seen, reference, 8)
    np.testing.assert_array_equal(columns[found], np.arange(16))
    drifted = RunningStatistics.from_bins(bins + rng.normal(scale=2.0, size=16)).statistics()
    np.testing.assert_array_equal(match_channels(drifted, reference, 8), np.arange(16))


@pytest.fixture(scope="module")
def run(cohort_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("robust") / "run"
    train("tiny", cohort_store, path, overrides=["train.steps=2", "train.validate_every=2", "encoder.width=16"])
    return path


def test_the_benchmark_writes_its_result_and_is_repeatable(run: Path) -> None:
    options = {"corruptions": ("packet loss", "permuted channels"), "severities": (1, 5), "n_trials": 4}
    first, second = (bench_robustness(run, **options) for _ in range(2))  # type: ignore[arg-type]
    assert first.to_dict() == second.to_dict() == read_json(run / "results" / "robustness" / "val.json")
    assert first.n_trials == 4 and set(first.mce) == {
        *("undefended", "interpolate", "gate", "remap", "renormalise", "all defences"),
    }
    rates = [rate for e in first.corruptions for rate in e.per["undefended"] if rate is not None]
    assert first.mce["undefended"] == pytest.approx(np.mean(rates))
    assert "mean corruption error" in first.summary()


def test_unknown_corruptions_and_severities_are_rejected(run: Path) -> None:
    with pytest.raises(UserError, match="'fire' is unknown; choose from dead array"):
        bench_robustness(run, corruptions=["fire"])
    with pytest.raises(UserError, match="severities must be from 1 to 5"):
        bench_robustness(run, severities=[6])
