"""State of online adaptation in one session. All types are immutable: a step returns a new state."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from arcuate.data.alphabet import BLANK


@dataclass(frozen=True, eq=False)
class AffineLayer:
    """Weight and bias of one session's input layer."""

    weight: Tensor  # (C, C)
    bias: Tensor  # (C,)

    def distance(self, other: "AffineLayer") -> float:
        """Euclidean distance to another layer, relative to the norm of that layer."""
        moved = torch.cat([(self.weight - other.weight).flatten(), self.bias - other.bias]).norm()
        return float(moved / torch.cat([other.weight.flatten(), other.bias]).norm().clamp(min=1e-12))

    def lerp(self, other: "AffineLayer", fraction: float) -> "AffineLayer":
        """Interpolate from this layer (0) to another (1)."""
        weight = torch.lerp(self.weight, other.weight, fraction)
        return AffineLayer(weight, torch.lerp(self.bias, other.bias, fraction))


@dataclass(frozen=True, eq=False)
class AdamMoments:
    """Running means of gradients and of squared gradients for weight and bias."""

    mean: tuple[Tensor, Tensor]
    square: tuple[Tensor, Tensor]
    n: int = 0

    @classmethod
    def zero(cls, layer: AffineLayer) -> "AdamMoments":
        zeros = (torch.zeros_like(layer.weight), torch.zeros_like(layer.bias))
        return cls(zeros, zeros)


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """Mean and covariance of bins, kept as float64 sums so that two sets can be added."""

    total: Tensor  # (C,)
    products: Tensor  # (C, C)
    n_bins: float

    @classmethod
    def of(cls, bins: Tensor) -> "InputStatistics":
        """Statistics of bins (T, C)."""
        exact = bins.double()
        return cls(exact.sum(0), exact.t() @ exact, float(len(bins)))

    def __add__(self, other: "InputStatistics") -> "InputStatistics":
        return InputStatistics(self.total + other.total, self.products + other.products, self.n_bins + other.n_bins)

    def reweighted(self, n_bins: float) -> "InputStatistics":
        """The same mean and covariance with the weight of `n_bins` bins."""
        scale = n_bins / max(self.n_bins, 1.0)
        return InputStatistics(self.total * scale, self.products * scale, n_bins)

    @property
    def mean(self) -> Tensor:
        return self.total / self.n_bins

    @property
    def covariance(self) -> Tensor:
        return self.products / self.n_bins - torch.outer(self.mean, self.mean)


@dataclass(frozen=True, eq=False)
class DecodedTrial:
    """One decoded trial with its pseudo-label."""

    bins: Tensor  # (T, C) normalised
    log_probs: np.ndarray  # (F, V)
    pseudo_label: tuple[int, ...]  # decoded tokens, from a word search if there is a language model


@dataclass(frozen=True)
class ModelComparison:
    """Confidence and number of decoded tokens of the adapted and the unadapted model on the last trials."""

    confidence: tuple[tuple[float, float], ...] = ()  # (adapted, unadapted) of each trial
    n_tokens: tuple[tuple[int, int], ...] = ()
    n_fallbacks: int = 0


@dataclass(frozen=True)
class ExpectedConfidence:
    """Confidence of the model on known sessions."""

    mean: float  # of session means
    session_sd: float = 0.0  # SD of session means
    trial_sd: float = 0.0  # SD of trials within a session


@dataclass(frozen=True, eq=False)
class SessionState:
    """Adaptation of one session so far: current and initial layer, and the statistics collected."""

    session: str
    init_session: str  # known session whose layer it started with
    initial: AffineLayer
    layer: AffineLayer
    moments: AdamMoments
    reference: InputStatistics | None = None  # input of `init_session`
    expected: ExpectedConfidence | None = None  # None: no recordings of known sessions
    unadapted_confidence: tuple[float, ...] = ()  # of the last trials, all-blank ones left out
    observed: InputStatistics | None = None  # input of this session
    buffer: tuple[DecodedTrial, ...] = ()  # for replay
    comparison: ModelComparison = field(default_factory=ModelComparison)
    n_trials: int = 0
    n_steps: int = 0


def confidence(log_probs: np.ndarray) -> float:
    """Geometric mean probability of the best class over non-blank frames; 0 if all frames are blank."""
    best = log_probs.max(-1)
    nonblank = log_probs.argmax(-1) != BLANK
    return float(np.exp(best[nonblank].mean())) if nonblank.any() else 0.0
