"""Word search: equal to enumeration of every word sequence, and its invariants."""

import itertools
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arcuate.decoding.config import DecodingConfig
from arcuate.decoding.word_search.search import build_word_search
from arcuate.errors import UserError
from arcuate.language.lexicon import Lexicon, make_lexicon
from arcuate.language.ngram.model import LanguageModel
from arcuate.models.layout import Frames
from support.cases import cases
from support.word_search import BLANK, BOUNDARY, CLASSES, frames

UNLIMITED = {"beam": 1_000_000, "threshold": 1e9}


def parse_words(tokens: tuple[int, ...], lexicon: Lexicon) -> list[tuple[tuple[str, ...], int, int]]:
    """All segmentations of tokens into words: (words, number of silences, number of missing silences)."""
    found: list[tuple[tuple[str, ...], int, int]] = []
    entries = [
        (lexicon.words[w], tuple(lexicon.tokens[a:b]))
        for w, a, b in zip(lexicon.word_of, lexicon.offsets, lexicon.offsets[1:], strict=False)
    ]

    def extend(at: int, words: tuple[str, ...], n_silences: int, n_missing: int, after_word: bool) -> None:
        if at == len(tokens):
            found.append((words, n_silences, n_missing))
            return
        if tokens[at] == BOUNDARY:
            extend(at + 1, words, n_silences + 1, n_missing, False)
        for word, phones in entries:
            if tokens[at : at + len(phones)] == phones:
                extend(at + len(phones), (*words, word), n_silences, n_missing + after_word, True)

    extend(0, (), 0, 0, False)
    return found


def enumerate_all(
    log_probs: np.ndarray, lexicon: Lexicon, model: LanguageModel, weights: DecodingConfig
) -> dict[tuple[str, ...], float]:
    """Score of every word sequence, summed over all class paths."""
    acoustic: dict[tuple[str, ...], float] = defaultdict(lambda: -np.inf)
    known: dict[tuple[int, ...], list[tuple[tuple[str, ...], int, int]]] = {}
    for path in itertools.product(range(len(CLASSES)), repeat=len(log_probs)):
        tokens = tuple(c for c, _ in itertools.groupby(path) if c != BLANK)
        path_score = sum(log_probs[t, c] - weights.blank_penalty * (c == BLANK) for t, c in enumerate(path))
        for words, n_silences, n_missing in known.setdefault(tokens, parse_words(tokens, lexicon)):
            extra = weights.silence_bonus * n_silences + weights.missing_silence_bonus * n_missing
            acoustic[words] = np.logaddexp(acoustic[words], float(path_score) + extra)
    return {words: score + lm_score(words, model, weights) for words, score in acoustic.items()}


def lm_score(words: tuple[str, ...], model: LanguageModel, weights: DecodingConfig) -> float:
    state, lm = model.start, 0.0
    for word in (*words, "</s>"):
        log_prob, state = model.advance(state, model.find(word))
        lm += log_prob
    return weights.lm_weight * lm + weights.word_bonus * len(words)


def some_weights(seed: int, **more: object) -> DecodingConfig:
    rng = np.random.default_rng(seed)
    values = {
        "lm_weight": rng.uniform(0.0, 1.5),
        "word_bonus": rng.normal(),
        "silence_bonus": rng.normal(),
        "missing_silence_bonus": rng.normal(),
        "blank_penalty": rng.normal(scale=0.3),
    }
    return DecodingConfig.model_validate({**values, **UNLIMITED, **more})


@settings(max_examples=cases(0.5))
@given(seed=st.integers(0, 10_000), n_frames=st.integers(0, 5))
def test_summed_alignments_equal_enumeration(seed: int, n_frames: int, lexicon: Lexicon, model: LanguageModel) -> None:
    weights = some_weights(seed)
    truth = enumerate_all(frames(seed, n_frames).astype(np.float64), lexicon, model, weights)
    search = build_word_search(lexicon, model, weights, merge_histories=False)
    found = search.search(Frames(frames(seed, n_frames)), 100_000)
    assert {h.words for h in found} == set(truth)
    assert [h.total for h in found] == pytest.approx([truth[h.words] for h in found], abs=1e-4)


