"""An append-only log that several states may share: what makes a search state a value without copying its past."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic


@dataclass(frozen=True, eq=False)
class Log:
    """The first `n` rows of a buffer. Rows are written once, so older states keep what they know.

    `written` counts the rows in use by anyone. Whoever stands at the end may append in place; a state that was
    left behind (two continuations of one beginning) goes on in a copy of its own.
    """

    rows: np.ndarray  # (room,), structured
    written: list[int]
    n: int

    def with_room(self, n_more: int) -> "Log":
        """A log with the same rows that may be appended to, up to `n_more` rows."""
        if self.written[0] == self.n and self.n + n_more <= len(self.rows):
            return self
        rows = np.empty(max(2 * self.n, self.n + 2 * n_more), self.rows.dtype)
        rows[: self.n] = self.rows[: self.n]
        return Log(rows, [self.n], self.n)

    def appended(self, n: int) -> "Log":
        """The log after rows were written behind it, `n` rows in all."""
        self.written[0] = n
        return Log(self.rows, self.written, n)


def empty_log(dtype: np.dtype, room: int) -> Log:
    return Log(np.empty(room, dtype), [0], 0)


# Arithmetic shared by the compiled searches: natural-log scores and identities of sequences.

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


# Arrays without owners, for compiled inner loops.


@intrinsic
def _pointer(typingctx: Any, address: Any) -> Any:
    """An address as a pointer."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.uintp), codegen


@njit(cache=True, inline="always")
def borrow(array):  # type: ignore[no-untyped-def]
    """The same memory as an array that is not counted."""
    return carray(_pointer(array.ctypes.data), array.shape, array.dtype)  # type: ignore[call-arg]
