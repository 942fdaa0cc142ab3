"""Front end: from stored bins to the bins that patches are extracted from.

Normalisation, Gaussian smoothing, session layer, and optionally a convolutional stem. Complete
trials go through `normalise` and `FrontEnd.forward`; streams through `start`, `normalise`, `step` and `take_patches`,
with an immutable state passed in and returned.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from arcuate.config import component_class
from arcuate.data.batching import BatchStatistics
from arcuate.errors import UserError
from arcuate.models.config import (
    ConvStemSettings,
    FrontEndSettings,
    SessionLayerSettings,
    SmoothingSettings,
)
from arcuate.models.convolution import depthwise_conv


@dataclass(frozen=True)
class _RunningSums:
    """Sums over the bins of a trial so far, relative to the mean of the past.

    In float64, so that the result does not depend on how the trial is cut into chunks.
    """

    total: Tensor  # (B, 1, C)
    squares: Tensor  # (B, 1, C)
    n_bins: int


@dataclass(frozen=True)
class FrontEndState:
    """Streaming state of the front end."""

    session: Tensor  # (1,) on the CPU
    statistics: BatchStatistics | None
    running: _RunningSums | None
    n_bins: int  # received so far
    normalised: Tensor  # (1, <taps, C) bins still needed for smoothing
    ready: Tensor  # (1, n, C) bins still needed for the next patch
    stem: Tensor | None  # (1, kernel - 1, C) last inputs of the stem


class FrontEnd(nn.Module):
    def __init__(self, settings: FrontEndSettings, n_channels: int, n_sessions: int, causal: bool) -> None:
        super().__init__()
        self.settings = settings
        self.n_channels = n_channels
        self.kernel = gaussian_kernel(settings.smoothing)
        self.left = (len(self.kernel) - 1) // 2  # zeros before the first bin
        self.right = len(self.kernel) - 1 - self.left  # zeros after the last bin: the look-ahead of smoothing
        self.session_layer = SessionLayer(settings.session_layer, n_channels, n_sessions)
        self.custom: nn.Module | None = None
        if settings.custom is not None:
            self.custom = component_class("front_end_steps", settings.custom.kind)(settings.custom, n_channels)
        self.stem: _Stem | None = None
        if settings.stem.enabled:
            self.stem = _Stem(settings.stem, n_channels, causal)

    def forward(self, bins: Tensor, n_bins: Tensor, session: Tensor) -> Tensor:
        """Normalised bins to the bins that patches are extracted from. (B, T, C) -> (B, max(T, patch) / dilation, C)

        Everything from the session layer on is computed for the sampled bins only, except if a stem convolves bins.
        """
        missing = max(self.settings.patch.bins - bins.shape[1], 0)
        bins = F.pad(bins, (0, 0, self.left, self.right + missing))
        is_padding = torch.arange(bins.shape[1], device=bins.device) >= (n_bins + self.left)[:, None]  # (B, T)
        bins = bins.masked_fill_(is_padding[..., None], 0.0)
        dilation = self.settings.patch.dilation
        if self.stem is None:
            return self._apply_custom(self.session_layer(smooth(bins, self.kernel, dilation), session))
        bins = self._apply_custom(self.session_layer(smooth(bins, self.kernel), session))
        return self.stem(bins, n_bins.clamp(min=self.settings.patch.bins), dilation)

    def sample(self, bins: Tensor) -> Tensor:
        """The bins that the encoder receives; the first one starts a patch. (B, T, …) -> (B, T / dilation, …)"""
        return bins[:, :: self.settings.patch.dilation]

    def _apply_custom(self, bins: Tensor) -> Tensor:
        return bins if self.custom is None else self.custom(bins)

    def start(self, session: Tensor, statistics: BatchStatistics | None, like: Tensor) -> FrontEndState:
        """State before the first bin of one trial; `like` gives device and dtype, and `session` is on the CPU."""
        zeros = like.new_zeros(1, self.left, self.n_channels)
        stem = None if self.stem is None else self.stem.start(zeros)
        return FrontEndState(session, statistics, None, 0, zeros, zeros[:, :0], stem)

    def normalise(self, state: FrontEndState, bins: Tensor) -> tuple[Tensor, FrontEndState]:
        """Normalise the next raw bins of a stream."""
        normalised, running = normalise(bins, state.statistics, self.settings, state.running)
        return normalised, replace(state, running=running, n_bins=state.n_bins + bins.shape[1])

    def final_padding(self, state: FrontEndState) -> tuple[Tensor, Tensor]:
        """Zeros that extend a short trial to one patch, and zeros for the look-ahead of smoothing. 2 x (1, n, C)"""
        n_patch = max(self.settings.patch.bins - state.n_bins, 0)
        zeros = state.normalised.new_zeros(1, n_patch + self.right, self.n_channels)
        return zeros[:, :n_patch], zeros[:, n_patch:]

    def step(self, state: FrontEndState, normalised: Tensor) -> tuple[Tensor, FrontEndState]:
        """Normalised bins of a stream to the bins that become ready for patches. (1, t, C) -> (1, n, C)"""
        waiting = torch.cat([state.normalised, normalised], dim=1)
        n_smooth = max(waiting.shape[1] - len(self.kernel) + 1, 0)
        ready, stem = state.ready[:, :0], state.stem
        if n_smooth:
            ready = self._apply_custom(self.session_layer(smooth(waiting, self.kernel), state.session))
            if self.stem is not None and stem is not None:
                ready, stem = self.stem.step(ready, stem)
        return ready, replace(state, normalised=waiting[:, n_smooth:], stem=stem)

    def take_patches(self, state: FrontEndState, ready: Tensor) -> tuple[Tensor, FrontEndState]:
        """Sampled bins of all complete patches (none if fewer than one), and the state with the bins later ones need.

        Bins wait at full rate, and the first one always starts a patch.
        """
        available, patch = torch.cat([state.ready, ready], dim=1), self.settings.patch
        n_frames = patch.count_frames(available.shape[1]) if available.shape[1] >= patch.bins else 0
        return self.sample(available), replace(state, ready=available[:, n_frames * patch.stride :])


def normalise(
    bins: Tensor,  # (B, T, C)
    statistics: BatchStatistics | None,
    settings: FrontEndSettings,
    running: _RunningSums | None = None,
) -> tuple[Tensor, _RunningSums | None]:
    """Z-score by block or rolling statistics, or pass through; non-finite values become 0.

    `running` continues the rolling sums of earlier chunks of the same trials.
    """
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
    bins: Tensor, past: BatchStatistics, rolling_bins: int, running: _RunningSums | None
) -> tuple[Tensor, _RunningSums]:
    """Causal z-score: the past has a weight of at most `rolling_bins` bins, every bin of the trial a weight of one.

    Sums are taken around the mean of the past, which avoids cancellation in E[x^2] - E[x]^2 for channels with a large
    offset.
    """
    weight = past.n_bins.clamp(max=rolling_bins).double()[:, None, None]  # (B, 1, 1)
    has_past = weight > 0
    mean = torch.where(has_past, past.mean[:, None].double().nan_to_num(), 0.0)  # (B, 1, C)
    sd = torch.where(has_past, past.sd[:, None].double().nan_to_num(), 0.0)
    if running is None:
        running = _RunningSums(torch.zeros_like(mean), torch.zeros_like(mean), 0)
    centred = torch.where(bins.isfinite(), bins - mean, 0.0)  # (B, T, C) float64
    total = centred.cumsum(1) + running.total
    squares = centred.square().cumsum(1) + running.squares
    n_bins = running.n_bins + bins.shape[1]
    position = torch.arange(running.n_bins + 1, n_bins + 1, device=bins.device)[None, :, None]  # (1, T, 1)
    count = weight + position
    shift = total / count
    variance = (weight * sd.square() + squares) / count - shift.square()
    z_scores = (centred - shift) / (variance.clamp(min=0.0).sqrt() + 1e-8)
    if bins.shape[1]:
        running = _RunningSums(total[:, -1:], squares[:, -1:], n_bins)
    return z_scores.to(bins.dtype), running


def gaussian_kernel(settings: SmoothingSettings) -> list[float]:
    """Gaussian weights centred on the kernel and summing to one; [1] if smoothing is disabled."""
    if settings.sd == 0:
        return [1.0]
    offsets = torch.arange(settings.taps, dtype=torch.float64, device="cpu") - (settings.taps - 1) / 2
    weights = torch.exp(-0.5 * (offsets / settings.sd) ** 2)
    return (weights / weights.sum()).tolist()


_BAND = 32  # bins smoothed by one product


def smooth(bins: Tensor, weights: list[float], every: int = 1) -> Tensor:
    """Convolve every channel with the same kernel, without padding. (B, T, C) -> (B, T - taps + 1, C)

    Of the result only every `every`-th bin is computed, starting with the first.

    Computed as products with a small banded (Toeplitz) matrix, `_BAND` bins at a time. The product does about
    (32 + taps) / taps times the arithmetic of a direct convolution, but as a dense matrix product in the given layout:
    on one CPU thread it is about ten times faster than a depthwise convolution with time last.
    """
    taps = len(weights)
    n_trials, n_bins = bins.shape[0], bins.shape[1] - taps + 1
    if taps == 1:
        return bins[:, ::every]
    band = _band_matrix(tuple(weights), bins.dtype, bins.device)
    pieces = []
    for first in range(0, n_bins, _BAND):
        n = min(_BAND, n_bins - first)
        piece = bins[:, first : first + n + taps - 1]
        rows = band[-first % every : n : every, : n + taps - 1]
        pieces.append(torch.bmm(rows.expand(n_trials, -1, -1), piece))
    return torch.cat(pieces, dim=1)


@lru_cache(maxsize=8)
def _band_matrix(weights: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Row i holds the weights from column i on; kept, because a copy to the device would synchronise."""
    taps = len(weights)
    with torch.inference_mode(False):
        band = torch.zeros(_BAND, _BAND + taps - 1, dtype=dtype, device=device)
        band.as_strided((_BAND, taps), (_BAND + taps, 1)).copy_(torch.tensor(weights, dtype=dtype))
    return band


