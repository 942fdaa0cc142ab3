"""Drift over sessions: similarity, dead channels, re-ordered channels, and the page."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from arcuate.adaptation.drift import (
    SAME_ORDER,
    SessionStatistics,
    channel_order_similarity,
    compare_sessions,
    measure_drift,
    measure_sessions,
    profile_similarity,
)
from arcuate.data.electrodes import ElectrodeArray, Feature
from arcuate.data.prepare import prepare
from arcuate.data.simulation import simulate
from arcuate.data.store import Store
from arcuate.data.trial import days_between
from arcuate.errors import UserError
from arcuate.files import read_jsonl
from support.cli import assert_refused, one_object
from support.command import arcuate
from support.days import DEAD, DRIFTED, FIRST, PERMUTED, SAME
from support.pages import check_page


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sessions close together, and two later ones, 5 and 60 days after them."""
    folder = tmp_path_factory.mktemp("drift")
    simulate(
        folder / "source",
        layout="b2t25",
        n_sessions=2,
        n_trials=20,
        n_electrodes=24,
        difficulty="easy",
        seed=3,
        later=(5, 60),
    )
    prepare(folder / "source", folder / "store")
    return folder


@pytest.fixture(scope="module")
def measured(simulated: Path) -> list[SessionStatistics]:
    return measure_sessions(Store.open(simulated / "store"))


def test_later_sessions_have_their_dates_and_do_not_change_the_others(tmp_path: Path, simulated: Path) -> None:
    sessions = Store.open(simulated / "store").sessions
    shorter = simulate(tmp_path, layout="b2t25", n_sessions=2, n_trials=20, n_electrodes=24, difficulty="easy", seed=3)
    assert sessions[:2] == shorter.sessions
    assert [days_between(s, sessions[1]) for s in sessions[2:]] == [5, 60]
    name = f"hdf5_data_final/{sessions[1]}/data_train.hdf5"
    assert (tmp_path / name).read_bytes() == (simulated / "source" / name).read_bytes()


@pytest.mark.parametrize("later", ["8,5", "x"])
def test_later_days_must_increase(tmp_path: Path, later: str) -> None:
    assert_refused(arcuate("simulate", tmp_path / "out", "--later", later), "5,8")


def test_similarity_decreases_with_time(measured: list[SessionStatistics]) -> None:
    same, near, far = (np.nanmedian(profile_similarity(measured[1], measured[i])) for i in (1, 2, 3))
    assert same == pytest.approx(1) and near > far


def test_dead_channels_are_those_of_the_simulator(simulated: Path, measured: list[SessionStatistics]) -> None:
    truth = {row["session"]: row["dead"] for row in read_jsonl(simulated / "source/simulation_truth.jsonl")}
    assert {d.session: np.flatnonzero(d.flat).tolist() for d in measured} == truth


def test_reordered_channels_are_detected_in_recordings_that_are_long_enough(measured: list[SessionStatistics]) -> None:
    before, a = measured[1], measured[2]
    order = np.roll(np.arange(len(a.flat)), 7)
    reordered = replace(
        a,
        **{name: getattr(a, name)[order] for name in ("mean", "sd", "skew", "autocorrelation", "flat")},
        correlation=a.correlation[np.ix_(order, order)],
    )
    same, other = channel_order_similarity(before, a), channel_order_similarity(before, reordered)
    assert same is not None and other is not None and same > SAME_ORDER > other
    assert channel_order_similarity(before, replace(reordered, n_bins=299)) is None
    assert channel_order_similarity(before, replace(reordered, n_bins=300)) is not None


def test_mean_shift_and_sd_ratio(measured: list[SessionStatistics]) -> None:
    """A channel whose mean rose by half an SD, one whose SD doubled, one that became flat; and their array."""
    session = measured[0]
    ones, none = np.ones(len(session.flat)), np.zeros(len(session.flat), dtype=bool)
    before = replace(session, mean=2 * ones, sd=4 * ones, flat=none)
    mean, sd, flat = 2 * ones, 4 * ones, none.copy()
    mean[0], sd[1], flat[2] = 4.0, 8.0, True
    mean[2] = sd[2] = 0.0
    after = replace(session, mean=mean, sd=sd, flat=flat)
    signal = (Feature("channels", range(8)),)
    arrays = [ElectrodeArray("first", range(3), signal), ElectrodeArray("rest", range(3, 8), signal)]
    _, row = compare_sessions([before, after], arrays, before)
    assert row.newly_flat == [2]
    assert row.mean_shift[:4] == [0.5, 0.0, None, 0.0]
    assert row.arrays["first"].mean_shift == pytest.approx(0.25)
    assert row.arrays["first"].sd_ratio == pytest.approx(2**0.5)
    assert (row.arrays["rest"].mean_shift, row.arrays["rest"].sd_ratio) == (0.0, 1.0)


def test_page_and_json_without_torch(new_days: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(new_days / "store", store)
    code = (
        "import sys\nfrom arcuate.cli import run\n"
        f"run(['report', {str(store)!r}, '--json'])\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = one_object(done.stdout)
    rows = {row["session"]: row for row in result["sessions"]}
    assert result["reference"] == FIRST
    assert len(rows[DEAD]["flat"]) == result["n_channels"] == len(rows[DEAD]["newly_flat"])
    assert rows[PERMUTED]["reordered"] and not rows[SAME]["reordered"]
    assert rows[SAME]["profile_similarity"] > rows[DRIFTED]["profile_similarity"]
    assert [len(row["mean_shift"]) for row in result["sessions"]] == [result["n_channels"]] * len(rows)
    page = (tmp_path / "store.report.html").read_text()
    assert result["report"] == str(tmp_path / "store.report.html")
    (spec,) = check_page(page).specs
    assert spec["description"].startswith("Similarity of 1 array over")
    assert page.startswith("<!DOCTYPE html>") and "re-ordered" in page


def test_sessions_are_compared_with_a_named_one(new_days: Path) -> None:
    assert measure_drift(new_days / "store", reference=SAME).reference == SAME
    with pytest.raises(UserError, match="store has no session x to compare with; it contains t15"):
        measure_drift(new_days / "store", reference="x")


def test_drift_as_a_data_frame(new_days: Path) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    frame = measure_drift(new_days / "store").to_frame()
    assert {"session", "array", "profile_similarity"} <= set(frame.columns)
