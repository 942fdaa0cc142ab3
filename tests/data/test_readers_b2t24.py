"""The '24 reader: partitions, features, labels from text, and damaged files."""

import contextlib
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


def test_partitions_become_splits_and_the_placeholder_is_dropped(tmp_path: Path) -> None:
    for partition in ("train", "test", "competitionHoldOut"):
        write_mat(tmp_path / partition / f"{SESSION}.mat", [noise()], ["Bring it closer."])
    source = find_release(tmp_path)
    assert [file.split for file in source.files] == ["train", "val", "test"]
    assert [file.path.parent.name for file in source.files] == ["train", "test", "competitionHoldOut"]
    (held_out,) = results(tmp_path, "test")
    assert held_out.trial is not None
    assert (held_out.trial.text, held_out.trial.tokens, held_out.problems) == (None, None, ())


def test_features_are_crossings_and_power_of_the_first_half(tmp_path: Path) -> None:
    bins = noise(30, 4)
    write_mat(tmp_path / "train" / f"{SESSION}.mat", [bins], ["Bring it closer."], [7])
    (result,) = results(tmp_path)
    trial = result.trial
    assert trial is not None
    np.testing.assert_array_equal(trial.bins[:, :4], np.abs(bins).astype(np.uint8))
    np.testing.assert_array_equal(trial.bins[:, 4:], bins)
    assert (trial.bins.dtype, trial.block, trial.text) == (np.float32, 7, "Bring it closer.")


@pytest.mark.parametrize(
    ("features", "n_channels", "first"), [("spikePow:6v", 4, 0), ("spikePow:44", 4, 100), ("tx1+spikePow:all", 16, 0)]
)
def test_other_features_can_be_chosen(tmp_path: Path, features: str, n_channels: int, first: int) -> None:
    bins = np.zeros((30, 4), dtype=np.float32)
    write_mat(tmp_path / "train" / f"{SESSION}.mat", [bins], ["Yes."])
    (result,) = results(tmp_path, features=features)
    assert result.trial is not None
    assert result.trial.bins.shape == (30, n_channels)
    assert result.trial.bins[0, 0] == first


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


def unreadable(tmp_path: Path) -> str:
    with pytest.raises(UnreadableFile) as caught:
        results(tmp_path)
    return str(caught.value)


def test_the_error_for_a_matlab_73_file_names_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "train" / f"{SESSION}.mat"
    path.parent.mkdir()
    with h5py.File(path, "w", userblock_size=512) as file:
        file["tx1"] = 1
    assert "-v7" in unreadable(tmp_path)


@pytest.mark.parametrize("content", [b"", b"nonsense", bytes(4000)])
def test_a_file_that_is_not_matlab_is_unreadable(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "train" / f"{SESSION}.mat"
    path.parent.mkdir()
    path.write_bytes(content)
    unreadable(tmp_path)


def test_a_truncated_file_is_unreadable(tmp_path: Path) -> None:
    path = write_mat(tmp_path / "train" / f"{SESSION}.mat", [noise(300, 64)], ["Yes."])
    path.write_bytes(path.read_bytes()[:-2000])
    unreadable(tmp_path)


@pytest.mark.parametrize("seed", range(15))
def test_random_damage_does_not_crash(tmp_path: Path, seed: int) -> None:
    """The compiled reader of scipy crashes on some damaged tags: then the file is unreadable."""
    rng = np.random.default_rng(seed)
    path = write_mat(tmp_path / "train" / f"{SESSION}.mat", [noise(), noise(seed=1)], ["Yes.", "No."])
    data = {name: value for name, value in scipy.io.loadmat(path).items() if not name.startswith("__")}
    scipy.io.savemat(path, data)  # uncompressed: no checksum detects the damage
    content = bytearray(path.read_bytes())
    for place in rng.integers(128, len(content), size=40):
        content[place] = rng.integers(256)
    path.write_bytes(content)
    with contextlib.suppress(UserError):  # no trial could be read
        assert prepare(tmp_path, tmp_path / "store").report.written


def test_a_missing_variable_is_named(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    scipy.io.savemat(tmp_path / "train" / f"{SESSION}.mat", {"other": 1, "tx1": 1})
    assert "no variable spikePow; its variables are other, tx1" in unreadable(tmp_path)


def test_plain_arrays_in_place_of_cells_are_unreadable(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    scipy.io.savemat(tmp_path / "train" / f"{SESSION}.mat", {"tx1": np.zeros((3, 4)), "spikePow": np.zeros((3, 4))})
    assert "cell array" in unreadable(tmp_path)


def test_numbers_of_trials_must_agree(tmp_path: Path) -> None:
    write_mat(tmp_path / "train" / f"{SESSION}.mat", [noise(), noise(seed=1)], ["Only one."], [1, 1])
    assert "2 trials but sentenceText has 1" in unreadable(tmp_path)


def test_one_damaged_cell_does_not_affect_the_others(tmp_path: Path) -> None:
    path = write_mat(tmp_path / "train" / f"{SESSION}.mat", [noise(), noise(seed=1)], ["Yes.", "No."])
    data = scipy.io.loadmat(path)
    data["tx1"][0, 0] = data["tx1"][0, 0][:-5]  # shorter than its power
    kept = {name: data[name] for name in ("tx1", "spikePow", "sentenceText", "blockIdx")}
    scipy.io.savemat(path, kept)
    first, second = results(tmp_path)
    assert first.trial is None
    assert "differ in length" in first.problems[0].detail
    assert second.trial is not None
