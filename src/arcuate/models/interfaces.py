"""What every kind of encoder offers: bins to frames, for whole trials and as a stream.

The state is a value of the encoder's own kind: whoever drives a stream hands it back and never looks inside.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from arcuate.errors import UserError

EncoderState: TypeAlias = Any  # a tensor or a frozen dataclass of tensors, as the kind likes


class Encoder(Protocol):
    @property
    def n_outputs(self) -> int:
        """Numbers in a frame."""

    def start(self, n_trials: int) -> EncoderState:
        """The state before the first frame."""

    def step(self, state: EncoderState, bins: Tensor) -> tuple[Tensor, EncoderState]:
        """Bins of whole patches (B, T, C) -> the frames (B, F, D) that are certain now, and the state after them."""

    def finish(self, state: EncoderState) -> Tensor:
        """The frames that were held back for a future that did not come. (B, F, D)"""

    def __call__(
        self, bins: Tensor, n_frames: Tensor | None, state: EncoderState
    ) -> tuple[Tensor, EncoderState]:
        """Whole trials (B, T, C) with their true lengths -> all frames (B, F, D), and the state after them."""

    def layered(
        self, bins: Tensor, n_frames: Tensor | None, state: EncoderState, layers: Collection[int]
    ) -> tuple[Tensor, EncoderState, dict[int, Tensor]]:
        """The same, and what some inner layers (1 = the first) say in frames that the same head can read."""


def require_causal(causal: bool) -> None:
    if not causal:
        raise UserError(
            "This model reads each trial in both directions and cannot stream; decode whole trials, or "
            "train with encoder.bidirectional=false."
        )


# Outputs: what a model says about a batch. Losses and searches start here and know no more of the model.


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
