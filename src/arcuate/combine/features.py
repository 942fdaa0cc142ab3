"""What a candidate is judged by when the weights between criteria are fitted."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from arcuate.combine.lists import CandidateList
from arcuate.combine.risk import expected_errors
from arcuate.lm.model import LanguageModel

# Criterion and its weight where nothing was fitted: from ten-seed lists of two participants together (docs/combine.md,
# with what weights from one of them do for the other). Decoders lose sounds more often than they invent them, hence
# the reward of length.
OWN: tuple[tuple[str, float], ...] = (
    ("agreement", 4.7),
    ("letters", 0.62),
    ("share", 2.45),
    ("length", 0.81),
)
NGRAM_WEIGHT, CAUSAL_WEIGHT = 0.22, 0.2  # per nat, each alone
NGRAM_BESIDE_CAUSAL = 0.04


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
    """Nearness to the others by word and by letter, share of the votes, letters, and the extra criteria."""
    if not found.texts:
        return Table((), np.zeros((0, len(OWN) + len(extra))))
    by_word = expected_errors(found.texts, votes, letter_share=0.0)
    by_letter = expected_errors(found.texts, votes, letter_share=1.0).risks - by_word.risks
    columns = [
        -by_word.risks,
        -by_letter,
        np.log(np.maximum(by_word.weights, 1e-6)),
        np.array([len(text) for text in by_word.texts], dtype=np.float64),
        *(feature.score(by_word.texts) for feature in extra),
    ]
    return Table(by_word.texts, np.stack(columns, axis=1))


def ngram_feature(lm: LanguageModel, weight: float = NGRAM_WEIGHT) -> Feature:
    """Log-probability under an n-gram model."""
    return Feature("ngram", weight, lambda texts: np.array([sentence_log_prob(lm, text) for text in texts]))


def known_feature(name: str, weight: float, scores: Mapping[str, float]) -> Feature:
    """Scores that were computed beforehand, all texts in one go."""
    return Feature(name, weight, lambda texts: np.array([scores[text] for text in texts]))


def sentence_log_prob(lm: LanguageModel, text: str) -> float:
    """Natural-log probability of the words and of the sentence's end."""
    words = np.array([*(lm.find(word) for word in text.split()), lm.eos], dtype=np.int32)
    log_probs, _ = lm.score(words)
    return float(log_probs.sum())
