"""Submissions: order, counts, rejected inputs, and the files as a server parses them."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from arcuate.errors import UserError
from arcuate.evaluation.submission import (
    SubmittedText,
    check_count,
    count_empty,
    guess_format,
    read_texts,
    submit,
    write_submission,
)


def line(identity: str, text: Any) -> dict[str, Any]:
    return {"id": identity, "text": text, "nbest": [{"text": text, "score": -1.0}]}


def write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def test_rows_are_in_order_of_date_and_trial(tmp_path: Path) -> None:
    path = write(
        tmp_path / "h.jsonl",
        line("t15.2024.02.25/test/0000", "Third, really?"),
        line("t15.2023.11.04/test/0010", "second"),
        line("t15.2023.11.04/test/0002", "first"),
    )
    texts = read_texts(path)
    assert [a.text for a in texts] == ["first", "second", "third really"]
    write_submission(tmp_path / "s.csv", texts, "b2t25")
    with (tmp_path / "s.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [
            {"id": "0", "text": "first"},
            {"id": "1", "text": "second"},
            {"id": "2", "text": "third really"},
        ]
    write_submission(tmp_path / "s.txt", texts, "b2t24")
    assert (tmp_path / "s.txt").read_text() == "first\nsecond\nthird really\n"


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"trial": "t15.2023.11.04/test/0001", "text": "the truth", "hypothesis": ["AA"]}, "may be the reference"),
        (line("t15.2023.11.04/test/0001", None), "text is None"),
        (line("t15.2023.11.04/test/0001", float("nan")), "not a sentence"),
        (line("t15.2023.11.04_b1_t1", "a"), "does not name"),
        (line("t15.2023.11.04/test/0000", "again"), "more than once"),
    ],
)
def test_unusable_lines_are_rejected(tmp_path: Path, row: object, word: str) -> None:
    path = write(tmp_path / "h.jsonl", line("t15.2023.11.04/test/0000", "yes"), row)
    with pytest.raises(UserError, match=word):
        read_texts(path)


def test_empty_texts_need_allow_empty(tmp_path: Path) -> None:
    texts = [SubmittedText("t15.2023.11.04", 0, "yes"), SubmittedText("t15.2023.11.04", 1, "")]
    with pytest.raises(UserError, match="trial 1 of t15"):
        count_empty(texts, allow_empty=False)
    assert count_empty(texts, allow_empty=True) == 1
    write_submission(tmp_path / "s.csv", texts, "b2t25")
    with (tmp_path / "s.csv").open(newline="") as file:
        assert [row["text"] for row in csv.DictReader(file)] == ["yes", ""]


def test_the_official_count_is_checked() -> None:
    assert check_count("b2t25", "test", 1450)[0] is True
    assert check_count("b2t24", "test", 1200)[0] is True
    complete, note = check_count("b2t25", "test", 1449)
    assert complete is False and "1450" in note and "1449" in note
    assert check_count("b2t25", "val", 1450)[0] is None


def test_the_format_follows_the_participant() -> None:
    assert guess_format([SubmittedText("t12.2022.04.28", 0, "a")]) == "b2t24"
    assert guess_format([SubmittedText("t15.2023.08.13", 0, "a")]) == "b2t25"
    with pytest.raises(UserError, match="both"):
        guess_format([SubmittedText("t12.2022.04.28", 0, "a"), SubmittedText("t15.2023.08.13", 0, "a")])


def test_the_word_decodings_of_a_run_are_found(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("name: x\n")
    with pytest.raises(UserError, match="arcuate decode"):
        submit(run, tmp_path / "s.csv")
    truth = {"trial": "t15.2023.11.04/test/0000", "text": "the truth", "hypothesis": ["AA"]}
    write(run / "results" / "test.jsonl", truth)
    with pytest.raises(UserError, match="no nbest"):
        submit(run, tmp_path / "s.csv")
    assert not (tmp_path / "s.csv").exists()
    write(run / "results" / "test.words.jsonl", line("t15.2023.11.04/test/0000", "decoded words"))
    submission = submit(run, tmp_path / "s.csv")
    assert submission.n_rows == 1 and submission.complete is False and submission.format == "b2t25"
    json.dumps(submission.to_dict())
    assert (tmp_path / "s.csv").read_text() == "id,text\n0,decoded words\n"


def test_decodings_are_not_overwritten_by_their_submission(tmp_path: Path) -> None:
    hyps = write(tmp_path / "h.jsonl", line("t15.2023.08.13_test_1", "a"))
    with pytest.raises(UserError, match="is an input of this command"):
        submit(hyps, hyps)
    with pytest.raises(UserError, match="is a folder"):
        submit(hyps, tmp_path)


def test_gaps_and_other_splits_are_refused_by_name(tmp_path: Path) -> None:
    gap = write(tmp_path / "h.jsonl", *(line(f"t15.2023.11.04/test/{n:04d}", "yes") for n in (0, 1, 3)))
    with pytest.raises(UserError, match=r"1 trials are missing, the first is trial 2 of t15\.2023\.11\.04"):
        submit(gap, tmp_path / "s.csv")
    other = write(tmp_path / "v.jsonl", *(line(f"t15.2023.11.04/val/{n:04d}", "yes") for n in (0, 1)))
    with pytest.raises(UserError, match=r"line 1: t15\.2023\.11\.04/val/0000 is a trial of the split val, not test"):
        submit(other, tmp_path / "s.csv")
    assert not (tmp_path / "s.csv").exists()
    assert submit(other, tmp_path / "s.csv", split="val").n_rows == 2


def test_only_earlier_submissions_are_replaced(tmp_path: Path) -> None:
    hyps = write(tmp_path / "h.jsonl", line("t15.2023.11.04/test/0000", "yes"))
    notes = tmp_path / "notes.txt"
    notes.write_text("Remember the milk.\n")
    for form in ("b2t25", "b2t24"):
        with pytest.raises(UserError, match="not an earlier"):
            submit(hyps, notes, format=form)
        for _ in range(2):
            submit(hyps, tmp_path / form, format=form)
    assert notes.read_text() == "Remember the milk.\n"
