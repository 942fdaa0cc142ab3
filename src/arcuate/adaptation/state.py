"""What adaptation knows of a day. Values: every step returns a new one, so anything can be taken back."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from arcuate.data.alphabet import BLANK


@dataclass(frozen=True, eq=False)
class Layer:
    """A session's affine map."""

    weight: Tensor  # (C, C)
    bias: Tensor  # (C,)

    def distance(self, other: "Layer") -> float:
        """How far this is from another one, relative to the norm of that."""
        moved = torch.cat([(self.weight - other.weight).flatten(), self.bias - other.bias]).norm()
        return float(moved / torch.cat([other.weight.flatten(), other.bias]).norm().clamp(min=1e-12))


@dataclass(frozen=True, eq=False)
class Moments:
    """Running means of gradients and of their squares, for weight and bias."""

    mean: tuple[Tensor, Tensor]
    square: tuple[Tensor, Tensor]
    n: int = 0

    @classmethod
    def zero(cls, layer: Layer) -> "Moments":
        return cls(
            (torch.zeros_like(layer.weight), torch.zeros_like(layer.bias)),
            (torch.zeros_like(layer.weight), torch.zeros_like(layer.bias)),
        )


@dataclass(frozen=True, eq=False)
class Sums:
    """Mean and covariance of many bins, as sums; float64."""

    total: Tensor  # (C,)
    products: Tensor  # (C, C)
    n_bins: float

    @classmethod
    def of(cls, bins: Tensor) -> "Sums":
        """Of bins (T, C)."""
        exact = bins.double()
        return cls(exact.sum(0), exact.t() @ exact, float(len(bins)))

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(self.total + other.total, self.products + other.products, self.n_bins + other.n_bins)

    def counting_as(self, n_bins: float) -> "Sums":
        """The same mean and covariance with another weight."""
        scale = n_bins / max(self.n_bins, 1.0)
        return Sums(self.total * scale, self.products * scale, n_bins)

    @property
    def mean(self) -> Tensor:
        return self.total / self.n_bins

    @property
    def covariance(self) -> Tensor:
        return self.products / self.n_bins - torch.outer(self.mean, self.mean)


@dataclass(frozen=True, eq=False)
class Heard:
    """One trial after it was read: its normalised bins and what was made of them."""

    bins: Tensor  # (T, C) normalised
    log_probs: np.ndarray  # (F, V)
    tokens: tuple[
        int, ...
    ]  # the label to learn from: what was read, through a language model where there is one


@dataclass(frozen=True)
class Trust:
    """Confidence and tokens of the last trials, read by the adapted and by the unadapted model."""

    adapted: tuple[float, ...] = ()
    unadapted: tuple[float, ...] = ()
    n_adapted: tuple[int, ...] = ()  # tokens
    n_unadapted: tuple[int, ...] = ()
    n_falls: int = 0


@dataclass(frozen=True)
class Expected:
    """How surely the model reads days that it knows."""

    confidence: float  # mean of the days' means
    day_sd: float = 0.0  # of days' means
    trial_sd: float = 0.0  # of trials within a day


@dataclass(frozen=True, eq=False)
class Day:
    """One day so far: where its layer began, where it is, and what it remembers."""

    session: str
    like: str  # the known session whose layer it began with
    start: Layer
    layer: Layer
    moments: Moments
    reference: Sums | None = None  # of the session it began with
    expected: Expected | None = None  # None: the model cannot be asked about days it knows
    plain: tuple[float, ...] = ()  # how surely the unadapted model read the last trials, silent ones left out
    seen: Sums | None = None  # of this day
    memory: tuple[Heard, ...] = ()
    trust: Trust = field(default_factory=Trust)
    n_trials: int = 0
    n_steps: int = 0


def confidence(log_probs: np.ndarray) -> float:
    """Geometric mean probability of the best class over frames that say something; 0 where none does."""
    best = log_probs.max(-1)
    said = log_probs.argmax(-1) != BLANK
    return float(np.exp(best[said].mean())) if said.any() else 0.0
