"""Candidate texts of trials: reading and validating the files, attaching references, scoring."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from arcuate.data.text import normalise_text
from arcuate.errors import UserError
from arcuate.evaluation.metrics import Score, ScoredTrial, score, score_text, total
from arcuate.evaluation.transcribe import occurs_in_lm_text
from arcuate.files import read_jsonl
from arcuate.language.ngram.model import LanguageModel

_Value = TypeVar("_Value")
_MAX_CANDIDATES = 10_000  # per trial; computing expected errors takes the square of it in time and memory


@dataclass(frozen=True)
class CandidateList:
    """Texts of one trial, by several systems or from one n-best list."""

    id: str
    texts: tuple[str, ...]  # normalised, in the order of the file
    scores: tuple[float, ...] | None = None  # natural-log scores, higher is better
    reference: str | None = None
    session: str | None = None
    corpus: str | None = None
    in_lm_text: bool | None = None
    lm: str | None = None  # language model that the texts were decoded with


def n_systems(lists: Sequence[CandidateList]) -> int | None:
    """Number of systems if every trial has one unscored candidate of each, else None."""
    sizes = {len(candidates.texts) for candidates in lists}
    if len(sizes) != 1 or any(candidates.scores is not None for candidates in lists):
        return None
    return sizes.pop() or None


def read_candidates(path: Path) -> list[CandidateList]:
    """Read lines with `candidates` (and `scores`, `text`), or decoding lines with `nbest` (and `reference`)."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a .jsonl file with candidates, or several run folders")
    rows = read_jsonl(path)
    if not rows:
        raise UserError(f"{path} has no lines; give one JSON object with candidates per trial")
    return parse_rows(rows, path)


def parse_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> list[CandidateList]:
    """Validate the lines of a file; every trial may occur once."""
    first_line: dict[str, int] = {}
    lists = []
    for number, row in enumerate(rows, start=1):
        candidates = _parse_row(row, f"{path} line {number}", f"line {number}")
        if candidates.id in first_line:
            raise UserError(
                f"{path} line {number}: trial {candidates.id!r} was on line {first_line[candidates.id]} already;"
                " keep one of the two"
            )
        first_line[candidates.id] = number
        lists.append(candidates)
    return lists


def attach_references(lists: Sequence[CandidateList], path: Path) -> list[CandidateList]:
    """Add references from lines with `id` and `text`; a trial that is not in the file keeps its own reference."""
    by_id: dict[str, Mapping[str, Any]] = {}
    for number, row in enumerate(read_jsonl(path), start=1):
        identity = row.get("id", row.get("trial"))
        if identity is None or not isinstance(row.get("text"), str):
            raise UserError(f"{path} line {number} needs an id and a text")
        if str(identity) in by_id:
            raise UserError(f"{path} line {number}: trial {identity!r} occurs twice; keep one of the two")
        by_id[str(identity)] = row
    if not any(candidates.id in by_id for candidates in lists):
        raise UserError(
            f"{path} has none of the trials; its first is {next(iter(by_id), None)!r}, expected {lists[0].id!r}"
        )
    return [_with_reference(c, by_id[c.id], path) if c.id in by_id else c for c in lists]


def mark_leakage(lists: Sequence[CandidateList], lm: LanguageModel) -> list[CandidateList]:
    """Set `in_lm_text` of each list."""
    return [replace(c, in_lm_text=occurs_in_lm_text(lm, c.reference, c.in_lm_text)) for c in lists]


def check_same_trials(name: str, trials: Sequence[str], other: str, others: Sequence[str]) -> None:
    """Check that two files hold the same trials in the same order."""
    if tuple(trials) == tuple(others):
        return
    unmatched = sorted(set(trials) ^ set(others))
    detail = (
        f"{len(unmatched)} trials are in only one of them, such as {unmatched[0]}"
        if unmatched
        else "their order differs"
    )
    raise UserError(f"{name} and {other} were not scored on the same trials: {detail}")


def score_candidates(lists: Sequence[CandidateList], texts: Sequence[str]) -> list[ScoredTrial]:
    """Scores of one text per trial for the trials that have a reference."""
    return [
        ScoredTrial(c.id, score_text(c.reference, text), c.session, c.corpus, c.in_lm_text)
        for c, text in zip(lists, texts, strict=True)
        if c.reference is not None
    ]


