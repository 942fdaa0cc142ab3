"""Lists of candidate texts, one per trial, as files hold them. Foreign until every line has been looked at."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.data.text import normalise_text
from arcuate.errors import UserError
from arcuate.evaluation.combine.frames import refuse_other_trials
from arcuate.evaluation.combine.mbr import softmax
from arcuate.files import read_jsonl
from arcuate.language.ngram.model import LanguageModel

MAX_CANDIDATES = 10_000  # per trial; the risk needs their square


@dataclass(frozen=True)
class CandidateList:
    """What several decoders, or one decoder's n-best search, read in one trial."""

    id: str
    texts: tuple[str, ...]  # normalised, in the order of the file
    scores: tuple[float, ...] | None = None  # natural logs, higher is better
    reference: str | None = None
    session: str | None = None
    corpus: str | None = None
    in_lm_text: bool | None = None
    lm: str | None = None  # the language model that the readings came by


def read_lists(path: Path) -> list[CandidateList]:
    """Lines with `candidates` (and `scores`, `text`), or hypothesis lines with `nbest` (and `reference`)."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a .jsonl file with candidates, or several run folders")
    rows = read_jsonl(path)
    if not rows:
        raise UserError(f"{path} holds no lines; give one JSON object with candidates per trial")
    first_seen: dict[str, int] = {}
    lists = []
    for number, row in enumerate(rows, start=1):
        where = f"{path} line {number}"
        found = parse_list(row, where, f"line {number}")
        if found.id in first_seen:
            raise UserError(
                f"{where}: trial {found.id!r} was on line {first_seen[found.id]} already; keep one of the two"
            )
        first_seen[found.id] = number
        lists.append(found)
    return lists


def parse_list(row: Mapping[str, Any], where: str, fallback_id: str) -> CandidateList:
    if "candidates" in row:
        texts, scores = _plain(row, where)
        said = row.get("text")
    elif "nbest" in row:
        texts, scores = _nbest(row["nbest"], where)
        said = row.get("reference")
    else:
        raise UserError(f"{where} has neither candidates nor nbest; each line needs a list of texts")
    if len(texts) > MAX_CANDIDATES:
        raise UserError(f"{where} has {len(texts)} candidates; at most {MAX_CANDIDATES} are taken")
    identity = row.get("id", row.get("trial", fallback_id))
    if not isinstance(identity, str | int) or isinstance(identity, bool):
        raise UserError(f"{where}: id should be a text, not {identity!r:.60}")
    return CandidateList(
        str(identity),
        tuple(normalise_text(text) for text in texts),
        scores,
        _text_or_none(said, "the reference", where),
        _text_or_none(row.get("session"), "session", where),
        _text_or_none(row.get("corpus"), "corpus", where),
        _flag(row.get("in_lm_text"), where),
        _text_or_none(row.get("lm"), "lm", where),
    )


def attach_references(lists: Sequence[CandidateList], path: Path) -> list[CandidateList]:
    """The lists with what was to be said, from lines with `id` and `text`; a trial not in the file keeps its own."""
    known: dict[str, Mapping[str, Any]] = {}
    for number, row in enumerate(read_jsonl(path), start=1):
        identity = row.get("id", row.get("trial"))
        if identity is None or not isinstance(row.get("text"), str):
            raise UserError(f"{path} line {number} needs an id and a text")
        if str(identity) in known:
            raise UserError(f"{path} line {number}: trial {identity!r} is there twice; keep one of the two")
        known[str(identity)] = row
    if not any(found.id in known for found in lists):
        raise UserError(
            f"{path} has none of the trials; its first is {next(iter(known), None)!r}, not {lists[0].id!r}"
        )
    return [_with_reference(found, known[found.id], path) if found.id in known else found for found in lists]


def _with_reference(found: CandidateList, row: Mapping[str, Any], path: Path) -> CandidateList:
    where = f"{path}: trial {found.id}"
    return replace(
        found,
        reference=row["text"],
        session=found.session or _text_or_none(row.get("session"), "session", where),
        corpus=found.corpus or _text_or_none(row.get("corpus"), "corpus", where),
        in_lm_text=_flag(row.get("in_lm_text"), where) if found.in_lm_text is None else found.in_lm_text,
    )


def mark_leakage(lists: Sequence[CandidateList], lm: LanguageModel) -> list[CandidateList]:
    """Lists flagged where their reference stands in the language model's training text, as far as it knows."""
    marked = []
    for found in lists:
        inside = lm.contains(found.reference) if found.reference is not None else None
        marked.append(
            found if inside is None else replace(found, in_lm_text=inside or bool(found.in_lm_text))
        )
    return marked


