"""Prefix beam search: equal to enumeration of every path, and its invariants."""

import itertools
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arcuate.decoding.prefix_beam import PrefixBeamSearch
from arcuate.errors import UserError

CLASSES = ("BLANK", "a", "b")
UNLIMITED = 3000


def frames(seed: int, n_frames: int, n_classes: int = 3, sharp: float = 2.0) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(scale=sharp, size=(n_frames, n_classes))
    return (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)


def collapse(path: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(token for token, _ in itertools.groupby(path) if token != 0)


def enumerate_all(log_probs: np.ndarray) -> dict[tuple[int, ...], float]:
    """Log-probability of every token sequence: the sum over all paths that collapse to it."""
    found: dict[tuple[int, ...], float] = defaultdict(lambda: -np.inf)
    for path in itertools.product(range(log_probs.shape[1]), repeat=len(log_probs)):
        score = float(sum(log_probs[t, c] for t, c in enumerate(path)))
        found[collapse(path)] = np.logaddexp(found[collapse(path)], score)
    return found


@given(seed=st.integers(0, 10_000), n_frames=st.integers(1, 6), sharp=st.floats(0.1, 5.0))
def test_equals_enumeration(seed: int, n_frames: int, sharp: float) -> None:
    log_probs = frames(seed, n_frames, sharp=sharp)
    truth = enumerate_all(log_probs.astype(np.float64))
    found = PrefixBeamSearch(UNLIMITED, CLASSES).search(log_probs, n_best=UNLIMITED)
    assert {h.tokens for h in found} == set(truth)
    assert [h.total for h in found] == pytest.approx([truth[h.tokens] for h in found], abs=1e-5)
    assert [h.total for h in found] == sorted((h.total for h in found), reverse=True)


def test_a_repeated_token_needs_a_blank() -> None:
    confident = np.log(np.array([[0.02, 0.97, 0.01], [0.97, 0.02, 0.01], [0.02, 0.97, 0.01]], np.float32))
    search = PrefixBeamSearch(20, CLASSES)
    assert search.tokens(confident) == [1, 1]
    assert search.tokens(confident[[0, 0, 2]]) == [1]


@given(seed=st.integers(0, 10_000), cuts=st.lists(st.integers(0, 40), max_size=6))
def test_result_is_independent_of_chunking(seed: int, cuts: list[int]) -> None:
    log_probs = frames(seed, 40, 6)
    search = PrefixBeamSearch(8, tuple("_abcde"))
    state = search.start()
    for first, last in itertools.pairwise([0, *sorted(cuts), 40]):
        state = search.step(state, log_probs[first:last])
    assert search.finish(state, 8) == search.search(log_probs, 8)


def test_a_state_is_a_value() -> None:
    search = PrefixBeamSearch(8, CLASSES)
    middle = search.step(search.start(), frames(1, 10))
    before = search.finish(middle, 8)
    one, other = search.step(middle, frames(2, 10)), search.step(middle, frames(3, 10))
    assert search.finish(middle, 8) == before
    assert search.finish(one) == search.search(np.concatenate([frames(1, 10), frames(2, 10)]))
    assert search.finish(other) == search.search(np.concatenate([frames(1, 10), frames(3, 10)]))


def test_n_best_sequences_are_distinct() -> None:
    found = PrefixBeamSearch(5, CLASSES).search(frames(4, 60, sharp=0.3), 5)
    assert len({h.tokens for h in found}) == len(found) == 5


def test_no_frames_give_the_empty_hypothesis() -> None:
    assert PrefixBeamSearch(5, CLASSES).search(np.zeros((0, 3)))[0].tokens == ()


def test_classes_of_probability_zero() -> None:
    log_probs = np.array([[0.0, -np.inf, -np.inf], [-np.inf, 0.0, -np.inf]], np.float32)
    found = PrefixBeamSearch(20, CLASSES).search(log_probs, 20)
    assert found[0].tokens == (1,) and found[0].total == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f + 1.0, "add up to"),
        (lambda f: np.exp(f), "natural-log"),
        (lambda f: np.where(np.arange(3) == 1, np.nan, f), "NaN"),
        (lambda f: f[:, :2], "one column per class"),
    ],
)
def test_invalid_log_probs_are_rejected(change, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=message):
        PrefixBeamSearch(5, CLASSES).search(change(frames(0, 4)))
