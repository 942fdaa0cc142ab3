"""Lines of decoded sentences: what is read from them, references, and malformed lines."""

import json
from pathlib import Path

import pytest

from arcuate.errors import UserError
from arcuate.evaluation.sentences import Sentence, attach_references, read_decodings


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def test_texts_are_normalised_and_keep_their_reference(tmp_path: Path) -> None:
    path = write(
        tmp_path / "l.jsonl",
        {"id": "x", "text": "Yes, I do.", "candidates": ["Yes I do!", "", "yes"], "in_lm_text": True},
        {"id": 7, "text": "no", "nbest": [{"text": "no", "score": -1.5, "lm": -1}, {"text": "now", "score": -2}]},
    )
    first, second = read_decodings(path)
    assert first.texts == ("yes i do", "", "yes") and first.reference == "Yes, I do." and first.in_lm_text
    assert second.id == "7" and second.totals == (-1.5, -2.0) and second.n_best[0].scores == {"lm": -1.0}
    assert second.reference is None  # `text` of a line with n-best is the decoded text
    assert read_decodings(write(tmp_path / "again.jsonl", second.to_row())) == [second]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"id": "x"}, ["candidates"]),
        ({"id": "x", "candidates": "yes"}, ["list"]),
        ({"id": "x", "candidates": ["a", None]}, ["entry 2"]),
        ({"id": "x", "candidates": ["a", 3]}, ["entry 2"]),
        ({"id": "x", "candidates": ["a"], "scores": [1.0, 2.0]}, ["1 candidates", "2 scores"]),
        ({"id": "x", "candidates": ["a"], "scores": [float("nan")]}, ["finite"]),
        ({"id": "x", "candidates": ["a"], "scores": ["1"]}, ["finite"]),
        ({"id": "x", "candidates": ["a"], "text": 5}, ["reference"]),
        ({"id": "first", "candidates": ["a"]}, ["already on line 1", "first"]),
        ({"id": ["x"], "candidates": ["a"]}, ["id"]),
        ({"id": "x", "nbest": [{"text": "a", "score": 1.0}, {"text": "b"}]}, ["entry 2"]),
        ({"id": "x", "nbest": [{"text": "a", "score": 1.0, "acoustic": float("nan")}]}, ["acoustic", "finite"]),
        ({"id": "x", "nbest": {"text": "a"}}, ["list"]),
    ],
)
def test_errors_name_the_malformed_line(tmp_path: Path, row: object, words: list[str]) -> None:
    path = write(tmp_path / "l.jsonl", {"id": "first", "candidates": ["a"]}, row)
    with pytest.raises(UserError) as caught:
        read_decodings(path)
    assert all(word in str(caught.value) for word in ("line 2", *words)), caught.value


def test_files_without_lines_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    for name in ("empty.jsonl", "binary.jsonl", "absent.jsonl", "."):
        with pytest.raises(UserError):
            read_decodings(tmp_path / name)


def test_references_are_found_by_id_else_line_by_line(tmp_path: Path) -> None:
    trials = [Sentence("a"), Sentence("b")]
    path = write(tmp_path / "r.jsonl", {"id": "b", "text": "y", "session": "s", "in_lm_text": False})
    first, second = attach_references(trials, path)
    assert first.reference is None and (second.reference, second.session) == ("y", "s")
    unnamed = write(tmp_path / "u.jsonl", {"text": "x"}, {"text": "y"})
    assert [s.reference for s in attach_references(trials, unnamed)] == ["x", "y"]
    for rows, message in (
        ([{"id": "z", "text": "y"}], "no line with id 'a'"),
        ([{"id": "b", "text": "y"}, {"id": "b", "text": "y"}], "twice"),
        ([{"text": "x"}], "1 lines, but there are 2"),
        ([{"id": "a"}, {"id": "b"}], "no text"),
    ):
        with pytest.raises(UserError, match=message):
            attach_references(trials, write(tmp_path / "wrong.jsonl", *rows))
    with pytest.raises(UserError, match="no line with id 'a'"):
        attach_references(trials, path, complete=True)