class _Stem(nn.Module):
    """Depthwise convolution over bins with a residual, between session layer and patches."""

    def __init__(self, settings: ConvStemSettings, n_channels: int, causal: bool) -> None:
        super().__init__()
        self.n_channels, self.causal, self.kernel_size = n_channels, causal, settings.conv_kernel
        self.weight = nn.Parameter(torch.empty(self.kernel_size, n_channels))
        self.bias = nn.Parameter(torch.zeros(n_channels))
        if not self.weight.is_meta:
            bound = 1 / math.sqrt(self.kernel_size)
            nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, bins: Tensor, n_bins: Tensor, every: int) -> Tensor:
        """Complete padded trials; only every `every`-th bin is computed. (B, T, C) -> (B, T / every, C)"""
        if self.causal:
            return self.step(bins, self.start(bins), every)[0]
        is_padding = torch.arange(bins.shape[1], device=bins.device) >= n_bins[:, None]
        bins = bins.masked_fill(is_padding[..., None], 0.0)
        left = (self.kernel_size - 1) // 2
        return self._convolve(F.pad(bins, (0, 0, left, self.kernel_size - 1 - left)), bins, every)

    def start(self, like: Tensor) -> Tensor:
        """State before the first bin, the last inputs of the convolution (B, kernel - 1, C); `like` is (B, …)."""
        return like.new_zeros(len(like), self.kernel_size - 1, self.n_channels)

    def step(self, bins: Tensor, recent: Tensor, every: int = 1) -> tuple[Tensor, Tensor]:
        """Next bins of a causal stream, convolved with past bins only, and the state after them.

        Of the result only every `every`-th bin is computed, starting with the first.
        """
        inputs = torch.cat([recent, bins], dim=1)
        return self._convolve(inputs, bins, every), inputs[:, inputs.shape[1] - self.kernel_size + 1 :]

    def _convolve(self, inputs: Tensor, bins: Tensor, every: int) -> Tensor:
        bins = bins[:, ::every]
        if not bins.shape[1]:
            return bins
        return bins + F.relu(depthwise_conv(inputs, self.weight, self.bias, every))


