"""Learning rate as a function of the number of optimizer steps already taken (and, for plateaus, of PER)."""

import math
from dataclasses import dataclass, replace

from arcuate.training.settings import (
    AnySchedule,
    Constant,
    HoldDecay,
    Linear,
    OneCycle,
    Plateau,
    Restarts,
    StepDecay,
    WarmupCosine,
)


@dataclass(frozen=True)
class PlateauState:
    """What a plateau schedule remembers: how often it reduced, the best PER, and how long ago that was."""

    scale: float = 1.0
    best: float | None = None
    n_bad: int = 0
    n_cooling: int = 0


def rate_at(schedule: AnySchedule, step: int, n_steps: int, plateau: PlateauState | None = None) -> float:
    """Rate for the update that follows `step` finished ones, in a run of `n_steps`."""
    match schedule:
        case Constant():
            return schedule.rate
        case Linear():
            progress = min(1.0, step / (schedule.decay_steps or n_steps))
            return schedule.peak + (schedule.floor - schedule.peak) * progress
        case WarmupCosine():
            return _warmup_cosine(schedule, step, schedule.decay_steps or n_steps)
        case OneCycle():
            return _one_cycle(schedule, step, schedule.cycle_steps or n_steps)
        case Plateau():
            return max(schedule.floor, schedule.peak * (plateau or PlateauState()).scale)
        case Restarts():
            return _restarts(schedule, step)
        case HoldDecay():
            return _hold_decay(schedule, step, schedule.decay_steps or n_steps)
        case StepDecay():
            n_drops = step // schedule.every if schedule.every else sum(step >= at for at in schedule.at)
            return max(schedule.floor, schedule.peak * schedule.factor**n_drops)


def after_validation(schedule: AnySchedule, state: PlateauState, per: float | None) -> PlateauState:
    """The state of a plateau schedule after one more validation; all other schedules ignore it."""
    if not isinstance(schedule, Plateau) or per is None:
        return state
    better = state.best is None or per < state.best * (1 - schedule.threshold)
    if better:
        return replace(state, best=per, n_bad=0, n_cooling=max(0, state.n_cooling - 1))
    if state.n_cooling:
        return replace(state, n_bad=0, n_cooling=state.n_cooling - 1)
    if state.n_bad + 1 <= schedule.patience:
        return replace(state, n_bad=state.n_bad + 1)
    return replace(state, scale=state.scale * schedule.factor, n_bad=0, n_cooling=schedule.cooldown)


def _warmup_cosine(schedule: WarmupCosine, step: int, decay_steps: int) -> float:
    """As in the '25 release: the very first update has rate 0, and after the decay the floor holds."""
    warmup = schedule.warmup or round(schedule.warmup_share * decay_steps)
    if step < warmup:
        return schedule.peak * step / warmup
    return _cosine(schedule.peak, schedule.floor, (step - warmup) / max(1, decay_steps - warmup))


def _one_cycle(schedule: OneCycle, step: int, cycle_steps: int) -> float:
    start = schedule.peak / schedule.div_factor
    end = start / schedule.final_div_factor
    top = schedule.pct_start * cycle_steps - 1
    anneal = _cosine if schedule.anneal == "cosine" else _line
    if step <= top:
        return anneal(start, schedule.peak, step / top if top > 0 else 1.0)
    return anneal(schedule.peak, end, (step - top) / max(1e-9, cycle_steps - 1 - top))


def _restarts(schedule: Restarts, step: int) -> float:
    if step < schedule.warmup:
        return schedule.peak * step / schedule.warmup
    within, period = step - schedule.warmup, schedule.period
    while within >= period and schedule.multiply > 1:
        within, period = within - period, period * schedule.multiply
    return _cosine(schedule.peak, schedule.floor, (within % period) / period)


def _hold_decay(schedule: HoldDecay, step: int, decay_steps: int) -> float:
    progress = max(0.0, step - schedule.hold) / max(1, decay_steps - schedule.hold)
    shape = _cosine if schedule.shape == "cosine" else _line
    return shape(schedule.peak, schedule.floor, progress)


def _cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def _line(start: float, end: float, progress: float) -> float:
    return start + (end - start) * min(1.0, progress)
