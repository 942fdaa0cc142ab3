"""Handwriting of T5: CORP sessions and the sentences of the release of 2021."""

from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from arcuate.data.alphabet import CHARACTERS, token_names
from arcuate.data.describe import describe_file
from arcuate.data.prepare import prepare
from arcuate.errors import UserError


def cells(values: list) -> np.ndarray:
    out = np.empty((1, len(values)), object)
    for i, value in enumerate(values):
        out[0, i] = value
    return out


def write(path: Path, n_trials: int = 10, **changes: object) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    bins = [rng.poisson(1.0, (40 + i, 5)).astype(np.uint8) for i in range(n_trials)]
    content = {
        "tx_feats": cells(bins),
        "sentences": cells([np.array(["hi>you,~"]) for _ in bins]),
        "blocks": cells([np.array([[3 + i // 5]]) for i in range(n_trials)]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, content | changes)
    return bins


def test_trials_of_a_session(tmp_path: Path) -> None:
    bins = write(tmp_path / "corp" / "t5.2022.05.18.mat")
    store = prepare(tmp_path / "corp", tmp_path / "store", layout="corp")
    assert [t.split for t in store.trials] == ["train"] * 8 + ["val", "test"]
    assert store.classes == CHARACTERS and store.sessions == ("t5.2022.05.18",)
    for trial, values in zip(store.trials, bins, strict=True):
        np.testing.assert_array_equal(store.read_bins(trial), values.astype(np.float32))
        assert trial.text == "hi you,." and "".join(token_names(trial.tokens or (), CHARACTERS)) == "hi>you,~"
    assert [t.block for t in store.trials] == [3] * 5 + [4] * 5
    assert "corp" in describe_file(tmp_path / "corp" / "t5.2022.05.18.mat").notes[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"blocks": np.zeros(3)}, "not a cell array"), ({"sentences": cells(["a"])}, "different numbers")],
)
def test_wrong_files_are_reported(tmp_path: Path, change: dict, message: str) -> None:
    write(tmp_path / "corp" / "t5.2022.05.18.mat", **change)
    with pytest.raises(UserError, match=message):
        prepare(tmp_path / "corp", tmp_path / "store", layout="corp")


def test_a_trial_without_bins_is_missing(tmp_path: Path) -> None:
    write(tmp_path / "corp" / "t5.2022.05.18.mat", tx_feats=cells([np.zeros((40, 5))] * 9 + [np.zeros((2, 2, 2))]))
    report = prepare(tmp_path / "corp", tmp_path / "store", layout="corp").report
    assert report is not None and report.trials == 9 and "(2, 2, 2)" in report.unreadable[0].detail


def write_sentences(path: Path, **changes: object) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    cube = rng.poisson(0.5, (10, 81, 5)).astype(np.uint8)
    lengths = np.arange(60, 80, 2).reshape(-1, 1) + 1  # an odd bin at the end
    prompts = np.array([["hi>you,~"]] * 8 + [["what>#now?"]] * 2, dtype=object)
    content = {"neuralActivityCube": cube, "numTimeBinsPerSentence": lengths, "sentencePrompt": prompts}
    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, content | {"sentenceBlockNums": np.repeat([[4], [6]], 5, 0), "other": np.zeros(3)} | changes)
    return cube, lengths.ravel()


def test_sentences_of_the_release_of_2021(tmp_path: Path) -> None:
    path = tmp_path / "Datasets" / "t5.2019.05.08" / "sentences.mat"
    cube, lengths = write_sentences(path)
    savemat(path.with_name("singleLetters.mat"), {"neuralActivityCube_a": cube})
    store = prepare(tmp_path / "Datasets", tmp_path / "store", layout="handwriting")
    assert store.sessions == ("t5.2019.05.08",) and [t.split for t in store.trials] == ["train"] * 8 + ["val", "test"]
    assert [t.block for t in store.trials] == [4] * 5 + [6] * 5
    for trial, values, n in zip(store.trials, cube, lengths, strict=True):
        expected = values[: n - 1 : 2].astype(np.float32) + values[1:n:2]
        np.testing.assert_array_equal(store.read_bins(trial), expected)
    assert store.trials[0].text == "hi you,." and store.trials[9].text == "what now?"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"neuralActivityCube": np.zeros((3, 4))}, "expected .sentences, bins, channels"),
        ({"sentenceBlockNums": np.zeros(3)}, "the same 10 sentences"),
        ({"sentencePrompt": np.zeros(10)}, "not a cell array"),
    ],
)
def test_wrong_sentences_are_reported(tmp_path: Path, change: dict, message: str) -> None:
    write_sentences(tmp_path / "Datasets" / "t5.2019.05.08" / "sentences.mat", **change)
    with pytest.raises(UserError, match=message):
        prepare(tmp_path / "Datasets", tmp_path / "store", layout="handwriting")


def test_a_folder_without_sentences(tmp_path: Path) -> None:
    write(tmp_path / "corp" / "t5.2022.05.18.mat")
    with pytest.raises(UserError, match="no <session>/sentences"):
        prepare(tmp_path / "corp", tmp_path / "store", layout="handwriting")
