"""Delayed fusion: a second language model scores the beam of the word search every few words.

A causal language model is too slow for every arc of the search, and n-best rescoring comes too late for hypotheses that
the n-gram has pruned. In delayed fusion (Hori et al. 2025) it scores hypotheses of the beam at longer intervals: here
the complete words of a hypothesis whenever their number is a multiple of `every` and the last of them has survived
`delay` frames, so that short-lived hypotheses cost nothing. The n-gram score of these words is replaced by the
interpolated one,

    lm(h) = (1 − alpha) · n-gram(h) + alpha · causal(h),

a function of the words alone: hypotheses that were fused later, or not yet, differ by their last words only. The next
frame prunes by the new scores. The n-best list at the end has exact scores of complete sentences.

`start / step / finish` with immutable states. Frames are processed one at a time, and the scores of prefixes belong to
the state, so results do not depend on chunking or on other trials.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from arcuate.decoding.config import DecodingConfig
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.decoding.word_search.nbest import trace_words
from arcuate.decoding.word_search.search import WordSearch, WordState
from arcuate.language.jit import njit
from arcuate.language.ngram.query import advance

Words = tuple[str, ...]


class PrefixScorer(Protocol):
    """A language model that scores the first words of a sentence. `scores` is an immutable value of one sentence."""

    def start(self) -> Any: ...

    def extend(self, scores: Any, prefixes: Sequence[Words]) -> Any:
        """`scores` with further prefixes; prefixes share the state of the model for the words they share."""
        ...

    def log_prob(self, scores: Any, prefix: Words) -> float | None:
        """Natural-log probability of a scored prefix; None for others."""
        ...

    def sentences(self, scores: Any, sentences: Sequence[Words]) -> np.ndarray:
        """Natural-log probabilities of complete sentences. (n,)"""
        ...


@dataclass(frozen=True, eq=False)
class FusedState:
    """State of the word search, and the prefixes scored so far."""

    words: WordState
    scores: Any


@dataclass(frozen=True, eq=False)
class FusedWordSearch:
    """A word search whose beam is scored by a second language model every few words."""

    words: WordSearch
    scorer: PrefixScorer
    alpha: float = 0.5  # share of the second model in the language-model score
    every: int = 2  # words
    delay: int = 2  # frames that a word must have survived
    max_prefixes: int = 16  # best new prefixes scored at a frame
    n_final: int = 20  # complete sentences scored at the end, at least
    _lm_words: dict[str, int] = field(init=False, repr=False)  # n-gram id of each lexicon word

    def __post_init__(self) -> None:
        ids = dict(zip(self.words.words, self.words.tree.lm_words.tolist(), strict=True))
        object.__setattr__(self, "_lm_words", ids)

    @property
    def settings(self) -> DecodingConfig:
        return self.words.settings

    def search(self, log_probs: np.ndarray, n_best: int = 1) -> list[Hypothesis]:
        """Decode a complete trial (F, V)."""
        return self.finish(self.step(self.start(), log_probs), n_best)

    def start(self) -> FusedState:
        return FusedState(self.words.start(), self.scorer.start())

    def step(self, state: FusedState, log_probs: np.ndarray) -> FusedState:
        """Advance the state over further frames: (F, V) natural-log probabilities."""
        for frame in np.asarray(log_probs):
            state = self._fuse(FusedState(self.words.step(state.words, frame[None]), state.scores))
        return state

    def partial(self, state: FusedState) -> list[str]:
        """Complete words of the best hypothesis so far."""
        return self.words.partial(state.words)

    def n_settled(self, state: FusedState) -> int:
        """Number of leading words that all hypotheses share."""
        return self.words.n_settled(state.words)

    def finish(self, state: FusedState, n_best: int = 1) -> list[Hypothesis]:
        """N-best list with exact scores of both language models."""
        found = self.words.finish(state.words, max(n_best, self.n_final))
        causal = self.scorer.sentences(state.scores, [h.words for h in found])
        scored = [self._rescore(h, float(llm)) for h, llm in zip(found, causal, strict=True)]
        return sorted(scored, key=lambda h: -round(h.total or 0.0, 9))[:n_best]

    def _rescore(self, hypothesis: Hypothesis, causal: float) -> Hypothesis:
        lm = self._ngram_score(hypothesis.words, ends=True)
        scores = {**hypothesis.scores, "lm": lm, "llm": causal}
        language = (1 - self.alpha) * lm + self.alpha * causal
        total = scores["acoustic"] + scores["bonus"] + self.settings.lm_weight * language
        return replace(hypothesis, scores=scores, total=total)

    def _ngram_score(self, words: Sequence[str], ends: bool) -> float:
        model = self.words.model
        ids = [self._lm_words[word] for word in words] + ([model.eos] if ends else [])
        total, state = 0.0, model.start
        for word in ids:
            log_prob, state = advance(model.arrays, state, word)
            total += float(log_prob)
        return total

    def _fuse(self, state: FusedState) -> FusedState:
        """Score the prefixes that are due, and use their scores for every hypothesis that starts with them."""
        beam, backpointers = state.words.beam, state.words.backpointers
        newest = state.words.n_frames - 1 - self.delay
        tops = np.unique(beam["backpointer"])
        tops = tops[_are_due(backpointers.rows, tops, self.every, newest)]
        if not len(tops):
            return state
        prefixes = {int(top): self._prefix(backpointers.rows, int(top)) for top in tops}
        scores = self._score_best(state, prefixes)
        changes: dict[int, float] = {}
        for top, prefix in prefixes.items():
            causal = self.scorer.log_prob(scores, prefix)
            if causal is None:
                continue
            lm = (1 - self.alpha) * self._ngram_score(prefix, ends=False) + self.alpha * causal
            if abs(lm - float(backpointers.rows["lm"][top])) > 1e-9:
                changes[top] = lm
        if not changes:
            return FusedState(state.words, scores)
        return FusedState(self._with_lm(state.words, changes), scores)

    def _prefix(self, rows: np.ndarray, top: int) -> Words:
        return tuple(self.words.words[w] for w in rows["word"][trace_words(rows, top)])

    def _score_best(self, state: FusedState, prefixes: dict[int, Words]) -> Any:
        """Scores with the best `max_prefixes` new prefixes of the beam added."""
        beam, weight = state.words.beam, self.settings.lm_weight
        totals = np.maximum(beam["log_blank"], beam["log_token"]) + beam["bonus"]
        totals = totals + weight * (beam["lm"] + beam["lookahead"])
        best: dict[Words, float] = {}
        for top, total in zip(beam["backpointer"].tolist(), totals.tolist(), strict=True):
            prefix = prefixes.get(top)
            if prefix is not None and self.scorer.log_prob(state.scores, prefix) is None:
                best[prefix] = max(best.get(prefix, -np.inf), total)
        ranked = sorted(best, key=lambda prefix: (-best[prefix], prefix))[: self.max_prefixes]
        return self.scorer.extend(state.scores, ranked) if ranked else state.scores

    def _with_lm(self, state: WordState, changes: dict[int, float]) -> WordState:
        """The state with other language-model scores of the histories that end at these back-pointers."""
        beam = state.beam.copy()
        sizes = _chain_lengths(state.backpointers.rows, np.array(list(changes), np.int64))
        backpointers = state.backpointers.reserve(int(sizes.sum()))
        n = backpointers.n
        for top, lm in changes.items():
            chosen = beam["backpointer"] == top
            new_top, n = _copy_history(backpointers.rows, n, top, lm, self.settings.lm_weight)
            beam["backpointer"][chosen], beam["lm"][chosen] = new_top, lm
        return replace(state, beam=beam, backpointers=backpointers.appended(n))


@njit(cache=True)
def _are_due(rows: np.ndarray, tops: np.ndarray, every: int, newest: int) -> np.ndarray:
    """Whether each history has a multiple of `every` words, the last of which ended at frame `newest` or before."""
    due = np.zeros(tops.shape[0], np.bool_)
    for k in range(tops.shape[0]):
        n, last, at = 0, -1, tops[k]
        while at >= 0:
            if rows[at].word >= 0:
                if n == 0:
                    last = rows[at].last_frame
                n += 1
            at = rows[at].previous
        due[k] = n > 0 and n % every == 0 and last <= newest
    return due


@njit(cache=True)
def _chain_lengths(rows: np.ndarray, tops: np.ndarray) -> np.ndarray:
    """Number of rows from each back-pointer to its last word: recombinations, and the word."""
    lengths = np.ones(tops.shape[0], np.int64)
    for k in range(tops.shape[0]):
        at = tops[k]
        while rows[at].word < 0:
            lengths[k] += 1
            at = rows[at].previous
    return lengths


@njit(cache=True)
def _copy_history(rows: np.ndarray, n_rows: int, top: int, lm: float, lm_weight: float) -> tuple[int, int]:
    """Append a copy of the last word of a history, and of the recombinations after it, with another score.

    Rows are shared between states and never changed, so a changed score needs new ones. The worse history of a
    recombination keeps its own score, so the gap to it changes. Returns the new back-pointer and number of rows.
    """
    length = 1
    at = top
    while rows[at].word < 0:
        length += 1
        at = rows[at].previous
    at = top
    for k in range(length - 1, -1, -1):  # a row only points to earlier ones: the word comes first
        new = rows[n_rows + k]
        rows[n_rows + k] = rows[at]
        if rows[at].word < 0:
            new.score_gap += np.float32(lm_weight * (lm - rows[at].lm))
            new.previous = n_rows + k - 1
        new.lm = lm
        at = rows[at].previous
    return n_rows + length - 1, n_rows + length
