"""Items that sources, the server and the adapter put into the queue of a live session."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from arcuate.data.statistics import Statistics


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive bins."""

    bins: np.ndarray  # (t, C)
    time_s: float | None = None  # end of the last bin, by the source's clock
    first: int | None = None  # number of the first bin, counted by the source


@dataclass(frozen=True, eq=False)
class LogProbs:
    """Frames of a model that runs elsewhere; only the word search runs here."""

    log_probs: np.ndarray  # (f, V) in the order of the model's classes


@dataclass(frozen=True)
class Mark:
    """Start of a trial; ends the sentence before it."""

    trial: str | None = None
    session: str | None = None
    reference: str | None = None
    statistics: Statistics | None = None  # of its block, if known


@dataclass(frozen=True)
class End:
    """End of the sentence; `on_done` is called on the decoding thread afterwards, even if there was no sentence."""

    on_done: Callable[[], None] | None = None


@dataclass(frozen=True)
class Command:
    """Command of a viewer: open, close, end, cut (end an incomplete sentence) or reset_adaptation."""

    name: str


@dataclass(frozen=True)
class AdaptationChanged:
    """The update thread has finished a sentence."""


Item = Chunk | LogProbs | Mark | End | Command | AdaptationChanged


class Source(Protocol):
    """A source of bins: puts items into the session's queue on its own thread between `start` and `stop`."""

    def start(self) -> None: ...

    def stop(self) -> None: ...
