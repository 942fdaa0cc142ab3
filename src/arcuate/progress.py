"""Progress reports and log messages: how library code talks to its caller without printing.

Long-running functions take `progress: Progress | None` and call it with (done, total, description). Messages meant
for the user go to `logger`; the library attaches no handler, so a script sees nothing unless it configures logging,
and the command line prints them to stderr.
"""

import logging
from collections.abc import Callable

Progress = Callable[[int, int, str], None]  # items done, items in total, what is being done

logger = logging.getLogger("arcuate")
logger.addHandler(logging.NullHandler())
