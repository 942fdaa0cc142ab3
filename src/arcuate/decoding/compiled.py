"""Parts shared by the compiled searches: back-pointer buffer, log-domain arithmetic, hashing, unmanaged array views."""

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from arcuate.language.jit import njit

NEG_INF = -math.inf  # log-probability of an impossible event
_T = TypeVar("_T")
Row = Any  # row of a structured array; compiled code reads its fields as attributes


@dataclass(frozen=True, eq=False)
class Backpointers:
    """The first `n` rows of an append-only buffer that several search states may share.

    Rows are written once, so older states stay valid and a state can be passed around as a value without copying its
    past. `written` counts the rows in use by any state. A state at the end of the buffer appends in place; a state that
    was left behind (two continuations of one prefix) continues in a copy.
    """

    rows: np.ndarray  # (capacity,), structured
    written: list[int]
    n: int

    @staticmethod
    def empty(dtype: np.dtype, capacity: int) -> "Backpointers":
        return Backpointers(np.empty(capacity, dtype), [0], 0)

    def reserve(self, n_more: int) -> "Backpointers":
        """Return a buffer with the same rows and space for `n_more` further ones."""
        if self.written[0] == self.n and self.n + n_more <= len(self.rows):
            return self
        rows = np.empty(max(2 * self.n, self.n + 2 * n_more), self.rows.dtype)
        rows[: self.n] = self.rows[: self.n]
        return Backpointers(rows, [self.n], self.n)

    def appended(self, n: int) -> "Backpointers":
        """Return the buffer after compiled code has filled it up to row `n`."""
        self.written[0] = n
        return Backpointers(self.rows, self.written, n)


@njit(cache=True)
def log_add(a: float, b: float) -> float:
    """Compute log(exp(a) + exp(b)) without overflow; either or both may be minus infinity."""
    if a < b:
        a, b = b, a
    if b == NEG_INF:
        return a
    return a + math.log1p(math.exp(b - a))


@njit(cache=True)
def hash_append(sequence: np.uint64, element: np.uint64) -> np.uint64:
    """Hash of a sequence from the hash of its prefix and its last element (splitmix64 finaliser).

    64 bits: with 10^4 live sequences per frame the probability of a collision is about 3e-12.
    """
    x = sequence ^ (element + np.uint64(0x9E3779B97F4A7C15) + (sequence << np.uint64(6)) + (sequence >> np.uint64(2)))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True)
def power_of_two(minimum: int) -> int:
    """Smallest power of two that is at least `minimum`: the size of a hash table."""
    size = 1
    while size < minimum:
        size *= 2
    return size


@intrinsic
def _pointer(typingctx: Any, address: Any) -> Any:
    """Turn an address into a void pointer."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.uintp), codegen


def unmanaged(value: _T) -> _T:
    """View the memory of an array, or of a named tuple of arrays, without reference counting.

    Numba updates an atomic reference counter whenever an array passes through a function or a tuple; inner loops work
    on unmanaged views to avoid that. The caller keeps the arrays alive. For compiled code only.
    """
    raise NotImplementedError


@overload(unmanaged, strict=False)
def _compile_unmanaged(value: Any) -> Any:
    if isinstance(value, types.Array):
        return lambda value: carray(_pointer(value.ctypes.data), value.shape, value.dtype)  # type: ignore[call-arg]
    # Compiled code cannot iterate over a tuple of different types, so its fields are written out.
    views = ", ".join(f"unmanaged(value[{i}])" for i in range(len(value)))
    scope = {"Class": value.instance_class, "unmanaged": unmanaged}
    exec(f"def view(value):\n    return Class({views})", scope)
    return scope["view"]
