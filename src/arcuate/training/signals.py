"""SIGTERM and Ctrl-C: finish the step, save, leave. A second Ctrl-C leaves at once."""

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
        self.patient = False  # ignore a second SIGINT

    def request(self) -> None:
        """Stop with a checkpoint. Callable from a callback or another thread."""
        self.requested = True

    @property
    def exit_code(self) -> int:
        return 0 if self.signal is None else 128 + self.signal

    def ask(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT and not self.patient:
            raise KeyboardInterrupt
        self.requested, self.signal = True, signal.Signals(number)


@contextmanager
def listening(stop: Stop | None = None, patient: bool = False) -> Iterator[Stop]:
    """Handle SIGINT and SIGTERM by requesting a stop; the previous handlers are restored afterwards.

    Python handles signals in the main thread only: in any other thread nothing is changed. With `patient`, a second
    SIGINT is ignored: launchers such as torchrun forward the Ctrl-C that the terminal has sent to every process.
    """
    stop = stop or Stop()
    stop.patient = patient
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    old = {s: signal.signal(s, stop.ask) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
