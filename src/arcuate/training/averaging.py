"""Averages of weights kept during training: exponential (EMA) and over the last part of the run (SWA)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from arcuate.training.config import Ema, Swa


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
