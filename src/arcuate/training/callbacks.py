"""Callbacks: what a training run reports to a terminal, to trackers and to user code."""

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

ErrorType = type[BaseException] | None


class Callback:
    """Base class of callbacks; every method does nothing unless overridden.

    A callback is a context manager that is open during training. Only rank 0 has callbacks.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: ErrorType, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

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
