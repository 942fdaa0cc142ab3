"""The optimizer (parameter groups, learning rates, trainable components, saved state) and averaged weights."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from arcuate.errors import UserError
from arcuate.models.model import Model, parameter_groups
from arcuate.training.config import Optimizer
from arcuate.training.curriculum import Stage

_COMPONENT_PREFIXES = {
    "front_end": "front_end.",
    "encoder": "encoder.",
    "ctc": "head.",
    "transducer": "transducer.",
    "mode": "mode.",
    "denoiser": "denoiser.",
}


def set_trainable(model: nn.Module, stage: Stage | None) -> None:
    """Enable gradients for the components of the stage only; without stages, leave them as they are."""
    if stage is None:
        return
    prefixes = tuple(_COMPONENT_PREFIXES[c] for c in stage.train) if stage.train else ("",)
    n_trained = 0
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(prefixes))
        n_trained += parameter.requires_grad
    if not n_trained:
        raise UserError(f"stage {stage.name!r} trains components without parameters; add others to train")


def make_optimizer(model: Model, settings: Optimizer) -> torch.optim.Optimizer:
    """Create the optimizer over the trainable parameters, in three groups: bias, session, rest."""
    decay = settings.weight_decay
    decays = {"bias": decay.biases, "session": decay.session_layers, "rest": decay.weights}
    groups = [
        {"params": trainable, "weight_decay": decays[name], "name": name}
        for name, parameters in parameter_groups(model).items()
        if (trainable := [p for p in parameters if p.requires_grad])
    ]
    # None, not False, which would also turn off the kernels over several parameters that torch uses on a GPU.
    fused = True if settings.fused and next(model.parameters()).device.type in ("cpu", "cuda") else None
    kind = torch.optim.Adam if settings.kind == "adam" else torch.optim.AdamW
    return kind(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=fused)


def set_learning_rates(optimizer: torch.optim.Optimizer, lr: float, session_factor: float) -> dict[str, float]:
    """Set and return the learning rate of each group; `session_factor` scales that of the session layers."""
    for group in optimizer.param_groups:
        group["lr"] = lr * session_factor if group["name"] == "session" else lr
    return {group["name"]: group["lr"] for group in optimizer.param_groups}


def set_eps(optimizer: torch.optim.Optimizer, eps: float) -> None:
    """Set the eps of Adam for the following updates."""
    for group in optimizer.param_groups:
        group["eps"] = eps


def typical_gradient(optimizer: torch.optim.Optimizer) -> float | None:
    """Return the median over the weights of Adam's root mean square gradient; None before the first step.

    Session layers are left out, because those without recent trials have no gradient. One read of the device: a fused
    optimizer keeps its counts of steps there.
    """
    squares = [
        state["exp_avg_sq"].flatten() / (1 - group["betas"][1] ** state["step"].double())
        for group in optimizer.param_groups
        if group["name"] != "session"
        for parameter in group["params"]
        if (state := optimizer.state.get(parameter)) and "exp_avg_sq" in state
    ]
    return math.sqrt(float(torch.cat(squares).median())) if squares else None


def fill_absent_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Give session layers without a trial in the batch a zero gradient, so that momentum still updates them."""
    for group in optimizer.param_groups:
        if group["name"] == "session":
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)


def transfer_state(old: torch.optim.Optimizer, new: torch.optim.Optimizer) -> None:
    """Copy the state of parameters that both optimizers train; the others start without state."""
    for group in new.param_groups:
        for parameter in group["params"]:
            if parameter in old.state:
                new.state[parameter] = old.state[parameter]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the complete state of the optimizer as named tensors."""
    return {
        f"optimizer.{index}.{name}": value
        for index, entry in optimizer.state_dict()["state"].items()
        for name, value in entry.items()
        if value is not None
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Restore what `optimizer_tensors` returned; ValueError if it belongs to a different optimizer or model."""
    kind = type(optimizer).__name__
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    expected = {"step", "exp_avg", "exp_avg_sq"}  # tensors per parameter
    state: dict[int, dict[str, Any]] = {}
    for name, value in tensors.items():
        prefix, _, rest = name.partition(".")
        if prefix != "optimizer":
            continue
        index, _, key = rest.partition(".")
        if key not in expected or not index.isdecimal() or int(index) >= len(parameters):
            raise ValueError(f"{name} is not part of the state of {kind}")
        if value.shape not in ((), parameters[int(index)].shape):
            raise ValueError(f"{name} and its parameter differ in shape")
        state.setdefault(int(index), {})[key] = value
    if any(entry.keys() != expected for entry in state.values()):
        raise ValueError(f"the state of {kind} needs {', '.join(sorted(expected))}, and some are missing")
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


class WeightAverage:
    """Exponential moving average of the weights (EMA); empty if `decay` is 0.

    It starts with a smaller decay, min(decay, (1 + n) / (10 + n)) after n updates.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._names = [name for name, _ in model.named_parameters()]
        self.weights = [p.detach().clone() for p in model.parameters()] if decay else []
        self.n = 0  # number of sets of weights in it

    @torch.no_grad()
    def start(self, model: nn.Module) -> None:
        """Start from the present weights; call it if they are replaced before the first update."""
        if self.weights:
            torch._foreach_copy_(self.weights, [p.detach() for p in model.parameters()])
        self.n = 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Add the present weights."""
        if self.weights:
            self.n += 1
            decay = min(self._decay, (1 + self.n) / (10 + self.n))
            torch._foreach_lerp_(self.weights, [p.detach() for p in model.parameters()], 1.0 - decay)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Replace the weights of the model by the average, if there is one, within the context."""
        if not self.weights:
            yield
            return
        # Copied in place, because cuDNN needs the weights of a GRU in one contiguous block of memory.
        weights = [p.data for p in model.parameters()]
        own = [w.clone() for w in weights]
        try:
            torch._foreach_copy_(weights, self.weights)
            yield
        finally:
            torch._foreach_copy_(weights, own)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the average as named tensors for a checkpoint."""
        return {f"ema.{n}": t for n, t in zip(self._names, self.weights, strict=False)}

    def restore(self, tensors: dict[str, torch.Tensor], n: int) -> None:
        """Restore what `tensors` returned, and `n`."""
        for name, tensor in zip(self._names, self.weights, strict=False):
            saved = tensors[f"ema.{name}"]
            if saved.shape != tensor.shape:
                raise ValueError(f"ema.{name} has the wrong shape")
            tensor.copy_(saved)
        self.n = n
