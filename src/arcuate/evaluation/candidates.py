"""Candidate texts of trials: files, references and scores, and the choice by vote (MBR decoding, ROVER)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist

from arcuate.data.text import normalise_text
from arcuate.errors import UserError
from arcuate.evaluation.metrics import Score, ScoredTrial, score, score_text, total
from arcuate.evaluation.transcribe import occurs_in_lm_text
from arcuate.files import read_jsonl
from arcuate.language.ngram.model import LanguageModel

_Value = TypeVar("_Value")
Votes = Literal["equal", "agreement"]
_MAX_CANDIDATES = 10_000  # per trial; computing expected errors takes the square of it in time and memory
# Cost of a letter edit relative to a word edit. Word edits alone leave many ties, and where two words differ, the
# candidate that is closer in letters is more often correct.
LETTER_COST = 0.02
_FIRST_CODE_POINT = 0x10000  # above the surrogates, so that every word can be one character
NO_WORD = ""  # the vote of a slot for no word
Slot = dict[str, float]  # word -> summed weight of its votes


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
                f"{path} line {number}: trial {candidates.id!r} is already on line"
                f" {first_line[candidates.id]}; keep one of the two"
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


# --- Votes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpectedErrors:
    """Distinct texts of one list, in order of appearance, with their weight and expected word errors."""

    texts: tuple[str, ...]
    weights: np.ndarray  # (n,), sums to one
    errors: np.ndarray  # (n,)

    @property
    def best(self) -> int:
        """Index of the fewest expected errors; ties go to the larger weight, then to the earlier text."""
        rounded = np.round(self.errors, 9)  # the order of summation must not decide
        return min(range(len(self.texts)), key=lambda i: (rounded[i], -round(float(self.weights[i]), 9), i))


def expected_errors(
    texts: Sequence[str], weights: Sequence[float] | np.ndarray, letter_cost: float = LETTER_COST
) -> ExpectedErrors:
    """Expected word errors of every distinct text if each text is the reference with the probability of its weight.

    Costs O(n²) edit distances for n distinct texts.
    """
    distinct = list(dict.fromkeys(texts))
    index = {text: i for i, text in enumerate(distinct)}
    mass = np.zeros(len(distinct))
    for text, weight in zip(texts, weights, strict=True):
        mass[index[text]] += weight
    mass = mass / mass.sum() if mass.sum() > 0 else np.full(len(distinct), 1 / max(len(distinct), 1))
    edits = _edit_distances(_words_as_characters(distinct)).astype(np.float64)  # (n, n)
    if letter_cost:
        edits += letter_cost * _edit_distances(distinct)
    return ExpectedErrors(tuple(distinct), mass, edits @ mass)


def mbr(
    texts: Sequence[str], weights: Sequence[float] | np.ndarray | None = None, letter_cost: float = LETTER_COST
) -> str:
    """Minimum-Bayes-risk text (Goel & Byrne 2000): fewest expected word errors over the candidates themselves.

    A text that one system decoded but that is close to all others can win against a text that two systems decoded.
    Empty for no texts.
    """
    if not texts:
        return ""
    found = expected_errors(texts, np.ones(len(texts)) if weights is None else weights, letter_cost)
    return found.texts[found.best]


def rover(texts: Sequence[str], weights: Sequence[float] | np.ndarray | None = None) -> str:
    """ROVER (Fiscus 1997): align the texts word by word into slots and take a weighted vote in each slot.

    Unlike the original, the texts are aligned to the MBR text, which also wins ties.
    """
    slots = confusion_network(texts, weights)
    winners = [max(slot, key=lambda word: round(slot[word], 9)) for slot in slots]  # ties: first inserted
    return " ".join(word for word in winners if word != NO_WORD)


def confusion_network(texts: Sequence[str], weights: Sequence[float] | np.ndarray | None = None) -> list[Slot]:
    """Slots of ROVER in order, each with the summed weights of its words; the MBR text comes first in every slot."""
    if not texts:
        return []
    found = expected_errors(texts, np.ones(len(texts)) if weights is None else weights)
    backbone = found.best
    order = [backbone, *(i for i in range(len(found.texts)) if i != backbone)]
    slots: list[Slot] = []
    cast = 0.0  # weight of the votes so far
    for i in order:
        weight = float(found.weights[i])
        slots = _add_votes(slots, found.texts[i].split(), weight, cast)
        cast += weight
    return slots


def _add_votes(slots: list[Slot], words: Sequence[str], weight: float, cast: float) -> list[Slot]:
    """Align one text with the slots and add its votes; an inserted word opens a slot with `cast` votes for no word.

    cost[i, j] is the cheapest alignment of the first i slots and j words:
    min(cost[i-1, j-1] + 1 − vote fraction of the word, cost[i-1, j] + 1 − vote fraction of no word, cost[i, j-1] + 1),
    so that a word is matched to the slot where it has the most votes. O(slots · words).
    """
    n, m = len(slots), len(words)
    cost = np.empty((n + 1, m + 1))
    cost[0] = np.arange(m + 1)
    for i, slot in enumerate(slots, start=1):
        votes = sum(slot.values())
        skip = 1 - slot.get(NO_WORD, 0.0) / votes
        cost[i, 0] = cost[i - 1, 0] + skip
        for j, word in enumerate(words, start=1):
            match = 1 - slot.get(word, 0.0) / votes
            cost[i, j] = min(cost[i - 1, j - 1] + match, cost[i - 1, j] + skip, cost[i, j - 1] + 1)
    return _trace_back(slots, words, weight, cast, cost)


def _trace_back(slots: list[Slot], words: Sequence[str], weight: float, cast: float, cost: np.ndarray) -> list[Slot]:
    """Follow the cheapest alignment from its end and add the votes."""
    i, j = len(slots), len(words)
    merged: list[Slot] = []
    while i or j:
        slot = slots[i - 1] if i else {}
        votes = sum(slot.values()) or 1.0
        if i and j and np.isclose(cost[i, j], cost[i - 1, j - 1] + 1 - slot.get(words[j - 1], 0.0) / votes):
            merged.append(_with_vote(slot, words[j - 1], weight))
            i, j = i - 1, j - 1
        elif i and np.isclose(cost[i, j], cost[i - 1, j] + 1 - slot.get(NO_WORD, 0.0) / votes):
            merged.append(_with_vote(slot, NO_WORD, weight))
            i -= 1
        else:
            opened: Slot = {NO_WORD: cast} if cast else {}
            merged.append(_with_vote(opened, words[j - 1], weight))
            j -= 1
    return merged[::-1]


def _with_vote(slot: Slot, word: str, weight: float) -> Slot:
    return {**slot, word: slot.get(word, 0.0) + weight}


def vote_weights(lists: Sequence[CandidateList], votes: Votes = "equal", scale: float = 1.0) -> list[np.ndarray]:
    """Vote weights of every trial's candidates: softmax of the scores if there are scores, else by system."""
    by_system = agreement_weights(lists) if votes == "agreement" and n_systems(lists) else None
    weights = []
    for candidates in lists:
        if candidates.scores is not None:
            weights.append(softmax(candidates.scores, scale))
        else:
            weights.append(by_system if by_system is not None else np.ones(len(candidates.texts)))
    return weights


