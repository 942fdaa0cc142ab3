"""The time-masked Transformer encoder: every frame looks back over a bounded past, all frames at once in training.

Patches are embedded by layer norm, linear map, layer norm; blocks normalise before they compute; positions are known
through distances alone. Each layer sees `context` frames, so that all layers reach depth * (context - 1) frames back,
while a stream remembers context - 1 keys and values per layer and no more.
"""

import math
from collections.abc import Collection
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arcuate.models.attention import Attention, Distances, Memory, Window
from arcuate.models.encoder import refuse_both_ways
from arcuate.models.patches import cut_patches
from arcuate.models.settings import Patch, TransformerEncoder

TransformerState = tuple[Memory, ...]  # one per block


class Embedding(nn.Module):
    """Patches to frames: layer norm over the patch, linear map, layer norm. (B, T, C) -> (B, F, W)"""

    def __init__(self, n_inputs: int, width: int, patch: Patch) -> None:
        super().__init__()
        self.patch = patch
        self.input_norm = nn.LayerNorm(n_inputs)
        self.linear = nn.Linear(n_inputs, width)
        self.output_norm = nn.LayerNorm(width)

    def forward(self, bins: Tensor) -> Tensor:
        frames: Tensor = self.output_norm(self.linear(self.input_norm(cut_patches(bins, self.patch))))
        return frames


class Block(nn.Module):
    """Attention, then two layers on each frame alone; both behind a norm and beside a residual."""

    def __init__(self, settings: TransformerEncoder) -> None:
        super().__init__()
        width, self.dropout = settings.width, settings.dropout
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, settings.heads, settings.context, settings.attention_dropout)
        self.frame_norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, settings.expansion * width)
        self.outer = nn.Linear(settings.expansion * width, width)
        if not self.outer.weight.is_meta:
            with torch.no_grad():  # the sum over all blocks starts at a usual size
                for layer in (self.attention.output, self.outer):
                    layer.weight /= math.sqrt(2 * settings.depth)

    def forward(self, frames: Tensor, windows: list[Window], memory: Memory) -> tuple[Tensor, Memory]:
        looked, memory = self.attention(self.attention_norm(frames), windows, memory)
        frames = frames + F.dropout(looked, self.dropout, self.training)
        inner = F.dropout(F.gelu(self.inner(self.frame_norm(frames))), self.dropout, self.training)
        return frames + F.dropout(self.outer(inner), self.dropout, self.training), memory


class Transformer(nn.Module):
    """Bins to frames: patches, then `depth` blocks."""

    def __init__(self, settings: TransformerEncoder, patch: Patch, n_channels: int) -> None:
        super().__init__()
        self.settings = settings
        self.embedding = Embedding(n_channels * patch.bins, settings.width, patch)
        self.distances = Distances(settings.heads, settings.buckets, settings.context, settings.bidirectional)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.depth))
        self.output_norm = nn.LayerNorm(settings.width)

    @property
    def n_outputs(self) -> int:
        return self.settings.width

    def start(self, n_trials: int) -> TransformerState:
        return tuple(cast(Block, block).attention.start(n_trials) for block in self.blocks)

    def step(self, state: TransformerState, bins: Tensor) -> tuple[Tensor, TransformerState]:
        """The frames that these bins complete, and the state after them."""
        refuse_both_ways(self.settings.causal)
        return self(bins, None, state)

    def finish(self, state: TransformerState) -> Tensor:
        """Nothing waits for bins to come. (B, 0, W)"""
        return state[0].keys.new_zeros(len(state[0].keys), 0, self.n_outputs)

    def forward(
        self, bins: Tensor, n_frames: Tensor | None, state: TransformerState
    ) -> tuple[Tensor, TransformerState]:
        """Bins (B, T, C), T at least one patch -> frames (B, F, W) and the state after the last frame."""
        frames, after, _ = self.layered(bins, n_frames, state, ())
        return frames, after

    def layered(
        self, bins: Tensor, n_frames: Tensor | None, state: TransformerState, layers: Collection[int]
    ) -> tuple[Tensor, TransformerState, dict[int, Tensor]]:
        frames = F.dropout(self.embedding(bins), self.settings.input_dropout, self.training)
        windows = self.distances.windows(
            state[0].keys.shape[2], frames.shape[1], self._padding(frames, n_frames)
        )
        after, inner = [], {}
        for layer, (block, before) in enumerate(zip(self.blocks, state, strict=True), start=1):
            frames, left = block(frames, windows, before)
            after.append(left)
            if layer in layers:
                inner[layer] = self.output_norm(frames)
        return self.output_norm(frames), tuple(after), inner

    def _padding(self, frames: Tensor, n_frames: Tensor | None) -> Tensor | None:
        """Which frames lie beyond a trial's end, where any frame could see them. (B, F)"""
        if self.settings.causal or n_frames is None:
            return None
        return torch.arange(frames.shape[1], device=frames.device) >= n_frames[:, None]
