"""Error rates: edits, alignments, sums divided once, one normalisation of texts, summaries that name their model."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arcuate.data.text import text_to_tokens
from arcuate.evaluation.metrics import (
    Score,
    ScoredTrial,
    align,
    confusions,
    score,
    score_text,
    summarise_words,
    total,
)
from arcuate.evaluation.significance import bootstrap_interval, score_difference

sequences = st.lists(st.sampled_from("ABC"), max_size=6)


def edit_distance(a: list[str], b: list[str]) -> int:
    """The textbook recursion, as a reference."""
    table = {(i, 0): i for i in range(len(a) + 1)} | {(0, j): j for j in range(len(b) + 1)}
    for i, j in itertools.product(range(1, len(a) + 1), range(1, len(b) + 1)):
        table[i, j] = min(table[i - 1, j] + 1, table[i, j - 1] + 1, table[i - 1, j - 1] + (a[i - 1] != b[j - 1]))
    return table[len(a), len(b)]


@given(sequences, sequences)
def test_errors_are_the_edit_distance_and_alignments_give_back_both_sides(a: list[str], b: list[str]) -> None:
    counted, pairs = score(a, b), align(a, b)
    assert counted.errors == edit_distance(a, b) == sum(r != h for r, h in pairs)
    assert counted.length == len(a) and counted.insertions - counted.deletions == len(b) - len(a)
    assert [r for r, _ in pairs if r != "<ins>"] == a and [h for _, h in pairs if h != "<del>"] == b


def test_rates_are_summed_errors_over_summed_lengths() -> None:
    parts = [score("A", "B"), score("ABCABCABC", "ABCABCABC")]
    assert total(parts).rate == pytest.approx(0.1)  # the mean of the two rates would be 0.5
    assert Score(insertions=3).rate is None and bootstrap_interval([Score(insertions=3)]) == (None, None)
    counts = confusions([(["A", "B"], ["A", "C"]), (["A"], [])])
    assert counts == {("A", "A"): 1, ("B", "C"): 1, ("A", "<del>"): 1}


def test_interval_contains_the_rate_and_narrows_with_more_trials() -> None:
    few = [Score(substitutions=i % 4, length=20) for i in range(20)]
    (low, high), (narrow_low, narrow_high) = bootstrap_interval(few), bootstrap_interval(few * 25)
    assert low is not None and high is not None and narrow_low is not None and narrow_high is not None
    assert low < (total(few).rate or 0) < high and narrow_high - narrow_low < 0.4 * (high - low)
    assert bootstrap_interval(few) == (low, high)


@pytest.mark.parametrize(
    ("typed", "decoded"),
    [
        ("It's five o'clock, isn't it?", "it's five o'clock isn't it"),
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


def trial(reference: str, hypothesis: str, **known: object) -> ScoredTrial:
    return ScoredTrial("x", score_text(reference, hypothesis), **known)  # type: ignore[arg-type]


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
    assert summarise_words([trial("a", "a", in_lm_text=False)], lm=None).leakage_warning is None
    assert summarise_words([trial("a", "a")], lm=None).leakage_warning is None
    summary = summarise_words([], lm=None, n_trials=3).to_dict()
    assert summary["wer"] is None and summary["wer_low"] is None and summary["cer"] is None


def test_a_clear_difference_is_significant_and_none_is_not() -> None:
    worse, better = [Score(substitutions=1, length=5)] * 40, [Score(length=5)] * 40
    clear = score_difference(better, worse)
    assert clear is not None and clear.rate == pytest.approx(-0.2) and clear.p < 0.001 and clear.high < 0
    same = score_difference(worse, worse)
    assert same is not None and same.rate == 0 and same.p == 1.0
    with pytest.raises(ValueError, match="same trials"):
        score_difference([Score(length=3)], [Score(length=4)])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=30))
def test_swapping_the_systems_negates_the_difference(errors: list[tuple[int, int]]) -> None:
    first, second = ([Score(substitutions=pair[k], length=4) for pair in errors] for k in (0, 1))
    there, back = score_difference(first, second), score_difference(second, first)
    assert there is not None and back is not None
    assert there.rate == -back.rate and there.p == back.p and there.low == pytest.approx(-back.high)
