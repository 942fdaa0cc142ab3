"""Averages of weights: EMA and SWA during training, and the mean of saved checkpoints afterwards.

The weights of one run lie in one basin of the loss, and their mean is often slightly better than any of them. The mean
of two runs is meaningless.
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

AVERAGE = "average"  # name of the checkpoint, beside `best` and `last`


class WeightAverages:
    """The averages that are enabled; `applied` replaces the weights by an average for a while."""

    def __init__(self, model: nn.Module, ema: Ema, swa: Swa) -> None:
        self._ema_settings, self._swa_settings = ema, swa
        self._names = [name for name, _ in model.named_parameters()]
        self._ema = [p.detach().clone() for p in model.parameters()] if ema.decay else []
        self._mean = [torch.zeros_like(p) for p in model.parameters()] if swa.start is not None else []
        self._n_ema = 0
        self._n_mean = 0

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Add the weights after the update of `step`."""
        weights = [p.detach() for p in model.parameters()]
        if self._ema:
            self._n_ema += 1
            decay = self._ema_settings.decay
            if self._ema_settings.warmup:
                decay = min(decay, (1 + self._n_ema) / (10 + self._n_ema))
            torch._foreach_lerp_(self._ema, weights, 1.0 - decay)
        start = self._swa_settings.start
        if start is not None and step >= start and (step - start) % self._swa_settings.every == 0:
            self._n_mean += 1
            torch._foreach_lerp_(self._mean, weights, 1.0 / self._n_mean)

    @property
    def current(self) -> list[torch.Tensor]:
        """The weights to validate and save: SWA if it has started, else EMA; empty = the weights themselves."""
        return self._mean if self._n_mean else self._ema

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Replace the weights of the model by the average while the context lasts."""
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
        """Return the averages as named tensors, for a checkpoint."""
        named = {f"ema.{n}": t for n, t in zip(self._names, self._ema, strict=False)}
        return named | {f"mean.{n}": t for n, t in zip(self._names, self._mean, strict=False)}

    def counts(self) -> dict[str, int]:
        return {"n_ema": self._n_ema, "n_mean": self._n_mean}

    def restore(self, tensors: dict[str, torch.Tensor], n_ema: int, n_mean: int) -> None:
        """Restore what `tensors` and `counts` returned."""
        for kind, averages in (("ema", self._ema), ("mean", self._mean)):
            for name, tensor in zip(self._names, averages, strict=False):
                saved = tensors[f"{kind}.{name}"]
                if saved.shape != tensor.shape:
                    raise ValueError(f"{kind}.{name} has another shape")
                tensor.copy_(saved)
        self._n_ema, self._n_mean = n_ema, n_mean


def average_checkpoints(run: Run, n_last: int | None = None, progress: Progress | None = None) -> list[str]:
    """Write checkpoints/average, the mean of the last `n_last` checkpoints or of all; return their names."""
    folders = _select_checkpoints(run, n_last)
    model = load_model(folders[0])
    total = {name: tensor.double() for name, tensor in model.state_dict().items()}
    for n, folder in enumerate(folders[1:], start=1):
        if progress is not None:
            progress(n, len(folders), "averaging")
        other = load_model(folder)
        if other.config != model.config:
            raise UserError(f"{folder} and {folders[0]} hold different models, which cannot be averaged")
        for name, tensor in other.state_dict().items():
            total[name] += tensor.double()
    with torch.no_grad():
        model.load_state_dict({name: (tensor / len(folders)).float() for name, tensor in total.items()})
    with atomic_folder(run.checkpoints / AVERAGE) as temporary:
        save_model(temporary, model)
        write_json(temporary / "average.json", {"checkpoints": [f.name for f in folders]})
    return [folder.name for folder in folders]


def _select_checkpoints(run: Run, n_last: int | None) -> list[Path]:
    """Return the last `n_last` checkpoints in the order of their steps."""
    found = sorted(p for p in run.checkpoints.glob("step-*") if p.name != "step-00000000")
    n = len(found) if n_last is None else n_last
    if len(found) < (needed := max(n, 2)):
        raise UserError(
            f"{run.path} has {len(found)} checkpoints, but {needed} are needed; train with"
            f" train.keep_checkpoints={max(needed, 5)}, or lower --last"
        )
    return found[len(found) - n :]
