"""Submission files of the two benchmarks, validated before and after writing.

'25: a CSV file `id,text` with ids from 0, sessions in order of date and trials in order within them.
'24: one sentence per line in the same order.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from arcuate.data.releases import RELEASES
from arcuate.data.store import Store, is_store
from arcuate.data.text import normalise_text
from arcuate.data.trial import SPLITS, layout_of_session, session_order
from arcuate.errors import UserError
from arcuate.files import OutputKind, check_writable, fields_to_dict, read_jsonl, write_text
from arcuate.hub import local_path
from arcuate.progress import logger
from arcuate.run import WORDS_LABEL, Run, RunLike, open_run

Format = Literal["b2t25", "b2t24"]
_MAX_TRIALS = 100_000  # trials per session
_MAX_TEXT_BYTES = 10_000_000
_TRIAL_ID = re.compile(rf"(?P<session>.+)/(?P<split>{'|'.join(SPLITS)})/(?P<number>\d{{1,9}})")
_CSV = OutputKind(re.compile(rb"id,text\r?\n"), "submission.csv")


@dataclass(frozen=True)
class SubmittedText:
    """One sentence of a submission."""

    session: str
    number: int
    text: str  # normalised


@dataclass(frozen=True)
class Submission:
    """Result of `submit`."""

    out: Path
    format: Format
    n_rows: int
    n_empty: int
    n_sessions: int
    complete: bool | None  # whether the number of rows is that of the official test set; None for any other split
    decodings: Path

    def to_dict(self) -> dict[str, Any]:
        return fields_to_dict(self)


def submit(
    source: RunLike,
    out: str | Path,
    *,
    split: str = "test",
    label: str | None = None,
    format: str | None = None,
    allow_empty: bool = False,
) -> Submission:
    """Write the decoded texts of a run folder or a decodings file as a submission.

    `label`: of `results/<split>.<label>.jsonl` in a run folder. `format`: b2t25 or b2t24; default: inferred from
    the session names.
    """
    if format not in (None, "b2t25", "b2t24"):
        raise UserError(f"--format is {format!r}; choose b2t25 or b2t24")
    path, target = local_path(source), Path(out)
    decodings = path if path.is_file() else find_decodings(open_run(path), split, label)
    check_writable(target, decodings)
    texts = read_texts(decodings, split)
    check_complete(texts, None if path.is_file() else open_run(path), split)
    kind: Format = guess_format(texts) if format is None else ("b2t24" if format == "b2t24" else "b2t25")
    _check_earlier(target, kind, len(texts))
    n_empty = count_empty(texts, allow_empty)
    complete, note = check_count(kind, split, len(texts))
    write_submission(target, texts, kind)
    logger.info(note)
    n_sessions = len({text.session for text in texts})
    return Submission(target, kind, len(texts), n_empty, n_sessions, complete, decodings)


def find_decodings(run: Run, split: str, label: str | None) -> Path:
    """results/<split>.<label>.jsonl; without a label the word decodings, then the results of the split."""
    labels = [label] if label else [WORDS_LABEL, None]
    for name in labels:
        file = run.results_file(split, name)
        if file.is_file():
            return file
    raise missing_decodings(run, split, label)


def missing_decodings(run: Run, split: str, label: str | None) -> UserError:
    """The error for a run without word decodings."""
    expected = run.results_file(split, label or WORDS_LABEL)
    return UserError(
        f"{expected} does not exist; decode to words first: arcuate decode {run.path} --split {split} --out {expected}"
    )


def read_texts(path: Path, split: str | None = None) -> list[SubmittedText]:
    """Read a file of word decodings, in the order of submission; with `split`, trials of another one are rejected.

    Lines without an n-best list are rejected: those of `arcuate evaluate` hold phonemes, and their `text` is the
    reference.
    """
    texts = [_parse_row(row, f"{path} line {i}", split) for i, row in enumerate(read_jsonl(path), start=1)]
    if not texts:
        raise UserError(f"{path} contains no trials")
    twice = [key for key, n in Counter((t.session, t.number) for t in texts).items() if n > 1]
    if twice:
        raise UserError(f"{path} contains trial {twice[0][1]} of {twice[0][0]} more than once; decode again")
    return sorted(texts, key=lambda t: (*session_order(t.session), t.number))


def check_complete(texts: Sequence[SubmittedText], run: Run | None, split: str) -> None:
    """Check that no trial is missing: rows are identified by their position, so a gap would shift all later ones.

    The trials of a session are numbered from 0. With a run, they are also compared with those of its store.
    """
    given = {(text.session, text.number) for text in texts}
    highest = dict(sorted(given))  # the last number of each session
    expected = {(session, n) for session, last in highest.items() for n in range(min(last, _MAX_TRIALS) + 1)}
    expected |= _stored_trials(run, split) if run is not None else set()
    if missing := sorted(expected - given):
        session, number = missing[0]
        raise UserError(
            f"{len(missing)} trials are missing, the first is trial {number} of {session}; a submission needs every"
            f" trial, because rows are identified by their position: decode all trials of the split {split}"
        )


def _stored_trials(run: Run, split: str) -> set[tuple[str, int]]:
    """The trials of the split in the store that the run was trained on, if that is still there."""
    path = Path(str(run.data().get("path", ""))) if run.environment_file.is_file() else Path()
    if not is_store(path):
        return set()
    return {(info.session, info.number) for info in Store.open(path).trials if info.split == split}


def _check_earlier(path: Path, format: Format, n_rows: int) -> None:
    """Check that a file that is already there is an earlier submission."""
    if format == "b2t25":
        check_writable(path, kind=_CSV)
    elif path.is_file() and path.stat().st_size:
        lines = path.read_bytes()[:_MAX_TEXT_BYTES].decode("utf-8", "replace").split("\n")[:-1]
        if len(lines) != n_rows or any(line != normalise_text(line) for line in lines):
            raise UserError(f"{path} exists and is not an earlier submission of {n_rows} lines; choose another name")


def _parse_row(row: Mapping[str, Any], where: str, split: str | None) -> SubmittedText:
    if "nbest" not in row:
        raise UserError(
            f"{where} has no nbest, so its text may be the reference; decode to words first:"
            " arcuate decode RUN --split SPLIT --out RUN/results/SPLIT.words.jsonl"
        )
    text = row.get("text")
    if not isinstance(text, str):
        raise UserError(f"{where}: text is {text!r:.40}, not a sentence; decode again")
    found = _TRIAL_ID.fullmatch(str(row.get("id", row.get("trial", ""))))
    if not found:
        raise UserError(f"{where}: the id {row.get('id')!r:.60} does not name session, split and number of a trial")
    if split is not None and found["split"] != split:
        raise UserError(
            f"{where}: {found[0]} is a trial of the split {found['split']}, not {split}; decode the split {split},"
            f" or check the format with --split {found['split']}"
        )
    return SubmittedText(found["session"], int(found["number"]), normalise_text(text))


def guess_format(texts: Sequence[SubmittedText]) -> Format:
    """The benchmark of the participant that the session names start with."""
    kinds = {layout_of_session(text.session) for text in texts}
    if len(kinds) > 1:
        raise UserError("the trials belong to both participants; choose one with --format")
    return "b2t24" if kinds == {"b2t24"} else "b2t25"


def count_empty(texts: Sequence[SubmittedText], allow_empty: bool) -> int:
    """Number of empty texts; an error unless they are allowed, because a server may drop such rows."""
    empty = [text for text in texts if not text.text]
    if empty and not allow_empty:
        first = empty[0]
        raise UserError(
            f"{len(empty)} texts are empty, the first is trial {first.number} of {first.session};"
            " decode with a wider beam, or submit them with --allow-empty"
        )
    return len(empty)


def check_count(format: Format, split: str, n: int) -> tuple[bool | None, str]:
    """Whether the number of rows is that of the official test set (None for any other split), and a message."""
    official = RELEASES[format].trials["test"]
    if split != "test":
        return None, f"{n} rows of split {split}; the official server accepts the test split only"
    if n == official:
        return True, f"{n} rows, the size of the official test set"
    return False, f"{n} rows, but the official test set has {official}: the release is incomplete"


def write_submission(path: Path, texts: Sequence[SubmittedText], format: Format) -> None:
    """Write a submission and read it back."""
    write_text(path, _to_csv(texts) if format == "b2t25" else "".join(f"{text.text}\n" for text in texts))
    if path.is_file():  # a pipe cannot be read back
        _check_written(path, texts, format)


def _to_csv(texts: Sequence[SubmittedText]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("id", "text"))
    writer.writerows((i, text.text) for i, text in enumerate(texts))
    return stream.getvalue()


def _check_written(path: Path, texts: Sequence[SubmittedText], format: Format) -> None:
    """Parse the file as a server would; a difference is an internal error."""
    content = path.read_text("utf-8")
    if format == "b2t25":
        rows = list(csv.reader(io.StringIO(content)))
        parsed = [text for _, text in rows[1:]]
        valid = rows[0] == ["id", "text"] and [row[0] for row in rows[1:]] == [str(i) for i in range(len(texts))]
    else:
        parsed, valid = content.split("\n")[:-1], content.endswith("\n")
    if not valid or parsed != [text.text for text in texts]:
        raise RuntimeError(f"{path} does not read back as it was written")
