"""Files that expand to far more than they hold are refused before they are inflated."""

import gzip
from pathlib import Path

import h5py
import numpy as np
import pytest
import scipy.io

from arcuate.data.prepare import prepare
from arcuate.decoding.frame_files import read_frames
from arcuate.errors import UserError
from arcuate.language.ngram.open import import_model
from support.recordings import FakeTrial, noise, write_hdf5

BYTES = 2**28  # 256 MB: far more than allowed, and little enough if the check fails


def test_npz(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "bomb.npz", logp=np.zeros((BYTES // 160, 40), np.float32), lengths=np.array([1]))
    assert (tmp_path / "bomb.npz").stat().st_size < BYTES / 500
    with pytest.raises(UserError, match="expand"):
        read_frames(tmp_path / "bomb.npz")


def test_hdf5(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "t15.2023.08.11" / "data_train.hdf5", [FakeTrial(noise())] * 2)
    with h5py.File(path, "a") as file:
        del file["trial_0001/input_features"]
        file["trial_0001"].create_dataset("input_features", (BYTES // 32, 8), "f4")  # nothing is stored: all zero
        file["trial_0001"].attrs["n_time_steps"] = BYTES // 32
    report = prepare(tmp_path, tmp_path / "store").report
    (row,) = report.unreadable
    assert report.trials == 1 and row.trial.endswith("0001") and "expand" in row.detail


def test_hdf5_trials_that_share_their_values(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "t15.2023.08.11" / "data_train.hdf5", [FakeTrial(noise())])
    with h5py.File(path, "a") as file:
        large = file.create_dataset("trial_0000/large", (2**19, 8), "f4")  # 16 MB in every trial
        for i in range(1, 9):
            file.create_group(f"trial_{i:04d}")["input_features"] = large
    report = prepare(tmp_path, tmp_path / "store").report
    assert 1 < report.trials < 9 and all("expand" in row.detail for row in report.unreadable)


def test_mat(tmp_path: Path) -> None:
    cells = np.empty((1, 1), dtype=object)
    cells[0, 0] = np.zeros((BYTES // 128, 16))
    (tmp_path / "train").mkdir()
    scipy.io.savemat(tmp_path / "train" / "t12.2022.04.28.mat", {"tx1": cells, "spikePow": cells}, do_compression=True)
    with pytest.raises(UserError, match="expand"):
        prepare(tmp_path, tmp_path / "store")


def test_arpa(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "bomb.arpa.gz", "wb") as file:
        file.write(b"\\data\\\nngram 1=1000000000\n\n\\1-grams:\n" + b"-1.0 a\n" * (2**25 // 7))
    with pytest.raises(UserError, match=r"expands|n-gram"):
        import_model(tmp_path / "bomb.arpa.gz", tmp_path / "out.alm")
    with gzip.open(tmp_path / "spaces.arpa.gz", "wb") as file:
        file.write(b"\n" * 2**25)
    with pytest.raises(UserError, match="expands to more than 100 times"):
        import_model(tmp_path / "spaces.arpa.gz", tmp_path / "out.alm")
