"""Interrupts: SIGTERM, Ctrl-C or a call ends training after the current step, with a checkpoint."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """Request to end training within one step, by a signal or by `request()`."""

    def __init__(self) -> None:
        self.requested = False
        self.signal: signal.Signals | None = None
        self.ignore_second_sigint = False

    def request(self) -> None:
        """Stop with a checkpoint. Callable from a callback or another thread."""
        self.requested = True

    @property
    def exit_code(self) -> int:
        return 0 if self.signal is None else 128 + self.signal

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Signal handler. A second Ctrl-C raises KeyboardInterrupt immediately."""
        if self.signal is not None and number == signal.SIGINT and not self.ignore_second_sigint:
            raise KeyboardInterrupt
        self.requested, self.signal = True, signal.Signals(number)


@contextmanager
def handle_signals(stop: Stop | None = None, ignore_second_sigint: bool = False) -> Iterator[Stop]:
    """Handle SIGINT and SIGTERM by requesting a stop; the previous handlers are restored afterwards.

    Python handles signals in the main thread only: in any other thread nothing is changed. A second SIGINT has to be
    ignored under launchers such as torchrun, which forward the Ctrl-C that the terminal has sent to every process.
    """
    stop = stop or Stop()
    stop.ignore_second_sigint = ignore_second_sigint
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    old = {s: signal.signal(s, stop.handle) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
