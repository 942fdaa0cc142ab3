"""A log as numbers over steps: the one thing every format is turned into, and every rule looks at."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

HUGE = 1e30


@dataclass(frozen=True)
class Series:
    """One quantity over steps, in ascending order; what was logged but is not finite stays NaN or infinite."""

    steps: np.ndarray = field(default_factory=lambda: np.empty(0))
    values: np.ndarray = field(default_factory=lambda: np.empty(0))
    unit: str = "steps"  # what the counter counts: batches, epochs, rows; steps where that is not known

    def __post_init__(self) -> None:
        """A number that no arithmetic survives is as good as infinite."""
        values = self.values
        with np.errstate(invalid="ignore"):
            huge = np.isfinite(values) & (np.abs(values) > HUGE)
        if huge.any():
            object.__setattr__(self, "values", np.where(huge, np.copysign(np.inf, values), values))

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def finite(self) -> "Series":
        kept = np.isfinite(self.values)
        return self if kept.all() else Series(self.steps[kept], self.values[kept], self.unit)

    @property
    def broken_steps(self) -> np.ndarray:
        """Steps at which a value was logged that is no finite number."""
        return self.steps[~np.isfinite(self.values)]

    def stretches(self, most: int = 400) -> "Series":
        """At most so many points: the middle value of each stretch, at its first step."""
        size = -(-len(self) // most)
        if size < 2:
            return self
        starts = np.arange(0, len(self), size)
        middle = np.array([np.median(self.values[i : i + size]) for i in starts])
        return Series(self.steps[starts], middle, self.unit)

    def between(self, start: float, stop: float) -> "Series":
        kept = (self.steps >= start) & (self.steps <= stop)
        return Series(self.steps[kept], self.values[kept], self.unit)


@dataclass(frozen=True)
class Log:
    """One run, whatever wrote it. An empty series was not logged."""

    name: str = ""
    per: Series = Series()
    val_loss: Series = Series()
    train_loss: Series = Series()
    grad_norm: Series = Series()
    lr: Series = Series()
    error_name: str = "PER"  # what `per` really is; WER where nothing better was logged
    dataset: str | None = None  # told by the file itself
    dataset_because: str = ""
    planned: int | None = None
    planned_because: str = ""
    said_finished: bool = False
    settings: Mapping[str, Any] = field(
        default_factory=dict
    )  # of the recipe, where it is known: name to value
    coupling: tuple[str, ...] = ()  # warnings about parts of a recipe that belong together
    own: bool = False  # written by arcuate: no published reference unless the data are the published ones
    notes: tuple[str, ...] = ()
    incidents: tuple[str, ...] = ()  # what a guard or scaler had to say, in sentences
    broken_steps: tuple[
        int, ...
    ] = ()  # steps whose loss was no number, as null or by a guard that gave up on it
    skipped_steps: tuple[int, ...] = ()  # steps that a guard left out for the same reason, and went on
    silent_since: int | None = None  # from here on the output held hardly a phoneme, by its own statistics

    @property
    def last_step(self) -> int | None:
        ends = [s.steps[-1] for s in (self.per, self.val_loss, self.train_loss) if len(s)]
        units = {s.unit for s in (self.per, self.val_loss, self.train_loss) if len(s)}
        return None if not ends else int(ends[0] if len(units) > 1 else max(ends))

    @property
    def judged(self) -> Series:
        """What the verdict rests on: the error rate, or the validation loss where there is none."""
        return self.per if len(self.per) else self.val_loss

    @property
    def empty(self) -> bool:
        return not any(len(s) for s in (self.per, self.val_loss, self.train_loss, self.grad_norm))


def running_median(values: np.ndarray, width: int = 3) -> np.ndarray:
    """The middle of each value and its neighbours; at the ends, the last value counts again."""
    if len(values) < width or width < 2:
        return values
    half = width // 2
    padded = np.pad(values, half, mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1)
