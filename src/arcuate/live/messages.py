"""What a source hands over: bins as they came, with what the source knows about them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from arcuate.data.statistics import Statistics


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some bins in a row."""

    bins: np.ndarray  # (t, C)
    time_s: float | None = None  # when the last of them ended, by the source's clock
    first: int | None = None  # number of the first of them, counted by the source


@dataclass(frozen=True, eq=False)
class Scores:
    """Frame scores of a model that runs elsewhere; only the words are looked for here."""

    log_probs: np.ndarray  # (f, V) natural logs, in the order of the model's classes


@dataclass(frozen=True)
class Mark:
    """The source knows that a trial begins here; whatever was being said before it is over."""

    trial: str | None = None
    session: str | None = None
    reference: str | None = None
    statistics: Statistics | None = None  # of its block, where they are known


@dataclass(frozen=True)
class End:
    """The source knows that the sentence is over; `last`: and that nothing will follow.

    `then` is called on the decoding thread when it is, whether or not anything had been said.
    """

    last: bool = False
    then: Callable[[], None] | None = None


@dataclass(frozen=True)
class Command:
    """A wish of a person at the page: open, close, end, forget; cut: end what is not over."""

    what: str


@dataclass(frozen=True)
class Learned:
    """A sentence was learned from, on its own thread: the page may be told."""


Item = Chunk | Scores | Mark | End | Command | Learned


# What every source offers to the server.


class Source(Protocol):
    """Begins to hand bins over when started, on a thread of its own; leaves when stopped."""

    def start(self) -> None: ...

    def stop(self) -> None: ...
