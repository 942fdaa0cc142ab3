"""Submissions: order, completeness, rejected inputs, and the files as a server parses them."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arcuate.data.releases import RELEASES
from arcuate.data.store import Store
from arcuate.data.trial import trial_id
from arcuate.errors import UserError
from arcuate.evaluation.submission import submit

SESSION, OTHER = "t15.2023.11.04", "t15.2024.02.25"


def line(identity: str, text: Any = "yes") -> dict[str, Any]:
    return {"id": identity, "text": text, "nbest": [{"text": text, "score": -1.0}]}


def write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Releases with test sets of three trials."""
    for layout in ("b2t25", "b2t24"):
        monkeypatch.setitem(RELEASES, layout, replace(RELEASES[layout], trials={"test": 3, "val": 2}))
    return {"test": 3, "val": 2}


@pytest.mark.usefixtures("sizes")
def test_rows_are_in_order_of_date_and_trial(tmp_path: Path) -> None:
    rows = [
        line(f"{OTHER}/test/0000", "Third, really?"),
        line(f"{SESSION}/test/0010", "second"),
        line(f"{SESSION}/test/0002", "first"),
    ]
    for _ in range(2):  # an earlier submission is replaced
        submission = submit(write(tmp_path / "h.jsonl", *rows), tmp_path / "s.csv")
    assert (submission.n_rows, submission.n_sessions, submission.complete) == (3, 2, True)
    assert json.dumps(submission.to_dict()) and submission.format == "b2t25"
    with (tmp_path / "s.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["text"] for row in found] == ["first", "second", "third really"]
    assert [row["id"] for row in found] == ["0", "1", "2"]
    older = [{**row, "id": row["id"].replace("t15", "t12")} for row in rows]
    for _ in range(2):
        assert submit(write(tmp_path / "o.jsonl", *older), tmp_path / "s.txt").format == "b2t24"
    assert (tmp_path / "s.txt").read_text() == "first\nsecond\nthird really\n"
    notes = tmp_path / "notes.txt"
    notes.write_text("Remember the milk.\n")
    for name in ("h.jsonl", "o.jsonl"):
        with pytest.raises(UserError, match="not an earlier"):
            submit(tmp_path / name, notes)
    assert notes.read_text() == "Remember the milk.\n"


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"trial": f"{SESSION}/test/0001", "text": "the truth", "hypothesis": ["AA"]}, "may be the reference"),
        (line(f"{SESSION}/test/0001", None), "text is None"),
        (line(f"{SESSION}/test/0001", float("nan")), "not a sentence"),
        (line(f"{SESSION}_b1_t1", "a"), "does not name"),
        (line(f"{SESSION}/test/0000", "again"), "more than once"),
        (line(f"{SESSION}/val/0001"), r"line 2: .*/val/0001 is a trial of the split val, not test"),
        (line("t12.2022.04.28/test/0001"), "both participants"),
        (line(f"{SESSION}/test/0001"), "there are 2 trials, but the release has 3"),
    ],
)
def test_unusable_lines_are_rejected(tmp_path: Path, row: object, word: str) -> None:
    path = write(tmp_path / "h.jsonl", line(f"{SESSION}/test/0000"), row)
    with pytest.raises(UserError, match=word):
        submit(path, tmp_path / "s.csv")
    assert not (tmp_path / "s.csv").exists()


def test_a_trial_of_the_store_that_is_missing_is_named(cohort_store: Path, tmp_path: Path) -> None:
    """Wherever it is: in between, at the end of a session, or a whole session."""
    trials = [t for t in Store.open(cohort_store).trials if t.split == "test"]
    last = max(t.number for t in trials if t.session == trials[0].session)
    gone = (trials[0].id, trial_id(trials[0].session, "test", last))
    for missing in (gone[:1], gone[1:], [t.id for t in trials if t.session == trials[0].session]):
        path = write(tmp_path / "h.jsonl", *(line(t.id) for t in trials if t.id not in missing))
        with pytest.raises(UserError, match=f"{len(missing)} trials? of .*missing: {missing[0]}"):
            submit(path, tmp_path / "s.csv", data=cohort_store)
    path = write(tmp_path / "h.jsonl", *(line(t.id, f"text {t.session} {t.number}") for t in reversed(trials)))
    submission = submit(path, tmp_path / "s.csv", data=cohort_store)
    assert submission.n_rows == len(trials) and submission.complete is False


@pytest.mark.usefixtures("sizes")
def test_empty_texts_need_allow_empty(tmp_path: Path) -> None:
    path = write(tmp_path / "h.jsonl", line(f"{SESSION}/val/0000"), line(f"{SESSION}/val/0001", ""))
    with pytest.raises(UserError, match=f"first is that of {SESSION}/val/0001"):
        submit(path, tmp_path / "s.csv", split="val")
    assert submit(path, tmp_path / "s.csv", split="val", allow_empty=True).n_empty == 1
    assert (tmp_path / "s.csv").read_text() == "id,text\n0,yes\n1,\n"


@pytest.mark.usefixtures("sizes")
def test_the_word_decodings_of_a_run_are_found(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(run / "results" / "test.jsonl", {"trial": f"{SESSION}/test/0000", "text": "the truth", "hypothesis": ["AA"]})
    (run / "recipe.yaml").write_text("name: x\n")
    with pytest.raises(UserError, match="arcuate decode"):
        submit(run, tmp_path / "s.csv")
    write(run / "results" / "test.words.jsonl", *(line(f"{SESSION}/test/000{n}", "decoded") for n in range(3)))
    assert submit(run, tmp_path / "s.csv").n_rows == 3


def test_decodings_are_not_overwritten_by_their_submission(tmp_path: Path) -> None:
    hyps = write(tmp_path / "h.jsonl", line(f"{SESSION}/test/0000"))
    with pytest.raises(UserError, match="is an input of this command"):
        submit(hyps, hyps)
    with pytest.raises(UserError, match="is a folder"):
        submit(hyps, tmp_path)
