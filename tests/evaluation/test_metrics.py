import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arcuate.evaluation.metrics import Score, align, confusions, score, total
from arcuate.evaluation.significance import bootstrap_interval

sequences = st.lists(st.sampled_from("ABC"), max_size=6)


def edit_distance(a: list[str], b: list[str]) -> int:
    """The textbook recursion, as a reference."""
    table = {(i, 0): i for i in range(len(a) + 1)} | {(0, j): j for j in range(len(b) + 1)}
    for i, j in itertools.product(range(1, len(a) + 1), range(1, len(b) + 1)):
        table[i, j] = min(table[i - 1, j] + 1, table[i, j - 1] + 1, table[i - 1, j - 1] + (a[i - 1] != b[j - 1]))
    return table[len(a), len(b)]


@given(sequences, sequences)
def test_errors_are_the_edit_distance(reference: list[str], hypothesis: list[str]) -> None:
    counted = score(reference, hypothesis)
    assert counted.errors == edit_distance(reference, hypothesis)
    assert counted.length == len(reference)
    assert counted.insertions - counted.deletions == len(hypothesis) - len(reference)


def test_insertions_and_deletions_are_relative_to_the_reference() -> None:
    assert score("AB", "ABC") == Score(insertions=1, length=2)
    assert score("ABC", "AB") == Score(deletions=1, length=3)


@given(sequences, sequences)
def test_alignment_gives_back_both_sides(reference: list[str], hypothesis: list[str]) -> None:
    pairs = align(reference, hypothesis)
    assert [r for r, _ in pairs if r != "<ins>"] == reference
    assert [h for _, h in pairs if h != "<del>"] == hypothesis
    assert sum(r != h for r, h in pairs) == score(reference, hypothesis).errors


def test_rates_are_summed_errors_over_summed_lengths() -> None:
    parts = [score("A", "B"), score("ABCABCABC", "ABCABCABC")]
    assert total(parts).rate == pytest.approx(0.1)  # the mean of the two rates would be 0.5


def test_an_empty_reference_has_no_rate() -> None:
    assert Score(insertions=3).rate is None
    assert bootstrap_interval([Score(insertions=3)]) == (None, None)


def test_interval_contains_the_rate_and_narrows_with_more_trials() -> None:
    few = [Score(substitutions=i % 4, length=20) for i in range(20)]
    many = few * 25
    low, high = bootstrap_interval(few)
    narrow_low, narrow_high = bootstrap_interval(many)
    rate = total(few).rate
    assert low is not None and high is not None and rate is not None
    assert narrow_low is not None and narrow_high is not None
    assert low < rate < high
    assert (narrow_high - narrow_low) < 0.4 * (high - low)
    assert bootstrap_interval(few) == (low, high)


def test_confusions_count_pairs() -> None:
    counts = confusions([(["A", "B"], ["A", "C"]), (["A"], [])])
    assert counts == {("A", "A"): 1, ("B", "C"): 1, ("A", "<del>"): 1}