def oracle_score(lists: Sequence[CandidateList]) -> Score:
    """Score of the best candidate of each list, chosen with the reference: a lower bound for any choice."""
    best = []
    for candidates in lists:
        reference = normalise_text(candidates.reference or "").split()
        options = [score(reference, text.split()) for text in dict.fromkeys(candidates.texts)]
        best.append(min(options or [score(reference, [])], key=lambda s: s.errors))
    return total(best)


def finite_number(value: Any, what: str) -> float:
    """Validate a number from a file; errors name `what` it is."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise UserError(f"{what} is {value!r:.60}; expected a finite number")
    return float(value)


def _parse_row(row: Mapping[str, Any], where: str, fallback_id: str) -> CandidateList:
    if "candidates" in row:
        texts, scores = _parse_candidates(row, where)
        reference = _optional(row, "text", str, where)
    elif "nbest" in row:  # `text` of such a line is the decoded text, never the reference
        texts, scores = _parse_nbest(row["nbest"], where)
        reference = _optional(row, "reference", str, where)
    else:
        raise UserError(f"{where} has neither candidates nor nbest; each line needs a list of texts")
    if len(texts) > _MAX_CANDIDATES:
        raise UserError(f"{where} has {len(texts)} candidates; expected at most {_MAX_CANDIDATES}")
    identity = row.get("id", row.get("trial", fallback_id))
    if not isinstance(identity, str | int) or isinstance(identity, bool):
        raise UserError(f"{where}: id should be a text, not {identity!r:.60}")
    return CandidateList(
        str(identity),
        tuple(normalise_text(text) for text in texts),
        scores,
        reference,
        _optional(row, "session", str, where),
        _optional(row, "corpus", str, where),
        _optional(row, "in_lm_text", bool, where),
        _optional(row, "lm", str, where),
    )


def _parse_candidates(row: Mapping[str, Any], where: str) -> tuple[list[str], tuple[float, ...] | None]:
    texts = _check_texts(row["candidates"], "candidates", where)
    given = row.get("scores")
    if given is None:
        return texts, None
    if not isinstance(given, list) or len(given) != len(texts):
        size = len(given) if isinstance(given, list) else "no list of"
        raise UserError(f"{where} has {len(texts)} candidates but {size} scores; give one score for each")
    return texts, tuple(finite_number(value, f"{where}: score {i}") for i, value in enumerate(given, start=1))


def _parse_nbest(entries: Any, where: str) -> tuple[list[str], tuple[float, ...] | None]:
    """Texts, or objects with `text` and `score`; scores are given for all entries or for none."""
    if not isinstance(entries, list):
        raise UserError(f"{where}: nbest should be a list")
    if not entries or not isinstance(entries[0], dict):
        return _check_texts(entries, "nbest", where), None
    texts = _check_texts([e.get("text") if isinstance(e, dict) else e for e in entries], "nbest", where)
    scores = [e.get("score") if isinstance(e, dict) else None for e in entries]
    if all(value is None for value in scores):
        return texts, None
    return texts, tuple(finite_number(value, f"{where}: score of entry {i}") for i, value in enumerate(scores, start=1))


def _check_texts(values: Any, name: str, where: str) -> list[str]:
    if not isinstance(values, list):
        raise UserError(f"{where}: {name} should be a list of texts")
    for i, value in enumerate(values, start=1):
        if not isinstance(value, str):
            raise UserError(f"{where}: entry {i} of {name} is {value!r:.60}, expected a text")
    return values


def _optional(row: Mapping[str, Any], key: str, kind: type[_Value], where: str) -> _Value | None:
    """A value of the row that may be absent; its type is checked."""
    value = row.get(key)
    if value is not None and not isinstance(value, kind):
        expected = "true or false" if kind is bool else "a text"
        name = "the reference" if key == "text" else key
        raise UserError(f"{where}: {name} should be {expected}, not {value!r:.60}")
    return value


def _with_reference(candidates: CandidateList, row: Mapping[str, Any], path: Path) -> CandidateList:
    where = f"{path}: trial {candidates.id}"
    known = candidates.in_lm_text
    return replace(
        candidates,
        reference=row["text"],
        session=candidates.session or _optional(row, "session", str, where),
        corpus=candidates.corpus or _optional(row, "corpus", str, where),
        in_lm_text=_optional(row, "in_lm_text", bool, where) if known is None else known,
    )
