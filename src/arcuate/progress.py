"""Progress reports and log messages: how library code reports to its caller without printing.

Long-running functions take `progress: Progress | None` and call it with (done, total, description). Messages meant
for the user go to `logger`; the library attaches no handler, so a script shows nothing unless it configures logging,
and the command line prints them to stderr.
"""

import logging
from collections.abc import Callable

Progress = Callable[[int, int, str], None]  # items done, items in total, what is being done

logger = logging.getLogger("arcuate")
logger.addHandler(logging.NullHandler())


def counted(n: int, noun: str) -> str:
    """`1 session`, `2 sessions`."""
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def percent(rate: float | None) -> str:
    """`12.3 %` for 0.123; a dash for None."""
    return "–" if rate is None else f"{100 * rate:.1f} %"
