"""What people see: messages and progress on stderr, results on stdout, JSON as one line."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.text import Text

from arcuate.files import check_output, to_json_line
from arcuate.progress import Progress, counted, logger, percent

__all__ = ["check_output", "counted", "emit_json", "err", "out", "percent", "progress", "say"]


class Messages(Console):
    """Whoever listened to the messages may leave; the work goes on in silence."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


class Results(Console):
    """A result nobody takes is the end, as the shell knows it."""

    def on_broken_pipe(self) -> None:
        nobody_listens()


err = Messages(stderr=True, highlight=False)
out = Results(highlight=False)


def say(message: str) -> None:
    """A line for the person at the terminal; never part of the result."""
    err.print(message, markup=False, soft_wrap=True)


class _MessageHandler(logging.Handler):
    """Prints what the library logs; warnings are marked as such."""

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        say(prefix + record.getMessage())


def show_log_messages() -> None:
    """Print the library's log messages on stderr, as every command does."""
    if not any(isinstance(handler, _MessageHandler) for handler in logger.handlers):
        logger.addHandler(_MessageHandler())
    logger.setLevel(logging.INFO)
    logger.propagate = False


def emit_json(value: Any) -> None:
    """Exactly one JSON object on one line on stdout; null and never NaN."""
    try:
        sys.stdout.write(to_json_line(value) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        nobody_listens()


def nobody_listens() -> NoReturn:
    """End as a program that a broken pipe stops: 128 + SIGPIPE, and no complaint at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(141)


class TimeLeft(TimeRemainingColumn):
    """How long it still takes; nothing where nobody knows how much there is to do."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else Text("left ") + super().render(task)


def bar() -> Bar:
    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeLeft(),
        console=err,
    )


@contextmanager
def progress(description: str) -> Iterator[Progress]:
    """A progress bar with the time remaining; it appears with the first report, so early errors show no bar."""
    with ExitStack() as stack:
        shown = bar()
        task = shown.add_task(description, total=None)

        def report(done: int, total: int, what: str) -> None:
            if not shown.live.is_started:
                stack.enter_context(shown)
            shown.update(task, completed=done, total=total, description=what or description)

        yield report
