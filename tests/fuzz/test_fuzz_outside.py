"""Damaged files of other labs and programs: NWB, FALCON H2, mappings, logits."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from arcuate.data.describe import describe_file
from arcuate.data.export import export_data
from arcuate.data.prepare import prepare_store
from arcuate.data.readers import process
from arcuate.data.readers.nwb import EXPORTED
from arcuate.data.simulation import simulate
from arcuate.data.store import Store
from arcuate.decoding.logits import read_logits
from arcuate.errors import UserError
from support.fuzzing import damaged, fuzz
from support.recordings import FakeTrial, noise, write_hdf5

SESSION = "t15.2023.08.11"


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A small NWB file."""
    pytest.importorskip("pynwb", reason="pynwb is not installed")
    write_hdf5(tmp_path / "source" / SESSION / "data_train.hdf5", [FakeTrial(noise(20, 4, seed=i)) for i in range(3)])
    prepare_store(tmp_path / "source", tmp_path / "prepared")
    return export_data(tmp_path / "prepared", tmp_path / "nwb").files[0]


def _prepare(path: Path, folder: Path, layout: str) -> None:
    report = prepare_store(path.parent, folder / "store", force=True, layout=layout)
    if not report.written:
        raise UserError(report.unreadable[0].detail if report.unreadable else "nothing was read")
    assert Store.open(folder / "store").find_changed() == []


def test_nwb(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MAX_CPU_SECONDS", 2.0)
    seed = exported.read_bytes()

    def read(content: bytes, folder: Path) -> None:
        exported.write_bytes(content)
        _prepare(exported, folder, "nwb")

    fuzz(read, damaged([seed], 25, 600), tmp_path / "fuzz").check()


def test_falcon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pynwb", reason="pynwb is not installed")
    monkeypatch.setattr(process, "MAX_CPU_SECONDS", 2.0)
    simulate(tmp_path / "data", layout="falcon-h2", n_sessions=1, n_trials=3, n_electrodes=4)
    path = next((tmp_path / "data").glob("*/*calib/*.nwb"))
    seed = path.read_bytes()

    def read(content: bytes, folder: Path) -> None:
        path.write_bytes(content)
        _prepare(path, folder, "falcon-h2")

    fuzz(read, damaged([seed], 15, 600), tmp_path / "fuzz").check()


def test_descriptions(exported: Path, tmp_path: Path) -> None:
    seed = exported.read_bytes()

    def read(content: bytes, folder: Path) -> None:
        (folder / "x.nwb").write_bytes(content)
        describe_file(folder / "x.nwb").mapping_text()

    fuzz(read, damaged([seed], 40, 600), tmp_path / "fuzz").check()


def test_mappings(exported: Path, tmp_path: Path) -> None:
    seed = json.dumps(EXPORTED.model_dump(mode="json"), indent=1).encode()

    def read(content: bytes, folder: Path) -> None:
        (folder / "mapping.yaml").write_bytes(content)
        report = prepare_store(
            exported.parent, folder / "store", force=True, layout="nwb", mapping=folder / "mapping.yaml"
        )
        if not report.written:
            raise UserError(report.unreadable[0].detail if report.unreadable else "nothing was read")

    fuzz(read, damaged([seed], 25, 600), tmp_path / "fuzz").check()


@pytest.mark.parametrize("kind", ["npz", "npy", "mat", "pkl"])
def test_logits(kind: str, tmp_path: Path) -> None:
    logits = np.random.default_rng(0).normal(size=(6, 41)).astype(np.float32)
    path = tmp_path / f"seed.{kind}"
    if kind == "npz":
        np.savez(path, logits=logits, lengths=np.array([2, 4]))
    elif kind == "npy":
        np.save(path, logits)
    elif kind == "mat":
        savemat(path, {"logits": logits, "lengths": np.array([2, 4])})
    else:
        path.write_bytes(pickle.dumps({"logits": [logits[:2], logits[2:]], "cue_sentence": ["a", "b"]}))
    seed = path.read_bytes()

    def read(content: bytes, folder: Path) -> None:
        target = folder / f"x.{kind}"
        target.write_bytes(content)
        (folder / "x.json").write_text('{"lengths": [2, 4]}', "utf-8")
        scores = read_logits(target).scores
        assert all(np.isfinite(frames).all() for frames in scores.trials)

    fuzz(read, damaged([seed], 150, 1000), tmp_path / kind).check(0.2)
