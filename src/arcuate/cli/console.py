"""What people see: messages and progress on stderr, results on stdout, JSON as one line."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from arcuate.run import to_line

err = Console(stderr=True, highlight=False)
out = Console(highlight=False)

Report = Callable[[int, int, str], None]


def say(message: str) -> None:
    """A line for the person at the terminal; never part of the result."""
    err.print(message, markup=False, soft_wrap=True)


def emit_json(value: Any) -> None:
    """Exactly one JSON object on one line on stdout; null and never NaN."""
    sys.stdout.write(to_line(value) + "\n")
    sys.stdout.flush()


def bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=err,
    )


@contextmanager
def progress(description: str) -> Iterator[Report]:
    """A progress bar with time left, as a function of (done, total, what)."""
    with bar() as shown:
        task = shown.add_task(description, total=None)

        def report(done: int, total: int, what: str) -> None:
            shown.update(task, completed=done, total=total, description=what or description)

        yield report


def percent(rate: float | None) -> str:
    return "–" if rate is None else f"{100 * rate:.1f} %"
