"""What every kind of encoder offers: bins to frames, for whole trials and as a stream.

The state is a value of the encoder's own kind: whoever drives a stream hands it back and never looks inside.
"""

from collections.abc import Collection
from typing import Any, Protocol, TypeAlias

from torch import Tensor

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


def refuse_both_ways(causal: bool) -> None:
    if not causal:
        raise UserError(
            "This model reads each trial in both directions and cannot stream; decode whole trials, or "
            "train with encoder.bidirectional=false."
        )
