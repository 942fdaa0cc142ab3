"""The optimizer and its three parameter groups: biases, session layers, everything else."""

import torch

from arcuate.models.model import Model, parameter_groups
from arcuate.recipe import Recipe
from arcuate.training.schedule import rate_at
from arcuate.training.settings import Optimizer


def make_optimizer(model: Model, settings: Optimizer) -> torch.optim.Optimizer:
    decay = settings.weight_decay
    decays = {"bias": decay.biases, "session": decay.session_layers, "rest": decay.weights}
    groups = [
        {"params": parameters, "weight_decay": decays[name], "name": name}
        for name, parameters in parameter_groups(model).items()
        if parameters
    ]
    kind = torch.optim.Adam if settings.kind == "adam" else torch.optim.AdamW
    return kind(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)


def set_rates(optimizer: torch.optim.Optimizer, recipe: Recipe, step: int) -> dict[str, float]:
    """Set and return the rate of each group for the update that follows `step` finished ones."""
    session_schedule = recipe.session_schedule or recipe.schedule
    rates = {}
    for group in optimizer.param_groups:
        schedule = session_schedule if group["name"] == "session" else recipe.schedule
        group["lr"] = rates[group["name"]] = rate_at(schedule, step, recipe.train.steps)
    return rates


def fill_absent(optimizer: torch.optim.Optimizer) -> None:
    """Give session layers without a trial in this batch a zero gradient, so that momentum moves them on."""
    for group in optimizer.param_groups:
        if group["name"] == "session":
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
