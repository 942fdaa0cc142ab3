"""Results of searches, and the greedy search. Importing it needs neither torch nor pydantic."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, Protocol

import numpy as np

from arcuate.data.alphabet import BLANK, token_names
from arcuate.models.layout import Frames, Head


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


@dataclass(frozen=True)
class Partial:
    """Result of a sentence so far; the first `n_settled` words can no longer change."""

    words: tuple[str, ...]  # complete words; the phonemes so far if no words are decoded
    tokens: tuple[int, ...]  # phonemes so far
    n_settled: int = 0
    n_frames: int = 0  # frames of the sentence so far
    log_probs: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.float32))  # (f, V) of the last push

    @property
    def text(self) -> str:
        return " ".join(self.words)


class Search(Protocol):
    """Frames to text: greedy, words (`word_search`), tokens or words with a transducer (`joint`).

    States are immutable: `step` returns a new one and leaves the old one valid.
    """

    @property
    def head(self) -> Head:
        """The heads that the search uses."""
        ...

    def start(self) -> Any: ...

    def step(self, state: Any, frames: Frames, /) -> Any:
        """Advance the state over further frames."""
        ...

    def partial(self, state: Any, /) -> Partial: ...

    def finish(self, state: Any, n_best: int = 1, /) -> list[Hypothesis]:
        """The best hypotheses of all frames so far, best first; empty if none is possible."""
        ...


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
class GreedyState:
    """Greedy output of a stream so far."""

    tokens: tuple[int, ...] = ()
    last: int = BLANK  # best class of the last frame
    scores: tuple[np.ndarray, ...] = ()  # (f,) log-probabilities of the best classes

    def extend(self, log_probs: np.ndarray) -> "GreedyState":
        """The output after further frames (f, V)."""
        if not len(log_probs):
            return self
        classes = [self.last, *log_probs.argmax(-1).tolist()]
        new = tuple(after for before, after in pairwise(classes) if after not in (before, BLANK))
        return GreedyState(self.tokens + new, classes[-1], (*self.scores, log_probs.max(axis=1)))


@dataclass(frozen=True)
class GreedySearch:
    """The best class of every frame, without repetitions and blanks."""

    classes: tuple[str, ...]
    head: Head = "ctc"

    def start(self) -> GreedyState:
        return GreedyState()

    def step(self, state: GreedyState, frames: Frames) -> GreedyState:
        return state.extend(frames.log_probs)

    def partial(self, state: GreedyState) -> Partial:
        return Partial(tuple(self.classes[token] for token in state.tokens), state.tokens)

    def finish(self, state: GreedyState, n_best: int = 1) -> list[Hypothesis]:
        score = float(np.concatenate(state.scores).sum()) if state.scores else 0.0
        return [Hypothesis(state.tokens, {"acoustic": score}, total=score)]


def greedy(log_probs: Any) -> list[int]:
    """Tokens of one trial from its frames (F, V) without padding."""
    return [span.token for span in token_spans(log_probs)]
