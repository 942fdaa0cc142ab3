"""Outputs: what a model says about a batch. Losses and searches start here and know no more of the model."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Outputs:
    frames: Tensor  # (B, F, D) what the encoder says
    n_frames: Tensor  # (B,) int64; frames beyond it are padding and mean nothing
    log_probs: dict[str, Tensor]  # per head, {"ctc": (B, F, V)}
