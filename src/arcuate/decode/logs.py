"""Arithmetic shared by the compiled searches: natural-log scores and identities of sequences."""

import math
from typing import Any

import numpy as np
from numba import njit

NEVER = -math.inf  # the score of what cannot happen
Row = Any  # a row of a structured array: its fields are attributes in compiled code


@njit(cache=True)
def log_add(a: float, b: float) -> float:
    """log(exp(a) + exp(b)), also where one or both are minus infinity."""
    if a < b:
        a, b = b, a
    if b == NEVER:
        return a
    return a + math.log1p(math.exp(b - a))


@njit(cache=True)
def mix(a: np.uint64, b: np.uint64) -> np.uint64:
    """The identity of a sequence from the identity of its beginning and its last element (splitmix64)."""
    x = a ^ (b + np.uint64(0x9E3779B97F4A7C15) + (a << np.uint64(6)) + (a >> np.uint64(2)))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True)
def power_of_two(least: int) -> int:
    """The smallest power of two that is not less: the size of a hash table."""
    size = 1
    while size < least:
        size *= 2
    return size
