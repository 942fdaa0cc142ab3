"""`arcuate submit`."""

from pathlib import Path
from typing import Any

from arcuate.cli.console import emit_json, out, say
from arcuate.errors import UserError
from arcuate.evaluation.submission import (
    Format,
    check_answers,
    count_note,
    guess_format,
    read_answers,
    write_submission,
)
from arcuate.files import check_writable
from arcuate.run import Run, open_run

WORDS = "words"  # the label under which word decodings lie in a run folder, unless another is named


def submit_command(
    source: Path,
    target: Path,
    split: str,
    label: str | None,
    format: str | None,
    allow_empty: bool,
    as_json: bool,
) -> None:
    if format not in (None, "b2t25", "b2t24"):
        raise UserError(f"--format is b2t25 or b2t24, not {format!r}")
    decodings = source if source.is_file() else find_decodings(open_run(source), split, label)
    check_writable(target, decodings)
    answers = read_answers(decodings)
    kind: Format = guess_format(answers) if format is None else ("b2t24" if format == "b2t24" else "b2t25")
    n_empty = check_answers(answers, allow_empty)
    complete, note = count_note(kind, split, len(answers))
    write_submission(target, answers, kind)
    summary: dict[str, Any] = {
        "out": str(target),
        "format": kind,
        "n_rows": len(answers),
        "n_empty": n_empty,
        "n_sessions": len({answer.session for answer in answers}),
        "complete": complete,
        "decodings": str(decodings),
    }
    say(note)
    if as_json:
        emit_json(summary)
    else:
        out.print(f"{target}", soft_wrap=True, markup=False)


def find_decodings(run: Run, split: str, label: str | None) -> Path:
    """results/<split>.<label>.jsonl; without a label the word decodings, then whatever the split has."""
    labels = [label] if label else [WORDS, None]
    for name in labels:
        file = run.results_file(split, name)
        if file.is_file():
            return file
    raise missing_words(run, split, label)


def missing_words(run: Run, split: str, label: str | None) -> UserError:
    wanted = run.results_file(split, label or WORDS)
    return UserError(
        f"{wanted} is not there; decode to words first:"
        f" arcuate decode {run.path} --split {split} --out {wanted}"
    )
