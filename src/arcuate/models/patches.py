"""Patches: some neighbouring bins make a frame; the first product of every encoder reads them."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from arcuate.models.front_end import count_frames
from arcuate.models.settings import Patch

FEW = 16  # frames whose patches may be written out: one product instead of several


def cut_patches(bins: Tensor, patch: Patch) -> Tensor:
    """Overlapping patches laid out bin after bin (time-major). (B, T, C) -> (B, F, bins * C)"""
    return bins.unfold(1, patch.bins, patch.stride).transpose(2, 3).flatten(2)


def project_patches(bins: Tensor, weight: Tensor, bias: Tensor, patch: Patch) -> Tensor:
    """Patches times weight, without writing the patches out. (B, T, C), (D, bins * C) -> (F, B, D)"""
    if not torch.is_grad_enabled() and count_frames(bins.shape[1], patch) <= FEW:
        return F.linear(cut_patches(bins, patch), weight, bias).transpose(0, 1)
    projected: Tensor = _ProjectPatches.apply(bins, weight, bias, patch)  # (F * B, D)
    return projected.view(-1, bins.shape[0], weight.shape[0])


class _ProjectPatches(torch.autograd.Function):
    """A patch is some whole strides and a part of one: patches times weight is a sum over shifted strides."""

    @staticmethod
    def forward(ctx: FunctionCtx, bins: Tensor, weight: Tensor, bias: Tensor, patch: Patch) -> Tensor:
        n_trials, n_bins, n_channels = bins.shape
        n_frames = count_frames(n_bins, patch)
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
