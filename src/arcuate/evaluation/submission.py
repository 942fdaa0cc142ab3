"""Decoded texts as the two benchmarks want them handed in, checked before a byte is written.

'25: a CSV `id,text`, ids counting from 0 over sessions in order of date and trials in order within them.
'24: one sentence per line in the same order, nothing else.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from arcuate.data.text import normalise_text
from arcuate.data.trial import SPLITS
from arcuate.errors import UserError
from arcuate.files import read_jsonl, write_text

Format = Literal["b2t25", "b2t24"]
# What the official servers expect of their held-out split.
N_OFFICIAL: dict[str, int] = {"b2t25": 1450, "b2t24": 1200}
_DATE = re.compile(r"(\d{4})\.(\d{2})\.(\d{2})")
_TRIAL_ID = re.compile(rf"(?P<session>.+)/(?:{'|'.join(SPLITS)})/(?P<number>\d+)")


@dataclass(frozen=True)
class Answer:
    """One sentence to hand in."""

    session: str
    number: int
    text: str  # normalised


def read_answers(path: Path) -> list[Answer]:
    """The texts of a file of word decodings, in the order of submission.

    Lines without an n-best list are refused: those of `arcuate evaluate` hold phonemes, and their `text` is what was
    to be said, not what was decoded.
    """
    answers = [parse_answer(row, f"{path} line {i}") for i, row in enumerate(read_jsonl(path), start=1)]
    if not answers:
        raise UserError(f"{path} holds no trials")
    twice = [key for key, n in Counter((a.session, a.number) for a in answers).items() if n > 1]
    if twice:
        raise UserError(f"{path} holds trial {twice[0][1]} of {twice[0][0]} more than once; decode again")
    return sorted(answers, key=lambda a: (*chronological(a.session), a.number))


def parse_answer(row: Mapping[str, Any], where: str) -> Answer:
    if "nbest" not in row:
        raise UserError(
            f"{where} has no nbest: it is no decoding to words, and its text may be the truth; decode first with:"
            " arcuate decode RUN --split SPLIT --out RUN/results/SPLIT.words.jsonl"
        )
    text = row.get("text")
    if not isinstance(text, str):
        raise UserError(f"{where}: text is {text!r:.40}, not a sentence; decode again")
    found = _TRIAL_ID.fullmatch(str(row.get("id", row.get("trial", ""))))
    if not found:
        raise UserError(
            f"{where}: the id {row.get('id')!r:.60} does not name session, split and number of a trial"
        )
    return Answer(found["session"], int(found["number"]), normalise_text(text))


def chronological(session: str) -> tuple[tuple[int, ...], str]:
    """Sessions by the date in their name, then by name."""
    date = _DATE.search(session)
    return (tuple(map(int, date.groups())) if date else (), session)


def guess_format(answers: Sequence[Answer]) -> Format:
    """By the participant that session names begin with."""
    kinds = {"b2t24" if answer.session.lower().startswith("t12") else "b2t25" for answer in answers}
    if len(kinds) > 1:
        raise UserError("the trials are of both participants; name the --format")
    return "b2t24" if kinds == {"b2t24"} else "b2t25"


def check_answers(answers: Sequence[Answer], allow_empty: bool) -> int:
    """How many texts are empty; refused unless that is stated to be meant, since a server may drop such rows."""
    empty = [answer for answer in answers if not answer.text]
    if empty and not allow_empty:
        first = empty[0]
        raise UserError(
            f"{len(empty)} texts are empty, the first is trial {first.number} of {first.session};"
            " decode with a wider beam, or hand them in as they are: --allow-empty"
        )
    return len(empty)


def count_note(format: Format, split: str, n: int) -> tuple[bool | None, str]:
    """Whether the number of rows is that of the official held-out split; None where there is no such number."""
    official = N_OFFICIAL[format]
    if split != "test":
        return None, f"{n} rows of split {split}: only test is handed in to the official server"
    if n == official:
        return True, f"{n} rows, as the official test set has"
    return False, f"{n} rows, but the official test set has {official}: this is not the complete release"


def write_submission(path: Path, answers: Sequence[Answer], format: Format) -> None:
    text = to_csv(answers) if format == "b2t25" else "".join(f"{answer.text}\n" for answer in answers)
    write_text(path, text)
    if path.is_file():  # what went down a pipe is gone
        check_written(path, answers, format)


def to_csv(answers: Sequence[Answer]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("id", "text"))
    writer.writerows((i, answer.text) for i, answer in enumerate(answers))
    return stream.getvalue()


def check_written(path: Path, answers: Sequence[Answer], format: Format) -> None:
    """Read the file back as a server would; a difference is a fault of ours."""
    content = path.read_text("utf-8")
    if format == "b2t25":
        rows = list(csv.reader(io.StringIO(content)))
        texts = [text for _, text in rows[1:]]
        right = rows[0] == ["id", "text"] and [row[0] for row in rows[1:]] == [
            str(i) for i in range(len(answers))
        ]
    else:
        texts, right = content.split("\n")[:-1], content.endswith("\n")
    if not right or texts != [answer.text for answer in answers]:
        raise RuntimeError(f"{path} does not read back as it was written")
