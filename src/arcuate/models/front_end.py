"""Depthwise convolution over time, channels last: every channel with a few weights of its own.

Time runs along the second axis as everywhere else, so that nothing is transposed; one pass over the input per tap.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from arcuate.data.batching import BatchStatistics
from arcuate.models.config import (
    ChannelGateSettings,
    ConvStemSettings,
    FrontEndSettings,
    Patch,
    SmoothingSettings,
)
from arcuate.models.session_layer import SessionLayer


def depthwise_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Weighted sums of neighbours, where all exist. (B, T + K - 1, C), (K, C), (C,) -> (B, T, C)"""
    y: Tensor = _Depthwise.apply(x, weight, bias)
    return y


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        n = x.shape[1] - weight.shape[0] + 1
        y = torch.addcmul(bias, x[:, :n], weight[0])
        for k in range(1, weight.shape[0]):
            y.addcmul_(x[:, k : k + n], weight[k])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, d: Tensor):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        n = d.shape[1]
        d_x = torch.zeros_like(x)
        d_weight = torch.empty_like(weight)
        for k in range(weight.shape[0]):
            d_x[:, k : k + n].addcmul_(d, weight[k])
            torch.sum(d * x[:, k : k + n], dim=(0, 1), out=d_weight[k])
        return d_x, d_weight, d.sum((0, 1))


# What may stand between session layer and patches: a gate on channels, and a short convolution over bins.


@dataclass(frozen=True)
class StemState:
    """What a stream remembers of the bins that went through."""

    total: Tensor  # (B, 1, C) sum of the bins so far
    n_bins: int
    recent: Tensor  # (B, <taps, C) last inputs of the convolution


class Stem(nn.Module):
    def __init__(
        self, gate: ChannelGateSettings, conv: ConvStemSettings, n_channels: int, causal: bool
    ) -> None:
        super().__init__()
        self.n_channels, self.causal = n_channels, causal
        self.taps = conv.conv_kernel if conv.enabled else 1
        self.gate = Gate(n_channels, gate.ratio) if gate.enabled else None
        self.weight = self.bias = None
        if conv.enabled:
            self.weight = nn.Parameter(torch.empty(conv.conv_kernel, n_channels))
            self.bias = nn.Parameter(torch.zeros(n_channels))
            if not self.weight.is_meta:
                bound = 1 / math.sqrt(conv.conv_kernel)
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
        return bins + F.relu(depthwise_conv(inputs, self.weight, self.bias))


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


# From stored bins to the bins an encoder reads: normalisation, smoothing, session layer, frame count.

BAND = 32  # bins smoothed by one product


@dataclass(frozen=True)
class Running:
    """Sums over the bins of a trial so far, around the past mean; float64, so that chunks add up exactly."""

    total: Tensor  # (B, 1, C)
    squares: Tensor  # (B, 1, C)
    n_bins: int


def normalise(
    bins: Tensor,  # (B, T, C)
    statistics: BatchStatistics | None,
    settings: FrontEndSettings,
    running: Running | None = None,
) -> tuple[Tensor, Running | None]:
    """Bins as the model sees them; a value that is not finite becomes 0, for every trial needs an answer."""
    if settings.log1p:
        bins = bins.sign() * bins.abs().log1p()
    if settings.normalise == "rolling":
        assert statistics is not None
        bins, running = _normalise_rolling(bins, statistics, settings.rolling_bins, running)
    elif settings.normalise == "block":
        assert statistics is not None
        bins = (bins - statistics.mean[:, None]) / (statistics.sd[:, None] + 1e-8)
    return torch.nan_to_num(bins, nan=0.0, posinf=0.0, neginf=0.0), running


def _normalise_rolling(
    bins: Tensor, past: BatchStatistics, rolling_bins: int, running: Running | None
) -> tuple[Tensor, Running]:
    """Causal z-scores: the past counts as at most `rolling_bins` bins, every bin of the trial as one."""
    weight = past.n_bins.clamp(max=rolling_bins).double()[:, None, None]  # (B, 1, 1)
    known = weight > 0
    mean = torch.where(known, past.mean[:, None].double().nan_to_num(), 0.0)  # (B, 1, C)
    sd = torch.where(known, past.sd[:, None].double().nan_to_num(), 0.0)
    if running is None:
        running = Running(torch.zeros_like(mean), torch.zeros_like(mean), 0)
    centred = torch.where(bins.isfinite(), bins - mean, 0.0)  # (B, T, C) float64
    total = centred.cumsum(1) + running.total
    squares = centred.square().cumsum(1) + running.squares
    n_bins = running.n_bins + bins.shape[1]
    seen = torch.arange(running.n_bins + 1, n_bins + 1, device=bins.device)[None, :, None]  # (1, T, 1)
    count = weight + seen
    shift = total / count
    variance = (weight * sd.square() + squares) / count - shift.square()
    scores = (centred - shift) / (variance.clamp(min=0.0).sqrt() + 1e-8)
    if bins.shape[1]:
        running = Running(total[:, -1:], squares[:, -1:], n_bins)
    return scores.to(bins.dtype), running


