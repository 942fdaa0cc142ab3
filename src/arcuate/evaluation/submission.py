"""Submission files of the two benchmarks.

'25: a CSV file `id,text` with ids from 0, sessions in order of date and trials in order within them.
'24: one sentence per line in the same order. Rows are identified by their position alone, so no trial may be missing.
"""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arcuate.data.releases import RELEASES
from arcuate.data.store import Store, is_store
from arcuate.data.text import normalise_text
from arcuate.data.trial import SPLITS, layout_of_session, session_order, trial_id
from arcuate.errors import UserError
from arcuate.evaluation.sentences import find_decodings
from arcuate.files import OutputKind, Result, check_writable, read_jsonl, write_text
from arcuate.hub import local_path
from arcuate.progress import counted, logger
from arcuate.run import RunLike, open_run

_MAX_TEXT_BYTES = 10_000_000
_TRIAL_ID = re.compile(rf"(?P<session>.+)/(?P<split>{'|'.join(SPLITS)})/(?P<number>\d{{1,9}})")
_CSV = OutputKind(re.compile(rb"id,text\r?\n"), "submission.csv")


@dataclass(frozen=True)
class Submission(Result):
    """Result of `submit`."""

    out: Path
    format: str  # b2t25 or b2t24
    n_rows: int
    n_empty: int
    n_sessions: int
    complete: bool | None  # whether the number of rows is that of the official test set; None for any other split
    decodings: Path


def submit(
    source: RunLike,
    out: str | Path,
    *,
    split: str = "test",
    label: str | None = None,
    data: str | Path | None = None,
    allow_empty: bool = False,
) -> Submission:
    """Write the decoded texts of a run folder or a decodings file as a submission; the session names tell which.

    Args:
        source: Run folder with decoded words, or a file of `arcuate decode`.
        out: File to write: CSV for '25, text for '24.
        split: Split to submit: test, or another one to check the format.
        label: With a run: of `results/<split>.<label>.jsonl`.
        data: Store whose trials have to be there; default: that of the training run. Without a store, the number of
            trials has to be that of the release.
        allow_empty: Submit empty texts too.
    """
    path, target = local_path(source), Path(out)
    run = None if path.is_file() else open_run(path)
    decodings = path if run is None else find_decodings(run, split, label)
    check_writable(target, decodings)
    texts = read_texts(decodings, split)
    layouts = {layout_of_session(session) for session, _ in texts}
    if len(layouts) > 1:
        raise UserError("the trials belong to both participants; decode and submit each benchmark by itself")
    layout = "b2t24" if layouts == {"b2t24"} else "b2t25"
    trained_on = Path(str(run.data().get("path", ""))) if run is not None and run.environment_file.is_file() else None
    check_complete(texts, layout, split, trained_on if data is None else Path(data))
    empty = [trial_id(session, split, n) for (session, n), text in texts.items() if not text]
    if empty and not allow_empty:
        raise UserError(
            f"{len(empty)} texts are empty, the first is that of {empty[0]}; decode with a wider beam, or submit them"
            " with --allow-empty"
        )
    _check_earlier(target, layout, len(texts))
    write_text(target, format_submission(list(texts.values()), layout))
    official = RELEASES[layout].trials["test"]
    complete = len(texts) == official if split == "test" else None
    logger.info(f"{counted(len(texts), 'row')} of the split {split}; the official test set has {official}")
    return Submission(target, layout, len(texts), len(empty), len({s for s, _ in texts}), complete, decodings)


def read_texts(path: Path, split: str | None = None) -> dict[tuple[str, int], str]:
    """Normalised texts by session and number, in the order of submission; trials of another split are rejected.

    Lines without an n-best list are rejected: those of `arcuate evaluate` hold phonemes, and their `text` is the
    reference.
    """
    texts: dict[tuple[str, int], str] = {}
    for i, row in enumerate(read_jsonl(path), start=1):
        trial, text = _parse_row(row, f"{path} line {i}", split)
        if trial in texts:
            raise UserError(f"{path} contains trial {trial[1]} of {trial[0]} more than once; decode again")
        texts[trial] = text
    if not texts:
        raise UserError(f"{path} contains no trials")
    return dict(sorted(texts.items(), key=lambda item: (*session_order(item[0][0]), item[0][1])))


def check_complete(texts: Mapping[tuple[str, int], str], layout: str, split: str, store: Path | None) -> None:
    """Check that no trial is missing, because rows after it would shift: against the store, else the release."""
    if store is not None and is_store(store):
        expected = {(info.session, info.number) for info in Store.open(store).trials if info.split == split}
        if missing := sorted(expected - texts.keys()):
            names = ", ".join(trial_id(session, split, n) for session, n in missing[:5])
            raise UserError(
                f"{counted(len(missing), 'trial')} of {store} missing: {names}{' …' if len(missing) > 5 else ''};"
                f" decode all trials of the split {split}"
            )
        return
    expected_rows = RELEASES[layout].trials.get(split)
    if len(texts) != expected_rows:
        raise UserError(
            f"there are {counted(len(texts), 'trial')}, but the release has {expected_rows} of the split {split}; a"
            " missing one would shift all later rows: give the store with --data, which shows whether any is missing"
        )


def format_submission(texts: Sequence[str], layout: str) -> str:
    """The content of a submission."""
    if layout == "b2t24":
        return "".join(f"{text}\n" for text in texts)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("id", "text"))
    writer.writerows(enumerate(texts))
    return stream.getvalue()


def _check_earlier(path: Path, layout: str, n_rows: int) -> None:
    """Check that a file that is already there is an earlier submission."""
    if layout == "b2t25":
        check_writable(path, kind=_CSV)
    elif path.is_file() and path.stat().st_size:
        lines = path.read_bytes()[:_MAX_TEXT_BYTES].decode("utf-8", "replace").split("\n")[:-1]
        if len(lines) != n_rows or any(line != normalise_text(line) for line in lines):
            raise UserError(f"{path} exists and is not an earlier submission of {n_rows} lines; choose another name")


def _parse_row(row: Mapping[str, Any], where: str, split: str | None) -> tuple[tuple[str, int], str]:
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
        raise UserError(f"{where}: {found[0]} is a trial of the split {found['split']}, not {split}; give its --split")
    return (found["session"], int(found["number"])), normalise_text(text)
