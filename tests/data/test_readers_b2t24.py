"""The '24 reader: partitions, features, labels from text, and damaged files."""

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import scipy.io

from arcuate.data.prepare import prepare
from arcuate.data.readers.b2t24 import B2T24, DEFAULT_FEATURES
from arcuate.data.readers.release import find_release
from arcuate.data.readers.source import ReadResult, UnreadableFile
from arcuate.data.store import Store
from arcuate.data.text import text_to_tokens
from arcuate.errors import UserError
from support.recordings import noise, write_mat

SESSION = "t12.2022.04.28"


def results(root: Path, split: str = "train", features: str = DEFAULT_FEATURES) -> list[ReadResult]:
    (file,) = [file for file in find_release(root).files if file.split == split]
    return list(B2T24(features).read_trials(file))


@pytest.mark.parametrize(
    ("features", "columns"),
    [
        (DEFAULT_FEATURES, ("counts", "power")),
        ("spikePow:6v", ("power",)),
        ("spikePow:44", ("power of 44",)),
        ("tx1:all", ("counts", "counts of 44")),
    ],
)
def test_features_are_columns_of_the_chosen_area(tmp_path: Path, features: str, columns: tuple[str, ...]) -> None:
    power = noise(30, 4)
    write_mat(tmp_path / "train" / f"{SESSION}.mat", [power], ["Bring it closer."], [7])
    (result,) = results(tmp_path, features=features)
    known = {"power": power, "power of 44": power + 100}
    known |= {name.replace("power", "counts"): np.abs(values).astype(np.uint8) for name, values in known.items()}
    assert result.trial is not None
    np.testing.assert_array_equal(result.trial.bins, np.concatenate([known[name] for name in columns], axis=1))
    assert (result.trial.bins.dtype, result.trial.block) == (np.float32, 7)


@pytest.mark.parametrize("features", ["tx9", "tx1:6w", "tx1+tx1", ""])
def test_unknown_features_raise(tmp_path: Path, features: str) -> None:
    with pytest.raises(UserError, match="spikePow"):
        prepare(tmp_path, tmp_path / "store", features=features)


def test_labels_come_from_the_text_and_unknown_words_are_reported(tmp_path: Path) -> None:
    texts = ["Bring it closer.", "Xyzzyqua is here."]
    write_mat(tmp_path / "train" / f"{SESSION}.mat", [noise(), noise(seed=1)], texts)
    first, second = results(tmp_path)
    assert first.trial is not None
    assert second.trial is not None
    assert list(first.trial.tokens) == text_to_tokens(texts[0])[0]
    assert first.problems == ()
    (remark,) = second.problems
    assert (remark.reason, remark.number, remark.severity) == ("unknown words", 1, "note")
    assert "xyzzyqua" in remark.detail


def test_the_mode_comes_from_the_simulated_truth(tmp_path: Path) -> None:
    write_mat(tmp_path / "c" / "train" / f"{SESSION}.mat", [noise(), noise(seed=1)], ["Yes.", "No."])
    (tmp_path / "simulation_truth.jsonl").write_text(
        f'{{"session": "{SESSION}", "split": "train", "number": 1, "mode": "silent"}}\nnonsense\n'
    )
    report = prepare(tmp_path, tmp_path / "store").report
    assert [info.mode for info in Store.open(tmp_path / "store").trials] == [None, "silent"]
    assert report is not None and "1 rows" in report.notes[0]


@pytest.mark.shared
def test_the_real_trial_is_prepared_and_normalised_by_its_block_statistics(shared: Path, tmp_path: Path) -> None:
    real = np.load(shared / "real" / "t12_trial" / "t12.2022.04.28_train_trial10.npz")
    counts, power = real["tx1_counts"], real["spikePow_rel_to_block_mean"]
    known = np.flatnonzero(real["tx1_block_sd"] > 0)
    cells = {name: np.empty((1, 1), dtype=object) for name in ("tx1", "spikePow")}
    cells["tx1"][0, 0] = np.concatenate([counts, counts], axis=1).astype(np.uint8)
    cells["spikePow"][0, 0] = np.concatenate([power, power], axis=1).astype(np.float32)
    sentence = "The eastern coast is a place for pure pleasure and excitement."
    (tmp_path / "train").mkdir()
    texts = {"sentenceText": np.array([sentence]), "blockIdx": np.array([[3.0]])}
    scipy.io.savemat(tmp_path / "train" / f"{SESSION}.mat", cells | texts)
    prepare(tmp_path, tmp_path / "store")
    store = Store.open(tmp_path / "store")
    (info,) = store.trials
    bins = store.read_bins(info)
    assert bins.shape == (591, 256)
    assert info.tokens is not None
    assert len(info.tokens) == 53
    mean, sd = real["tx1_block_mean"][known], real["tx1_block_sd"][known]
    np.testing.assert_allclose((bins[:, known] - mean) / sd, real["z_raw_official"][:, known], atol=1e-3)
    z_power = (bins[:, 128:] - 1.0) / real["spikePow_block_cv"]
    np.testing.assert_allclose(z_power, real["z_raw_official"][:, 128:], atol=1e-3)
    # The block of this store is the one trial, so its own statistics standardise it exactly.
    own = store.block_statistics(info)
    z_own = (bins - own.mean) / (own.sd + 1e-8)
    np.testing.assert_allclose(z_own.std(axis=0)[own.sd > 0], 1.0, atol=1e-4)


# --- damaged and unexpected files --------------------------------------------------------------------------


def cut_in_half(path: Path) -> None:
    write_mat(path, [noise(300, 64)], ["Yes."])
    path.write_bytes(path.read_bytes()[:-2000])


def matlab73(path: Path) -> None:
    with h5py.File(path, "w", userblock_size=512) as file:
        file["tx1"] = 1


PLAIN = np.zeros((3, 4))
UNREADABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "MATLAB 7.3": (matlab73, "-v7"),
    "empty": (lambda path: path.write_bytes(b""), "not a MATLAB 5 file"),
    "zeros": (lambda path: path.write_bytes(bytes(4000)), "not a MATLAB 5 file"),
    "truncated": (cut_in_half, "[a-z]"),
    "no features": (lambda path: scipy.io.savemat(path, {"other": 1, "tx1": 1}), "its variables are other, tx1"),
    "no cells": (lambda path: scipy.io.savemat(path, {"tx1": PLAIN, "spikePow": PLAIN}), "cell array"),
    "fewer sentences": (
        lambda path: write_mat(path, [noise(), noise(seed=1)], ["Only one."], [1, 1]),
        "2 trials but sentenceText has 1",
    ),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_files_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    write, words = UNREADABLE[name]
    (tmp_path / "train").mkdir()
    write(tmp_path / "train" / f"{SESSION}.mat")
    with pytest.raises(UnreadableFile, match=words):
        results(tmp_path)


def test_one_damaged_cell_does_not_affect_the_others(tmp_path: Path) -> None:
    path = write_mat(tmp_path / "train" / f"{SESSION}.mat", [noise(), noise(seed=1)], ["Yes.", "No."])
    data = scipy.io.loadmat(path)
    data["tx1"][0, 0] = data["tx1"][0, 0][:-5]  # shorter than its power
    scipy.io.savemat(path, {name: data[name] for name in ("tx1", "spikePow", "sentenceText", "blockIdx")})
    first, second = results(tmp_path)
    assert first.trial is None and "differ in length" in first.problems[0].detail
    assert second.trial is not None