def test_merged_histories_are_all_in_the_n_best_list(lexicon: Lexicon, model: LanguageModel) -> None:
    log_probs = frames(5, 8, sharp=1.0)
    separate = build_word_search(lexicon, model, some_weights(5), merge_histories=False).search(Frames(log_probs), 200)
    merged = build_word_search(lexicon, model, some_weights(5)).search(Frames(log_probs), 200)
    assert merged[0].words == separate[0].words
    assert {h.words for h in separate[:20]} <= {h.words for h in merged}


def test_scores_by_source_add_up(lexicon: Lexicon, model: LanguageModel) -> None:
    weights = some_weights(8)
    for hypothesis in build_word_search(lexicon, model, weights).search(Frames(frames(8, 12)), 20):
        scores = hypothesis.scores
        assert scores["acoustic"] + weights.lm_weight * scores["lm"] + scores["bonus"] == pytest.approx(
            hypothesis.total
        )
        assert weights.lm_weight * scores["lm"] + scores["bonus"] == pytest.approx(
            lm_score(hypothesis.words, model, weights), abs=1e-4
        )
        assert scores["bonus"] == pytest.approx(weights.word_bonus * len(hypothesis.words), abs=1e-5)


@settings(max_examples=cases(0.5))
@given(seed=st.integers(0, 10_000), cuts=st.lists(st.integers(0, 50), max_size=8), beam=st.integers(1, 60))
def test_result_is_independent_of_chunking(
    seed: int, cuts: list[int], beam: int, lexicon: Lexicon, model: LanguageModel
) -> None:
    weights = DecodingConfig(beam=beam, threshold=8.0)
    log_probs, search = frames(seed, 50), build_word_search(lexicon, model, weights)
    state = search.start()
    for first, last in itertools.pairwise([0, *sorted(cuts), 50]):
        state = search.step(state, Frames(log_probs[first:last]))
        assert len(state.beam) <= beam
    assert search.finish(state, 20) == build_word_search(lexicon, model, weights).search(Frames(log_probs), 20)


def test_a_state_is_a_value(lexicon: Lexicon, model: LanguageModel) -> None:
    search = build_word_search(lexicon, model, DecodingConfig(beam=50))
    middle = search.step(search.start(), Frames(frames(1, 20)))
    before = search.finish(middle, 10)
    one, other = search.step(middle, Frames(frames(2, 20))), search.step(middle, Frames(frames(3, 20)))
    assert search.finish(middle, 10) == before
    assert search.finish(one, 10) == search.search(Frames(np.concatenate([frames(1, 20), frames(2, 20)])), 10)
    assert search.finish(other, 10) == search.search(Frames(np.concatenate([frames(1, 20), frames(3, 20)])), 10)


