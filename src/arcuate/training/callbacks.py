"""Callbacks of a training run, and requests to stop it by a call, a signal or Ctrl-C."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from arcuate.progress import Progress

PARENT_PIPE = "ARCUATE_PARENT_PIPE"  # environment variable: stdin is a pipe that closes when the parent ends
GRACE_S = 120.0  # time for training to finish its step and save after a request to stop

ErrorType = type[BaseException] | None


class Callback:
    """Base class of callbacks; every method does nothing unless overridden.

    A callback is a context manager that is open during training. Only rank 0 has callbacks.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: ErrorType, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def on_start(self, classes: Sequence[str]) -> None:
        """Called before the first step with the alphabet of the store."""

    def on_step(self, step: int) -> None:
        """Called after every optimizer step that was not rewound."""

    def on_metrics(self, row: dict[str, Any]) -> None:
        """Called with every row of metrics.jsonl."""

    def on_incident(self, row: dict[str, Any]) -> None:
        """Called with every row of incidents.jsonl."""

    def on_stage_end(self, row: dict[str, Any]) -> None:
        """Called at the end of every stage of a curriculum."""

    def on_sample(self, reference: Sequence[str], hypothesis: Sequence[str]) -> None:
        """Called with one decoded validation trial, before the metrics row of that validation."""


class StepProgress(Callback):
    """Callback that reports steps to a progress function; `before` steps of earlier trainings count too."""

    def __init__(self, progress: Progress, total: int, description: str, before: int = 0) -> None:
        self._progress, self._total = progress, total
        self._description, self._before = description, before

    def on_step(self, step: int) -> None:
        self._progress(self._before + step, self._total, self._description)

    def on_stage_end(self, row: dict[str, Any]) -> None:
        self._total = row["ends_at"]  # a stage that ends early shortens the run


class CallbackList(Callback):
    """Several callbacks as one; they always close, in reverse order."""

    def __init__(self, *callbacks: Callback) -> None:
        self._callbacks = callbacks
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opening:  # closes those already open if one cannot be opened
            for callback in self._callbacks:
                opening.enter_context(callback)
            self._stack = opening.pop_all()
        return self

    def __exit__(self, kind: ErrorType, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)

    def on_start(self, classes: Sequence[str]) -> None:
        for callback in self._callbacks:
            callback.on_start(classes)

    def on_step(self, step: int) -> None:
        for callback in self._callbacks:
            callback.on_step(step)

    def on_metrics(self, row: dict[str, Any]) -> None:
        for callback in self._callbacks:
            callback.on_metrics(row)

    def on_incident(self, row: dict[str, Any]) -> None:
        for callback in self._callbacks:
            callback.on_incident(row)

    def on_stage_end(self, row: dict[str, Any]) -> None:
        for callback in self._callbacks:
            callback.on_stage_end(row)

    def on_sample(self, reference: Sequence[str], hypothesis: Sequence[str]) -> None:
        for callback in self._callbacks:
            callback.on_sample(reference, hypothesis)


class Stop:
    """Request to end training within one step, by a signal or by `request()`."""

    def __init__(self) -> None:
        self.requested = False
        self.signal: signal.Signals | None = None
        self.ignore_second_sigint = False

    def request(self) -> None:
        """Stop with a checkpoint. Callable from a callback or another thread."""
        self.requested = True

    def request_here(self) -> None:
        """Stop because another process of the training received a signal, unless this one did as well."""
        if not self.requested:
            self.requested, self.signal = True, signal.SIGTERM

    @property
    def exit_code(self) -> int:
        return 0 if self.signal is None else 128 + self.signal

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Signal handler. A second Ctrl-C raises KeyboardInterrupt immediately."""
        if self.signal is not None and number == signal.SIGINT and not self.ignore_second_sigint:
            raise KeyboardInterrupt
        self.requested, self.signal = True, signal.Signals(number)


def stop_with_parent(stop: Stop) -> None:
    """In a run started by a sweep or ablation: request a stop when the parent process ends, even if it is killed.

    The parent holds the other end of stdin and never writes to it. If training does not reach the end of a step in
    time, it is ended without a checkpoint.
    """
    if os.environ.pop(PARENT_PIPE, None) is None:
        return

    def wait() -> None:
        while os.read(0, 1024):
            pass
        stop.requested, stop.signal = True, signal.SIGTERM
        time.sleep(GRACE_S)
        os._exit(stop.exit_code)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def _handled_signals() -> Iterator[signal.Signals]:
    """SIGHUP (a closed terminal) is not handled under nohup, which ignores it, and does not exist on Windows."""
    yield from (signal.SIGTERM, signal.SIGINT)
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN:
        yield hangup


@contextmanager
def handle_signals(stop: Stop | None = None, ignore_second_sigint: bool = False) -> Iterator[Stop]:
    """Handle SIGINT, SIGTERM and SIGHUP by requesting a stop; the previous handlers are restored afterwards.

    Python handles signals in the main thread only: in any other thread nothing is changed. A second SIGINT has to be
    ignored under launchers such as torchrun, which forward the Ctrl-C that the terminal has sent to every process.
    """
    stop = stop or Stop()
    stop.ignore_second_sigint = ignore_second_sigint
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    old = {s: signal.signal(s, stop.handle) for s in _handled_signals()}
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
