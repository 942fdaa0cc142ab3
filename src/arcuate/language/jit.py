"""Numba's `njit` for all compiled functions, and what they share: log-domain arithmetic, hashes, unmanaged arrays.

Numba keeps compiled functions beside their modules, or else in the user's cache folder. In a container both may be
read-only, and every `njit(cache=True)` then fails with "no locator available". In that case they go to a temporary
folder that is deleted when the process ends.
"""

import atexit
import math
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numba import carray, config, types
from numba import njit as njit
from numba.core import cgutils, event
from numba.extending import intrinsic, overload

from arcuate.progress import logger

NEG_INF = -math.inf  # log-probability of an impossible event
Row = Any  # row of a structured array; compiled code reads its fields as attributes
_T = TypeVar("_T")


def _ensure_cache() -> None:
    """Choose a temporary cache folder if Numba finds none that it can write."""
    try:
        njit(cache=True)(_probe)
    except RuntimeError:
        folder = tempfile.mkdtemp(prefix="arcuate-numba-")
        vars(config)["CACHE_DIR"] = folder
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        logger.info(
            f"neither the program folder nor the user's cache folder can be written: compiled functions are kept in"
            f" {folder} until this command ends; set NUMBA_CACHE_DIR to a folder to keep them"
        )


def _probe() -> None:
    """A function to locate the cache for; it is never compiled."""


def drop_stale_caches(package: Path) -> None:
    """Remove functions that were compiled before a compiled module of the package changed.

    Numba looks at the file of a function only, not at those of the functions that it calls and contains, and would go
    on with their old code.
    """
    indexes = list(package.rglob("__pycache__/*.nbi"))  # MODULE.FUNCTION-LINE.PYTHON.nbi
    with suppress(OSError):  # another process removes them too, or the folder cannot be written
        modules = {index.parents[1] / f"{index.name.split('.')[0]}.py" for index in indexes}
        changed = max((module.stat().st_mtime for module in modules if module.is_file()), default=0.0)
        for index in indexes:
            if index.stat().st_mtime < changed:
                index.unlink(missing_ok=True)


class _CompilationNotice(event.Listener):
    """Logs once per process that functions are being compiled, to explain the delay."""

    given = False

    def on_start(self, event: event.Event) -> None:
        if not self.given:
            self.given = True
            logger.info("compiling functions on first use, about a minute; later commands load them from a cache")

    def on_end(self, event: event.Event) -> None:
        pass


_ensure_cache()
drop_stale_caches(Path(__file__).parents[1])
event.register("numba:compile", _CompilationNotice())


# --- shared by compiled functions ---------------------------------------------------------------------------


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
