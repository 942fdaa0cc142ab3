"""Files of frame log-probabilities: any class order, and one clear message per problem."""

from pathlib import Path

import numpy as np
import pytest

from arcuate.data.alphabet import CLASSES
from arcuate.decoding.class_order import word_order
from arcuate.decoding.frame_files import read_frames
from arcuate.errors import UserError


def frames(n: int, n_classes: int = len(CLASSES), seed: int = 0) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(size=(n, n_classes))
    return (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float16)


def save(path: Path, **parts: object) -> Path:
    np.savez(path, **parts)  # type: ignore[arg-type]
    return path


def test_trials_are_split(tmp_path: Path) -> None:
    logp = frames(9)
    path = save(tmp_path / "s.npz", logp=logp, lengths=[4, 0, 5], classes=CLASSES, trials=["a", "b", "c"])
    loaded = read_frames(path)
    assert [len(t) for t in loaded.trials] == [4, 0, 5] and loaded.ids == ("a", "b", "c")
    assert np.array_equal(np.concatenate(loaded.trials), logp) and loaded.boundary == 40


def test_classes_are_reordered(tmp_path: Path) -> None:
    logp = frames(6)
    order = np.random.default_rng(1).permutation(len(CLASSES))
    path = save(tmp_path / "s.npz", logp=logp[:, order], lengths=[6], classes=np.array(CLASSES)[order])
    loaded = read_frames(path)
    assert loaded.classes == CLASSES and np.array_equal(loaded.trials[0], logp)


def test_punctuation_becomes_the_boundary_of_words() -> None:
    logp, order = frames(5, 4), word_order(["<ctc>", ".", "a", ">"])
    assert order.classes == ("<ctc>", "a", ">") and order.boundary == 2
    both = np.exp(logp[:, 1].astype(float)) + np.exp(logp[:, 3].astype(float))
    assert np.exp(order(logp)[:, -1]) == pytest.approx(both, rel=1e-3)


GOOD = {"logp": frames(6), "lengths": [6], "classes": CLASSES}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": [5]}, "lengths add up to 5"),
        ({"lengths": [-1, 7]}, "non-negative integers"),
        ({"lengths": [5.5]}, "non-negative integers"),
        ({"logp": np.zeros((6, 41), int)}, "scores are int64"),
        ({"logp": frames(6, 40)}, "classes must be a list of 40 names"),
        ({"classes": ("x", *CLASSES[1:])}, "blank"),
        ({"classes": (*CLASSES[:-1], "AA")}, "distinct class names"),
        ({"trials": ["a", "b"]}, "trials must be a list of 1"),
        ({"lengths": None}, "lacks lengths"),
    ],
)
def test_invalid_files_are_rejected(tmp_path: Path, change: dict, message: str) -> None:
    parts = {k: v for k, v in {**GOOD, **change}.items() if v is not None}
    with pytest.raises(UserError, match=message):
        read_frames(save(tmp_path / "s.npz", **parts))


def test_other_files_and_pickles_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "s.npz").write_bytes(b"not an archive")
    with pytest.raises(UserError, match="not a readable"):
        read_frames(tmp_path / "s.npz")
    with pytest.raises(UserError, match="not a readable"):
        read_frames(save(tmp_path / "p.npz", **{**GOOD, "classes": np.array([object()])}))
    with pytest.raises(UserError, match="write frame log-prob"):
        read_frames(tmp_path / "none.npz")


def test_lengths_that_overflow_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    lengths = np.array([2**63 - 1, 2**63 - 1, 4])  # adds up to 2 in 64 bits
    np.savez(path, logp=np.full((2, 3), -np.log(3)), lengths=lengths, classes=["BLANK", "a", "SIL"])
    with pytest.raises(UserError, match="add up to 18446744073709551618"):
        read_frames(path)


def test_a_text_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "s.npz").write_text("hello\n")
    with pytest.raises(UserError, match="not a zip archive") as error:
        read_frames(tmp_path / "s.npz")
    assert "pickle" not in str(error.value)
