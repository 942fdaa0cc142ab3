"""Progress reports, log messages and memory in use: how library code reports to its caller without printing.

Long-running functions take `progress: Progress | None` and call it with (done, total, description). Messages meant
for the user go to `logger`; the library attaches no handler, so a script shows nothing unless it configures logging,
and the command line prints them to stderr.
"""

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

Progress = Callable[[int, int, str], None]  # items done, items in total, what is being done

logger = logging.getLogger("arcuate")
logger.addHandler(logging.NullHandler())

_OUTPUT_INTERVAL_S = 0.2  # between two updates of a line in a notebook
_OUTPUT_WIDTH = 30  # characters of its bar


class ProgressBar:
    """A progress bar for scripts and notebooks: `arcuate.train(…, progress=ProgressBar())`.

    Every description gets its own line, which updates itself and stays when it is complete. In terminals it is drawn
    by rich. In notebooks it is a plain-text output, because rich needs ipywidgets there and captures later prints.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._tasks: dict[str, Any] = {}

    def __call__(self, done: int, total: int, description: str) -> None:
        if _in_notebook():
            self._update_output(done, total, description)
            return
        from rich.progress import Progress as Bar

        if self._bar is None:
            self._bar, self._tasks = Bar(transient=False), {}
            self._bar.start()
        if description not in self._tasks:
            self._tasks[description] = self._bar.add_task(description, total=total)
        self._bar.update(self._tasks[description], completed=done, total=total)
        if self._bar.finished:
            self.close()

    def _update_output(self, done: int, total: int, description: str) -> None:
        from IPython.display import display

        handle, shown_at = self._tasks.get(description, (None, 0.0))
        if handle is not None and done < total and time.monotonic() - shown_at < _OUTPUT_INTERVAL_S:
            return
        n_filled = round(_OUTPUT_WIDTH * done / total) if total > 0 else 0
        text = f"{description} {'━' * n_filled}{'┈' * (_OUTPUT_WIDTH - n_filled)} {done:,}/{total:,}"
        if handle is None:
            handle = display({"text/plain": text}, raw=True, display_id=True)
        else:
            handle.update({"text/plain": text}, raw=True)
        self._tasks[description] = (handle, time.monotonic())
        if done >= total:
            del self._tasks[description]  # the same work, done again, gets a new line

    def close(self) -> None:
        """Stop drawing; called when everything is complete, and needed only after an interruption."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this process."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


def counted(n: int, noun: str) -> str:
    """`1 session`, `2 sessions`."""
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def percent(rate: float | None) -> str:
    """`12.3 %` for 0.123; a dash for None."""
    return "–" if rate is None else f"{100 * rate:.1f} %"


def peak_memory_bytes() -> int:
    """Peak resident memory of this process; 0 where the system does not report it (Windows)."""
    usage = resource_usage()
    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux KiB
    return 0 if usage is None else int(usage.ru_maxrss * unit)


def resource_usage() -> Any:
    """Result of `getrusage` for this process; None on a system without it (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF)