class SessionLayer(nn.Module):
    """One affine map x W_s + b_s per session, because electrodes and tuning change between days.

    Activation, optional layer norm and dropout follow. Each session has its own parameters, so that an optimizer does
    not touch sessions absent from the batch.
    """

    def __init__(self, settings: SessionLayerSettings, n_channels: int, n_sessions: int) -> None:
        super().__init__()
        self.settings = settings
        n_maps = n_sessions if settings.enabled else 0
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(n_channels, n_channels)) for _ in range(n_maps))
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(n_channels)) for _ in range(n_maps))
        for weight in self.weights:
            if not weight.is_meta:
                nn.init.eye_(weight)
        self.layer_norm = nn.LayerNorm(n_channels) if settings.layer_norm else None

    def forward(self, bins: Tensor, session: Tensor) -> Tensor:
        """(B, T, C), (B,) -> (B, T, C); `session` is best on the CPU, because the host chooses the maps."""
        n_maps, softsign = len(self.biases), self.settings.activation == "softsign"
        if self.settings.enabled:
            indices = session.tolist()
            present = sorted(set(indices))
            if present[0] < 0 or present[-1] >= n_maps:
                raise UserError(
                    f"session index {present[0] if present[0] < 0 else present[-1]} is out of range; the model has"
                    f" {n_maps} sessions, numbered from 0"
                )
            map_of_trial = [present.index(s) for s in indices]
            weights, biases = [self.weights[s] for s in present], [self.biases[s] for s in present]
            bins = _SessionMaps.apply(bins, map_of_trial, softsign, *weights, *biases)
        elif softsign:
            bins = F.softsign(bins)
        if self.layer_norm is not None:
            bins = self.layer_norm(bins)
        return F.dropout(bins, self.settings.dropout, self.training)


