"""Transformer encoder with bounded context and relative positions, intended for heavy time masking.

A frame attends to the `context` frames up to itself (and as many after it in the bidirectional model). A stream
therefore keeps a bounded number of keys and values, and long trials are processed block by block: the cost of a frame
does not depend on the number of frames before it.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arcuate.models.config import Patch, TransformerSettings
from arcuate.models.convolution import extract_patches
from arcuate.models.interfaces import Encoder

_MIN_BLOCK = 64  # minimum number of query frames processed together
_PADDING_BIAS = -1e4  # attention to padding is exactly 0 after softmax, and rows of padding alone stay finite


@dataclass(frozen=True)
class _KeyValueCache:
    """Keys and values of the last frames, fewer than `context` of them."""

    keys: Tensor  # (B, H, n, d)
    values: Tensor  # (B, H, n, d)


@dataclass(frozen=True)
class _Window:
    """A block of queries, the keys that any of them may attend to, and their bias."""

    queries: slice  # of the new frames
    keys: slice  # of cached and new frames together
    bias: Tensor  # (1 or B, H, q, k), -inf outside the context


_State = tuple[_KeyValueCache, ...]  # one per block


class Transformer(Encoder):
    """Bins to frames: patch embedding, then `depth` blocks."""

    settings: TransformerSettings

    def __init__(self, settings: TransformerSettings, patch: Patch, n_channels: int) -> None:
        super().__init__()
        self.settings = settings
        self.embedding = _PatchEmbedding(n_channels * patch.bins, settings.width, patch)
        self.position_bias = RelativePositionBias(settings)
        self.blocks = nn.ModuleList(_Block(settings) for _ in range(settings.depth))
        self.output_norm = nn.LayerNorm(settings.width)

    def blocks_to_compile(self) -> Iterable[nn.Module]:
        return self.blocks

    def start(self, n_trials: int) -> _State:
        return tuple(cast(_Block, block).attention.start(n_trials) for block in self.blocks)

    def finish(self, state: _State) -> Tensor:
        """No frames are held back. (B, 0, W)"""
        return state[0].keys.new_zeros(len(state[0].keys), 0, self.n_outputs)

    def forward_with_layers(
        self,
        bins: Tensor,
        n_frames: Tensor | None,
        state: _State,
        layers: Collection[int],
        lengths: tuple[int, ...] | None = None,
    ) -> tuple[Tensor, _State, dict[int, Tensor]]:
        """`forward`, and the normalised outputs of the given layers (1 = the first)."""
        frames = F.dropout(self.embedding(bins), self.settings.input_dropout, self.training)
        windows = self.position_bias.windows(state[0].keys.shape[2], frames.shape[1], self._padding(frames, n_frames))
        caches, inner = [], {}
        for layer, (block, before) in enumerate(zip(self.blocks, state, strict=True), start=1):
            frames, after = block(frames, windows, before)
            caches.append(after)
            if layer in layers:
                inner[layer] = self.output_norm(frames)
        return self.output_norm(frames), tuple(caches), inner

    def _padding(self, frames: Tensor, n_frames: Tensor | None) -> Tensor | None:
        """Mask of padding frames, needed only if frames attend to later ones. (B, F)"""
        if self.settings.causal or n_frames is None:
            return None
        return torch.arange(frames.shape[1], device=frames.device) >= n_frames[:, None]


class _PatchEmbedding(nn.Module):
    """Layer norm over the patch, linear map, layer norm. (B, T, C) -> (B, F, W)"""

    def __init__(self, n_inputs: int, width: int, patch: Patch) -> None:
        super().__init__()
        self.patch = patch
        self.input_norm = nn.LayerNorm(n_inputs)
        self.linear = nn.Linear(n_inputs, width)
        self.output_norm = nn.LayerNorm(width)

    def forward(self, bins: Tensor) -> Tensor:
        frames: Tensor = self.output_norm(self.linear(self.input_norm(extract_patches(bins, self.patch))))
        return frames


class _Block(nn.Module):
    """Pre-norm attention and feed-forward layer, each with a residual."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        width, self.dropout = settings.width, settings.dropout
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, settings.n_heads, settings.context, settings.attention_dropout)
        self.ffn_norm = nn.LayerNorm(width)
        self.ffn_in = nn.Linear(width, settings.ffn_expansion * width)
        self.ffn_out = nn.Linear(settings.ffn_expansion * width, width)
        if not self.ffn_out.weight.is_meta:
            with torch.no_grad():  # keeps the variance of the residual stream independent of depth
                for layer in (self.attention.output, self.ffn_out):
                    layer.weight /= math.sqrt(2 * settings.depth)

    def forward(self, frames: Tensor, windows: list[_Window], cache: _KeyValueCache) -> tuple[Tensor, _KeyValueCache]:
        attended, cache = self.attention(self.attention_norm(frames), windows, cache)
        frames = frames + F.dropout(attended, self.dropout, self.training)
        hidden = F.dropout(F.gelu(self.ffn_in(self.ffn_norm(frames))), self.dropout, self.training)
        return frames + F.dropout(self.ffn_out(hidden), self.dropout, self.training), cache


