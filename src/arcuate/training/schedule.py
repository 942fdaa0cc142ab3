"""Learning-rate schedules: their settings, and the learning rate as a function of the optimizer step.

Schedules count optimizer steps, not batches. All of them are pure functions; only `plateau` depends on more than the
step, and its state is an immutable value that is passed in and returned.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field, model_validator

from arcuate.config import Settings

MAX_STEPS = 99_999_999  # checkpoint names hold eight digits
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS)]
_StepsOrZero = Annotated[int, Field(ge=0, le=MAX_STEPS)]
_LearningRate = Annotated[float, Field(ge=0.0, le=100.0)]

_RUN_LENGTH = "Step at which the schedule ends; null = the last step of the run."


class _Decaying(Settings):
    """Common settings of the schedules that decay from a peak to a minimum."""

    kind: str
    peak_lr: _LearningRate = Field(description="Highest learning rate.")
    min_lr: _LearningRate = Field(0.0, description="Lowest learning rate.")

    @model_validator(mode="after")
    def _minimum_below_peak(self) -> "_Decaying":
        if self.min_lr > self.peak_lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above peak_lr {self.peak_lr:g}; lower min_lr or raise peak_lr")
        return self


class Constant(Settings):
    """The same learning rate at every step."""

    kind: Literal["constant"] = "constant"
    peak_lr: _LearningRate = Field(description="Learning rate.")


class Linear(_Decaying):
    """Linear decay from `peak_lr` to `min_lr` over `decay_steps`."""

    kind: Literal["linear"] = "linear"
    min_lr: _LearningRate = Field(description="Learning rate at the end.")
    decay_steps: Steps | None = Field(None, description=_RUN_LENGTH)


class WarmupCosine(_Decaying):
    """Linear warm-up from 0 to `peak_lr`, then half a cosine down to `min_lr` at `decay_steps`."""

    kind: Literal["warmup_cosine"] = "warmup_cosine"
    warmup_steps: _StepsOrZero = Field(0, description="Length of the warm-up in steps.")
    warmup_fraction: float = Field(0.0, ge=0.0, le=1.0, description="Warm-up as a fraction of the schedule.")
    decay_steps: Steps | None = Field(None, description=_RUN_LENGTH)

    @model_validator(mode="after")
    def _warmup_fits(self) -> "WarmupCosine":
        if self.warmup_steps and self.warmup_fraction:
            raise ValueError("warmup_steps and warmup_fraction are mutually exclusive; set one of them to 0")
        if self.decay_steps is not None and self.warmup_steps > self.decay_steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} is longer than decay_steps {self.decay_steps}, which includes the"
                " warm-up; lower warmup_steps or raise decay_steps"
            )
        return self


class OneCycle(Settings):
    """Rise from peak_lr / div_factor to `peak_lr`, then fall to peak_lr / (div_factor × final_div_factor).

    Both along half a cosine over the length of the run, identical to torch's OneCycleLR.
    """

    kind: Literal["one_cycle"] = "one_cycle"
    peak_lr: _LearningRate = Field(description="Highest learning rate.")
    pct_start: float = Field(0.3, gt=0.0, lt=1.0, description="Fraction of the cycle spent increasing.")
    div_factor: float = Field(25.0, ge=1.0, le=1e6, description="Ratio of peak_lr to the initial learning rate.")
    final_div_factor: float = Field(1e4, ge=1.0, le=1e9, description="Ratio of the first to the last learning rate.")


class Plateau(_Decaying):
    """Multiply by `factor` when the validation error rate has not improved for more than `patience` validations.

    The error rate is the one that `train.select_by` names.
    """

    kind: Literal["plateau"] = "plateau"
    factor: float = Field(0.5, gt=0.0, lt=1.0, description="Factor on the learning rate at a reduction.")
    patience: int = Field(8, ge=0, le=10_000, description="Validations without improvement before a reduction.")


class StepDecay(_Decaying):
    """Multiply by `factor` at each of the milestones."""

    kind: Literal["step_decay"] = "step_decay"
    factor: float = Field(0.1, gt=0.0, lt=1.0, description="Factor on the learning rate at each milestone.")
    milestones: tuple[Steps, ...] = Field(
        min_length=1, description="Steps at which the learning rate is multiplied by `factor`."
    )

    @model_validator(mode="after")
    def _milestones_increase(self) -> "StepDecay":
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError(f"milestones {list(self.milestones)} must be strictly increasing")
        return self


AnySchedule = Constant | Linear | WarmupCosine | OneCycle | Plateau | StepDecay
Schedule = Annotated[AnySchedule, Field(discriminator="kind")]


@dataclass(frozen=True)
class PlateauState:
    """State of a plateau schedule."""

    scale: float = 1.0  # product of the reductions so far
    best: float | None = None  # lowest error rate so far
    n_bad: int = 0  # validations since then


def learning_rate(schedule: AnySchedule, step: int, n_steps: int, plateau: PlateauState | None = None) -> float:
    """Return the learning rate of the update that follows `step` completed ones, in a run of `n_steps`."""
    match schedule:
        case Constant():
            return schedule.peak_lr
        case Linear():
            progress = min(1.0, step / (schedule.decay_steps or n_steps))
            return schedule.peak_lr + (schedule.min_lr - schedule.peak_lr) * progress
        case WarmupCosine():
            return _warmup_cosine(schedule, step, schedule.decay_steps or n_steps)
        case OneCycle():
            return _one_cycle(schedule, step, n_steps)
        case Plateau():
            return max(schedule.min_lr, schedule.peak_lr * (plateau or PlateauState()).scale)
        case StepDecay():
            n_reductions = sum(step >= m for m in schedule.milestones)
            return max(schedule.min_lr, schedule.peak_lr * schedule.factor**n_reductions)


def update_plateau(schedule: AnySchedule, state: PlateauState, error_rate: float | None) -> PlateauState:
    """Return the plateau state after one more validation; other schedules leave it unchanged."""
    if not isinstance(schedule, Plateau) or error_rate is None:
        return state
    if state.best is None or error_rate < state.best:
        return replace(state, best=error_rate, n_bad=0)
    if state.n_bad + 1 <= schedule.patience:
        return replace(state, n_bad=state.n_bad + 1)
    return replace(state, scale=state.scale * schedule.factor, n_bad=0)


def _warmup_cosine(schedule: WarmupCosine, step: int, decay_steps: int) -> float:
    """As in the '25 release: the first update has learning rate 0, and `min_lr` holds after the decay."""
    warmup = schedule.warmup_steps or round(schedule.warmup_fraction * decay_steps)
    if step < warmup:
        return schedule.peak_lr * step / warmup
    return _cosine(schedule.peak_lr, schedule.min_lr, (step - warmup) / max(1, decay_steps - warmup))


def _one_cycle(schedule: OneCycle, step: int, n_steps: int) -> float:
    start = schedule.peak_lr / schedule.div_factor
    top = schedule.pct_start * n_steps - 1
    if step <= top:
        return _cosine(start, schedule.peak_lr, step / top if top > 0 else 1.0)
    return _cosine(schedule.peak_lr, start / schedule.final_div_factor, (step - top) / max(1e-9, n_steps - 1 - top))


def _cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
