"""`combine`: candidate files, runs, means of frame scores, rejected options, no torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arcuate.data.alphabet import CLASSES
from arcuate.decoding.frame_files import FrameLogProbs, write_frames
from arcuate.errors import UserError
from arcuate.evaluation.combine import average, combine, mean_frames, read_frames
from arcuate.files import to_json_line


def summary_of(*sources: Path, **options: Any) -> dict[str, Any]:
    """The JSON output of a combination."""
    line = to_json_line(combine(*sources, **options).to_dict())
    return json.loads(line, parse_constant=lambda c: pytest.fail(f"{c} in JSON"))


def write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    rows = [
        {"id": f"t{i}", "text": "a b c d", "candidates": ["a b c", "a b c d", "a b x d", "a b c d"]} for i in range(12)
    ]
    return write(tmp_path / "lists.jsonl", *rows)


def test_candidates_are_combined_scored_and_written(lists: Path, tmp_path: Path) -> None:
    for method in ("auto", "linear", "mbr"):
        summary = summary_of(lists, method=method, out=tmp_path / "out.jsonl")
        assert summary["wer"] == 0.0 and summary["lm"] is None and summary["n_trials"] == 12
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert written[0]["text"] == "a b c d" and len(written[0]["nbest"]) == 4
    again = summary_of(tmp_path / "out.jsonl", method="mbr")
    assert again["wer"] == 0.0  # what was written can be combined again


def test_without_references_there_is_no_rate(tmp_path: Path) -> None:
    path = write(tmp_path / "l.jsonl", {"candidates": ["a", "a"]}, {"candidates": []})
    summary = summary_of(path, out=tmp_path / "out.jsonl")
    assert summary["wer"] is None and summary["n_empty"] == 1
    assert "no candidates" not in (tmp_path / "out.jsonl").read_text()


def test_weights_are_fitted_saved_and_reused(lists: Path, tmp_path: Path) -> None:
    weights = tmp_path / "w.yaml"
    summary = summary_of(lists, fit=True, weights=weights)
    assert summary["cross_fitted"] is True and summary["wer_fitted_on_same_trials"] == 0.0
    again = summary_of(lists, weights=weights)
    assert again["weights_from"] == str(weights) and again["wer"] == 0.0
    weights.write_text("weights: {agreement: 1.0}\n")
    with pytest.raises(UserError, match="same language models"):
        combine(lists, weights=weights)
    weights.write_text("weights: {agreement: .nan, letters: 1, share: 1, length: 1}\n")
    with pytest.raises(UserError, match="finite"):
        combine(lists, weights=weights)


def test_leakage_is_reported(lists: Path, tmp_path: Path, messages: list[str]) -> None:
    marked = [json.loads(line) | {"in_lm_text": i < 3} for i, line in enumerate(lists.read_text().splitlines())]
    path = write(tmp_path / "m.jsonl", *marked)
    assert summary_of(path)["wer_without_lm_text"] == 0.0
    assert any("3 of 12 sentences" in message for message in messages)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"method": "best"}, "no method"),
        ({"method": "mbr", "lm": "default"}, "linear"),
        ({"method": "geometric"}, "at least two"),
    ],
)
def test_contradicting_options_are_rejected(lists: Path, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        combine(lists, **changes)


def make_run(folder: Path, texts: list[str], frames: np.ndarray, ids: list[str] | None = None) -> Path:
    names = ids or [f"s/val/{i:04d}" for i in range(len(texts))]
    folder.mkdir()
    (folder / "recipe.yaml").write_text("name: x\n")
    rows = (
        {"id": n, "text": t, "reference": "a b", "nbest": [{"text": t, "score": -1.0}]}
        for n, t in zip(names, texts, strict=True)
    )
    write(folder / "results" / "val.words.jsonl", *rows)
    labels = ({"trial": n, "text": "a b", "reference": ["AA"], "hypothesis": []} for n in names)
    write(folder / "results" / "val.jsonl", *labels)
    scores = FrameLogProbs(CLASSES, tuple(frames for _ in names), tuple(names), folder.name)
    write_frames(folder / "results" / "val.scores.npz", scores)
    return folder


def frames_for(token: int, p: float) -> np.ndarray:
    values = np.full((2, len(CLASSES)), (1 - p) / (len(CLASSES) - 1))
    values[:, token] = p
    return np.log(values).astype(np.float32)


def test_runs_vote_on_words_and_average_frames(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "one", ["a b", "a"], frames_for(1, 0.9)),
        make_run(tmp_path / "two", ["a b", "a b"], frames_for(1, 0.6)),
        make_run(tmp_path / "three", ["c b", "a b"], frames_for(5, 0.7)),
    ]
    words = summary_of(*runs, method="mbr", label="words")
    assert words["wer"] == 0.0 and words["n_trials"] == 2
    pooled = summary_of(*runs, method="geometric", out=tmp_path / "mean.npz")
    assert pooled["per"] == 0.0 and pooled["single_per"] == [0.0, 0.0, 1.0] and pooled["best_single"] == 1
    assert read_frames(tmp_path / "mean.npz").ids == ("s/val/0000", "s/val/0001")
    other = make_run(tmp_path / "other", ["a b", "a"], frames_for(1, 0.9), ids=["s/val/0000", "s/val/0007"])
    for method in ("mbr", "geometric"):
        with pytest.raises(UserError, match="same trials"):
            combine(runs[0], other, method=method)


def test_missing_decodings_name_the_command_that_writes_them(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", ["a"], frames_for(1, 0.9))
    (run / "results" / "val.scores.npz").unlink()
    with pytest.raises(UserError, match="arcuate evaluate"):
        combine(run, run, method="geometric")
    with pytest.raises(UserError, match="arcuate decode"):
        combine(run, run, split="test")
    with pytest.raises(UserError, match="one run alone"):
        combine(run)


def test_combining_imports_no_torch(lists: Path) -> None:
    program = (
        "import sys\nfrom arcuate.cli import run\n"
        f"run(['combine', {str(lists)!r}, '--json'])\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["wer"] == 0.0


def test_the_language_models_of_the_decoders_are_named(tmp_path: Path) -> None:
    row = {"id": "1", "reference": "a", "in_lm_text": True, "nbest": [{"text": "a", "score": -1.0}]}
    one = write(tmp_path / "one.jsonl", {**row, "lm": "first.alm"})
    two = write(tmp_path / "two.jsonl", {**row, "lm": "second.alm", "in_lm_text": None})
    assert summary_of(one)["lm"] == "first.alm"
    assert summary_of(one, two, out=tmp_path / "o.jsonl")["lm"] == "first.alm / second.alm"
    written = json.loads((tmp_path / "o.jsonl").read_text())
    assert (written["lm"], written["in_lm_text"]) == ("first.alm / second.alm", True)


def normalised(seed: int, n_frames: int = 4) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(size=(n_frames, 3))
    return (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)


def test_the_mean_of_frames_is_normalised_and_keeps_equal_models() -> None:
    pooled = mean_frames([normalised(0), normalised(1)])
    assert np.exp(pooled).sum(axis=1) == pytest.approx(np.ones(4), abs=1e-5)
    assert mean_frames([normalised(0)] * 3) == pytest.approx(normalised(0), abs=1e-5)
    difference = pooled - (normalised(0) + normalised(1)) / 2
    assert difference == pytest.approx(np.repeat(difference[:, :1], 3, axis=1), abs=1e-5)


@pytest.mark.parametrize(
    ("frames", "message"),
    [(normalised(0, 5), "4 frames in a and 5 in b"), (np.full((4, 3), np.nan, np.float32), "NaN")],
)
def test_averaging_requires_the_same_frame_counts(frames: np.ndarray, message: str) -> None:
    models = zip("ab", (normalised(0), frames), strict=True)
    with pytest.raises(UserError, match=message):
        average([FrameLogProbs(("BLANK", "A", "B"), (own,), ("t1",), name) for name, own in models])


def test_outputs_are_checked_first(lists: Path, tmp_path: Path) -> None:
    for out, message in ((lists, "is an input"), (tmp_path, "is a folder"), (lists / "o.jsonl", "is not a folder")):
        with pytest.raises(UserError, match=message):
            combine(lists, out=out)


def test_references_for_some_trials_are_reported(tmp_path: Path, messages: list[str]) -> None:
    bare = write(tmp_path / "bare.jsonl", *({"id": f"t{i}", "candidates": ["a b"]} for i in range(20)))
    few = write(tmp_path / "few.jsonl", *({"id": f"t{i}", "text": "a b"} for i in range(5)))
    combine(bare, references=few)
    assert any("5 of 20 trials have a reference" in message for message in messages)
    with pytest.raises(UserError, match="add --references"):
        combine(bare, references=few, fit=True)


@pytest.mark.filterwarnings("error")
def test_scores_of_any_size_are_accepted(tmp_path: Path) -> None:
    row = {"id": "1", "text": "a", "candidates": ["a", "b", "b"], "scores": [1e99, -1e99, 0.0]}
    assert summary_of(write(tmp_path / "l.jsonl", row), method="mbr")["wer"] == 0.0