class Attention(nn.Module):
    """Multi-head attention over windows of frames. (B, F, W) -> (B, F, W)"""

    def __init__(self, width: int, n_heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.n_heads, self.context, self.dropout = n_heads, context, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width)

    def start(self, n_trials: int) -> _KeyValueCache:
        width = self.output.in_features
        empty = self.output.weight.new_zeros(n_trials, self.n_heads, 0, width // self.n_heads)
        return _KeyValueCache(empty, empty)

    def forward(self, frames: Tensor, windows: list[_Window], cache: _KeyValueCache) -> tuple[Tensor, _KeyValueCache]:
        projected = self.qkv(frames).unflatten(-1, (3, self.n_heads, -1))  # (B, F, 3, H, d)
        q, k, v = projected.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, F, d)
        if cache.keys.shape[2]:
            k = torch.cat([cache.keys.to(k.dtype), k], dim=2)
            v = torch.cat([cache.values.to(v.dtype), v], dim=2)
        attended = [
            F.scaled_dot_product_attention(
                q[:, :, w.queries],
                k[:, :, w.keys],
                v[:, :, w.keys],
                attn_mask=w.bias.to(q.dtype),
                dropout_p=self.dropout if self.training else 0.0,
            )
            for w in windows
        ]
        joined = attended[0] if len(attended) == 1 else torch.cat(attended, dim=2)
        first = max(k.shape[2] - self.context + 1, 0)
        cache = _KeyValueCache(k[:, :, first:], v[:, :, first:])
        return self.output(joined.transpose(1, 2).flatten(2)), cache


class RelativePositionBias(nn.Module):
    """Learned attention bias per head and bucket of relative positions (T5, Raffel et al. 2020).

    Differences from T5: distances beyond `context` are masked instead of sharing the last bucket, and the bias is laid
    out for blocks of queries, so that cost and memory of a trial grow linearly with its length.
    """

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        self.n_buckets, self.context = settings.n_buckets, settings.context
        self.bidirectional = settings.bidirectional
        self.table = nn.Parameter(torch.zeros(settings.n_heads, settings.n_buckets))

    def windows(self, n_cached: int, n_new: int, padding: Tensor | None = None) -> list[_Window]:
        """Windows over `n_new` frames after `n_cached` cached ones; `padding` (B, F) marks frames to ignore."""
        n_block = min(max(self.context, _MIN_BLOCK), n_new)
        buckets = _bucket_index(self.context, self.n_buckets, self.bidirectional, self.table.device)
        by_distance = self.table[:, buckets]
        by_distance = F.pad(by_distance, (n_block, n_block), value=-math.inf)
        windows = []
        for first in range(0, n_new, n_block):
            end = min(first + n_block, n_new)
            low = max(n_cached + first - self.context + 1, 0)
            high = min(n_cached + end + (self.context - 1 if self.bidirectional else 0), n_cached + n_new)
            farthest = n_cached + end - 1 - low  # distance from the last query to the first key
            offset = n_block + self.context - 1 - farthest
            n_queries, n_keys = end - first, high - low
            # The bias matrix is a Toeplitz matrix: overlapping views of one row of biases by distance.
            diagonal = by_distance[:, offset : offset + n_queries + n_keys - 1]  # (H, q + k - 1), descending
            bias = diagonal.unfold(-1, n_keys, 1).flip(1)[None]  # (1, H, q, k)
            if padding is not None:
                bias = bias + _PADDING_BIAS * padding[:, None, None, low:high].to(bias.dtype)
            windows.append(_Window(slice(first, end), slice(low, high), bias))
        return windows


@lru_cache(maxsize=64)
def _bucket_index(context: int, n_buckets: int, bidirectional: bool, device: torch.device) -> Tensor:
    """`relative_position_buckets` on the device; kept, because a copy to the device would synchronise."""
    with torch.inference_mode(False):
        return torch.tensor(relative_position_buckets(context, n_buckets, bidirectional), device=device)


@lru_cache(maxsize=64)
def relative_position_buckets(context: int, n_buckets: int, bidirectional: bool) -> tuple[int, ...]:
    """Bucket of each distance from context - 1 down to 0, and down to -(context - 1) if bidirectional.

    Past and future have separate halves of the buckets.
    """
    n = n_buckets // 2 if bidirectional else n_buckets
    past = [relative_position_bucket(d, context, n) for d in range(context)]
    future = [n + b for b in past[1:]] if bidirectional else []
    return (*reversed(past), *future)


def relative_position_bucket(distance: int, context: int, n_buckets: int) -> int:
    """Half of the buckets hold one distance each; the others are spaced logarithmically up to `context`."""
    n_exact = max(n_buckets // 2, 1)
    if context <= n_buckets or distance < n_exact:
        return min(distance, n_buckets - 1)
    fraction = math.log(distance / n_exact) / math.log(context / n_exact)
    return min(n_exact + int(fraction * (n_buckets - n_exact)), n_buckets - 1)
