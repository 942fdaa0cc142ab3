"""Votes of several systems, or of one n-best list: MBR decoding and ROVER."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist

from arcuate.errors import UserError
from arcuate.evaluation.combine.candidates import CandidateList, check_same_trials, n_systems
from arcuate.evaluation.metrics import score, total

Votes = Literal["equal", "agreement"]
# Cost of a letter edit relative to a word edit. Word edits alone leave many ties, and where two words differ, the
# candidate that is closer in letters is more often correct.
LETTER_COST = 0.02
_FIRST_CODE_POINT = 0x10000  # above the surrogates, so that every word can be one character
_NO_WORD = ""  # the vote of a slot for no word

_Slot = dict[str, float]  # word -> summed weight of its votes


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
    if not texts:
        return ""
    found = expected_errors(texts, np.ones(len(texts)) if weights is None else weights)
    backbone = found.best
    order = [backbone, *(i for i in range(len(found.texts)) if i != backbone)]
    slots: list[_Slot] = []
    cast = 0.0  # weight of the votes so far
    for i in order:
        weight = float(found.weights[i])
        slots = _add_votes(slots, found.texts[i].split(), weight, cast)
        cast += weight
    winners = [max(slot, key=lambda word: round(slot[word], 9)) for slot in slots]  # ties: first inserted
    return " ".join(word for word in winners if word != _NO_WORD)


def _add_votes(slots: list[_Slot], words: Sequence[str], weight: float, cast: float) -> list[_Slot]:
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
        skip = 1 - slot.get(_NO_WORD, 0.0) / votes
        cost[i, 0] = cost[i - 1, 0] + skip
        for j, word in enumerate(words, start=1):
            match = 1 - slot.get(word, 0.0) / votes
            cost[i, j] = min(cost[i - 1, j - 1] + match, cost[i - 1, j] + skip, cost[i, j - 1] + 1)
    return _trace_back(slots, words, weight, cast, cost)


def _trace_back(slots: list[_Slot], words: Sequence[str], weight: float, cast: float, cost: np.ndarray) -> list[_Slot]:
    """Follow the cheapest alignment from its end and add the votes."""
    i, j = len(slots), len(words)
    merged: list[_Slot] = []
    while i or j:
        slot = slots[i - 1] if i else {}
        votes = sum(slot.values()) or 1.0
        if i and j and np.isclose(cost[i, j], cost[i - 1, j - 1] + 1 - slot.get(words[j - 1], 0.0) / votes):
            merged.append(_with_vote(slot, words[j - 1], weight))
            i, j = i - 1, j - 1
        elif i and np.isclose(cost[i, j], cost[i - 1, j] + 1 - slot.get(_NO_WORD, 0.0) / votes):
            merged.append(_with_vote(slot, _NO_WORD, weight))
            i -= 1
        else:
            opened: _Slot = {_NO_WORD: cast} if cast else {}
            merged.append(_with_vote(opened, words[j - 1], weight))
            j -= 1
    return merged[::-1]


def _with_vote(slot: _Slot, word: str, weight: float) -> _Slot:
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
