"""Messages that the library logs while a block runs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from arcuate.progress import logger


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collect the log messages of the library, whatever handlers the command line has installed."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
