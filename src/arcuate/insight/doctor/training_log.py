"""`TrainingLog`: one run as series over steps. Every reader produces it and every rule works on it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_HUGE = 1e30


@dataclass(frozen=True)
class Series:
    """One quantity over ascending steps; logged values that are not finite stay NaN or infinite."""

    steps: np.ndarray = field(default_factory=lambda: np.empty(0))
    values: np.ndarray = field(default_factory=lambda: np.empty(0))
    unit: str = "steps"  # what the counter counts: batches, epochs, rows; "steps" if unknown

    def __post_init__(self) -> None:
        """Replace values too large for further arithmetic by infinity."""
        values = self.values
        with np.errstate(invalid="ignore"):
            huge = np.isfinite(values) & (np.abs(values) > _HUGE)
        if huge.any():
            object.__setattr__(self, "values", np.where(huge, np.copysign(np.inf, values), values))

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def finite(self) -> "Series":
        kept = np.isfinite(self.values)
        return self if kept.all() else Series(self.steps[kept], self.values[kept], self.unit)

    @property
    def non_finite_steps(self) -> np.ndarray:
        return self.steps[~np.isfinite(self.values)]

    def downsample(self, n_points: int = 400) -> "Series":
        """At most `n_points` points: the median of each stretch, at its first step."""
        size = -(-len(self) // n_points)
        if size < 2:
            return self
        starts = np.arange(0, len(self), size)
        medians = np.array([np.median(self.values[i : i + size]) for i in starts])
        return Series(self.steps[starts], medians, self.unit)

    def between(self, start: float, stop: float) -> "Series":
        kept = (self.steps >= start) & (self.steps <= stop)
        return Series(self.steps[kept], self.values[kept], self.unit)


@dataclass(frozen=True)
class TrainingLog:
    """One run, whichever program wrote it. An empty series was not logged."""

    name: str = ""
    per: Series = Series()
    val_loss: Series = Series()
    train_loss: Series = Series()
    grad_norm: Series = Series()
    lr: Series = Series()
    error_name: str = "PER"  # what `per` contains; WER if no phoneme error rate was logged
    dataset: str | None = None  # stated by the file
    dataset_because: str = ""
    planned: int | None = None
    planned_because: str = ""
    reported_finished: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the recipe, if known: dotted path to value
    coupling_warnings: tuple[str, ...] = ()  # learning rate, eps and loss reduction that do not match
    is_arcuate: bool = False  # no published reference applies unless the data are the published ones
    notes: tuple[str, ...] = ()
    incidents: tuple[str, ...] = ()  # interventions of the guard, in sentences
    non_finite_steps: tuple[int, ...] = ()  # no finite loss was logged, or the guard gave up on the step
    skipped_steps: tuple[int, ...] = ()  # steps with a non-finite loss that the guard skipped
    blank_since: int | None = None  # from here on the output was almost only blanks, by its own statistics

    @property
    def last_step(self) -> int | None:
        logged = [s for s in (self.per, self.val_loss, self.train_loss) if len(s)]
        if not logged:
            return None
        ends = [s.steps[-1] for s in logged]
        return int(ends[0] if len({s.unit for s in logged}) > 1 else max(ends))

    @property
    def judged(self) -> Series:
        """The series that the verdict rests on: the error rate, or the validation loss if there is none."""
        return self.per if len(self.per) else self.val_loss

    @property
    def empty(self) -> bool:
        return not any(len(s) for s in (self.per, self.val_loss, self.train_loss, self.grad_norm))


def running_median(values: np.ndarray, width: int = 3) -> np.ndarray:
    """Median over a centred window; the ends are padded with the edge values."""
    if len(values) < width or width < 2:
        return values
    half = width // 2
    padded = np.pad(values, half, mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1)
