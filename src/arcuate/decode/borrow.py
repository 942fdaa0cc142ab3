"""Arrays without owners, for compiled inner loops.

Compiled code counts references to every array it touches, one locked instruction up and one down; in a loop of many
small functions over many arrays that took half of the time of the search. A borrowed view has no count. It must not
outlive the array it looks at: borrow inside a compiled function whose arguments own the memory, and return nothing
borrowed.
"""

from typing import Any

from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic


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
