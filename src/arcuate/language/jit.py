"""Numba's `njit` for all compiled functions: a cache folder that is always writable, and a notice while compiling.

Numba keeps compiled functions beside their modules, or else in the user's cache folder. In a container both may be
read-only, and every `njit(cache=True)` then fails with "no locator available". In that case they go to a temporary
folder that is deleted when the process ends.
"""

import atexit
import shutil
import tempfile

from numba import config
from numba import njit as njit
from numba.core import event

from arcuate.progress import logger


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
event.register("numba:compile", _CompilationNotice())
