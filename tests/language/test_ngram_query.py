"""Trie queries equal the definition of back-off for any n-grams, and states carry all relevant context."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arcuate.errors import UserError
from arcuate.language.ngram.trie import NGramTable, NGramTables, model_from_tables
from support.backoff import SMALL, Backoff, model_of, reference_log10, walk
from support.cases import cases

WORDS = ("<unk>", "<s>", "</s>", "a", "b", "c", "d")
LOGS = st.floats(-9, 0, width=32)
WEIGHTS = st.one_of(st.just(0.0), st.floats(-3, 1, width=32))


@st.composite
def backoff_models(draw: st.DrawFn) -> Backoff:
    """Any set of n-grams: contexts and suffixes may be missing, back-offs may be zero."""
    order = draw(st.integers(1, 5))
    ngrams: Backoff = {(word,): (draw(LOGS), draw(WEIGHTS)) for word in WORDS}
    longer = st.lists(st.sampled_from(WORDS), min_size=2, max_size=max(order, 2)).map(tuple)
    for gram in draw(st.lists(longer, max_size=25)) if order > 1 else ():
        ngrams[gram] = (draw(LOGS), draw(WEIGHTS))
    return ngrams


@given(ngrams=backoff_models(), text=st.lists(st.sampled_from(WORDS), min_size=1, max_size=12))
@settings(max_examples=cases(10))
def test_queries_equal_the_definition(ngrams: Backoff, text: list[str]) -> None:
    model = model_of(ngrams)
    scores, _ = walk(model, text)
    order = max(map(len, ngrams))
    defined = [reference_log10(ngrams, text[max(0, i - order + 1) : i], word) for i, word in enumerate(text)]
    expected = [min(log_prob, 0.0) for log_prob in defined]  # probabilities are at most one, whatever the back-offs
    assert scores == pytest.approx(expected, abs=1e-5)


@given(ngrams=backoff_models(), text=st.lists(st.sampled_from(WORDS), min_size=1, max_size=8))
@settings(max_examples=cases(5))
def test_a_state_carries_all_relevant_context(ngrams: Backoff, text: list[str]) -> None:
    """The state depends on the last order − 1 words only and is a context of the model."""
    model = model_of(ngrams)
    _, state = walk(model, text)
    order = max(map(len, ngrams))
    _, again = walk(model, text[max(0, len(text) - order + 1) :])
    assert state == again
    assert 0 <= state < len(model.arrays.backoffs)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1e38, -1e38])
@pytest.mark.parametrize("name", ["log_probs", "backoffs"])
def test_every_log_prob_is_finite_and_at_most_zero(name: str, value: float) -> None:
    """Whatever a file contains: a search adds log-probabilities and compares them."""
    model = model_of(SMALL)
    damaged = getattr(model.arrays, name).copy()
    damaged[:] = value
    model = replace(model, arrays=model.arrays._replace(**{name: damaged}))
    for state in range(len(model.arrays.backoffs)):
        for word in range(len(model.words)):
            assert -1e30 <= model.advance(state, word)[0] <= 0.0


def test_irrelevant_context_is_dropped() -> None:
    model = model_of(SMALL)
    assert walk(model, ["c"])[1] == model.empty  # no back-off, no children
    assert walk(model, ["a"])[1] != model.empty


def test_start_is_the_state_after_the_sentence_mark() -> None:
    model = model_of(SMALL)
    assert walk(model, ["a", "b"], model.start)[0] == pytest.approx([-0.2, -0.1], abs=1e-6)
    assert model.order == 3 and model.counts == (6, 3, 2)


def test_missing_special_words_are_added_with_probability_zero() -> None:
    model = model_of({("a",): (-0.3, 0.0), ("b",): (-0.3, 0.0)})
    assert model.metadata["added"] == ["<unk>", "<s>", "</s>"]
    assert model.start == model.empty
    assert walk(model, ["zebra"])[0] == pytest.approx([-99], abs=1e-4)


def test_words_are_found_by_name_and_id() -> None:
    model = model_of({(word,): (-1.0, 0.0) for word in ("naïve", "日本")})
    assert model.words == ("naïve", "日本", "<unk>", "<s>", "</s>")
    assert model.find_all(["日本", "absent", ""]).tolist() == [1, -1, -1] and model.find("absent") == 2


def test_a_repeated_ngram_with_different_values_is_rejected() -> None:
    words = ["<unk>", "<s>", "</s>"]
    unigrams = NGramTable(np.arange(3, dtype=np.int32)[:, None], np.full(3, -1, np.float32), np.zeros(3, np.float32))
    twice = np.array([[0, 2], [0, 2]], np.int32)
    with pytest.raises(UserError, match="'<unk> </s>' occurs twice"):
        model_from_tables(
            NGramTables(words, (unigrams, NGramTable(twice, np.array([-1, -2], np.float32), np.zeros(2, np.float32))))
        )
    same = NGramTable(twice, np.array([-1, -1], np.float32), np.zeros(2, np.float32))
    assert model_from_tables(NGramTables(words, (unigrams, same))).counts == (3, 1)