def gaussian_kernel(settings: SmoothingSettings) -> list[float]:
    """A Gaussian of `taps` weights around their middle, summing to one; [1] where smoothing is off."""
    if settings.sd == 0:
        return [1.0]
    offsets = torch.arange(settings.taps, dtype=torch.float64, device="cpu") - (settings.taps - 1) / 2
    weights = torch.exp(-0.5 * (offsets / settings.sd) ** 2)
    return (weights / weights.sum()).tolist()


def smooth(bins: Tensor, weights: list[float]) -> Tensor:
    """Weighted sums over neighbouring bins, where all of them exist. (B, T, C) -> (B, T - taps + 1, C)

    As products with a small banded matrix, some 32 bins at a time: on one CPU thread about ten times faster
    than a depthwise convolution, which would also want time last.
    """
    taps = len(weights)
    n_trials, n_bins = bins.shape[0], bins.shape[1] - taps + 1
    if taps == 1:
        return bins
    band = bins.new_zeros(BAND, BAND + taps - 1)  # row i holds the weights from column i on
    band.as_strided((BAND, taps), (BAND + taps, 1)).copy_(bins.new_tensor(weights))
    pieces = []
    for first in range(0, n_bins, BAND):
        n = min(BAND, n_bins - first)
        piece = bins[:, first : first + n + taps - 1]
        pieces.append(torch.bmm(band[:n, : n + taps - 1].expand(n_trials, -1, -1), piece))
    return torch.cat(pieces, dim=1)


@dataclass(frozen=True)
class FrontEndState:
    """What a stream remembers between chunks."""

    session: Tensor  # (1,)
    statistics: BatchStatistics | None
    running: Running | None
    n_bins: int  # received so far
    normalised: Tensor  # (1, <taps, C) bins still needed by smoothing
    ready: Tensor  # (1, n, C) bins still needed by the next patch
    stem: StemState | None


class FrontEnd(nn.Module):
    def __init__(self, settings: FrontEndSettings, n_channels: int, n_sessions: int, causal: bool) -> None:
        super().__init__()
        self.settings = settings
        self.n_channels = n_channels
        self.kernel = gaussian_kernel(settings.smoothing)
        self.left = (len(self.kernel) - 1) // 2  # zeros before the first bin
        self.right = len(self.kernel) - 1 - self.left  # and after the last: how far smoothing looks ahead
        self.session_layer = SessionLayer(settings.session_layer, n_channels, n_sessions)
        self.stem: Stem | None = None
        if settings.channel_gate.enabled or settings.stem.enabled:
            self.stem = Stem(settings.channel_gate, settings.stem, n_channels, causal)

    def forward(self, bins: Tensor, n_bins: Tensor, session: Tensor) -> Tensor:
        """Normalised bins to the bins that patches are cut from. (B, T, C) -> (B, max(T, patch), C)

        What a speaking mode changes is changed after this.
        """
        missing = max(self.settings.patch.bins - bins.shape[1], 0)
        bins = F.pad(bins, (0, 0, self.left, self.right + missing))
        beyond = torch.arange(bins.shape[1], device=bins.device) >= (n_bins + self.left)[:, None]  # (B, T)
        bins = bins.masked_fill_(beyond[..., None], 0.0)  # whatever the padding held
        bins = self.session_layer(smooth(bins, self.kernel), session)
        return bins if self.stem is None else self.stem(bins, n_bins.clamp(min=self.settings.patch.bins))

    def start(self, session: Tensor, statistics: BatchStatistics | None) -> FrontEndState:
        weight = next(self.session_layer.parameters(), torch.zeros(()))
        zeros = torch.zeros(1, self.left, self.n_channels, dtype=weight.dtype, device=session.device)
        stem = None if self.stem is None else self.stem.start(zeros)
        return FrontEndState(session, statistics, None, 0, zeros, zeros[:, :0], stem)

    def normalise(self, state: FrontEndState, bins: Tensor) -> tuple[Tensor, FrontEndState]:
        """The next raw bins of a stream as the model sees them."""
        normalised, running = normalise(bins, state.statistics, self.settings, state.running)
        return normalised, replace(state, running=running, n_bins=state.n_bins + bins.shape[1])

    def missing(self, state: FrontEndState) -> Tensor:
        """The zeros that a trial shorter than a patch is filled up with."""
        n = max(self.settings.patch.bins - state.n_bins, 0)
        return state.normalised.new_zeros(1, n, self.n_channels)

    def beyond(self, state: FrontEndState) -> Tensor:
        """The zeros that smoothing sees after the last bin."""
        return state.normalised.new_zeros(1, self.right, self.n_channels)

    def step(self, state: FrontEndState, normalised: Tensor) -> tuple[Tensor, FrontEndState]:
        """Normalised bins in; out the bins ready for patches that are new, (1, n, C)."""
        waiting = torch.cat([state.normalised, normalised], dim=1)
        n_smooth = max(waiting.shape[1] - len(self.kernel) + 1, 0)
        fresh, stem = state.ready[:, :0], state.stem
        if n_smooth:
            fresh = self.session_layer(smooth(waiting, self.kernel), state.session)
            if self.stem is not None and stem is not None:
                fresh, stem = self.stem.step(fresh, stem)
        return fresh, replace(state, normalised=waiting[:, n_smooth:], stem=stem)

    def cut(self, state: FrontEndState, fresh: Tensor) -> tuple[Tensor, FrontEndState]:
        """The bins of all complete patches (none: shorter than a patch), and what later ones still need."""
        ready, patch = torch.cat([state.ready, fresh], dim=1), self.settings.patch
        n_frames = patch.count_frames(ready.shape[1]) if ready.shape[1] >= patch.bins else 0
        return ready, replace(state, ready=ready[:, n_frames * patch.stride :])


