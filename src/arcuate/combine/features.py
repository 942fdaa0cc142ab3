"""What a candidate is judged by when the weights between criteria are fitted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from arcuate.combine.lists import CandidateList
from arcuate.combine.risk import expected_errors

# Criterion and the weight a fit starts from; also what is used where there is nothing to fit on.
OWN: tuple[tuple[str, float], ...] = (("agreement", 6.0), ("letters", 0.5), ("share", 2.0), ("words", 0.0))


@dataclass(frozen=True)
class Feature:
    """One more criterion: a name, the weight to start from, and a number for every text of a list."""

    name: str
    prior: float
    score: Callable[[Sequence[str]], np.ndarray]  # texts -> (n,)


@dataclass(frozen=True)
class Table:
    """The distinct candidates of one trial and their criteria."""

    texts: tuple[str, ...]
    values: np.ndarray  # (n, k)

    def choose(self, weights: np.ndarray) -> str:
        """The highest weighted sum; of equals the earlier."""
        return self.texts[int(np.argmax(np.round(self.values @ weights, 9)))] if self.texts else ""


def prior_of(extra: Sequence[Feature]) -> tuple[tuple[str, ...], list[float]]:
    """Names and starting weights of all criteria, in the order of the table's columns."""
    pairs = [*OWN, *((feature.name, feature.prior) for feature in extra)]
    return tuple(name for name, _ in pairs), [weight for _, weight in pairs]


def features_of(found: CandidateList, votes: np.ndarray, extra: Sequence[Feature]) -> Table:
    """Nearness to the other candidates by word and by letter, share of the votes, length, and the extra criteria."""
    if not found.texts:
        return Table((), np.zeros((0, len(OWN) + len(extra))))
    by_word = expected_errors(found.texts, votes, letter_share=0.0)
    by_letter = expected_errors(found.texts, votes, letter_share=1.0).risks - by_word.risks
    columns = [
        -by_word.risks,
        -by_letter,
        np.log(np.maximum(by_word.weights, 1e-6)),
        np.array([len(text.split()) for text in by_word.texts], dtype=np.float64),
        *(feature.score(by_word.texts) for feature in extra),
    ]
    return Table(by_word.texts, np.stack(columns, axis=1))
