"""Word and letter errors: one normalisation, sums divided once, the language model named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arcuate.data.text import text_to_tokens
from arcuate.evaluation.metrics import Score, ScoredTrial, score_text, summarise_words
from arcuate.evaluation.significance import score_difference


def trial(reference: str, hypothesis: str, **known: object) -> ScoredTrial:
    return ScoredTrial("x", score_text(reference, hypothesis), **known)  # type: ignore[arg-type]


def test_both_sides_are_normalised() -> None:
    assert score_text("It's five o'clock, isn't it?", "its five o'clock isn't it").words == Score(1, 0, 0, 5)
    assert score_text("Bring it.", "bring it").letters.errors == 0


@pytest.mark.parametrize(
    ("typed", "decoded"),
    [
        ("I don’t know", "i don't know"),
        ("I waited 5 minutes – at the café.", "i waited five minutes at the cafe"),
        ("It cost $20 in 1984…", "it cost twenty dollars in nineteen eighty-four"),
    ],
)
def test_a_reference_is_read_as_its_labels_are(typed: str, decoded: str) -> None:
    assert score_text(typed, decoded).letters.errors == 0
    assert text_to_tokens(typed)[0] == text_to_tokens(decoded)[0]


def test_letters_count_spaces() -> None:
    assert score_text("a way", "away").letters == Score(0, 0, 1, 5)


def test_rates_are_summed_over_trials() -> None:
    trials = [trial("a", "x"), trial("b c d e f g h i j", "b c d e f g h i j")]
    assert summarise_words(trials, lm=None).wer == pytest.approx(0.1)


def test_summary_by_corpus_and_session_with_the_lm_named() -> None:
    trials = [
        trial("a b", "a b", session="s1", corpus="Harvard", in_lm_text=True),
        trial("a b", "a c", session="s1", corpus="Random", in_lm_text=False),
        trial("a b", "c", session="s2", corpus=None, in_lm_text=False),
    ]
    metrics = summarise_words(trials, lm="four.lm", n_trials=4)
    summary = metrics.to_dict()
    assert summary["wer"] == pytest.approx(3 / 6) and summary["lm"] == "four.lm"
    assert summary["wer_by_session"] == {"s1": 0.25, "s2": 1.0}
    assert summary["wer_by_corpus"] == {"Harvard": 0.0, "Random": 0.5}
    assert (summary["n_trials"], summary["n_scored"], summary["n_in_lm_text"]) == (4, 3, 1)
    assert summary["wer_without_lm_text"] == pytest.approx(3 / 4)
    warning = metrics.leakage_warning
    assert warning and "1 of 3" in warning and "75.00 %" in warning and "four.lm" in warning


def test_no_warning_without_leakage() -> None:
    assert summarise_words([trial("a", "a")], lm=None).leakage_warning is None
    assert summarise_words([trial("a", "a", in_lm_text=False)], lm=None).leakage_warning is None


def test_no_scored_trials_give_none_and_not_nan() -> None:
    summary = summarise_words([], lm=None, n_trials=3).to_dict()
    assert summary["wer"] is None and summary["wer_low"] is None and summary["cer"] is None


def test_a_clear_difference_is_significant_and_none_is_not() -> None:
    worse = [Score(substitutions=1, length=5)] * 40
    better = [Score(length=5)] * 40
    clear = score_difference(better, worse)
    assert clear is not None and clear.rate == pytest.approx(-0.2) and clear.p < 0.001 and clear.high < 0
    same = score_difference(worse, worse)
    assert same is not None and same.rate == 0 and same.p == 1.0


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=30))
def test_swapping_the_systems_negates_the_difference(errors: list[tuple[int, int]]) -> None:
    first = [Score(substitutions=a, length=4) for a, _ in errors]
    second = [Score(substitutions=b, length=4) for _, b in errors]
    there = score_difference(first, second)
    back = score_difference(second, first)
    assert there is not None and back is not None
    assert there.rate == -back.rate and there.p == back.p and there.low == pytest.approx(-back.high)


def test_systems_scored_on_different_trials_are_rejected() -> None:
    with pytest.raises(ValueError, match="same trials"):
        score_difference([Score(length=3)], [Score(length=4)])
