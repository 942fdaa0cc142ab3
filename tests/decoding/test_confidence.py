"""Word confidences: posteriors of n-best lists, their calibration, and the same values from every search."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arcuate.decoding.confidence import SENTENCE_FEATURES, WORD_FEATURES, with_confidence, word_features
from arcuate.decoding.config import ConfidenceConfig, DecodingConfig, parse_decoding_config
from arcuate.decoding.hypothesis import Hypothesis, WordTime
from arcuate.decoding.word_search.search import build_word_search
from arcuate.errors import UserError
from arcuate.language.lexicon import Lexicon
from arcuate.language.ngram.model import LanguageModel
from arcuate.models.layout import Frames
from support.word_search import frames

SETTINGS = DecodingConfig()
POSTERIOR = WORD_FEATURES.index("posterior")


def hypothesis(text: str, acoustic: float, lm: float = 0.0, start: int = 0) -> Hypothesis:
    words = tuple(text.split())
    times = tuple(WordTime(start + 4 * i, start + 4 * i + 3) for i in range(len(words)))
    total = acoustic + SETTINGS.lm_weight * lm
    return Hypothesis((), {"acoustic": acoustic, "lm": lm, "bonus": 0.0}, words, times, total)


def test_a_word_has_the_summed_posterior_of_the_hypotheses_that_contain_it() -> None:
    n_best = [hypothesis("see the dog", -1.0), hypothesis("see a dog", -2.0), hypothesis("sea a dog", -3.0)]
    weights = np.exp([-1.0, -2.0, -3.0])
    expected = [(weights[:2].sum(), weights[2]), (weights[0], weights[1:].sum())]
    found = word_features(n_best, None, SETTINGS.lm_weight)[:, POSTERIOR]
    assert found[:2] == pytest.approx([np.log(right / wrong) for right, wrong in expected], abs=1e-3)
    assert found[2] == 8.0  # no rival


def test_a_word_at_other_frames_is_not_the_same_word() -> None:
    later = hypothesis("dog", -1.5, start=40)
    found = word_features([hypothesis("dog", -1.0), later], None, SETTINGS.lm_weight)[0, POSTERIOR]
    assert found == pytest.approx(0.5, abs=1e-3)


def test_acoustic_and_language_evidence_are_kept_apart() -> None:
    n_best = [hypothesis("the", -5.0, lm=-1.0), hypothesis("a", -1.0, lm=-9.0)]
    features = dict(zip(WORD_FEATURES, word_features(n_best, None, SETTINGS.lm_weight)[0], strict=True))
    assert features["acoustic_margin"] == pytest.approx(-4.0)
    assert features["lm_margin"] == pytest.approx(8.0 * SETTINGS.lm_weight)
    assert features["acoustic_posterior"] < 0 < features["lm_posterior"]


def test_scaled_totals_give_the_same_confidences() -> None:
    n_best = [hypothesis("see the dog", -1.0, -2.0), hypothesis("see a dog", -2.0, -1.5)]
    halved = [Hypothesis(h.tokens, h.scores, h.words, h.times, 0.5 * (h.total or 0.0)) for h in n_best]
    expected = with_confidence(n_best, None, SETTINGS)[0].confidences
    assert with_confidence(halved, None, SETTINGS, 2.0)[0].confidences == pytest.approx(expected)


def test_a_list_without_words_stays_as_it_is() -> None:
    assert with_confidence([], None, SETTINGS) == []
    empty = [Hypothesis((), total=-1.0)]
    assert with_confidence(empty, None, SETTINGS) == empty


@given(st.integers(0, 200), st.integers(1, 12))
def test_confidences_are_probabilities_and_do_not_depend_on_chunks(
    lexicon: Lexicon, model: LanguageModel, seed: int, cut: int
) -> None:
    search = build_word_search(lexicon, model, SETTINGS)
    scores = frames(seed, 12)
    whole = with_confidence(search.search(Frames(scores), 100), scores, SETTINGS)
    state = search.step(search.step(search.start(), Frames(scores[:cut])), Frames(scores[cut:]))
    chunked = with_confidence(search.finish(state, 100), scores, SETTINGS)
    assert whole == chunked
    if whole and whole[0].words:
        assert len(whole[0].confidences) == len(whole[0].words)
        assert all(0.0 < p < 1.0 for p in whole[0].confidences)
        assert whole[0].probability is not None and 0.0 < whole[0].probability < 1.0


def test_weights_of_another_length_are_rejected_with_the_expected_length() -> None:
    default = ConfidenceConfig()
    assert len(default.word.weights) == len(WORD_FEATURES)
    assert len(default.sentence.weights) == len(SENTENCE_FEATURES)
    wrong = {"expected 10 numbers, got 2": {"word": {"weights": [1.0, 2.0]}}}
    wrong |= {r"weights\.yaml": {"sentence": {"weights": [1e300, 0.0, 0.0, 0.0]}}}
    for message, settings in wrong.items():
        with pytest.raises(UserError, match=message):
            parse_decoding_config({"confidence": settings}, "weights.yaml")
