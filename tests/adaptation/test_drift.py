"""What changes over days: likeness, dead channels, re-ordered ones, and the page about it."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from arcuate.adaptation.drift import (
    SAME_MAPPING,
    fingerprint_likeness,
    measure_days,
    profile_likeness,
    subspace_likeness,
    summarise,
)
from arcuate.cli import _drift as drift
from arcuate.data.arrays import ElectrodeArray, Feature, list_arrays
from arcuate.data.prepare import prepare
from arcuate.data.simulation import simulate
from arcuate.data.store import Store
from arcuate.errors import UserError
from support.cli import assert_refused, one_object
from support.days import DEAD, DRIFTED, FIRST, PERMUTED, SAME
from support.forking import arcuate


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two days close together, two later ones: 5 and 60 days on."""
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


def test_later_sessions_fall_on_their_days_and_leave_the_others_alone(
    tmp_path: Path, simulated: Path
) -> None:
    sessions = Store.open(simulated / "store").sessions
    shorter = simulate(
        tmp_path, layout="b2t25", n_sessions=2, n_trials=20, n_electrodes=24, difficulty="easy", seed=3
    )
    assert sessions[:2] == shorter.sessions
    from arcuate.data.sessions import days_between

    assert [days_between(s, sessions[1]) for s in sessions[2:]] == [5, 60]
    name = f"hdf5_data_final/{sessions[1]}/data_train.hdf5"
    assert (tmp_path / name).read_bytes() == (simulated / "source" / name).read_bytes()


@pytest.mark.parametrize("later", ["8,5", "0", "x", "5,5"])
def test_later_days_must_rise(tmp_path: Path, later: str) -> None:
    assert_refused(arcuate("simulate", tmp_path / "out", "--later", later), "5,8")


def test_days_grow_unlike_with_time(simulated: Path) -> None:
    days = measure_days(Store.open(simulated / "store"))
    channels = np.arange(len(days[0].flat))
    near = subspace_likeness(days[1], days[2], channels)
    far = subspace_likeness(days[1], days[3], channels)
    assert (
        near is not None
        and far is not None
        and subspace_likeness(days[1], days[1], channels) == pytest.approx(1)
    )
    assert near > far + 0.05
    assert np.nanmedian(profile_likeness(days[1], days[2])) > np.nanmedian(profile_likeness(days[1], days[3]))


def test_dead_channels_are_those_that_the_simulator_killed(simulated: Path) -> None:
    truth = {}
    for line in (simulated / "source/simulation_truth.jsonl").read_text().splitlines():
        row = json.loads(line)
        truth[row["session"]] = row["dead"]
    days = measure_days(Store.open(simulated / "store"))
    assert {d.session: np.flatnonzero(d.flat).tolist() for d in days} == truth


def test_channels_in_another_order_are_noticed(simulated: Path) -> None:
    days = measure_days(Store.open(simulated / "store"))
    order = np.roll(np.arange(len(days[0].flat)), 7)
    a = days[2]
    replugged = replace(
        a,
        **{name: getattr(a, name)[order] for name in ("mean", "sd", "skew", "memory", "flat")},
        correlation=a.correlation[np.ix_(order, order)],
    )
    same, other = fingerprint_likeness(days[1], a), fingerprint_likeness(days[1], replugged)
    assert same is not None and other is not None
    assert same > SAME_MAPPING > other


def test_a_few_seconds_say_nothing_about_the_order_of_channels(simulated: Path) -> None:
    day = measure_days(Store.open(simulated / "store"))[1]
    order = np.roll(np.arange(len(day.flat)), 7)
    short = replace(day, n_bins=299, skew=day.skew[order], memory=day.memory[order])
    assert fingerprint_likeness(day, short) is None
    assert fingerprint_likeness(day, replace(short, n_bins=300)) is not None


def test_small_arrays_show_drift_too(simulated: Path) -> None:
    """Half of the channels' directions hold all that electrodes do, for each has two channels that go together."""
    store = Store.open(simulated / "store")
    days = measure_days(store)
    groups = list_arrays(store.layout, store.n_channels)
    found = [subspace_likeness(days[0], days[-1], g.channels) for g in groups]
    assert all(v is not None and v < 0.9 for v in found), found


