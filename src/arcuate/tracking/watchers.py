"""Watchers side by side, and the one that hands what it sees to a tracker without ever stopping training."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Protocol

from arcuate.tracking.scalars import scalars

Say = Callable[[str], None]


class Watcher(AbstractContextManager["Watcher"], Protocol):
    """What the training loop tells, and a decoded validation trial shortly before the row it belongs to."""

    def step(self, step: int) -> None: ...

    def row(self, row: dict[str, Any]) -> None: ...

    def incident(self, row: dict[str, Any]) -> None: ...

    def stage(self, row: dict[str, Any]) -> None: ...

    def sample(self, reference: Sequence[str], hypothesis: Sequence[str]) -> None: ...


class Watchers:
    """Several watchers as one; they close in the opposite order of opening, whatever happens."""

    def __init__(self, *watchers: Any) -> None:
        self.watchers: tuple[Watcher, ...] = watchers
        self.open = ExitStack()

    def __enter__(self) -> "Watchers":
        with ExitStack() as opening:
            for watcher in self.watchers:
                opening.enter_context(watcher)
            self.open = opening.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open.__exit__(kind, error, trace)

    def step(self, step: int) -> None:
        for watcher in self.watchers:
            watcher.step(step)

    def row(self, row: dict[str, Any]) -> None:
        for watcher in self.watchers:
            watcher.row(row)

    def incident(self, row: dict[str, Any]) -> None:
        for watcher in self.watchers:
            watcher.incident(row)

    def stage(self, row: dict[str, Any]) -> None:
        for watcher in self.watchers:
            watcher.stage(row)

    def sample(self, reference: Sequence[str], hypothesis: Sequence[str]) -> None:
        for watcher in self.watchers:
            watcher.sample(reference, hypothesis)


class Backend(Protocol):
    """An open tracker."""

    def send(self, step: int, values: Mapping[str, float], text: str | None) -> None:
        """One row of metrics.jsonl, and the sample that goes with it."""

    def rewound(self, step: int) -> None:
        """What was sent for later steps is undone."""

    def close(self, failed: bool) -> None: ...


class Tracker:
    """A watcher that feeds a tracker.

    A tracker that fails later than at its opening is closed and named once, and training goes on: its disk, its
    network and its own process are no part of the run, and metrics.jsonl has every number. Only errors from outside
    are taken this way: OSError, or an exception type of the tracker's own package. Any other one is a mistake in this
    code and is raised.
    """

    def __init__(
        self, name: str, package: str, start: Callable[[], Backend], samples: bool, say: Say
    ) -> None:
        self.name, self.package, self.start, self.samples, self.say = name, package, start, samples, say
        self.backend: Backend | None = None
        self.text: str | None = None

    def __enter__(self) -> "Tracker":
        self.backend = self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tell(lambda backend: backend.close(failed=kind is not None))
        self.backend = None

    def step(self, step: int) -> None:
        pass

    def row(self, row: dict[str, Any]) -> None:
        text = None
        if row["split"] != "train":
            text, self.text = self.text, None
        self.tell(lambda backend: backend.send(row["step"], scalars(row), text))

    def incident(self, row: dict[str, Any]) -> None:
        if (target := row.get("rewound_to")) is not None:
            self.tell(lambda backend: backend.rewound(target))

    def stage(self, row: dict[str, Any]) -> None:
        pass  # every row names its stage

    def sample(self, reference: Sequence[str], hypothesis: Sequence[str]) -> None:
        if self.samples:
            self.text = f"said {' '.join(reference)}\nread {' '.join(hypothesis)}"

    def tell(self, message: Callable[[Backend], None]) -> None:
        if self.backend is None:
            return
        try:
            message(self.backend)
        except Exception as error:
            if not self.is_outside(error):
                raise
            self.backend = None
            self.say(
                f"{self.name} is given up: {type(error).__name__}: {error}; training goes on, and metrics.jsonl has"
                " every number"
            )

    def is_outside(self, error: Exception) -> bool:
        return isinstance(error, OSError) or type(error).__module__.partition(".")[0] == self.package
