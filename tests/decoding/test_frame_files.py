"""Files of frame scores: .npz, .npy with JSON, .mat and pickles, in any class order; one sentence per problem."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import savemat

from arcuate.data.alphabet import CHARACTERS, CLASSES, encode, token_names
from arcuate.data.text import text_to_tokens
from arcuate.decoding.class_order import word_order
from arcuate.decoding.frame_files import FrameLogProbs, read_frames, write_frames
from arcuate.decoding.hypothesis import greedy
from arcuate.errors import UserError

LM_ORDER = ("BLANK", "SIL", *CLASSES[1:-1])
WORDS = ["HH AY SIL", "Y EH S SIL"]


def frames_of(names: str, order: tuple[str, ...] = CLASSES) -> np.ndarray:
    """Logits whose greedy output is the given tokens."""
    tokens = encode(names.split(), order)
    logits = np.random.default_rng(0).normal(size=(2 * len(tokens), len(order)))
    for i, token in enumerate(tokens):
        logits[2 * i, token] += 20
        logits[2 * i + 1, 0] += 20
    return logits


def decoded(path: Path) -> list[str]:
    scores = read_frames(path)
    assert all(np.allclose(np.exp(frames).sum(axis=1), 1, atol=1e-5) for frames in scores.trials)
    return [" ".join(token_names(greedy(frames), scores.classes)) for frames in scores.trials]


@pytest.fixture
def logits() -> list[np.ndarray]:
    return [frames_of(names) for names in WORDS]


def padded(parts: list[np.ndarray]) -> np.ndarray:
    out = np.zeros((len(parts), max(map(len, parts)), parts[0].shape[1]))
    for row, part in zip(out, parts, strict=True):
        row[: len(part)] = part
    return out


def test_npz_with_logits(tmp_path: Path, logits: list[np.ndarray]) -> None:
    lengths = np.array([len(part) for part in logits])
    np.savez(tmp_path / "joined.npz", logits=np.concatenate(logits), lengths=lengths, texts=np.array(["hi", "yes"]))
    np.savez(tmp_path / "padded.npz", logits=padded(logits), lengths=lengths, trials=np.array(["a", "b"]))
    assert decoded(tmp_path / "joined.npz") == decoded(tmp_path / "padded.npz") == WORDS
    assert read_frames(tmp_path / "joined.npz").texts == ("hi", "yes")
    assert read_frames(tmp_path / "padded.npz").ids == ("a", "b")


def test_npy_with_json(tmp_path: Path, logits: list[np.ndarray]) -> None:
    np.save(tmp_path / "x.npy", np.concatenate(logits).astype(np.float32))
    with pytest.raises(UserError, match=r"x\.json"):
        read_frames(tmp_path / "x.npy")
    about = {"lengths": [len(part) for part in logits], "classes": list(CLASSES), "texts": ["hi", None]}
    (tmp_path / "x.json").write_text(json.dumps(about), "utf-8")
    assert decoded(tmp_path / "x.npy") == WORDS and read_frames(tmp_path / "x.npy").texts == ("hi", None)


def test_mat(tmp_path: Path, logits: list[np.ndarray]) -> None:
    cells = np.empty((1, 2), object)
    cells[0, 0], cells[0, 1] = logits
    savemat(tmp_path / "x.mat", {"logits": cells, "texts": np.array(["hi", "yes"], object)})
    assert decoded(tmp_path / "x.mat") == WORDS and read_frames(tmp_path / "x.mat").texts == ("hi", "yes")


@pytest.mark.parametrize("order", [CLASSES, LM_ORDER])
def test_the_copy_task_pickle_reveals_its_order(tmp_path: Path, order: tuple[str, ...]) -> None:
    """Silence is second in the order of the language model; what was decoded online tells which order it is."""
    content = {
        "cue_sentence": ["hi", "yes"],
        "decoded_phonemes_raw": [names.split() for names in WORDS],
        "rnn_logits": [frames_of(names, order)[None] for names in WORDS],
    }
    (tmp_path / "t15.pkl").write_bytes(pickle.dumps(content))
    found = read_frames(tmp_path / "t15.pkl")
    assert decoded(tmp_path / "t15.pkl") == WORDS and found.texts == ("hi", "yes")


def in_order(order: tuple[str, ...], texts: list[str]) -> list[np.ndarray]:
    """Trials that say the texts, of different lengths."""
    return [frames_of(" ".join(token_names(text_to_tokens(text)[0])), order) for text in texts]


SENTENCES = ["we will see it", "hello there", "a day for you and me"]
ARRANGEMENTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "per trial": lambda entries: {key: list(value) for key, value in entries.items()},
    "per batch": lambda entries: {key: [value[:2], value[2:]] for key, value in entries.items()},
    "records": lambda entries: [
        {key: value[i : i + 1] if key == "logits" else value[i] for key, value in entries.items()} for i in range(3)
    ],
}


@pytest.mark.parametrize("arranged", ARRANGEMENTS)
@pytest.mark.parametrize("length", ["adjusted_lens", "adjusted_len", "n_time_steps"])
@pytest.mark.parametrize("order", [CLASSES, LM_ORDER], ids=["silence last", "silence second"])
@pytest.mark.parametrize("with_texts", [True, False], ids=["texts", "no texts"])
def test_records_of_other_decoders(tmp_path: Path, arranged: str, length: str, order: tuple, with_texts: bool) -> None:
    """Padding is cut off, and the order of the classes is found from the texts or from the frequency of silence."""
    parts = in_order(order, SENTENCES)
    n_frames = np.array([len(part) for part in parts])
    entries: dict[str, Any] = {"logits": padded(parts), length: n_frames}
    if length == "n_time_steps":  # of the '25 trainer: patches of 14 bins, every 4
        entries[length] = 14 + 4 * (n_frames - 1) + np.array([0, 3, 1])
    if with_texts:  # character codes, 0 at the end
        entries["transcription"] = np.array([[*map(ord, text), *[0] * (40 - len(text))] for text in SENTENCES])
    content = ARRANGEMENTS[arranged](entries)
    if arranged == "per batch":  # padded to the longest trial of the batch
        content["logits"] = [padded(parts[:2]), padded(parts[2:])]
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(content))
    scores = read_frames(tmp_path / "x.pkl")
    assert [len(trial) for trial in scores.trials] == n_frames.tolist()
    assert [token_names(greedy(trial)) for trial in scores.trials] == [
        token_names(text_to_tokens(text)[0]) for text in SENTENCES
    ]
    assert scores.texts == (tuple(SENTENCES) if with_texts else None)
    said = scores.summary(n_references=3 if with_texts else 0)
    assert f"`{length}`" in said and ("references" if with_texts else "probability of silence") in said


def test_references_beside_the_file_tell_the_order(tmp_path: Path) -> None:
    parts = in_order(LM_ORDER, SENTENCES)
    np.savez(tmp_path / "x.npz", logits=padded(parts), lengths=[len(part) for part in parts])
    scores = read_frames(tmp_path / "x.npz", lambda n, ids: SENTENCES)
    assert token_names(greedy(scores.trials[1])) == token_names(text_to_tokens(SENTENCES[1])[0])
    assert "found from the references" in scores.order


def test_characters_have_a_known_order(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", logits=frames_of("h i > y o u", CHARACTERS))
    assert decoded(tmp_path / "x.npz") == ["h i > y o u"]


def test_scores_of_evaluate_in_any_order_of_classes(tmp_path: Path, logits: list[np.ndarray]) -> None:
    log_probs = tuple((x - np.log(np.exp(x).sum(1, keepdims=True))).astype(np.float16) for x in logits)
    trials = (log_probs[0], log_probs[0][:0], log_probs[1])
    path = tmp_path / "scores.npz"
    write_frames(path, FrameLogProbs(CLASSES, trials, ("a", "b", "c"), "scores"))
    found = read_frames(path)
    assert found.ids == ("a", "b", "c") and found.boundary == 40
    assert all(np.array_equal(a, b) for a, b in zip(found.trials, trials, strict=True))
    order = np.random.default_rng(1).permutation(len(CLASSES))
    shuffled = np.concatenate(trials)[:, order]
    np.savez(path, logp=shuffled, lengths=[len(t) for t in trials], classes=np.array(CLASSES)[order])
    again = read_frames(path)
    assert again.classes == CLASSES and np.array_equal(again.trials[0], trials[0])


def test_punctuation_becomes_the_boundary_of_words() -> None:
    log_probs, order = np.log(np.array([[0.1, 0.2, 0.3, 0.4]])), word_order(["<ctc>", ".", "a", ">"])
    assert order.classes == ("<ctc>", "a", ">") and order.boundary == 2
    assert np.exp(order(log_probs)) == pytest.approx(np.array([[0.1, 0.3, 0.6]]), rel=1e-3)


SCORES = np.log(np.full((6, 41), 1 / 41, np.float32))
GOOD = {"logp": SCORES, "lengths": [6], "classes": CLASSES}
PADDED = {"logits": padded(in_order(CLASSES, SENTENCES))}
EVEN = {"logits": np.random.default_rng(0).normal(size=(2, 30, 41)), "lengths": [30, 30]}
WRONG_ARCHIVES: list[tuple[dict[str, Any], str]] = [
    (GOOD | {"lengths": [5]}, "lengths add up to 5"),
    (GOOD | {"lengths": [-1, 7]}, "non-negative integers"),
    (GOOD | {"lengths": [5.5]}, "non-negative integers"),
    (GOOD | {"lengths": np.array([2**63 - 1, 2**63 - 1, 8])}, "add up to 18446744073709551622"),
    (GOOD | {"logp": np.zeros((6, 41), int)}, "scores are int64"),
    (GOOD | {"logp": SCORES[:, :40]}, "classes must be a list of 40 names"),
    (GOOD | {"classes": ("x", *CLASSES[1:])}, "blank"),
    (GOOD | {"classes": (*CLASSES[:-1], "AA")}, "distinct class names"),
    (GOOD | {"classes": np.array([object()])}, "not a readable"),
    (GOOD | {"trials": ["a", "b"]}, "trials must be a list of 1"),
    ({"logp": SCORES, "classes": CLASSES}, "lacks lengths"),
    (PADDED, "last .* of .* frames are equal, as in padding, .* store the frames of every trial as `lengths`"),
    (PADDED | {"n_time_steps": [30, 31, 32]}, "does not follow from `n_time_steps`"),
    (PADDED | {"adjusted_lens": [1, 2, 999]}, "3 lengths do not fit 3 trials"),
    (PADDED | {"adjusted_lens": [1.5, 2, 3]}, "adjusted_lens must be non-negative integers"),
    (EVEN, r"silence is the second or the last .* store the names as `classes`"),
]
WRONG_PICKLES: list[tuple[Any, str]] = [
    ({"logits": [np.eye(3, 7)]}, "does not name its 7 classes"),
    ({"other": [1]}, "no entry with logits"),
    ({"logits": []}, "0 trials"),
    ({"logits": [np.full((3, 41), np.nan)]}, "NaN"),
    ({"logits": [np.eye(3, 41), -1e200 * np.eye(3, 41)]}, r"trial 1: logits reach 1e\+200"),
    ({"logits": [np.eye(3, 41), np.eye(3, 40)]}, "different numbers"),
    ({"logits": [np.zeros(3)]}, "expected"),
    ({"logits": [np.eye(3, 41)], "texts": ["a", "b"]}, "texts must be a list of 1"),
    (17, "expected a dict"),
]


@pytest.mark.parametrize(("entries", "message"), WRONG_ARCHIVES)
def test_wrong_archives_are_explained(tmp_path: Path, entries: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "x.npz", **entries)
    with pytest.raises(UserError, match=message):
        read_frames(tmp_path / "x.npz")


@pytest.mark.parametrize(("content", "message"), WRONG_PICKLES)
def test_wrong_pickles_are_explained(tmp_path: Path, content: Any, message: str) -> None:
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match=message):
        read_frames(tmp_path / "x.pkl")


def test_other_files_are_refused_and_no_code_is_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            import os

            return os.system, (f"touch {tmp_path / 'ran'}",)

    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"logits": [Evil()]}))
    (tmp_path / "text.npz").write_text("hello\n")
    for name, message in (("x.pkl", "x.pkl"), ("text.npz", "not a zip archive"), ("none.npz", "write frame log-prob")):
        with pytest.raises(UserError, match=message):
            read_frames(tmp_path / name)
    assert not (tmp_path / "ran").exists()
