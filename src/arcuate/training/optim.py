"""Learning rate as a function of the number of optimizer steps already taken (and, for plateaus, of PER)."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from arcuate.models.model import Model, parameter_groups
from arcuate.training.config import (
    AnySchedule,
    Constant,
    HoldDecay,
    Linear,
    OneCycle,
    Optimizer,
    Plateau,
    Restarts,
    StepDecay,
    TrainingConfig,
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


# The optimizer and its three parameter groups: biases, session layers, everything else.


def make_optimizer(model: Model, settings: Optimizer) -> torch.optim.Optimizer:
    decay = settings.weight_decay
    decays = {"bias": decay.biases, "session": decay.session_layers, "rest": decay.weights}
    groups = [
        {"params": learning, "weight_decay": decays[name], "name": name}
        for name, parameters in parameter_groups(model).items()
        if (learning := [p for p in parameters if p.requires_grad])
    ]
    fused = settings.fused and next(model.parameters()).device.type in ("cpu", "cuda")
    if settings.kind == "sgd":
        return torch.optim.SGD(
            groups, lr=0.0, momentum=settings.momentum, nesterov=settings.nesterov, fused=fused
        )
    kind = torch.optim.Adam if settings.kind == "adam" else torch.optim.AdamW
    return kind(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=fused)


def set_rates(
    optimizer: torch.optim.Optimizer,
    recipe: TrainingConfig,
    step: int,
    scale: float = 1.0,
    plateaus: tuple[PlateauState, PlateauState] = (PlateauState(), PlateauState()),
    n_steps: int | None = None,
) -> dict[str, float]:
    """Set and return the rate of each group for the update that follows `step` finished ones of `n_steps`."""
    rates = {}
    for group in optimizer.param_groups:
        own = group["name"] == "session" and recipe.session_schedule is not None
        schedule = (recipe.session_schedule if own else None) or recipe.schedule
        rate = rate_at(schedule, step, n_steps or recipe.train.steps, plateaus[1 if own else 0])
        group["lr"] = rates[group["name"]] = scale * rate
    return rates


def fill_absent(optimizer: torch.optim.Optimizer) -> None:
    """Give session layers without a trial in this batch a zero gradient, so that momentum moves them on."""
    for group in optimizer.param_groups:
        if group["name"] == "session":
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)


def carry_over(old: torch.optim.Optimizer, new: torch.optim.Optimizer) -> None:
    """What the old optimizer remembers of weights that go on learning; the others start afresh."""
    for group in new.param_groups:
        for parameter in group["params"]:
            if parameter in old.state:
                new.state[parameter] = old.state[parameter]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All of the optimizer's memory as named tensors."""
    return {
        f"optimizer.{index}.{name}": value
        for index, entry in optimizer.state_dict()["state"].items()
        for name, value in entry.items()
        if value is not None
    }


def memory_names(optimizer: torch.optim.Optimizer) -> set[str]:
    """What this kind of optimizer remembers of each weight."""
    if isinstance(optimizer, torch.optim.SGD):
        return {"momentum_buffer"} if optimizer.defaults["momentum"] else set()
    return {"step", "exp_avg", "exp_avg_sq"}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Take back what `optimizer_tensors` gave; a ValueError where it belongs to another optimizer or model."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    known = memory_names(optimizer)
    state: dict[int, dict[str, Any]] = {}
    for name, value in tensors.items():
        kind, _, place = name.partition(".")
        if kind != "optimizer":
            continue
        index, _, key = place.partition(".")
        if key not in known or not index.isdecimal() or int(index) >= len(parameters):
            raise ValueError(f"{name} is nothing that {type(optimizer).__name__} remembers")
        if value.shape not in ((), parameters[int(index)].shape):
            raise ValueError(f"{name} has another shape than its weights")
        state.setdefault(int(index), {})[key] = value
    if any(entry.keys() != known for entry in state.values()):
        raise ValueError(
            f"{type(optimizer).__name__} remembers {', '.join(sorted(known))}, and some are missing"
        )
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
