"""Learning rate as a function of the number of optimizer steps already taken."""

import math

from arcuate.training.settings import Constant, Schedule, WarmupCosine


def rate_at(schedule: Schedule, step: int, n_steps: int) -> float:
    """Rate for the update that follows `step` finished ones, in a run of `n_steps`."""
    match schedule:
        case Constant():
            return schedule.rate
        case WarmupCosine():
            return warmup_cosine(schedule, step, schedule.decay_steps or n_steps)


def warmup_cosine(schedule: WarmupCosine, step: int, decay_steps: int) -> float:
    """As in the '25 release: the very first update has rate 0, and after the decay the floor holds."""
    warmup = schedule.warmup or round(schedule.warmup_share * decay_steps)
    if step < warmup:
        return schedule.peak * step / warmup
    if step >= decay_steps:
        return schedule.floor
    progress = (step - warmup) / max(1, decay_steps - warmup)
    return schedule.floor + (schedule.peak - schedule.floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