# Patches: some neighbouring bins make a frame; the first product of every encoder reads them.

FEW = 16  # frames whose patches may be written out: one product instead of several


def extract_patches(bins: Tensor, patch: Patch) -> Tensor:
    """Overlapping patches laid out bin after bin (time-major). (B, T, C) -> (B, F, bins * C)"""
    return bins.unfold(1, patch.bins, patch.stride).transpose(2, 3).flatten(2)


def project_patches(bins: Tensor, weight: Tensor, bias: Tensor, patch: Patch) -> Tensor:
    """Patches times weight, without writing the patches out. (B, T, C), (D, bins * C) -> (F, B, D)"""
    if not torch.is_grad_enabled() and patch.count_frames(bins.shape[1]) <= FEW:
        return F.linear(extract_patches(bins, patch), weight, bias).transpose(0, 1)
    projected: Tensor = _ProjectPatches.apply(bins, weight, bias, patch)  # (F * B, D)
    return projected.view(-1, bins.shape[0], weight.shape[0])


class _ProjectPatches(torch.autograd.Function):
    """A patch is some whole strides and a part of one: patches times weight is a sum over shifted strides."""

    @staticmethod
    def forward(ctx: FunctionCtx, bins: Tensor, weight: Tensor, bias: Tensor, patch: Patch) -> Tensor:
        n_trials, n_bins, n_channels = bins.shape
        n_frames = patch.count_frames(n_bins)
        n_strides = n_frames - 1 + -(-patch.bins // patch.stride)
        bins = F.pad(bins, (0, 0, 0, n_strides * patch.stride - n_bins))
        strides = bins.view(n_trials, n_strides, -1).transpose(0, 1).flatten(0, 1)  # (strides * B, sC)
        projected = bias.repeat(n_frames * n_trials, 1)
        for rows, columns, part in _shifts(patch, n_frames, n_trials, n_channels):
            projected.addmm_(strides[rows, part], weight[:, columns].t())
        ctx.save_for_backward(strides, weight)
        ctx.patch, ctx.shape = patch, (n_trials, n_bins, n_channels)  # type: ignore[attr-defined]
        return projected

    @staticmethod
    @once_differentiable
    def backward(ctx, d: Tensor):  # type: ignore[no-untyped-def]
        strides, weight = ctx.saved_tensors
        n_trials, n_bins, n_channels = ctx.shape
        d_strides = torch.zeros_like(strides) if ctx.needs_input_grad[0] else None
        d_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for rows, columns, part in _shifts(ctx.patch, d.shape[0] // n_trials, n_trials, n_channels):
            if d_strides is not None:
                d_strides[rows, part].addmm_(d, weight[:, columns])
            if d_weight is not None:
                torch.mm(d.t(), strides[rows, part], out=d_weight[:, columns])
        d_bins = None
        if d_strides is not None:
            d_bins = d_strides.view(-1, n_trials, d_strides.shape[1]).transpose(0, 1)
            d_bins = d_bins.reshape(n_trials, -1, n_channels)
            d_bins = F.pad(d_bins, (0, 0, 0, n_bins - d_bins.shape[1]))  # bins beyond the last patch, or none
        return d_bins, d_weight, d.sum(0) if ctx.needs_input_grad[2] else None, None


def _shifts(patch: Patch, n_frames: int, n_trials: int, n_channels: int) -> list[tuple[slice, slice, slice]]:
    """For every stride within a patch: its rows for all frames, its columns of the weight, its used part."""
    shifts = []
    for i, first in enumerate(range(0, patch.bins, patch.stride)):
        width = min(patch.stride, patch.bins - first) * n_channels
        rows = slice(i * n_trials, (i + n_frames) * n_trials)
        columns = slice(first * n_channels, first * n_channels + width)
        shifts.append((rows, columns, slice(0, width)))
    return shifts
