"""Averages of weights kept during training: exponential (EMA) and over the last part of the run (SWA)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from arcuate.training.config import Ema, Swa


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
        """Return the averages as named tensors for a checkpoint."""
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
