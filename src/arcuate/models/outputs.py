"""Outputs: what a model says about a batch. Losses and searches start here and know no more of the model."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Joint:
    """Both sides of a transducer; their logits (B, F, U + 1, V) are large, and made by whoever needs them."""

    frames: Tensor  # (B, F, W)
    predicted: Tensor  # (B, U + 1, W) after 0, 1, … U tokens
    weight: Tensor  # (V, W)
    bias: Tensor  # (V,)

    def logits(self, frames: Tensor, predicted: Tensor) -> Tensor:
        """(B, f, W), (B, U + 1, W) -> (B, f, U + 1, V)"""
        return F.linear(torch.tanh(frames[:, :, None] + predicted[:, None]), self.weight, self.bias)


@dataclass(frozen=True)
class Flow:
    """How fast the denoiser would move frames somewhere along the way, and how fast it should."""

    said: Tensor  # (B, F, D)
    wanted: Tensor  # (B, F, D)


@dataclass(frozen=True)
class Outputs:
    frames: Tensor  # (B, F, D) what the encoder says
    n_frames: Tensor  # (B,) int64; frames beyond it are padding and mean nothing
    log_probs: dict[str, Tensor]  # per head, {"ctc": (B, F, V)}
    joint: Joint | None = None  # of the transducer head, where there is one and tokens were given
    mode: Tensor | None = None  # (B, 2) logits of the speaking mode, where the model tells it
    flow: Flow | None = None  # of the denoiser, where clean bins were given
    intermediate: dict[int, Tensor] = field(
        default_factory=dict
    )  # CTC scores of inner layers, where asked for
