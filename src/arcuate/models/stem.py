"""What may stand between session layer and patches: a gate on channels, and a short convolution over bins.

Both are causal where the encoder is, and then carry a state: the gate looks at the mean of the bins so far, the
convolution at the last few. Otherwise the gate sees the mean of the whole trial and the convolution both sides.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arcuate.models.depthwise import depthwise
from arcuate.models.settings import ChannelGate, ConvStem


@dataclass(frozen=True)
class StemState:
    """What a stream remembers of the bins that went through."""

    total: Tensor  # (B, 1, C) sum of the bins so far
    n_bins: int
    recent: Tensor  # (B, <taps, C) last inputs of the convolution


class Stem(nn.Module):
    def __init__(self, gate: ChannelGate, conv: ConvStem, n_channels: int, causal: bool) -> None:
        super().__init__()
        self.n_channels, self.causal = n_channels, causal
        self.taps = conv.taps if conv.enabled else 1
        self.gate = Gate(n_channels, gate.ratio) if gate.enabled else None
        self.weight = self.bias = None
        if conv.enabled:
            self.weight = nn.Parameter(torch.empty(conv.taps, n_channels))
            self.bias = nn.Parameter(torch.zeros(n_channels))
            if not self.weight.is_meta:
                bound = 1 / math.sqrt(conv.taps)
                nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, bins: Tensor, n_bins: Tensor) -> Tensor:
        """Whole trials, padded. (B, T, C) -> (B, T, C)"""
        if self.causal:
            return self.step(bins, self.start(bins))[0]
        beyond = torch.arange(bins.shape[1], device=bins.device) >= n_bins[:, None]
        bins = bins.masked_fill(beyond[..., None], 0.0)
        if self.gate is not None:
            bins = self.gate(bins, bins.sum(1, keepdim=True) / n_bins[:, None, None])
        left = (self.taps - 1) // 2
        return self._convolve(F.pad(bins, (0, 0, left, self.taps - 1 - left)), bins)

    def start(self, like: Tensor) -> StemState:
        zeros = like.new_zeros(len(like), self.taps - 1, self.n_channels)
        return StemState(like.new_zeros(len(like), 1, self.n_channels), 0, zeros)

    def step(self, bins: Tensor, state: StemState) -> tuple[Tensor, StemState]:
        """The next bins of a stream, each seeing only those before it."""
        total, n_bins = state.total, state.n_bins + bins.shape[1]
        if self.gate is not None and bins.shape[1]:
            sums = bins.cumsum(1) + total
            seen = torch.arange(state.n_bins + 1, n_bins + 1, device=bins.device)[:, None]
            bins, total = self.gate(bins, sums / seen), sums[:, -1:]
        inputs = torch.cat([state.recent, bins], dim=1)
        recent = inputs[:, inputs.shape[1] - self.taps + 1 :]
        return self._convolve(inputs, bins), StemState(total, n_bins, recent)

    def _convolve(self, inputs: Tensor, bins: Tensor) -> Tensor:
        if self.weight is None or self.bias is None or not bins.shape[1]:
            return bins
        return bins + F.relu(depthwise(inputs, self.weight, self.bias))


class Gate(nn.Module):
    """Squeeze and excite: how loud each channel is, from the mean over time of all; starts at 1 for every channel."""

    def __init__(self, n_channels: int, ratio: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(n_channels, max(n_channels // ratio, 1))
        self.excite = nn.Linear(max(n_channels // ratio, 1), n_channels)
        if not self.excite.weight.is_meta:
            nn.init.zeros_(self.excite.weight)
            nn.init.zeros_(self.excite.bias)

    def forward(self, bins: Tensor, mean: Tensor) -> Tensor:
        return bins * (2 * torch.sigmoid(self.excite(F.relu(self.squeeze(mean)))))
