"""Comparison of two ways to compute the same log-probabilities and text, and the count of compared cases."""

import atexit
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch
from hypothesis import settings

from arcuate.decoding.hypothesis import Hypothesis
from arcuate.models.config import Patch
from support.cases import cases as n_cases
from support.cases import many

BOUND = 1e-4  # nats: largest difference of a float32 log-probability; the largest ones seen are about 1e-5
NEAR_TIE = 1e-3  # nats: two hypotheses this close may change places when log-probabilities are rounded differently

cases: Counter[str] = Counter()
near_ties: Counter[str] = Counter()
largest: dict[str, float] = {}


def law(share: float = 1.0) -> settings:
    """Profile of a law: the same cases in every run, a share of `--cases`."""
    return settings(max_examples=n_cases(share), derandomize=True, database=None)


def assert_same_frames(
    name: str, found: np.ndarray, expected: np.ndarray, patch: Patch, bound: float = BOUND, context: str = ""
) -> None:
    """Compare log-probabilities (F, V); the message names the first frame that differs, its bins and its class."""
    where = f" ({context})" if context else ""
    assert found.shape == expected.shape, f"{name}{where}: {len(found)} frames instead of {len(expected)}"
    difference = np.abs(found.astype(np.float64) - expected)
    worst = float(difference.max(initial=0.0))
    largest[name] = max(largest.get(name, 0.0), worst)
    if worst <= bound and np.isfinite(found).all():  # NaN is never within the bound
        return
    frame = int(np.flatnonzero(~(difference <= bound).all(axis=1))[0])
    column = int(np.nanargmax(np.where(np.isnan(difference[frame]), np.inf, difference[frame])))
    first = frame * patch.stride
    raise AssertionError(
        f"{name}{where}: the first differing frame is {frame} of {len(expected)} (bins {first} to"
        f" {first + patch.bins - 1}); class {column} is {found[frame, column]:.7g} instead of"
        f" {expected[frame, column]:.7g}, bound {bound:g}"
    )


def assert_same_text(
    name: str, found: Sequence[Hypothesis], expected: Sequence[Hypothesis], exact: bool = False, context: str = ""
) -> None:
    """Compare the best hypotheses of two n-best lists; unless `exact`, near ties may change places and are counted."""
    best, other = expected[0], found[0]
    if (other.tokens, other.words) == (best.tokens, best.words):
        return
    if not exact and len(expected) > 1 and total(best) - total(expected[1]) < NEAR_TIE:
        near_ties[name] += 1
        return
    position = next(
        (i for i, pair in enumerate(zip(other.tokens, best.tokens, strict=False)) if pair[0] != pair[1]),
        min(len(other.tokens), len(best.tokens)),
    )
    raise AssertionError(
        f"{name} ({context}): the first differing token is number {position}: {other.phonemes[position:][:1]} instead"
        f" of {best.phonemes[position:][:1]} (words {' '.join(other.words)!r} instead of {' '.join(best.words)!r})"
    )


def total(hypothesis: Hypothesis) -> float:
    return sum(hypothesis.scores.values()) if hypothesis.total is None else hypothesis.total


def chunks(n: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise([0, *sorted(min(c, n) for c in cuts), n]))


@contextmanager
def n_threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@atexit.register
def _print_counts() -> None:
    if many() and cases:
        for name, n in sorted(cases.items()):
            print(
                f"law {name}: {n} cases, largest difference {largest.get(name, 0.0):.1e}, {near_ties[name]} near ties"
            )
        print(f"laws: {sum(cases.values())} cases")
