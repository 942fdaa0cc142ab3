"""Files of frame scores: any class order, and one sentence for everything that is wrong with one."""

from pathlib import Path

import numpy as np
import pytest

from arcuate.data.alphabet import CLASSES
from arcuate.decoding.log_probs import read_log_probs
from arcuate.errors import UserError


def frames(n: int, n_classes: int = len(CLASSES), seed: int = 0) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(size=(n, n_classes))
    return (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float16)


def save(path: Path, **parts: object) -> Path:
    np.savez(path, **parts)  # type: ignore[arg-type]
    return path


def test_trials_come_apart_again(tmp_path: Path) -> None:
    logp = frames(9)
    path = save(tmp_path / "s.npz", logp=logp, lengths=[4, 0, 5], classes=CLASSES, trials=["a", "b", "c"])
    scores = read_log_probs(path)
    assert [len(t) for t in scores.trials] == [4, 0, 5] and scores.ids == ("a", "b", "c")
    assert np.array_equal(np.concatenate(scores.trials), logp) and scores.boundary == 40


def test_another_class_order_is_put_right(tmp_path: Path) -> None:
    logp = frames(6)
    order = np.random.default_rng(1).permutation(len(CLASSES))
    path = save(tmp_path / "s.npz", logp=logp[:, order], lengths=[6], classes=np.array(CLASSES)[order])
    scores = read_log_probs(path)
    assert scores.classes == CLASSES and np.array_equal(scores.trials[0], logp)


def test_folded_classes_become_the_boundary(tmp_path: Path) -> None:
    names = ["<ctc>", ">", ".", "a"]
    logp = frames(5, 4)
    scores = read_log_probs(save(tmp_path / "s.npz", logp=logp, lengths=[5], classes=names), ">", (".",))
    assert scores.classes == ("<ctc>", "a", ">")
    both = np.exp(logp[:, 1].astype(float)) + np.exp(logp[:, 2].astype(float))
    assert np.exp(scores.trials[0][:, -1]) == pytest.approx(both, rel=1e-3)


GOOD = {"logp": frames(6), "lengths": [6], "classes": CLASSES}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"lengths": [5]}, "lengths add up to 5"),
        ({"lengths": [-1, 7]}, "non-negative integers"),
        ({"lengths": [6.0]}, "non-negative integers"),
        ({"logp": np.zeros((6, 41), int)}, "floating-point"),
        ({"logp": frames(6, 40)}, "distinct class names"),
        ({"classes": ("x", *CLASSES[1:])}, "blank"),
        ({"classes": (*CLASSES[:-1], "AA")}, "distinct class names"),
        ({"trials": ["a", "b"]}, "2 ids"),
        ({"lengths": None}, "lacks lengths"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, change: dict, sentence: str) -> None:
    parts = {k: v for k, v in {**GOOD, **change}.items() if v is not None}
    with pytest.raises(UserError, match=sentence):
        read_log_probs(save(tmp_path / "s.npz", **parts))


def test_no_npz_no_pickle(tmp_path: Path) -> None:
    (tmp_path / "s.npz").write_bytes(b"nothing of the kind")
    with pytest.raises(UserError, match="not a readable"):
        read_log_probs(tmp_path / "s.npz")
    with pytest.raises(UserError, match="not a readable"):
        read_log_probs(save(tmp_path / "p.npz", **{**GOOD, "classes": np.array([object()])}))
    with pytest.raises(UserError, match="there is no file"):
        read_log_probs(tmp_path / "none.npz")


@pytest.mark.parametrize(
    ("boundary", "fold", "said"),
    [
        ("BLANK", (), "is the blank"),
        (None, ("BLANK",), "is the blank"),
        (None, ("SIL",), "already the boundary"),
    ],
)
def test_the_blank_is_no_boundary(
    boundary: str | None, fold: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "s.npz"
    np.savez(path, logp=np.full((2, 3), -np.log(3)), lengths=[2], classes=["BLANK", "a", "SIL"])
    with pytest.raises(UserError, match=said):
        read_log_probs(path, boundary, fold)


def test_lengths_that_overflow_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    lengths = np.array([2**63 - 1, 2**63 - 1, 4])  # adds up to 2 in 64 bits
    np.savez(path, logp=np.full((2, 3), -np.log(3)), lengths=lengths, classes=["BLANK", "a", "SIL"])
    with pytest.raises(UserError, match="add up to 18446744073709551618"):
        read_log_probs(path)


def test_a_text_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "s.npz").write_text("hello\n")
    with pytest.raises(UserError, match="not a zip archive") as told:
        read_log_probs(tmp_path / "s.npz")
    assert "pickle" not in str(told.value)
