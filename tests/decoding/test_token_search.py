"""Searches for tokens with CTC: greedy, and prefix beams that equal the enumeration of every path."""

import itertools
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arcuate.decoding.hypothesis import GreedyState, greedy
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


@given(seed=st.integers(0, 10_000), n_frames=st.integers(0, 6), sharp=st.floats(0.1, 5.0))
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
        before, expected = state, search.finish(state, 8)
        state = search.step(state, log_probs[first:last])
        search.step(before, frames(seed + 1, 5, 6))  # another continuation changes neither
        assert search.finish(before, 8) == expected
    assert search.finish(state, 8) == search.search(log_probs, 8)


def test_classes_of_probability_zero() -> None:
    log_probs = np.array([[0.0, -np.inf, -np.inf], [-np.inf, 0.0, -np.inf]], np.float32)
    found = PrefixBeamSearch(20, CLASSES).search(log_probs, 20)
    assert found[0].tokens == (1,) and found[0].total == 0.0


def test_invalid_log_probs_are_rejected() -> None:
    good = frames(0, 4)
    changed = {"add up to": good + 1.0, "natural-log": np.exp(good), "NaN": good * np.nan, "one column": good[:, :2]}
    for message, log_probs in changed.items():
        with pytest.raises(UserError, match=message):
            PrefixBeamSearch(5, CLASSES).search(log_probs)


def certain(classes: list[int]) -> np.ndarray:
    return np.log(np.eye(4)[classes] * 0.9 + 0.025)


@pytest.mark.parametrize(
    ("classes", "tokens"),
    [([], []), ([0, 0], []), ([1, 1, 2, 2], [1, 2]), ([1, 0, 1], [1, 1]), ([0, 3, 3, 0, 0, 3, 1, 0], [3, 3, 1])],
)
def test_greedy_merges_repeats_before_it_removes_blanks(classes: list[int], tokens: list[int]) -> None:
    assert greedy(certain(classes)) == tokens
    for cut in range(len(classes) + 1):
        stream = GreedyState().extend(certain(classes[:cut])).extend(certain(classes[cut:]))
        assert list(stream.tokens) == tokens
