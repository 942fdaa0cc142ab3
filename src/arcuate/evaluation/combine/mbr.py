"""Minimum Bayes risk: the candidate that is expected to have the fewest word errors.

The expectation is over the candidates themselves, each as probable as its weight. So a text that no decoder read
exactly, but that all of them nearly agree with, can win against the one that two of them read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist

# A letter edit counts this much of a word edit. Word edits alone leave many ties, and where two words differ the
# candidate closer in letters is the better guess.
LETTER_SHARE = 0.02
_FIRST_PRIVATE = 0x10000  # above all surrogates, so that every word gets one character


@dataclass(frozen=True)
class Risks:
    """Distinct texts of one list with their weight and expected word errors, in order of appearance."""

    texts: tuple[str, ...]
    weights: np.ndarray  # (n,), sums to one
    risks: np.ndarray  # (n,)

    @property
    def best(self) -> int:
        """The least risk; of equals the heavier, then the earlier."""
        rounded = np.round(self.risks, 9)  # sums in another order are no reason to choose another text
        return min(range(len(self.texts)), key=lambda i: (rounded[i], -round(float(self.weights[i]), 9), i))


def expected_errors(
    texts: Sequence[str], weights: Sequence[float] | np.ndarray, letter_share: float = LETTER_SHARE
) -> Risks:
    """Expected word errors of every distinct text if the truth is each text with its weight's probability."""
    distinct = list(dict.fromkeys(texts))
    place = {text: i for i, text in enumerate(distinct)}
    mass = np.zeros(len(distinct))
    for text, weight in zip(texts, weights, strict=True):
        mass[place[text]] += weight
    mass = mass / mass.sum() if mass.sum() > 0 else np.full(len(distinct), 1 / max(len(distinct), 1))
    edits = distances(as_characters(distinct)).astype(np.float64)  # (n, n)
    if letter_share:
        edits += letter_share * distances(distinct)
    return Risks(tuple(distinct), mass, edits @ mass)


def minimum_risk(
    texts: Sequence[str],
    weights: Sequence[float] | np.ndarray | None = None,
    letter_share: float = LETTER_SHARE,
) -> str:
    """The text with the fewest expected word errors; nothing where there are no texts."""
    if not texts:
        return ""
    found = expected_errors(texts, np.ones(len(texts)) if weights is None else weights, letter_share)
    return found.texts[found.best]


def as_characters(texts: Sequence[str]) -> list[str]:
    """Each text with one character per word, so that edit distances of words are those of strings."""
    ids: dict[str, str] = {}
    return [
        "".join(ids.setdefault(word, chr(_FIRST_PRIVATE + len(ids))) for word in text.split())
        for text in texts
    ]


def distances(strings: Sequence[str]) -> np.ndarray:
    """Edit distances between all pairs: (n, n)."""
    return cdist(strings, strings, scorer=Levenshtein.distance, dtype=np.int32)


def softmax(scores: Sequence[float] | np.ndarray, scale: float = 1.0) -> np.ndarray:
    """Scores as probabilities: (n,)"""
    with np.errstate(over="ignore", invalid="ignore"):  # what is infinitely worse gets nothing
        values = np.nan_to_num(scale * np.asarray(scores, dtype=np.float64))
        raised = np.exp(values - values.max()) if len(values) else values
    return raised / raised.sum() if len(values) else raised
