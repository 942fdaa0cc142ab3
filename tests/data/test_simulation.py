"""Simulated files: exact official layouts, same seed same bytes, ground truth beside them."""

import csv
import hashlib
import json
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from scipy.io import loadmat

from arcuate.data import alphabet as tokens
from arcuate.data.prepare import prepare
from arcuate.data.readers.release import find_release
from arcuate.data.simulation import TRUTH_FILE, simulate
from arcuate.data.simulation.cohort import DESCRIPTION_FILE, session_names
from arcuate.data.simulation.layouts import HOLDOUT_TEXT
from arcuate.data.store import Store
from arcuate.data.text import pronounce
from arcuate.errors import UserError
from arcuate.experiments.train import describe_store
from support.recordings import FakeTrial, noise, write_hdf5

SMALL: dict[str, Any] = {"n_sessions": 2, "n_trials": 20, "n_electrodes": 8}


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def b2t25(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("b2t25")
    simulate(out, layout="b2t25", seed=3, **SMALL)
    return out


@pytest.fixture(scope="module")
def b2t24(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("b2t24")
    simulate(out, layout="b2t24", seed=3, **SMALL)
    return out


def truth(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / TRUTH_FILE).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("layout", ["b2t25", "b2t24"])
def test_same_seed_same_bytes(layout: Any, b2t25: Path, b2t24: Path, tmp_path: Path) -> None:
    first = hashes(b2t25 if layout == "b2t25" else b2t24)
    simulate(tmp_path / "again", layout=layout, seed=3, **SMALL)
    assert hashes(tmp_path / "again") == first
    simulate(tmp_path / "other", layout=layout, seed=4, **SMALL)
    other = hashes(tmp_path / "other")
    assert not set(other.values()) & set(first.values())


def test_a_session_depends_on_its_own_index_alone(b2t25: Path, tmp_path: Path) -> None:
    simulate(tmp_path, layout="b2t25", seed=3, **(SMALL | {"n_sessions": 1}))
    alone = hashes(tmp_path / "hdf5_data_final")
    among = hashes(b2t25 / "hdf5_data_final")
    assert len(alone) == 3
    assert alone.items() <= among.items()
    assert len(set(among.values())) == 6


def test_hdf5_layout(b2t25: Path) -> None:
    sessions = sorted(path.name for path in (b2t25 / "hdf5_data_final").iterdir())
    assert sessions == session_names("b2t25", 2, 3)
    assert sessions[0] == "sim.2023.08.11"
    for session in sessions:
        for split, n_trials in (("train", 16), ("val", 2), ("test", 2)):
            with h5py.File(b2t25 / "hdf5_data_final" / session / f"data_{split}.hdf5") as file:
                assert list(file) == [f"trial_{i:04d}" for i in range(n_trials)]
                for group in file.values():
                    bins = group["input_features"][:]
                    assert bins.dtype == np.float32
                    assert bins.shape == (group.attrs["n_time_steps"], 16)
                    assert bins.max() <= 10
                    assert group.attrs["session"] == session
                    assert {"block_num", "trial_num"} <= set(group.attrs)
                    labelled = {"seq_class_ids", "transcription"} <= set(group)
                    named = {"seq_len", "sentence_label"} <= set(group.attrs)
                    assert labelled == named == (split != "test")


def test_hdf5_labels(b2t25: Path) -> None:
    path = b2t25 / "hdf5_data_final" / "sim.2023.08.11" / "data_train.hdf5"
    with h5py.File(path) as file:
        for group in file.values():
            text = group.attrs["sentence_label"]
            length = int(group.attrs["seq_len"])
            labels = group["seq_class_ids"][:]
            assert labels.shape == (500,)
            assert labels.dtype == np.int32
            assert tokens.token_names(labels[:length]) == pronounce(text).names
            assert not labels[length:].any()
            letters = group["transcription"][:]
            assert "".join(chr(code) for code in letters[letters > 0]) == text


def test_description_counts_every_trial(b2t25: Path) -> None:
    with (b2t25 / DESCRIPTION_FILE).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = ["Date", "Post-implant day", "Block number", "Number of sentences", "Corpus", "Split"]
    assert list(rows[0]) == columns
    assert sum(int(row["Number of sentences"]) for row in rows) == 40
    assert {row["Split"] for row in rows} == {"Train", "Val/Test"}
    blocks = {(row["Date"].replace("-", "."), int(row["Block number"])): row["Corpus"] for row in rows}
    for line in truth(b2t25):
        assert blocks[line["session"][4:], line["block"]] == line["corpus"].capitalize()


def test_mat_layout(b2t24: Path) -> None:
    for partition, n_trials in (("train", 16), ("test", 2), ("competitionHoldOut", 2)):
        mat = loadmat(b2t24 / "competitionData" / partition / "sim24.2022.04.28.mat")
        assert mat["sentenceText"].shape == (n_trials,)
        assert mat["blockIdx"].shape == (n_trials, 1)
        for name, kind in (("tx1", np.uint8), ("tx4", np.uint8), ("spikePow", np.float32)):
            assert mat[name].shape == (1, n_trials)
            assert mat[name][0, 0].dtype == kind
            assert mat[name][0, 0].shape[1] == 16  # area 6v, then area 44
        assert (mat["tx1"][0, 0] >= mat["tx2"][0, 0]).all()
        assert mat["tx1"][0, 0].sum() > mat["tx4"][0, 0].sum()
        assert mat["spikePow"][0, 0].min() > 0
        texts = {text.strip() for text in mat["sentenceText"]}
        assert (texts == {HOLDOUT_TEXT}) == (partition == "competitionHoldOut")


@pytest.mark.parametrize("layout", ["b2t25", "b2t24"])
def test_truth_has_every_trial(layout: str, b2t25: Path, b2t24: Path) -> None:
    lines = truth(b2t25 if layout == "b2t25" else b2t24)
    keys = {(line["session"], line["split"], line["number"]) for line in lines}
    assert len(keys) == len(lines) == 40
    assert sum(line["split"] == "test" for line in lines) == 4
    for line in lines:
        assert line["mode"] in ("vocalised", "silent")
        assert line["phonemes"] == pronounce(line["text"]).names
        assert len(line["onsets_s"]) == len(line["phonemes"])
        assert np.all(np.diff(line["onsets_s"]) > 0)
        assert (line["seed"], line["difficulty"]) == (3, "real")
        assert all(0 <= electrode < 16 for electrode in line["dead"])


def test_real_recordings_are_never_replaced(b2t25: Path, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"layout": "b2t25", "n_sessions": 1, "n_trials": 3, "n_electrodes": 4}
    (tmp_path / "hdf5_data_final" / "t15.2023.08.11").mkdir(parents=True)
    with pytest.raises(UserError, match="already contains hdf5_data_final"):
        simulate(tmp_path, **arguments)
    shutil.copytree(b2t25, tmp_path / "mixed")
    (tmp_path / "mixed" / "store").mkdir()
    with pytest.raises(UserError, match="already contains store"):
        simulate(tmp_path / "mixed", **arguments)


def test_simulated_recordings_are_replaced(tmp_path: Path) -> None:
    simulate(tmp_path, layout="b2t25", n_sessions=2, n_trials=3, n_electrodes=4, seed=1)
    simulate(tmp_path, layout="b2t25", n_sessions=1, n_trials=3, n_electrodes=4, seed=2)
    assert len(list((tmp_path / "hdf5_data_final").iterdir())) == 1
    assert {line["seed"] for line in truth(tmp_path)} == {2}


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ({"difficulty": "tough"}, "easy, real, hard"),
        ({"difficulty": -1.0}, "easy, real, hard"),
        ({"difficulty": 1e-300}, "from 0.01"),
        ({"difficulty": "1e300"}, "to 100"),
        ({"seed": -1}, "seed"),
        ({"seed": 10**400}, "seed"),
        ({"n_sessions": -3}, "1 session"),
        ({"layout": "b2t23"}, "b2t25, b2t24, falcon-h2"),
        ({"n_trials": 2}, "3 trials"),
        ({"n_electrodes": 2}, "4 electrodes"),
        ({"layout": "nwb"}, "export a prepared cohort"),
    ],
)
def test_errors_name_the_remedy(wrong: dict[str, Any], remedy: str, tmp_path: Path) -> None:
    arguments = {"layout": "b2t25", "n_sessions": 1, "n_trials": 3, "n_electrodes": 4} | wrong
    with pytest.raises(UserError, match=remedy):
        simulate(tmp_path, **arguments)
    assert not list(tmp_path.iterdir())


