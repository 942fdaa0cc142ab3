"""SIGTERM and Ctrl-C: finish the step, save, leave. A second Ctrl-C leaves at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """Which signal asked for an end, if any."""

    def __init__(self, patient: bool = False) -> None:
        self.signal: signal.Signals | None = None
        self.patient = patient  # stay when asked again

    @property
    def exit_code(self) -> int:
        return 0 if self.signal is None else 128 + self.signal

    def ask(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT and not self.patient:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)


@contextmanager
def listening(patient: bool = False) -> Iterator[Stop]:
    """Signals set a flag while training runs; the old handlers come back afterwards.

    Patient: a launcher such as torchrun passes on a Ctrl-C that the terminal has sent to all already, so a second
    one says nothing new.
    """
    stop = Stop(patient)
    old = {s: signal.signal(s, stop.ask) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
