"""Submissions: order, counts, what is refused, and the files as a server reads them."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from arcuate.errors import UserError
from arcuate.evaluation.submission import (
    Answer,
    check_answers,
    count_note,
    guess_format,
    read_answers,
    write_submission,
)


def line(identity: str, text: Any) -> dict[str, Any]:
    return {"id": identity, "text": text, "nbest": [{"text": text, "score": -1.0}]}


def write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def test_rows_stand_by_date_then_trial(tmp_path: Path) -> None:
    path = write(
        tmp_path / "h.jsonl",
        line("t15.2024.02.25/test/0000", "Third, really?"),
        line("t15.2023.11.04/test/0010", "second"),
        line("t15.2023.11.04/test/0002", "first"),
    )
    answers = read_answers(path)
    assert [a.text for a in answers] == ["first", "second", "third really"]
    write_submission(tmp_path / "s.csv", answers, "b2t25")
    with (tmp_path / "s.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [
            {"id": "0", "text": "first"},
            {"id": "1", "text": "second"},
            {"id": "2", "text": "third really"},
        ]
    write_submission(tmp_path / "s.txt", answers, "b2t24")
    assert (tmp_path / "s.txt").read_text() == "first\nsecond\nthird really\n"


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"trial": "t15.2023.11.04/test/0001", "text": "the truth", "hypothesis": ["AA"]}, "truth"),
        (line("t15.2023.11.04/test/0001", None), "text is None"),
        (line("t15.2023.11.04/test/0001", float("nan")), "not a sentence"),
        (line("t15.2023.11.04_b1_t1", "a"), "does not name"),
        (line("t15.2023.11.04/test/0000", "again"), "more than once"),
    ],
)
def test_what_cannot_be_handed_in_is_refused(tmp_path: Path, row: object, word: str) -> None:
    path = write(tmp_path / "h.jsonl", line("t15.2023.11.04/test/0000", "yes"), row)
    with pytest.raises(UserError, match=word):
        read_answers(path)


def test_empty_texts_need_a_word_of_consent(tmp_path: Path) -> None:
    answers = [Answer("t15.2023.11.04", 0, "yes"), Answer("t15.2023.11.04", 1, "")]
    with pytest.raises(UserError, match="trial 1 of t15"):
        check_answers(answers, allow_empty=False)
    assert check_answers(answers, allow_empty=True) == 1
    write_submission(tmp_path / "s.csv", answers, "b2t25")
    with (tmp_path / "s.csv").open(newline="") as file:
        assert [row["text"] for row in csv.DictReader(file)] == ["yes", ""]


def test_the_official_count_is_checked() -> None:
    assert count_note("b2t25", "test", 1450)[0] is True
    assert count_note("b2t24", "test", 1200)[0] is True
    complete, note = count_note("b2t25", "test", 1449)
    assert complete is False and "1450" in note and "1449" in note
    assert count_note("b2t25", "val", 1450)[0] is None


def test_the_format_follows_the_participant() -> None:
    assert guess_format([Answer("t12.2022.04.28", 0, "a")]) == "b2t24"
    assert guess_format([Answer("t15.2023.08.13", 0, "a")]) == "b2t25"
    with pytest.raises(UserError, match="both"):
        guess_format([Answer("t12.2022.04.28", 0, "a"), Answer("t15.2023.08.13", 0, "a")])


def test_the_command_finds_the_words_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from arcuate.cli._submit import submit_command

    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("name: x\n")
    with pytest.raises(UserError, match="arcuate decode"):
        submit_command(run, tmp_path / "s.csv", "test", None, None, False, True)
    truth = {"trial": "t15.2023.11.04/test/0000", "text": "the truth", "hypothesis": ["AA"]}
    write(run / "results" / "test.jsonl", truth)
    with pytest.raises(UserError, match="no nbest"):
        submit_command(run, tmp_path / "s.csv", "test", None, None, False, True)
    assert not (tmp_path / "s.csv").exists()
    write(run / "results" / "test.words.jsonl", line("t15.2023.11.04/test/0000", "decoded words"))
    submit_command(run, tmp_path / "s.csv", "test", None, None, False, True)
    summary = json.loads(capsys.readouterr().out)
    assert summary["n_rows"] == 1 and summary["complete"] is False and summary["format"] == "b2t25"
    assert (tmp_path / "s.csv").read_text() == "id,text\n0,decoded words\n"


def test_decodings_are_not_overwritten_by_their_submission(tmp_path: Path) -> None:
    from arcuate.cli._submit import submit_command

    hyps = write(tmp_path / "h.jsonl", line("t15.2023.08.13_test_1", "a"))
    with pytest.raises(UserError, match="read by this command"):
        submit_command(hyps, hyps, "test", None, None, False, as_json=True)
    with pytest.raises(UserError, match="is a folder"):
        submit_command(hyps, tmp_path, "test", None, None, False, as_json=True)
