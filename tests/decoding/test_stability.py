"""Stability of partial results, as benchmarks/streaming_search.py measures it."""

import pytest

from support.benchmarks import load

benchmark = load("streaming_search")
Partial, Stability, stability = benchmark.Partial, benchmark.Stability, benchmark.stability


def partials_of(*texts: str) -> list[Partial]:
    return [Partial(n, tuple(text.split())) for n, text in enumerate(texts, start=1)]


def test_text_that_only_grows_is_stable() -> None:
    *partials, final = partials_of("", "a", "a", "a b", "a b c")
    measured = stability(partials, final, [1, 3, 4])
    assert (measured.n_revisions, measured.flicker, measured.mean_frames_to_final) == (0, 0.0, 0.0)
    assert measured.n_updates == 3


def test_removed_words_are_counted() -> None:
    *partials, final = partials_of("a", "a x", "a b", "y b", "a b")
    measured = stability(partials, final, [0, 1])
    assert measured.n_revisions == 1 + 2 + 2  # x; then a and b; then y and b
    assert measured.n_flickers == 3 and measured.n_updates == 5
    assert measured.revisions_per_word == pytest.approx(2.5)


def test_time_to_final_starts_at_the_end_of_the_word() -> None:
    *partials, final = partials_of("", "", "x", "x", "a", "a b")
    # a ended in frame 1 and is final after 5 frames: 3 frames late; b ended in frame 5 and is final at once
    assert stability(partials, final, [1, 5]).frames_to_final == 3


def test_stabilities_add_up() -> None:
    *partials, final = partials_of("a", "b")
    one = stability(partials, final, [0])
    assert one + Stability() == one
    assert (one + one).n_words == 2 and (one + one).revisions_per_word == one.revisions_per_word
