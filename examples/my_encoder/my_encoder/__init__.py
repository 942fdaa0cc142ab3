"""A causal encoder of depthwise-separable convolutions over frames (as in QuartzNet, Kriman et al. 2020)."""

from collections.abc import Collection

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from arcuate.models.config import Patch, PluginEncoderSettings
from arcuate.models.convolution import extract_patches
from arcuate.models.interfaces import Encoder


class SeparableConvSettings(PluginEncoderSettings):
    """Settings of the encoder, as they appear in a recipe below `encoder`."""

    width: int = Field(96, ge=1, le=8192, description="Model dimension.")
    depth: int = Field(3, ge=1, le=64, description="Number of convolutional blocks.")
    conv_kernel: int = Field(5, ge=2, le=64, description="Kernel length in frames; a block sees only earlier frames.")
    dropout: float = Field(0.1, ge=0.0, lt=1.0, description="Dropout on the output of each block.")


class SeparableConv(Encoder):
    """Patches, a linear map, then residual blocks: depthwise convolution over time, pointwise map over channels.

    The state of a stream is the last `conv_kernel - 1` inputs of every block, so a stream gives the same frames as the
    complete trial.
    """

    Settings = SeparableConvSettings
    settings: SeparableConvSettings

    def __init__(self, settings: SeparableConvSettings, patch: Patch, n_channels: int) -> None:
        super().__init__()
        self.settings, self.patch = settings, patch
        width, kernel = settings.width, settings.conv_kernel
        self.embed = nn.Linear(n_channels * patch.bins, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(settings.depth))
        self.depthwise = nn.ModuleList(nn.Conv1d(width, width, kernel, groups=width) for _ in range(settings.depth))
        self.pointwise = nn.ModuleList(nn.Linear(width, width) for _ in range(settings.depth))

    def start(self, n_trials: int) -> Tensor:
        """Zeros before the first frame. (depth, B, kernel - 1, D)"""
        shape = (self.settings.depth, n_trials, self.settings.conv_kernel - 1, self.settings.width)
        return self.embed.weight.new_zeros(shape)

    def forward_with_layers(
        self,
        bins: Tensor,
        n_frames: Tensor | None,
        state: Tensor,
        layers: Collection[int],
        lengths: tuple[int, ...] | None = None,
    ) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """Bins (B, T, C) to frames (B, F, D), the state after them, and the outputs of the layers that a loss uses."""
        x = self.embed(extract_patches(bins, self.patch))
        seen, inner = [], {}
        for i in range(self.settings.depth):
            context = torch.cat([state[i], self.norms[i](x)], dim=1)
            seen.append(context[:, context.shape[1] - state.shape[2] :])
            mixed = self.depthwise[i](context.transpose(1, 2)).transpose(1, 2)
            x = x + F.dropout(self.pointwise[i](F.gelu(mixed)), self.settings.dropout, self.training)
            if i + 1 in layers:
                inner[i + 1] = x
        return x, torch.stack(seen), inner

    def finish(self, state: Tensor) -> Tensor:
        """No frames are held back. (B, 0, D)"""
        return state.new_zeros(state.shape[1], 0, self.n_outputs)