def test_levels_and_spreads_of_channels_are_told(simulated: Path) -> None:
    """A channel that rose by half an SD, one that doubled, one that died; and the array they belong to."""
    day = measure_days(Store.open(simulated / "store"))[0]
    ones, none = np.ones(len(day.flat)), np.zeros(len(day.flat), dtype=bool)
    before = replace(day, mean=2 * ones, sd=4 * ones, flat=none)
    mean, sd, flat = 2 * ones, 4 * ones, none.copy()
    mean[0], sd[1], flat[2] = 4.0, 8.0, True
    mean[2] = sd[2] = 0.0
    after = replace(day, mean=mean, sd=sd, flat=flat)
    signal = (Feature("channels", range(8)),)
    arrays = [ElectrodeArray("first", range(3), signal), ElectrodeArray("rest", range(3, 8), signal)]
    _, row = summarise([before, after], arrays, before)
    assert row["died"] == [2]
    assert row["channels"]["mean"][:3] == [4.0, 2.0, 0.0]
    assert row["channels"]["level_change"][:4] == [0.5, 0.0, None, 0.0]
    assert row["channels"]["spread_factor"][:4] == [1.0, 2.0, None, 1.0]
    assert row["arrays"]["first"]["level_change"] == pytest.approx(0.25)
    assert row["arrays"]["first"]["spread_factor"] == pytest.approx(2**0.5)
    assert (row["arrays"]["rest"]["level_change"], row["arrays"]["rest"]["spread_factor"]) == (0.0, 1.0)


def test_a_page_and_numbers_without_torch(new_days: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom arcuate.cli import app\n"
        f"app(['drift', {str(new_days / 'store')!r}, '--out', {str(tmp_path / 'drift.html')!r}, '--json'],"
        " standalone_mode=False)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = one_object(done.stdout)
    rows = {row["session"]: row for row in told["days"]}
    assert told["reference"] == FIRST and told["errors"] is None
    assert len(rows[DEAD]["flat"]) == told["n_channels"] == len(rows[DEAD]["died"])
    assert rows[PERMUTED]["reordered"] and not rows[SAME]["reordered"]
    assert rows[SAME]["profile_likeness"] > rows[DRIFTED]["profile_likeness"]
    assert [len(row["channels"]["level_change"]) for row in told["days"]] == [told["n_channels"]] * len(rows)
    page = (tmp_path / "drift.html").read_text()
    assert "How far levels moved" in page and 'mask="url(#levels)"' in page
    assert page.startswith("<!DOCTYPE html>") and "<script" not in page and "re-ordered" in page


def test_error_rates_by_day_come_with_a_run(new_days: Path, tmp_path: Path) -> None:
    words = ("--run", new_days / "run", "--out", tmp_path / "drift.html", "--json", "--adapt", "statistics")
    done = arcuate("drift", new_days / "store", *words)
    assert done.returncode == 0, done.stderr
    told = one_object(done.stdout)
    assert told["reference"] == "t15.2030.01.04"  # the last day that the model knows
    assert [d["known"] for d in told["errors"]["days"]][:3] == [True, True, False]
    assert "Error rate by day" in (tmp_path / "drift.html").read_text()
    assert (new_days / "run" / "results" / "val.drift-statistics.json").is_file()  # of its own


def test_a_page_replaces_nothing_but_a_page(new_days: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.html").write_text("my notes")
    assert_refused(arcuate("drift", new_days / "store", "--out", tmp_path / "notes.html"), "something else")
    assert_refused(arcuate("drift", tmp_path / "nowhere"), "no store")
    assert_refused(
        arcuate("drift", new_days / "store", "--reference", "x", "--out", tmp_path / "d.html"), "no session x"
    )


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"reference": "x"}, "no session x to compare with; store holds t15"),
        ({"adapt": "magic"}, "'magic' is unknown; choose none"),
        ({"split": "x"}, "no split 'x'; choose train"),
    ],
)
def test_names_that_mean_nothing_are_told_before_the_work(
    new_days: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, str], said: str
) -> None:
    monkeypatch.setattr(drift, "measure_days", lambda *_: pytest.fail("measured all the same"))
    with pytest.raises(UserError, match=said):
        drift.drift_command(
            drift.Asked(new_days / "store", new_days / "run", new_days / "d.html", **asked), False
        )