def merge_decoders(
    paths: Sequence[Path], decodings: Sequence[Sequence[CandidateList]], scale: float = 1.0
) -> list[CandidateList]:
    """One list per trial from the n-best lists of several decoders.

    Each decoder has one vote, divided over its candidates by the softmax of their scores. The new score of a candidate
    is the logarithm of its fraction.
    """
    ids = [candidates.id for candidates in decodings[0]]
    for path, lists in zip(paths[1:], decodings[1:], strict=True):
        check_same_trials(str(paths[0]), ids, str(path), [candidates.id for candidates in lists])
    return [_merge_trial(paths, lists, scale) for lists in zip(*decodings, strict=True)]


def _merge_trial(paths: Sequence[Path], lists: Sequence[CandidateList], scale: float) -> CandidateList:
    references = {candidates.reference for candidates in lists if candidates.reference is not None}
    if len(references) > 1:
        raise UserError(
            f"{paths[0]} and the others disagree on the reference of trial {lists[0].id}; they were not scored on the"
            " same data"
        )
    texts: list[str] = []
    fractions: list[float] = []
    for candidates in lists:
        texts += candidates.texts
        votes = softmax(candidates.scores, scale) if candidates.scores else np.ones(len(candidates.texts))
        fractions += (votes / votes.sum()).tolist() if len(votes) else []
    models = dict.fromkeys(candidates.lm for candidates in lists if candidates.lm is not None)
    known = [candidates.in_lm_text for candidates in lists if candidates.in_lm_text is not None]
    return replace(
        lists[0],
        texts=tuple(texts),
        scores=tuple(float(np.log(max(fraction, 1e-300))) for fraction in fractions),
        reference=next(iter(references), None),
        in_lm_text=any(known) if known else None,
        lm=" / ".join(models) or None,
    )


def agreement_weights(lists: Sequence[CandidateList]) -> np.ndarray:
    """Weight of each system from its agreement with the MBR text; uses no references. (systems,)

    The log odds of a correct word, the optimal weight if systems err independently (Nitzan & Paroush 1982).
    """
    consensus = [mbr(candidates.texts).split() for candidates in lists]
    rates = []
    for system in range(len(lists[0].texts)):
        pairs = zip(consensus, lists, strict=True)
        counts = total(score(words, candidates.texts[system].split()) for words, candidates in pairs)
        rates.append(counts.rate or 0.0)
    p = np.clip(np.array(rates), 1e-4, 0.5 - 1e-4)
    return np.log((1 - p) / p)


def softmax(scores: Sequence[float] | np.ndarray, scale: float = 1.0) -> np.ndarray:
    """Scores as probabilities: (n,)"""
    with np.errstate(over="ignore", invalid="ignore"):  # scores may be infinitely far apart
        values = np.nan_to_num(scale * np.asarray(scores, dtype=np.float64))
        raised = np.exp(values - values.max()) if len(values) else values
    return raised / raised.sum() if len(values) else raised


def _words_as_characters(texts: Sequence[str]) -> list[str]:
    """Each text with one character per word, so that string distances are word distances."""
    codes: dict[str, str] = {}
    return [
        "".join(codes.setdefault(word, chr(_FIRST_CODE_POINT + len(codes))) for word in text.split()) for text in texts
    ]


def _edit_distances(strings: Sequence[str]) -> np.ndarray:
    """Edit distances between all pairs: (n, n)."""
    return cdist(strings, strings, scorer=Levenshtein.distance, dtype=np.int32)
