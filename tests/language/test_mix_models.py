"""Perplexity, tuned interpolation weights, and normalised interpolations."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arcuate.errors import UserError
from arcuate.language.ngram.estimate import estimate_model
from arcuate.language.ngram.mix import interpolate, tune_weights
from arcuate.language.ngram.model import LanguageModel
from arcuate.language.ngram.perplexity import score_text, score_tokens
from arcuate.language.ngram.trie import model_from_tables
from support.backoff import SMALL, model_of, reference_log10

TEXT = (Path(__file__).parent / "lmplz" / "text.txt").read_text().splitlines()


def built(folder: Path, lines: list[str], order: int) -> LanguageModel:
    (folder / "text.txt").write_text("\n".join(lines) + "\n")
    return estimate_model([folder / "text.txt"], order).model


def test_perplexity_counts_words_and_sentence_ends() -> None:
    found = score_text(model_of(SMALL), ["a b", "zebra c"])
    sentences = [["<s>", "a", "b", "</s>"], ["<s>", "<unk>", "c", "</s>"]]
    logs = [reference_log10(SMALL, s[max(0, i - 2) : i], s[i]) for s in sentences for i in range(1, len(s))]
    known = logs[:3] + logs[4:]
    assert found.perplexity == pytest.approx(10 ** (-sum(known) / 5), rel=1e-5)
    assert found.perplexity_with_oov == pytest.approx(10 ** (-sum(logs) / 6), rel=1e-5)
    assert (found.n_words, found.n_oov, found.oov_words) == (4, 1, ("zebra",))


def test_a_model_without_sentence_ends_is_scored_on_words_only() -> None:
    found = score_text(model_of({("a",): (-0.5, 0.0), ("b",): (-0.2, 0.0)}), ["a b", "b"])
    assert found.perplexity == pytest.approx(10 ** (0.9 / 3), rel=1e-5)
    assert (found.n_words, found.n_oov) == (3, 0)


def test_sentence_marks_in_text_are_rejected() -> None:
    with pytest.raises(UserError, match="sentence 2"):
        score_tokens(model_of(SMALL), ["a", "<s> a"])


def test_leakage_and_perplexity_of_unseen_sentences(tmp_path: Path) -> None:
    model = built(tmp_path, TEXT[:100], 3)
    found = score_text(model, [TEXT[0].upper(), "the unseen neck was usually noisy"])
    assert found.n_in_training_text == 1
    alone = score_text(model, ["the unseen neck was usually noisy"])
    assert found.perplexity_unseen == pytest.approx(alone.perplexity)


def test_tuned_weights_are_optimal(tmp_path: Path) -> None:
    models = [built(tmp_path, TEXT[:90], 3), built(tmp_path, TEXT[60:140], 2)]
    found = tune_weights(models, TEXT[140:])
    probs = [score_tokens(m, TEXT[140:]) for m in models]
    table = np.stack([np.where(s.known, np.exp(s.log_probs), 0) for s in probs])
    table = table[:, table.sum(0) > 0]
    grid = [-np.log(w * table[0] + (1 - w) * table[1]).mean() for w in np.linspace(0.001, 0.999, 999)]
    assert math.log(found.perplexity) == pytest.approx(min(grid), abs=1e-5)
    assert sum(found.weights) == pytest.approx(1)


def test_an_uninformative_model_gets_no_weight(tmp_path: Path) -> None:
    good, bad = built(tmp_path, TEXT, 3), model_of(SMALL)
    assert tune_weights([good, bad], TEXT[:50]).weights[0] > 0.99


@given(weight=st.floats(0.05, 0.95), history=st.lists(st.sampled_from([*TEXT[70].split(), "i", "zebra"]), max_size=4))
def test_an_interpolation_sums_to_one(
    tmp_path_factory: pytest.TempPathFactory, weight: float, history: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("mix")
    models = [built(folder, TEXT[:80], 3), built(folder, TEXT[60:], 4)]
    model = model_from_tables(interpolate(models, [weight, 1 - weight]))
    state = model.start
    for word in history:
        _, state = model.advance(state, model.find(word))
    total = sum(math.exp(model.advance(state, w)[0]) for w in range(len(model.words)) if w != model.bos)
    assert total == pytest.approx(1, abs=1e-4)


def test_explicit_ngrams_have_the_interpolated_probability(tmp_path: Path) -> None:
    models = [built(tmp_path, TEXT[:80], 3), built(tmp_path, TEXT[60:], 3)]
    mixed = model_from_tables(interpolate(models, [0.3, 0.7]))
    for line in TEXT[60:80]:  # in both texts, so every n-gram of them is explicit
        probs = [np.exp(score_tokens(model, [line]).log_probs) for model in (*models, mixed)]
        assert probs[2] == pytest.approx(0.3 * probs[0] + 0.7 * probs[1], rel=1e-4)


def test_interpolating_a_model_with_itself_changes_nothing(tmp_path: Path) -> None:
    model = built(tmp_path, TEXT[:100], 4)
    again = model_from_tables(interpolate([model, model], [1, 3]))
    a, b = (score_tokens(m, TEXT[100:]).log_probs for m in (model, again))
    assert b == pytest.approx(a, abs=2e-3)  # back-offs are recomputed from rounded probabilities


def test_invalid_weights_are_rejected(tmp_path: Path) -> None:
    for weights in ([1.0], [1.0, -0.5], [0.0, 0.0], [float("nan"), 1.0]):
        with pytest.raises(UserError, match="weight"):
            interpolate([model_of(SMALL), model_of(SMALL)], weights)
