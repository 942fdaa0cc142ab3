"""Session layer: one affine map per recording session, because electrodes and tuning change between days.

Each session has its own parameters, so that an optimizer does not touch sessions absent from the batch.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from arcuate.errors import UserError
from arcuate.models.config import SessionLayerSettings


class SessionLayer(nn.Module):
    """x W_s + b_s, activation, optional layer norm, dropout."""

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
        """(B, T, C), (B,) -> (B, T, C)"""
        softsign = self.settings.activation == "softsign"
        if self.settings.enabled:
            indices = session.tolist()
            present = sorted(set(indices))
            if present[0] < 0 or present[-1] >= len(self.weights):
                raise UserError(
                    f"session index {present[0] if present[0] < 0 else present[-1]} is out of range; the model has"
                    f" {len(self.weights)} sessions, numbered from 0"
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
