"""Learning-rate schedules: their settings, and the learning rate as a function of the optimizer step.

Schedules count optimizer steps, not batches. All of them are pure functions; only `plateau` depends on more than the
step, and its state is an immutable value that is passed in and returned.
"""

import math
from collections.abc import Callable
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
    lr: _LearningRate = Field(description="Learning rate.")

    @property
    def peak_lr(self) -> float:
        return self.lr


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

    Identical to torch's OneCycleLR.
    """

    kind: Literal["one_cycle"] = "one_cycle"
    peak_lr: _LearningRate = Field(description="Highest learning rate.")
    pct_start: float = Field(0.3, gt=0.0, lt=1.0, description="Fraction of the cycle spent increasing.")
    div_factor: float = Field(25.0, ge=1.0, le=1e6, description="Ratio of peak_lr to the initial learning rate.")
    final_div_factor: float = Field(1e4, ge=1.0, le=1e9, description="Ratio of the first to the last learning rate.")
    anneal: Literal["cosine", "linear"] = Field("cosine", description="Shape of the increase and the decay.")
    cycle_steps: Steps | None = Field(None, description="Length in steps; null = the length of the run.")


class Plateau(_Decaying):
    """Multiply by `factor` when the validation error rate has not improved for more than `patience` validations.

    The error rate is the one that `train.select_by` names.
    """

    kind: Literal["plateau"] = "plateau"
    factor: float = Field(0.5, gt=0.0, lt=1.0, description="Factor on the learning rate at a reduction.")
    patience: int = Field(8, ge=0, le=10_000, description="Validations without improvement before a reduction.")
    threshold: float = Field(
        0.0, ge=0.0, lt=1.0, description="Smallest relative decrease that counts as an improvement."
    )
    cooldown: int = Field(0, ge=0, le=10_000, description="Number of validations ignored after a reduction.")


class Restarts(_Decaying):
    """SGDR (Loshchilov & Hutter 2017): half a cosine from `peak_lr` to `min_lr`, restarted every period."""

    kind: Literal["restarts"] = "restarts"
    period: Steps = Field(description="Length of the first period in steps.")
    period_factor: int = Field(1, ge=1, le=100, description="Ratio of the length of each period to the previous one.")
    warmup_steps: _StepsOrZero = Field(0, description="Steps of linear warm-up before the first period.")

    @model_validator(mode="after")
    def _warmup_fits(self) -> "Restarts":
        if self.warmup_steps > self.period:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} is longer than period {self.period}; lower warmup_steps or raise"
                " period"
            )
        return self


class HoldDecay(_Decaying):
    """Hold `peak_lr` for `hold_steps`, then decay to `min_lr` by step `decay_steps`."""

    kind: Literal["hold_decay"] = "hold_decay"
    hold_steps: _StepsOrZero = Field(0, description="Number of steps at `peak_lr`.")
    shape: Literal["linear", "cosine"] = Field("linear", description="Shape of the decay.")
    decay_steps: Steps | None = Field(None, description=_RUN_LENGTH)

    @model_validator(mode="after")
    def _hold_fits(self) -> "HoldDecay":
        if self.decay_steps is not None and self.hold_steps > self.decay_steps:
            raise ValueError(
                f"hold_steps {self.hold_steps} is longer than decay_steps {self.decay_steps}, which includes the hold;"
                " lower hold_steps or raise decay_steps"
            )
        return self


class StepDecay(_Decaying):
    """Multiply by `factor` at each of the milestones, or every `every_steps` steps."""

    kind: Literal["step_decay"] = "step_decay"
    factor: float = Field(0.1, gt=0.0, lt=1.0, description="Factor on the learning rate at each milestone.")
    milestones: tuple[Steps, ...] = Field((), description="Steps at which the learning rate is multiplied.")
    every_steps: Steps | None = Field(None, description="Steps between reductions, instead of `milestones`.")

    @model_validator(mode="after")
    def _milestones_or_interval(self) -> "StepDecay":
        if bool(self.milestones) == (self.every_steps is not None):
            raise ValueError("step_decay needs exactly one of milestones (a list of steps) and every_steps")
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError(f"milestones {list(self.milestones)} must be strictly increasing")
        return self


AnySchedule = Constant | Linear | WarmupCosine | OneCycle | Plateau | Restarts | HoldDecay | StepDecay
Schedule = Annotated[AnySchedule, Field(discriminator="kind")]


@dataclass(frozen=True)
class PlateauState:
    """State of a plateau schedule."""

    scale: float = 1.0  # product of the reductions so far
    best: float | None = None  # lowest error rate so far
    n_bad: int = 0  # validations since then
    n_cooling: int = 0  # validations still to ignore after a reduction


def learning_rate(schedule: AnySchedule, step: int, n_steps: int, plateau: PlateauState | None = None) -> float:
    """Return the learning rate of the update that follows `step` completed ones, in a run of `n_steps`."""
    match schedule:
        case Constant():
            return schedule.lr
        case Linear():
            return _line(schedule.peak_lr, schedule.min_lr, step / (schedule.decay_steps or n_steps))
        case WarmupCosine():
            return _warmup_cosine(schedule, step, schedule.decay_steps or n_steps)
        case OneCycle():
            return _one_cycle(schedule, step, schedule.cycle_steps or n_steps)
        case Plateau():
            return max(schedule.min_lr, schedule.peak_lr * (plateau or PlateauState()).scale)
        case Restarts():
            return _restarts(schedule, step)
        case HoldDecay():
            return _hold_decay(schedule, step, schedule.decay_steps or n_steps)
        case StepDecay():
            every = schedule.every_steps
            n_reductions = step // every if every else sum(step >= m for m in schedule.milestones)
            return max(schedule.min_lr, schedule.peak_lr * schedule.factor**n_reductions)


def update_plateau(schedule: AnySchedule, state: PlateauState, error_rate: float | None) -> PlateauState:
    """Return the plateau state after one more validation; other schedules leave it unchanged."""
    if not isinstance(schedule, Plateau) or error_rate is None:
        return state
    if state.best is None or error_rate < state.best * (1 - schedule.threshold):
        return replace(state, best=error_rate, n_bad=0, n_cooling=max(0, state.n_cooling - 1))
    if state.n_cooling:
        return replace(state, n_bad=0, n_cooling=state.n_cooling - 1)
    if state.n_bad + 1 <= schedule.patience:
        return replace(state, n_bad=state.n_bad + 1)
    return replace(state, scale=state.scale * schedule.factor, n_bad=0, n_cooling=schedule.cooldown)


def _warmup_cosine(schedule: WarmupCosine, step: int, decay_steps: int) -> float:
    """As in the '25 release: the first update has learning rate 0, and `min_lr` holds after the decay."""
    warmup = schedule.warmup_steps or round(schedule.warmup_fraction * decay_steps)
    if step < warmup:
        return schedule.peak_lr * step / warmup
    return _cosine(schedule.peak_lr, schedule.min_lr, (step - warmup) / max(1, decay_steps - warmup))


