"""Delayed fusion: exact final scores, independent of chunking, and able to change what survives in the beam."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arcuate.decoding.config import DecodingConfig
from arcuate.decoding.word_search.fusion import FusedWordSearch
from arcuate.decoding.word_search.search import build_word_search
from arcuate.language.ngram.model import LanguageModel
from arcuate.language.ngram.query import advance
from support.live_parts import small_ngram, small_search
from support.word_search import frames as small_frames

Scores = Mapping[tuple[str, ...], float]


@dataclass(frozen=True)
class NGramScorer:
    """An n-gram as the second language model, with the words that it scored."""

    model: LanguageModel
    factor: float = 1.0

    def start(self) -> Scores:
        return {(): 0.0}

    def extend(self, scores: Scores, prefixes: Sequence[tuple[str, ...]]) -> Scores:
        return {**scores, **{prefix: self._score(prefix, False) for prefix in prefixes}}

    def log_prob(self, scores: Scores, prefix: tuple[str, ...]) -> float | None:
        return scores.get(prefix)

    def sentences(self, scores: Scores, sentences: Sequence[tuple[str, ...]]) -> np.ndarray:
        return np.array([self._score(words, True) for words in sentences])

    def _score(self, words: tuple[str, ...], ends: bool) -> float:
        total, state = 0.0, self.model.start
        for word in [*self.model.words.find_all(words), *([self.model.eos] if ends else [])]:
            log_prob, state = advance(self.model.arrays, state, int(word) if word >= 0 else self.model.unk)
            total += float(log_prob)
        return self.factor * total


SEARCH = small_search()
OTHER = NGramScorer(small_ngram(), factor=0.3)
FUSED = FusedWordSearch(SEARCH, OTHER, alpha=0.6, every=1, delay=0)


def log_probs(seed: int, n_frames: int) -> np.ndarray:
    logits = 3.0 * np.random.default_rng(seed).normal(size=(n_frames, len(SEARCH.classes)))
    return (logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)).astype(np.float32)


@given(st.integers(0, 9), st.integers(1, 3), st.integers(0, 3), st.lists(st.integers(0, 24), max_size=4))
def test_any_chunking_gives_the_same_result(seed: int, every: int, delay: int, cuts: list[int]) -> None:
    search, frames = replace(FUSED, every=every, delay=delay, max_prefixes=3), log_probs(seed, 24)
    complete, state = search.search(frames, 5), search.start()
    for piece in np.split(frames, sorted(cuts)):
        search.step(state, piece[::-1])  # another continuation changes nothing
        state = search.step(state, piece)
    assert search.finish(state, 5) == complete and complete[0].words


@pytest.mark.parametrize("seed", range(4))
def test_scores_are_those_of_complete_sentences(lexicon, model, seed: int) -> None:
    """Acoustic scores are not changed by the fusion, and the total interpolates both models."""
    exact = DecodingConfig(beam=100_000, threshold=200.0, merge_histories=False, missing_silence_bonus=-1.0)
    search, scorer, frames = build_word_search(lexicon, model, exact), NGramScorer(model, 0.3), small_frames(seed, 6)
    expected = {h.words: h.scores for h in search.search(frames, 10_000)}
    found = FusedWordSearch(search, scorer, alpha=0.6, every=1, delay=0).search(frames, 50)
    assert len(found) == 50
    for h in found:
        assert h.scores == pytest.approx({**expected[h.words], "llm": h.scores["llm"]}, abs=1e-3)
        assert h.scores["llm"] == pytest.approx(scorer.sentences({}, [h.words])[0])
        language = 0.4 * h.scores["lm"] + 0.6 * h.scores["llm"]
        total = h.scores["acoustic"] + h.scores["bonus"] + search.settings.lm_weight * language
        assert h.total == pytest.approx(total, abs=1e-3)


def test_without_weight_nothing_changes() -> None:
    for seed in range(4):
        frames = log_probs(seed, 24)
        expected, found = SEARCH.search(frames, 3), replace(FUSED, alpha=0.0).search(frames, 3)
        assert [h.words for h in found] == [h.words for h in expected]
        assert [h.total for h in found] == pytest.approx([h.total for h in expected], abs=1e-3)


def test_the_beam_follows_the_second_model(lexicon, model) -> None:
    """A narrow beam loses the sentence that the second model prefers, unless it is consulted during the search."""
    best_by_fusion, best_by_rescoring = 0.0, 0.0
    for seed in range(12):
        search = build_word_search(lexicon, model, DecodingConfig(beam=3, threshold=30.0, missing_silence_bonus=-1.0))
        scorer = NGramScorer(model, factor=-1.5)  # prefers what the n-gram rejects
        frames = small_frames(seed, 14)
        fused = FusedWordSearch(search, scorer, alpha=0.9, every=1, delay=0)
        late = replace(fused, every=1000)  # only the final list is scored
        best_by_fusion += fused.search(frames)[0].total
        best_by_rescoring += late.search(frames)[0].total
    assert best_by_fusion > best_by_rescoring + 1.0
