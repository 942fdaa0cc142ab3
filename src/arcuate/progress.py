"""Progress reports, log messages and memory in use: how library code reports to its caller without printing.

Long-running functions take `progress: Progress | None` and call it with (done, total, description). Messages meant
for the user go to `logger`; the library attaches no handler, so a script shows nothing unless it configures logging,
and the command line prints them to stderr.
"""

import logging
import sys
from collections.abc import Callable
from typing import Any

Progress = Callable[[int, int, str], None]  # items done, items in total, what is being done

logger = logging.getLogger("arcuate")
logger.addHandler(logging.NullHandler())


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
