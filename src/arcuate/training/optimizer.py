"""The optimizer and its three parameter groups: biases, session layers, everything else."""

from typing import Any

import torch

from arcuate.models.model import Model, parameter_groups
from arcuate.recipe import Recipe
from arcuate.training.schedule import PlateauState, rate_at
from arcuate.training.settings import Optimizer


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
    recipe: Recipe,
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
