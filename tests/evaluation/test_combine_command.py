"""`arcuate combine` as a user meets it: lists, runs, frame scores, refusals, no torch."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arcuate.cli._combine import Asked, combine_command
from arcuate.data.alphabet import CLASSES
from arcuate.decoding.log_probs import FrameLogProbs
from arcuate.errors import UserError
from arcuate.evaluation.combine.frames import read_named, write_frames


def asked(*sources: Path, **changes: Any) -> Asked:
    plain = Asked(
        list(sources), "auto", "val", None, "equal", 1.0, None, None, False, 5, None, None, None, None
    )
    return replace(plain, **changes)


def combine(capsys: pytest.CaptureFixture[str], request: Asked) -> dict[str, Any]:
    combine_command(request, as_json=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    return json.loads(lines[0], parse_constant=lambda c: pytest.fail(f"{c} in JSON"))


def write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    rows = [
        {"id": f"t{i}", "text": "a b c d", "candidates": ["a b c", "a b c d", "a b x d", "a b c d"]}
        for i in range(12)
    ]
    return write(tmp_path / "lists.jsonl", *rows)


def test_a_list_is_combined_scored_and_written(
    lists: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for method in ("auto", "linear", "mbr", "rover"):
        summary = combine(capsys, asked(lists, method=method, out=tmp_path / "out.jsonl"))
        assert summary["wer"] == 0.0 and summary["lm"] is None and summary["n_trials"] == 12
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert written[0]["text"] == "a b c d" and len(written[0]["nbest"]) == 4
    again = combine(capsys, asked(tmp_path / "out.jsonl", method="mbr"))
    assert again["wer"] == 0.0  # what was written can be combined again


def test_without_references_there_is_no_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "l.jsonl", {"candidates": ["a", "a"]}, {"candidates": []})
    summary = combine(capsys, asked(path, out=tmp_path / "out.jsonl"))
    assert summary["wer"] is None and summary["n_empty"] == 1
    assert "no candidates" not in (tmp_path / "out.jsonl").read_text()


def test_weights_are_fitted_kept_and_used_again(
    lists: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "w.yaml"
    summary = combine(capsys, asked(lists, fit=True, save_weights=weights))
    assert summary["cross_fitted"] is True and summary["wer_fitted_on_same_trials"] == 0.0
    again = combine(capsys, asked(lists, weights=weights))
    assert again["weights_from"] == str(weights) and again["wer"] == 0.0
    weights.write_text("weights: {agreement: 1.0}\n")
    with pytest.raises(UserError, match="same language models"):
        combine_command(asked(lists, weights=weights), as_json=True)
    weights.write_text("weights: {agreement: .nan, letters: 1, share: 1, length: 1}\n")
    with pytest.raises(UserError, match="finite"):
        combine_command(asked(lists, weights=weights), as_json=True)


def test_an_ngram_that_saw_the_sentences_is_named(
    lists: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marked = [
        json.loads(line) | {"in_lm_text": i < 3} for i, line in enumerate(lists.read_text().splitlines())
    ]
    path = write(tmp_path / "m.jsonl", *marked)
    combine_command(asked(path), as_json=True)
    captured = capsys.readouterr()
    assert "3 of 12 sentences" in captured.err and json.loads(captured.out)["wer_without_lm_text"] == 0.0


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"method": "best"}, "no method"),
        ({"voters": "some"}, "equal or agreement"),
        ({"method": "rover", "lm": "default"}, "linear"),
        ({"fit": True, "weights": Path("w")}, "one of the two"),
        ({"save_weights": Path("w")}, "--fit"),
        ({"method": "geometric"}, "at least two"),
    ],
)
def test_contradictions_are_refused(lists: Path, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        combine_command(asked(lists, **changes), as_json=True)


def test_fitting_needs_enough_references(tmp_path: Path) -> None:
    path = write(tmp_path / "l.jsonl", *({"id": i, "candidates": ["a", "b"]} for i in range(20)))
    with pytest.raises(UserError, match="--references"):
        combine_command(asked(path, fit=True), as_json=True)


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


def test_runs_vote_on_words_and_average_frames(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        make_run(tmp_path / "one", ["a b", "a"], frames_for(1, 0.9)),
        make_run(tmp_path / "two", ["a b", "a b"], frames_for(1, 0.6)),
        make_run(tmp_path / "three", ["c b", "a b"], frames_for(5, 0.7)),
    ]
    words = combine(capsys, asked(*runs, method="mbr", label="words"))
    assert words["wer"] == 0.0 and words["n_trials"] == 2
    for mean in ("arithmetic", "geometric"):
        pooled = combine(capsys, asked(*runs, method=mean, out=tmp_path / "mean.npz"))
        assert pooled["per"] == 0.0 and pooled["single_per"] == [0.0, 0.0, 1.0]
    assert read_named(tmp_path / "mean.npz").ids == ("s/val/0000", "s/val/0001")
    other = make_run(tmp_path / "other", ["a b", "a"], frames_for(1, 0.9), ids=["s/val/0000", "s/val/0007"])
    for method in ("mbr", "arithmetic"):
        with pytest.raises(UserError, match="same trials"):
            combine_command(asked(runs[0], other, method=method), as_json=True)


def test_runs_without_decodings_are_told_how_to_get_them(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", ["a"], frames_for(1, 0.9))
    (run / "results" / "val.scores.npz").unlink()
    with pytest.raises(UserError, match="arcuate evaluate"):
        combine_command(asked(run, run, method="arithmetic"), as_json=True)
    with pytest.raises(UserError, match="arcuate decode"):
        combine_command(asked(run, run, split="test"), as_json=True)
    with pytest.raises(UserError, match="one run alone"):
        combine_command(asked(run), as_json=True)


def test_combining_imports_no_torch(lists: Path) -> None:
    program = (
        "import sys\nfrom arcuate.cli import app\n"
        f"app(['combine', {str(lists)!r}, '--json'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["wer"] == 0.0


def test_the_models_behind_the_readings_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"id": "1", "reference": "a", "in_lm_text": True, "nbest": [{"text": "a", "score": -1.0}]}
    one = write(tmp_path / "one.jsonl", {**row, "lm": "first.alm"})
    two = write(tmp_path / "two.jsonl", {**row, "lm": "second.alm", "in_lm_text": None})
    assert combine(capsys, asked(one))["lm"] == "first.alm"
    assert combine(capsys, asked(one, two, out=tmp_path / "o.jsonl"))["lm"] == "first.alm / second.alm"
    written = json.loads((tmp_path / "o.jsonl").read_text())
    assert (written["lm"], written["in_lm_text"]) == ("first.alm / second.alm", True)


def test_phonemes_of_a_run_lead_to_decoding(tmp_path: Path) -> None:
    """A run that was evaluated has results, but none in words."""
    run = make_run(tmp_path / "one", ["a"], frames_for(1, 0.9))
    (run / "results" / "val.words.jsonl").unlink()
    write(run / "results" / "val.jsonl", {"trial": "0", "reference": ["AH"], "phonemes": ["AH"]})
    with pytest.raises(UserError, match=r"arcuate decode .*one --split val --out .*val\.words\.jsonl"):
        combine_command(asked(run, run, method="mbr"), as_json=True)


def test_targets_are_checked_before_the_work(lists: Path, tmp_path: Path) -> None:
    for out, said in ((lists, "read by"), (tmp_path, "is a folder"), (lists / "o.jsonl", "is not a folder")):
        with pytest.raises(UserError, match=said):
            combine_command(asked(lists, out=out), as_json=True)


def test_references_of_some_trials_are_told(
    lists: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = write(tmp_path / "bare.jsonl", *({"id": f"t{i}", "candidates": ["a b"]} for i in range(12)))
    few = write(tmp_path / "few.jsonl", *({"id": f"t{i}", "text": "a b"} for i in range(5)))
    combine_command(asked(bare, references=few), as_json=True)
    assert "5 of 12 trials have a reference" in capsys.readouterr().err


@pytest.mark.filterwarnings("error")
def test_scores_of_any_size_are_weighed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"id": "1", "text": "a", "candidates": ["a", "b", "b"], "scores": [1e308, -1e308, 0.0]}
    assert combine(capsys, asked(write(tmp_path / "l.jsonl", row), method="mbr", scale=100.0))["wer"] == 0.0