def _plain(row: Mapping[str, Any], where: str) -> tuple[list[str], tuple[float, ...] | None]:
    texts = _texts(row["candidates"], "candidates", where)
    given = row.get("scores")
    if given is None:
        return texts, None
    if not isinstance(given, list) or len(given) != len(texts):
        size = len(given) if isinstance(given, list) else "no list of"
        raise UserError(f"{where} has {len(texts)} candidates but {size} scores; give one score for each")
    return texts, tuple(finite_number(value, f"{where}: score {i}") for i, value in enumerate(given, start=1))


def _nbest(entries: Any, where: str) -> tuple[list[str], tuple[float, ...] | None]:
    """Texts, or objects with `text` and `score`; either all are scored or none."""
    if not isinstance(entries, list):
        raise UserError(f"{where}: nbest should be a list")
    if not entries or not isinstance(entries[0], dict):
        return _texts(entries, "nbest", where), None
    texts = _texts([e.get("text") if isinstance(e, dict) else e for e in entries], "nbest", where)
    scores = [e.get("score") if isinstance(e, dict) else None for e in entries]
    if all(score is None for score in scores):
        return texts, None
    return texts, tuple(
        finite_number(score, f"{where}: score of entry {i}") for i, score in enumerate(scores, start=1)
    )


def _texts(values: Any, name: str, where: str) -> list[str]:
    if not isinstance(values, list):
        raise UserError(f"{where}: {name} should be a list of texts")
    for i, value in enumerate(values, start=1):
        if not isinstance(value, str):
            raise UserError(f"{where}: entry {i} of {name} is {value!r:.60}, not a text")
    return values


def finite_number(value: Any, what: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise UserError(f"{what} is {value!r:.60}; it should be a finite number")
    return float(value)


def _text_or_none(value: Any, name: str, where: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: {name} should be a text, not {value!r:.60}")
    return value


def _flag(value: Any, where: str) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{where}: in_lm_text should be true or false, not {value!r:.60}")
    return value


# The n-best lists of several decoders as one list per trial: each decoder has one vote, spread over its readings.


def merge_lists(
    paths: Sequence[Path], decodings: Sequence[Sequence[CandidateList]], scale: float = 1.0
) -> list[CandidateList]:
    """Candidates of all decoders with the logarithm of their share as score; refuses decodings of other trials."""
    first = [found.id for found in decodings[0]]
    for path, lists in zip(paths[1:], decodings[1:], strict=True):
        refuse_other_trials(str(paths[0]), first, str(path), [found.id for found in lists])
    return [merge_trial(paths, found, scale) for found in zip(*decodings, strict=True)]


def merge_trial(paths: Sequence[Path], lists: Sequence[CandidateList], scale: float) -> CandidateList:
    said = {found.reference for found in lists if found.reference is not None}
    if len(said) > 1:
        raise UserError(
            f"{paths[0]} and the others disagree on what was to be said in trial {lists[0].id};"
            " they were not scored on the same data"
        )
    texts: list[str] = []
    shares: list[float] = []
    for found in lists:
        texts += found.texts
        spread = softmax(found.scores, scale) if found.scores else np.ones(len(found.texts))
        shares += (spread / spread.sum()).tolist() if len(spread) else []
    scores = tuple(float(np.log(max(share, 1e-300))) for share in shares)
    models = dict.fromkeys(found.lm for found in lists if found.lm is not None)
    read = [found.in_lm_text for found in lists if found.in_lm_text is not None]
    return replace(
        lists[0],
        texts=tuple(texts),
        scores=scores,
        reference=next(iter(said), None),
        in_lm_text=any(read) if read else None,
        lm=" / ".join(models) or None,
    )