COHORT: dict[str, Any] = {"layout": "b2t25", "n_sessions": 2, "n_trials": 6, "n_electrodes": 4}


def test_an_interrupted_cohort_is_not_found(tmp_path: Path) -> None:
    """Killed in the second session: readers find nothing, and the next attempt is complete."""

    def die(done: int, total: int, description: str) -> None:
        if done == 8:
            os._exit(9)

    out = tmp_path / "cohort"
    child = multiprocessing.get_context("fork").Process(target=lambda: simulate(out, progress=die, **COHORT))
    child.start()
    child.join()
    assert child.exitcode == 9 and not out.exists()
    simulate(out, **COHORT)
    assert {path.name for path in out.iterdir()} == {"hdf5_data_final", TRUTH_FILE, DESCRIPTION_FILE}
    assert len(find_release(out).files) == 6


def test_a_failure_leaves_an_older_cohort_unchanged(tmp_path: Path) -> None:
    simulate(tmp_path, **COHORT)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def fail(done: int, total: int, description: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(tmp_path, seed=5, progress=fail, **COHORT)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_prepared_store_says_that_it_is_simulated(b2t25: Path, tmp_path: Path) -> None:
    store = prepare(b2t25, tmp_path / "store")
    assert store.simulated and all(session.startswith("sim.") for session in store.sessions)
    assert Store.open(tmp_path / "store").simulated
    assert describe_store(store, store.sessions)["simulated"] is True
    write_hdf5(tmp_path / "source" / "t15.2023.08.11" / "data_train.hdf5", [FakeTrial(noise())])
    assert not prepare(tmp_path / "source", tmp_path / "recorded").simulated
