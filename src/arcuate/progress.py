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

_NOTEBOOK_INTERVAL_S = 0.2  # between two updates of a line in a notebook
_NOTEBOOK_WIDTH = 30  # characters of its bar
_TEXT_INTERVAL_S = 30.0  # between two lines of text


class ProgressBar:
    """A progress bar for scripts and notebooks: `arcuate.train(…, progress=ProgressBar())`.

    In a terminal, every activity has a bar with the remaining time, drawn by rich. In a notebook, it is a line of text
    that updates itself, because rich needs ipywidgets there and captures later prints. Elsewhere, a line is printed at
    most every 30 s; a short activity prints nothing or, with `always`, one line when it is complete. What follows a
    comma in the description of an activity, such as a loss, may change.
    """

    def __init__(
        self, *, always: bool = False, console: Any = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._always, self._clock = console, always, clock
        self._bar: Any = None
        self._lines: dict[str, _Line] = {}  # by activity

    def __call__(self, done: int, total: int, activity: str) -> None:
        name = activity.split(",")[0]
        line = self._lines.setdefault(name, _Line(self._clock(), done))
        if _in_notebook():
            self._update_notebook(line, done, total, activity)
        elif self._get_console().is_terminal:
            self._update_bar(line, done, total, activity)
        else:
            self._print_line(line, done, total, activity)
        if done >= total:
            self._lines.pop(name, None)  # the same work, done again, gets a new line

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop drawing; called when everything is complete, and needed only after an interruption."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            self._lines.clear()

    def _get_console(self) -> Any:
        if self._console is None:
            from rich.console import Console

            self._console = Console(stderr=True)
        return self._console

    def _update_bar(self, line: "_Line", done: int, total: int, activity: str) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Bar(*columns, TextColumn("left"), TimeRemainingColumn(), console=self._console)
            self._bar.start()
        if line.handle is None:
            line.handle = self._bar.add_task(activity, total=total)
        self._bar.update(line.handle, completed=done, total=total, description=activity)
        if self._bar.finished:
            self.close()

    def _update_notebook(self, line: "_Line", done: int, total: int, activity: str) -> None:
        from IPython.display import display

        now = self._clock()
        if line.handle is not None and done < total and now - line.shown < _NOTEBOOK_INTERVAL_S:
            return
        n_filled = round(_NOTEBOOK_WIDTH * done / total) if total > 0 else 0
        text = f"{activity} {'━' * n_filled}{'┈' * (_NOTEBOOK_WIDTH - n_filled)} {done:,}/{total:,}"
        if line.handle is None:
            line.handle = display({"text/plain": text}, raw=True, display_id=True)
        else:
            line.handle.update({"text/plain": text}, raw=True)
        line.shown = now

    def _print_line(self, line: "_Line", done: int, total: int, activity: str) -> None:
        now = self._clock()
        is_complete = done >= total and (self._always or line.shown > line.started)  # the second: after other lines
        if now - line.shown < _TEXT_INTERVAL_S and not is_complete:
            return
        line.shown = now
        elapsed, n = now - line.started, done - line.first
        left = f", {duration(elapsed * (total - done) / n)} left" if n > 0 and done < total else ""
        text = f"{activity} {done}/{total}, {duration(elapsed)}{left}"
        self._get_console().print(text, markup=False, soft_wrap=True)


class _Line:
    """What is shown of one activity."""

    def __init__(self, now: float, first: int) -> None:
        self.started = self.shown = now
        self.first = first  # items done at the first report
        self.handle: Any = None  # of the bar or the output that shows it


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


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
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