def test_compaction_and_cache_clearing_change_nothing(
    lexicon: Lexicon, model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_probs, weights = frames(6, 400), DecodingConfig(beam=30)
    expected = build_word_search(lexicon, model, weights).search(Frames(log_probs), 10)
    monkeypatch.setattr("arcuate.decoding.word_search.search._MAX_BACKPOINTERS", 600)
    monkeypatch.setattr("arcuate.decoding.word_search.search._MAX_CACHE_ROWS", 5)
    search = build_word_search(lexicon, model, weights)
    state = search.start()
    for t in range(len(log_probs)):
        state = search.step(state, Frames(log_probs[t : t + 1]))
    assert search.finish(state, 10) == expected
    assert search.workspace.generation > 0


def test_warm_up_changes_nothing_and_fills_the_cache(lexicon: Lexicon, model: LanguageModel) -> None:
    log_probs = frames(8, 60)
    cold, warm = build_word_search(lexicon, model), build_word_search(lexicon, model)
    warm.warm_up()
    n_rows = int(warm.workspace.models.lookahead.n_rows[0])
    assert warm.search(Frames(log_probs), 5) == cold.search(Frames(log_probs), 5)
    assert int(warm.workspace.models.lookahead.n_rows[0]) == n_rows > 0


def test_settled_words_do_not_change(lexicon: Lexicon, model: LanguageModel) -> None:
    search = build_word_search(lexicon, model, DecodingConfig(beam=20))
    log_probs, seen = frames(9, 150), []
    state = search.start()
    for t in range(len(log_probs)):
        state = search.step(state, Frames(log_probs[t : t + 1]))
        partial = search.partial(state)
        seen.append(partial.words[: partial.n_settled])
    final = search.finish(state)[0].words
    assert all(words == final[: len(words)] for words in seen)
    assert len(seen[-1]) > 3


def test_twenty_homophones_are_all_found(model: LanguageModel) -> None:
    words = [f"word{i}" for i in range(20)]
    lexicon = make_lexicon([(word, ("a", "b")) for word in words], CLASSES, "homophones")
    search = build_word_search(lexicon, model, DecodingConfig())
    confident = np.log(np.array([[0.01, 0.97, 0.01, 0.01], [0.01, 0.01, 0.97, 0.01]], np.float32))
    assert {h.words for h in search.search(Frames(confident), 25)} >= {(word,) for word in words}
    assert len(search.oov_words) == 20


def test_an_incomplete_last_word_is_dropped(lexicon: Lexicon, model: LanguageModel) -> None:
    lexicon = make_lexicon([("ab", ("a", "b"))], CLASSES, "one word")
    confident = np.log(np.array([[1e-6, 1 - 3e-6, 1e-6, 1e-6]], np.float32))
    found = build_word_search(lexicon, model, DecodingConfig(beam=1)).search(Frames(confident))
    assert found[0].words == ()


def test_words_added_at_run_time_are_found(lexicon: Lexicon, model: LanguageModel) -> None:
    search = build_word_search(lexicon, model, DecodingConfig(lm_weight=0.5, word_bonus=0.0))
    confident = np.log(np.array([[0.01, 0.01, 0.97, 0.01], [0.01, 0.97, 0.01, 0.01]], np.float32))
    assert "ba" not in search.search(Frames(confident))[0].words
    longer = lexicon.with_entries([("ba", ("b", "a"))])
    extended = build_word_search(longer, model, search.settings, weights={"ba": 8.0})
    best = extended.search(Frames(confident))[0]
    assert best.words == ("ba",) and best.scores["bonus"] == pytest.approx(8.0)
    with pytest.raises(UserError, match="no pronunciation"):
        build_word_search(lexicon, model, weights={"absent": 1.0})


def test_word_times_are_frames_of_the_tokens(lexicon: Lexicon, model: LanguageModel) -> None:
    log_probs = np.full((9, 4), np.log(0.001), np.float32)
    for t, c in enumerate([0, 1, 2, 1, 0, 3, 0, 1, 0]):  # ab, silence, one or won
        log_probs[t, c] = np.log(0.997)
    best = build_word_search(lexicon, model, DecodingConfig(lm_weight=0.1)).search(Frames(log_probs))[0]
    assert best.words[0] == "ab" and len(best.words) == 2
    assert [(w.first, w.last) for w in best.times] == [(1, 3), (7, 7)]


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1e38, -1e38])
@pytest.mark.parametrize("name", ["log_probs", "backoffs"])
def test_damaged_model_values_give_finite_scores(
    name: str, value: float, lexicon: Lexicon, model: LanguageModel
) -> None:
    """A damaged file may give wrong words, but every score is finite."""
    damaged = getattr(model.arrays, name).copy()
    damaged[np.random.default_rng(1).random(len(damaged)) < 0.4] = value
    damaged.flags.writeable = False  # as in a mapped file, so that nothing is recompiled
    search = build_word_search(lexicon, replace(model, arrays=model.arrays._replace(**{name: damaged})))
    found = search.search(Frames(frames(4, 60)), 5)
    assert found and all(np.isfinite([h.total, *h.scores.values()]).all() for h in found)


@pytest.mark.parametrize("name", ["firsts", "words"])
def test_links_out_of_range_are_not_followed(name: str, lexicon: Lexicon, model: LanguageModel) -> None:
    damaged = getattr(model.arrays, name).copy()
    damaged[len(model.words) + 2 : -1] = 2**31 - 1
    damaged.flags.writeable = False  # as in a mapped file, so that nothing is recompiled
    search = build_word_search(lexicon, replace(model, arrays=model.arrays._replace(**{name: damaged})))
    assert search.search(Frames(frames(4, 60)), 5)


def test_impossible_frames_give_no_hypothesis(lexicon: Lexicon, model: LanguageModel) -> None:
    """Frames that are certain of a token with which no word starts."""
    only = make_lexicon([("one", ("a",))], CLASSES, "one word")
    certain = np.full((3, 4), -np.inf, np.float32)
    certain[:, 2] = 0.0
    search = build_word_search(only, model)
    state = search.step(search.start(), Frames(certain))
    assert search.finish(state, 5) == [] and (search.partial(state).words, search.partial(state).n_settled) == ((), 0)
