"""Hypothesis, the result of every search, and the greedy search."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

from arcuate.data.alphabet import BLANK, token_names


@dataclass(frozen=True)
class WordTime:
    """Frames of a word's first and last token."""

    first: int
    last: int


@dataclass(frozen=True)
class Hypothesis:
    """Tokens, words or both, with natural-log scores by source."""

    tokens: tuple[int, ...]
    scores: dict[str, float] = field(default_factory=dict)  # by source, such as "acoustic" and "lm"
    words: tuple[str, ...] = ()
    times: tuple[WordTime, ...] = ()  # one per word, if the search provides them
    total: float | None = None  # weighted sum of the scores, by which an n-best list is ranked
    confidences: tuple[float, ...] = ()  # probability that each word is correct; best hypothesis of a list only
    probability: float | None = None  # probability that the sentence has no word error
    accept_above: float | None = None  # lowest confidence of an accepted word in this sentence

    @property
    def accepted(self) -> tuple[bool, ...]:
        """Whether each word is accepted; empty without confidences."""
        return tuple(self.accept_above is not None and p >= self.accept_above for p in self.confidences)

    @property
    def phonemes(self) -> list[str]:
        return token_names(self.tokens)

    @property
    def text(self) -> str | None:
        """The words as one string; None if only phonemes were decoded."""
        return " ".join(self.words) if self.words else None


def word_alternatives(
    words: Sequence[str], nbest: Sequence[Sequence[str]], totals: Sequence[float | None] = ()
) -> dict[int, list[str]]:
    """Words of the other hypotheses at each position of `words` where they differ, most probable first.

    The probability of an alternative is the summed softmax of the `totals` of its hypotheses; without totals, the order
    is that of the hypotheses.
    """
    from rapidfuzz.distance import Levenshtein  # not installed with the runtime of exported models

    best = max((t for t in totals if t is not None), default=0.0)
    weights = [math.exp((t if t is not None else best) - best) for t in totals] or [0.0] * len(nbest)
    found: dict[int, dict[str, float]] = {}
    for hypothesis, weight in zip(nbest, weights, strict=True):
        for op in Levenshtein.opcodes(words, hypothesis):
            if op.tag != "replace":
                continue
            width, other = op.src_end - op.src_start, hypothesis[op.dest_start : op.dest_end]
            for k in range(width):  # word by word; surplus words go to the last position
                alternative = " ".join(other[k:] if k == width - 1 else other[k : k + 1])
                others = found.setdefault(op.src_start + k, {})
                if alternative:
                    others[alternative] = others.get(alternative, 0.0) + weight
    return {at: sorted(others, key=lambda word: -others[word]) for at, others in found.items()}


@dataclass(frozen=True)
class TokenSpan:
    """A token and the frames it covers."""

    token: int
    first: int
    n_frames: int


def token_spans(log_probs: Any) -> list[TokenSpan]:
    """Runs of frames with the same best class, without blanks; `log_probs` is an array or tensor (F, V).

    Repeats are merged before blanks are removed, so a blank between two equal tokens keeps both.
    """
    found, first = [], 0
    for token, group in groupby(log_probs.argmax(-1).tolist()):
        n_frames = len(list(group))
        if token != BLANK:
            found.append(TokenSpan(token, first, n_frames))
        first += n_frames
    return found


@dataclass(frozen=True)
class GreedyTokens:
    """Greedy output of a stream so far, extended frame by frame."""

    tokens: tuple[int, ...] = ()
    last: int = BLANK  # best class of the last frame

    def extend(self, log_probs: Any) -> "GreedyTokens":
        """The output after further frames (f, V)."""
        classes = [self.last, *log_probs.argmax(-1).tolist()]
        new = tuple(after for before, after in pairwise(classes) if after not in (before, BLANK))
        return GreedyTokens(self.tokens + new, classes[-1])


def greedy(log_probs: Any) -> list[int]:
    """Tokens of one trial from its frames (F, V) without padding."""
    return [span.token for span in token_spans(log_probs)]
