"""Two convolutions over time with channels last: the patch projection and the depthwise convolution.

Bins are (B, T, C) everywhere in the package. `torch.nn.Conv1d` expects time last and would transpose the batch twice;
both kernels here work on the given layout, which on a CPU is also several times faster for these shapes.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from arcuate.models.config import Patch

_UNFOLD_MAX_FRAMES = 16  # up to this many frames one product over unfolded patches is faster than several


def extract_patches(bins: Tensor, patch: Patch) -> Tensor:
    """Overlapping patches, flattened bin after bin (time-major). (B, T, C) -> (B, F, bins * C)"""
    return bins.unfold(1, patch.bins, patch.stride).transpose(2, 3).flatten(2)


def project_patches(bins: Tensor, weight: Tensor, bias: Tensor, patch: Patch) -> Tensor:
    """Linear map of every patch, equal to a strided convolution. (B, T, C), (D, bins * C), (D,) -> (F, B, D)"""
    if not torch.is_grad_enabled() and patch.count_frames(bins.shape[1]) <= _UNFOLD_MAX_FRAMES:
        return F.linear(extract_patches(bins, patch), weight, bias).transpose(0, 1)
    if torch.is_autocast_enabled(bins.device.type):  # which does not reach into the function below
        dtype = torch.get_autocast_dtype(bins.device.type)
        bins, weight, bias = bins.to(dtype), weight.to(dtype), bias.to(dtype)
    projected: Tensor = _ProjectPatches.apply(bins, weight, bias, patch)  # (F * B, D)
    return projected.view(-1, bins.shape[0], weight.shape[0])


class _ProjectPatches(torch.autograd.Function):
    """Patch projection without materialising the patches.

    With k bins per patch and stride s, unfolding copies every bin k / s times (3.5 times for 14 and 4). Instead, the
    trial is viewed as consecutive chunks of s bins. Patch f consists of the chunks f, f + 1, … f + ceil(k / s) - 1, the
    last one possibly in part, so

        projected[f] = bias + sum over i of  chunk[f + i] @ weight[:, columns of chunk i].T

    Each term is one matrix product over all frames, since the rows for i = 0, 1, … are the same array shifted by i.
    Chunks are laid out (chunk, trial), which makes each shift a contiguous slice of rows. The number of multiplications
    is that of the unfolded product; memory falls from F * k * C to T * C per trial.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, bins: Tensor, weight: Tensor, bias: Tensor, patch: Patch) -> Tensor:
        n_trials, n_bins, n_channels = bins.shape
        n_frames = patch.count_frames(n_bins)
        n_chunks = n_frames - 1 + -(-patch.bins // patch.stride)
        bins = F.pad(bins, (0, 0, 0, n_chunks * patch.stride - n_bins))
        chunks = bins.view(n_trials, n_chunks, -1).transpose(0, 1).flatten(0, 1)  # (chunks * B, s * C)
        projected = bias.repeat(n_frames * n_trials, 1)
        for rows, columns, part in _shifts(patch, n_frames, n_trials, n_channels):
            projected.addmm_(chunks[rows, part], weight[:, columns].t())
        ctx.save_for_backward(chunks, weight)
        ctx.patch, ctx.shape = patch, (n_trials, n_bins, n_channels)  # type: ignore[attr-defined]
        return projected

    @staticmethod
    @once_differentiable
    def backward(ctx, d: Tensor):  # type: ignore[no-untyped-def]
        chunks, weight = ctx.saved_tensors
        n_trials, n_bins, n_channels = ctx.shape
        d_chunks = torch.zeros_like(chunks) if ctx.needs_input_grad[0] else None
        d_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for rows, columns, part in _shifts(ctx.patch, d.shape[0] // n_trials, n_trials, n_channels):
            if d_chunks is not None:
                d_chunks[rows, part].addmm_(d, weight[:, columns])
            if d_weight is not None:
                torch.mm(d.t(), chunks[rows, part], out=d_weight[:, columns])
        d_bins = None
        if d_chunks is not None:
            d_bins = d_chunks.view(-1, n_trials, d_chunks.shape[1]).transpose(0, 1)
            d_bins = d_bins.reshape(n_trials, -1, n_channels)
            # Drops the padding of the last chunk, or adds zeros for bins after the last complete patch.
            d_bins = F.pad(d_bins, (0, 0, 0, n_bins - d_bins.shape[1]))
        return d_bins, d_weight, d.sum(0) if ctx.needs_input_grad[2] else None, None


def _shifts(patch: Patch, n_frames: int, n_trials: int, n_channels: int) -> list[tuple[slice, slice, slice]]:
    """For every chunk of a patch: its rows for all frames, its columns of the weight, the part of the chunk in use."""
    shifts = []
    for i, first in enumerate(range(0, patch.bins, patch.stride)):
        width = min(patch.stride, patch.bins - first) * n_channels
        rows = slice(i * n_trials, (i + n_frames) * n_trials)
        columns = slice(first * n_channels, first * n_channels + width)
        shifts.append((rows, columns, slice(0, width)))
    return shifts


def depthwise_conv(x: Tensor, weight: Tensor, bias: Tensor, every: int = 1) -> Tensor:
    """Depthwise convolution over time without padding. (B, T + K - 1, C), (K, C), (C,) -> (B, T, C)

    y[t, c] = bias[c] + sum over k of weight[k, c] * x[t + k, c]

    Of the result only every `every`-th bin is computed, starting with the first.
    """
    y: Tensor = _DepthwiseConv.apply(x, weight, bias, every)
    return y


class _DepthwiseConv(torch.autograd.Function):
    """One fused multiply-add over the complete input per tap: K passes, each contiguous in memory.

    A depthwise convolution is bound by memory, not by arithmetic, and K is small (4 to 7); the passes stream through
    (B, T, C) in its own layout. Only input and weight are saved for the backward pass.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor, every: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.every = every  # type: ignore[attr-defined]
        n = x.shape[1] - weight.shape[0] + 1
        y = torch.addcmul(bias, x[:, :n:every], weight[0])
        for k in range(1, weight.shape[0]):
            y.addcmul_(x[:, k : k + n : every], weight[k])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, d: Tensor):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        n = x.shape[1] - weight.shape[0] + 1
        d_x = torch.zeros_like(x)
        d_weight = torch.empty_like(weight)
        for k in range(weight.shape[0]):
            bins = slice(k, k + n, ctx.every)
            d_x[:, bins].addcmul_(d, weight[k])
            torch.sum(d * x[:, bins], dim=(0, 1), out=d_weight[k])
        return d_x, d_weight, d.sum((0, 1)), None
