"""The mean of several checkpoints of one run, as a model of its own beside them.

Weights of one run lie in one valley, and their mean is often a little better than any of them; of two runs it is
nothing. Training can keep averages itself (`ema`, `average`); this one needs no plan, only checkpoints that were kept.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from arcuate.errors import UserError
from arcuate.files import atomic_folder, write_json
from arcuate.models.io import load_model, save_model
from arcuate.progress import Progress
from arcuate.run import Run
from arcuate.training.config import Ema, Swa

NAME = "average"  # beside `best` and `last`


def average_checkpoints(run: Run, n_last: int | None, report: Progress) -> list[str]:
    """Write checkpoints/average, the mean of the last ones (None: of all that were kept); returns their names."""
    folders = choose(run, n_last)
    model = load_model(folders[0])
    total = {name: tensor.double() for name, tensor in model.state_dict().items()}
    for n, folder in enumerate(folders[1:], start=1):
        report(n, len(folders), "averaging")
        other = load_model(folder)
        if other.config != model.config:
            raise UserError(f"{folder} holds another model than {folders[0]}; they have no mean")
        for name, tensor in other.state_dict().items():
            total[name] += tensor.double()
    with torch.no_grad():
        model.load_state_dict({name: (tensor / len(folders)).float() for name, tensor in total.items()})
    with atomic_folder(run.checkpoints / NAME) as temporary:
        save_model(temporary, model)
        write_json(temporary / "average.json", {"checkpoints": [f.name for f in folders]})
    return [folder.name for folder in folders]


def choose(run: Run, n_last: int | None) -> list[Path]:
    """The checkpoints of this run in the order of their steps, the last `n_last` of them."""
    found = sorted(p for p in run.checkpoints.glob("step-*") if p.name != "step-00000000")
    wanted = len(found) if n_last is None else n_last
    if len(found) < max(wanted, 2):
        raise UserError(
            f"{run.path} kept {len(found)} checkpoints and {max(wanted, 2)} are wanted; train with"
            f" train.keep_checkpoints={max(wanted, 5)}, or ask for fewer with --last"
        )
    return found[len(found) - wanted :]


# Averages of weights: the exponential one (EMA) and the plain one over the last stretch (SWA).


class Averages:
    """Keeps what the settings ask for; `shown` puts the best average in place of the weights for a while."""

    def __init__(self, model: nn.Module, ema: Ema, swa: Swa) -> None:
        self.ema_settings, self.swa_settings = ema, swa
        self.names = [name for name, _ in model.named_parameters()]
        self.ema = [p.detach().clone() for p in model.parameters()] if ema.decay else []
        self.mean = [torch.zeros_like(p) for p in model.parameters()] if swa.start is not None else []
        self.n_ema = 0
        self.n_mean = 0

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Take in the weights after an update that was kept."""
        weights = [p.detach() for p in model.parameters()]
        if self.ema:
            self.n_ema += 1
            decay = self.ema_settings.decay
            if self.ema_settings.warmup:
                decay = min(decay, (1 + self.n_ema) / (10 + self.n_ema))
            torch._foreach_lerp_(self.ema, weights, 1.0 - decay)
        start = self.swa_settings.start
        if start is not None and step >= start and (step - start) % self.swa_settings.every == 0:
            self.n_mean += 1
            torch._foreach_lerp_(self.mean, weights, 1.0 / self.n_mean)

    @property
    def current(self) -> list[torch.Tensor]:
        """The weights to validate and keep: the plain mean, else the EMA, else none (the weights themselves)."""
        return self.mean if self.n_mean else self.ema

    @contextmanager
    def shown(self, model: nn.Module) -> Iterator[None]:
        """The model with averaged weights; its own come back afterwards."""
        parameters = list(model.parameters())
        if not self.current:
            yield
            return
        own = [p.data for p in parameters]
        try:
            for parameter, averaged in zip(parameters, self.current, strict=True):
                parameter.data = averaged
            yield
        finally:
            for parameter, data in zip(parameters, own, strict=True):
                parameter.data = data

    def tensors(self) -> dict[str, torch.Tensor]:
        named = {f"ema.{n}": t for n, t in zip(self.names, self.ema, strict=False)}
        return named | {f"mean.{n}": t for n, t in zip(self.names, self.mean, strict=False)}

    def counts(self) -> dict[str, int]:
        return {"n_ema": self.n_ema, "n_mean": self.n_mean}

    def restore(self, tensors: dict[str, torch.Tensor], n_ema: int, n_mean: int) -> None:
        for kind, kept in (("ema", self.ema), ("mean", self.mean)):
            for name, tensor in zip(self.names, kept, strict=False):
                saved = tensors[f"{kind}.{name}"]
                if saved.shape != tensor.shape:
                    raise ValueError(f"{kind}.{name} has another shape")
                tensor.copy_(saved)
        self.n_ema, self.n_mean = n_ema, n_mean
