"""Terminal output: messages and progress on stderr, results on stdout, JSON on one line."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from arcuate.files import check_output, to_json_line
from arcuate.progress import Progress, counted, logger, percent

__all__ = ["check_output", "counted", "emit_json", "err", "out", "percent", "progress", "say"]


class _MessageConsole(Console):
    """Messages are optional: if their reader goes away, the command continues without them."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


class _ResultConsole(Console):
    """Results are required: a closed stdout ends the command."""

    def on_broken_pipe(self) -> None:
        _exit_broken_pipe()


err = _MessageConsole(stderr=True, highlight=False)
out = _ResultConsole(highlight=False)


def say(message: str) -> None:
    """Print a message on stderr."""
    err.print(message, markup=False, soft_wrap=True)


class _MessageHandler(logging.Handler):
    """Prints log messages of the library; warnings and errors with a prefix."""

    def emit(self, record: logging.LogRecord) -> None:
        prefix = {logging.WARNING: "warning: ", logging.ERROR: "error: "}.get(record.levelno, "")
        say(prefix + record.getMessage())


def show_log_messages() -> None:
    """Print log messages of the library on stderr."""
    if not any(isinstance(handler, _MessageHandler) for handler in logger.handlers):
        logger.addHandler(_MessageHandler())
    logger.setLevel(logging.INFO)
    logger.propagate = False


def emit_json(value: Any) -> None:
    """Print one JSON object on one line on stdout; NaN and infinity become null."""
    try:
        sys.stdout.write(to_json_line(value) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _exit_broken_pipe()


def _exit_broken_pipe() -> NoReturn:
    """Exit with 128 + SIGPIPE, as the shell reports a broken pipe, and without an error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(141)


class TimeLeft(TimeRemainingColumn):
    """Remaining time; empty while the total is unknown."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else Text("left ") + super().render(task)


def bar() -> Bar:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeLeft())
    return Bar(*columns, console=err)


@contextmanager
def progress(description: str) -> Iterator[Progress]:
    """A progress bar with the time remaining; it appears with the first report, so early errors show no bar."""
    with ExitStack() as stack:
        shown = bar()
        task = shown.add_task(description, total=None)

        def report(done: int, total: int, activity: str) -> None:
            if not shown.live.is_started:
                stack.enter_context(shown)
            shown.update(task, completed=done, total=total, description=activity or description)

        yield report