def _one_cycle(schedule: OneCycle, step: int, cycle_steps: int) -> float:
    start = schedule.peak_lr / schedule.div_factor
    end = start / schedule.final_div_factor
    top = schedule.pct_start * cycle_steps - 1
    anneal = _shape(schedule.anneal)
    if step <= top:
        return anneal(start, schedule.peak_lr, step / top if top > 0 else 1.0)
    return anneal(schedule.peak_lr, end, (step - top) / max(1e-9, cycle_steps - 1 - top))


def _restarts(schedule: Restarts, step: int) -> float:
    if step < schedule.warmup_steps:
        return schedule.peak_lr * step / schedule.warmup_steps
    within, period = step - schedule.warmup_steps, schedule.period
    while within >= period and schedule.period_factor > 1:
        within, period = within - period, period * schedule.period_factor
    return _cosine(schedule.peak_lr, schedule.min_lr, (within % period) / period)


def _hold_decay(schedule: HoldDecay, step: int, decay_steps: int) -> float:
    progress = max(0.0, step - schedule.hold_steps) / max(1, decay_steps - schedule.hold_steps)
    return _shape(schedule.shape)(schedule.peak_lr, schedule.min_lr, progress)


def _shape(name: Literal["cosine", "linear"]) -> Callable[[float, float, float], float]:
    return _cosine if name == "cosine" else _line


def _cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def _line(start: float, end: float, progress: float) -> float:
    return start + (end - start) * min(1.0, progress)
