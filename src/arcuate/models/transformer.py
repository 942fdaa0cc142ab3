"""Attention over a bounded neighbourhood, with a learned preference for each distance.

A frame sees the `context` frames up to itself (or as many on both sides), so that a stream remembers a bounded number
of keys and values, and long trials are read some frames at a time: the cost of a frame never depends on how much came
before. What is preferred depends on the distance alone, exactly for near frames and in growing steps for far ones.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arcuate.models.config import Patch, TransformerSettings
from arcuate.models.front_end import extract_patches
from arcuate.models.interfaces import require_causal

BLOCK = 64  # frames that look together, at least
HIDDEN = (
    -1e4
)  # added to the score of padding: its share is exactly 0, and a frame that sees nothing else has no NaN


@dataclass(frozen=True)
class Memory:
    """Keys and values of the last frames, fewer than `context` of them."""

    keys: Tensor  # (B, H, n, d)
    values: Tensor  # (B, H, n, d)


@dataclass(frozen=True)
class Window:
    """Some new frames that look together, the frames that any of them may see, and how much each is preferred."""

    asking: slice  # of the new frames
    seen: slice  # of remembered and new frames together
    bias: Tensor  # (1 or B, H, q, k), -inf where a frame may not look


class RelativePositionBias(nn.Module):
    """How much each head likes to look so far back (or ahead): one number per bucket of distances."""

    def __init__(self, n_heads: int, n_buckets: int, context: int, both_ways: bool) -> None:
        super().__init__()
        self.n_buckets, self.context, self.both_ways = n_buckets, context, both_ways
        self.table = nn.Parameter(torch.zeros(n_heads, n_buckets))

    def windows(self, n_past: int, n_new: int, hidden: Tensor | None = None) -> list[Window]:
        """Windows over `n_new` frames after `n_past` remembered ones; `hidden` (B, F) marks padding within sight."""
        n_block = min(max(self.context, BLOCK), n_new)
        liking = F.pad(self.table[:, self._buckets()], (n_block, n_block), value=-math.inf)
        return list(self._cut(liking, n_past, n_new, n_block, hidden))

    def _buckets(self) -> Tensor:
        """The bucket of every distance that is seen, farthest past first."""
        found = relative_position_buckets(self.context, self.n_buckets, self.both_ways)
        return torch.tensor(found, device=self.table.device)

    def _cut(
        self, liking: Tensor, n_past: int, n_new: int, n_block: int, hidden: Tensor | None
    ) -> Iterator[Window]:
        for first in range(0, n_new, n_block):
            end = min(first + n_block, n_new)
            low = max(n_past + first - self.context + 1, 0)
            high = min(n_past + end + (self.context - 1 if self.both_ways else 0), n_past + n_new)
            farthest = n_past + end - 1 - low  # distance of the last frame that asks to the first one seen
            at = n_block + self.context - 1 - farthest
            n_asking, n_seen = end - first, high - low
            along = liking[:, at : at + n_asking + n_seen - 1]  # (H, q + k - 1) by falling distance
            bias = along.unfold(-1, n_seen, 1).flip(1)[None]  # (1, H, q, k)
            if hidden is not None:
                bias = bias + HIDDEN * hidden[:, None, None, low:high].to(bias.dtype)
            yield Window(slice(first, end), slice(low, high), bias)


@lru_cache(maxsize=64)
def relative_position_buckets(context: int, n_buckets: int, both_ways: bool) -> tuple[int, ...]:
    """Bucket of each distance from context - 1 down to 0, and on to -(context - 1) where frames look ahead too."""
    n = n_buckets // 2 if both_ways else n_buckets
    back = [relative_position_bucket(d, context, n) for d in range(context)]
    ahead = [n + b for b in back[1:]] if both_ways else []
    return (*reversed(back), *ahead)


def relative_position_bucket(distance: int, context: int, n_buckets: int) -> int:
    """Near distances have a bucket each, far ones share them in equal steps of the logarithm."""
    n_exact = max(n_buckets // 2, 1)
    if context <= n_buckets or distance < n_exact:
        return min(distance, n_buckets - 1)
    share = math.log(distance / n_exact) / math.log(context / n_exact)
    return min(n_exact + int(share * (n_buckets - n_exact)), n_buckets - 1)


class Attention(nn.Module):
    """Heads that look over windows of frames. (B, F, W) -> (B, F, W)"""

    def __init__(self, width: int, n_heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.n_heads, self.context, self.dropout = n_heads, context, dropout
        self.project = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width)

    def start(self, n_trials: int) -> Memory:
        width = self.output.in_features
        nothing = self.output.weight.new_zeros(n_trials, self.n_heads, 0, width // self.n_heads)
        return Memory(nothing, nothing)

    def forward(self, frames: Tensor, windows: list[Window], memory: Memory) -> tuple[Tensor, Memory]:
        projected = self.project(frames).unflatten(-1, (3, self.n_heads, -1))  # (B, F, 3, H, d)
        asked, keys, values = projected.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, F, d)
        if memory.keys.shape[2]:
            keys = torch.cat([memory.keys.to(keys.dtype), keys], dim=2)
            values = torch.cat([memory.values.to(values.dtype), values], dim=2)
        looked = [
            F.scaled_dot_product_attention(
                asked[:, :, w.asking],
                keys[:, :, w.seen],
                values[:, :, w.seen],
                attn_mask=w.bias.to(asked.dtype),
                dropout_p=self.dropout if self.training else 0.0,
            )
            for w in windows
        ]
        found = looked[0] if len(looked) == 1 else torch.cat(looked, dim=2)
        first = max(keys.shape[2] - self.context + 1, 0)
        kept = Memory(keys[:, :, first:], values[:, :, first:])
        return self.output(found.transpose(1, 2).flatten(2)), kept


# The time-masked Transformer encoder: every frame looks back over a bounded past, all frames at once in training.

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
        frames: Tensor = self.output_norm(self.linear(self.input_norm(extract_patches(bins, self.patch))))
        return frames


class Block(nn.Module):
    """Attention, then two layers on each frame alone; both behind a norm and beside a residual."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        width, self.dropout = settings.width, settings.dropout
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, settings.n_heads, settings.context, settings.attention_dropout)
        self.frame_norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, settings.ffn_expansion * width)
        self.outer = nn.Linear(settings.ffn_expansion * width, width)
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

    def __init__(self, settings: TransformerSettings, patch: Patch, n_channels: int) -> None:
        super().__init__()
        self.settings = settings
        self.embedding = Embedding(n_channels * patch.bins, settings.width, patch)
        self.distances = RelativePositionBias(
            settings.n_heads, settings.n_buckets, settings.context, settings.bidirectional
        )
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.depth))
        self.output_norm = nn.LayerNorm(settings.width)

    @property
    def n_outputs(self) -> int:
        return self.settings.width

    def start(self, n_trials: int) -> TransformerState:
        return tuple(cast(Block, block).attention.start(n_trials) for block in self.blocks)

    def step(self, state: TransformerState, bins: Tensor) -> tuple[Tensor, TransformerState]:
        """The frames that these bins complete, and the state after them."""
        require_causal(self.settings.causal)
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
