"""A causal state-space encoder whose frames are held back, so that each one is computed from later bins too.

Frame t is the output of the network after the patch of frame t + delay. The first `delay` outputs are dropped, and
`delay` empty frames follow the last patch, so that a trial has as many frames as without a delay. No encoder of the
package holds back frames; the interface allows it (`Encoder.finish`), and `arcuate check-encoder
delayed_encoder:DelayedSSM delay=3` in this folder checks streaming, padding and gradients.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from arcuate.models.config import Patch, PluginEncoderSettings
from arcuate.models.convolution import project_patches
from arcuate.models.ssm import SSM, SSMState


class DelayedSettings(PluginEncoderSettings):
    """The settings of the causal `ssm`, and the delay."""

    n_heads: int = Field(4, ge=1, description="Number of SSM heads; divides width.")
    state_dim: int = Field(32, ge=1, description="State size per channel.")
    conv_kernel: int = Field(4, ge=2, description="Kernel length in frames of the convolution before the scan.")
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout on the embedded patches and on each block's output.")
    delay: int = Field(0, ge=0, le=100, description="Number of frames that are held back.")

    @property
    def bidirectional(self) -> bool:
        return False

    @property
    def n_directions(self) -> int:
        return 1


@dataclass(frozen=True)
class DelayedState:
    """State of the blocks, and the number of outputs still to be dropped."""

    blocks: SSMState
    n_dropped: int


class DelayedSSM(SSM):
    """`SSM` with a delay."""

    Settings = DelayedSettings
    settings: DelayedSettings  # type: ignore[assignment]

    def __init__(self, settings: DelayedSettings, patch: Patch, n_channels: int) -> None:
        super().__init__(settings, patch, n_channels)  # type: ignore[arg-type]

    def start(self, n_trials: int) -> DelayedState:  # type: ignore[override]
        return DelayedState(super().start(n_trials), self.settings.delay)

    def forward_with_layers(  # type: ignore[override]
        self,
        bins: Tensor,
        n_frames: Tensor | None,
        state: DelayedState,
        layers: Collection[int],
        lengths: tuple[int, ...] | None = None,
    ) -> tuple[Tensor, DelayedState, dict[int, Tensor]]:
        """Complete trials (`n_frames` given) are followed by empty frames; a stream gets them from `finish`."""
        embedded = project_patches(bins, self.input.weight, self.input.bias, self.patch).transpose(0, 1)
        embedded = F.dropout(self.input_norm(embedded), self.settings.dropout, self.training)
        if n_frames is not None:
            is_padding = torch.arange(embedded.shape[1], device=embedded.device) >= n_frames[:, None]
            embedded = F.pad(embedded.masked_fill(is_padding[..., None], 0.0), (0, 0, 0, self.settings.delay))
        frames, state, inner = self._apply_blocks(embedded, state, layers)
        return frames, state, inner

    def finish(self, state: DelayedState) -> Tensor:  # type: ignore[override]
        like = state.blocks[0].conv_inputs
        empty = like.new_zeros(len(like), self.settings.delay, self.settings.width)
        return self._apply_blocks(empty, state, ())[0] if self.settings.delay else empty

    def _apply_blocks(
        self, frames: Tensor, state: DelayedState, layers: Collection[int]
    ) -> tuple[Tensor, DelayedState, dict[int, Tensor]]:
        states, inner = [], {}
        n_dropped = min(state.n_dropped, frames.shape[1])
        for layer, (block, before) in enumerate(zip(self.blocks, state.blocks, strict=True), start=1):
            frames, after = block(frames, None, before)
            states.append(after)
            if layer in layers:
                inner[layer] = self.output_norm(frames[:, n_dropped:])
        after_all = DelayedState(tuple(states), state.n_dropped - n_dropped)
        return self.output_norm(frames[:, n_dropped:]), after_all, inner