class _SessionMaps(torch.autograd.Function):
    """Affine maps and activation in one kernel, without a (B, C, C) copy of the weights.

    Softsign y = x / (1 + |x|) has the derivative (1 - |y|)^2, so only the output is saved, not the pre-activation. In
    mixed precision the products are computed in the dtype of the bins, and the gradients of the maps are accumulated in
    the dtype of the maps.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, bins: Tensor, map_of_trial: list[int], softsign: bool, *parameters: Tensor) -> Tensor:
        n = len(parameters) // 2
        weights, biases = parameters[:n], parameters[n:]
        mapped = torch.empty_like(bins, memory_format=torch.contiguous_format)
        cast_weights, cast_biases = [w.to(bins.dtype) for w in weights], [b.to(bins.dtype) for b in biases]
        for trial, out, s in zip(bins, mapped, map_of_trial, strict=True):
            torch.addmm(cast_biases[s], trial, cast_weights[s], out=out)
            if softsign:
                out.div_(out.abs().add_(1.0))
        ctx.map_of_trial, ctx.softsign = map_of_trial, softsign  # type: ignore[attr-defined]
        ctx.save_for_backward(bins, *([mapped] if softsign else []), *weights)
        return mapped

    @staticmethod
    @once_differentiable
    def backward(ctx, d_mapped: Tensor):  # type: ignore[no-untyped-def]
        bins, *saved = ctx.saved_tensors
        mapped, weights = (saved[0], saved[1:]) if ctx.softsign else (None, saved)
        n = len(weights)
        need_bins, need = ctx.needs_input_grad[0], ctx.needs_input_grad[3:]
        d_bins = torch.empty_like(bins) if need_bins else None
        d_weights = [torch.zeros_like(w) if need[i] else None for i, w in enumerate(weights)]
        d_biases = [w.new_zeros(w.shape[1]) if need[n + i] else None for i, w in enumerate(weights)]
        cast_weights = [w.to(bins.dtype) for w in weights]
        for i, s in enumerate(ctx.map_of_trial):
            d = d_mapped[i]
            if mapped is not None:
                d = mapped[i].abs().sub_(1.0).square_().mul_(d)
            if (d_weight := d_weights[s]) is not None:
                if d_weight.dtype == d.dtype:
                    d_weight.addmm_(bins[i].t(), d)
                else:
                    d_weight.add_(bins[i].t() @ d)
            if (d_bias := d_biases[s]) is not None:
                d_bias.add_(d.sum(0))
            if d_bins is not None:
                torch.mm(d, cast_weights[s].t(), out=d_bins[i])
        return d_bins, None, None, *d_weights, *d_biases
