"""The session layer: one affine map per recording session, because electrodes and tuning move between days.

Each session owns its parameters, so an optimizer leaves a session that is not in the batch entirely alone.
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
        self.weights = nn.ParameterList(
            nn.Parameter(torch.empty(n_channels, n_channels)) for _ in range(n_maps)
        )
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(n_channels)) for _ in range(n_maps))
        for weight in self.weights:
            if not weight.is_meta:
                nn.init.eye_(weight)
        self.layer_norm = nn.LayerNorm(n_channels) if settings.layer_norm else None

    def forward(self, bins: Tensor, session: Tensor) -> Tensor:
        """(B, T, C), (B,) -> (B, T, C)"""
        softsign = self.settings.activation == "softsign"
        if self.settings.enabled:
            rows = session.tolist()
            present = sorted(set(rows))
            if present[0] < 0 or present[-1] >= len(self.weights):
                raise UserError(
                    f"The model knows {len(self.weights)} sessions, numbered from 0; choose one of them."
                )
            which = [present.index(s) for s in rows]
            weights, biases = [self.weights[s] for s in present], [self.biases[s] for s in present]
            bins = _SessionMaps.apply(bins, which, softsign, *weights, *biases)
        elif softsign:
            bins = F.softsign(bins)
        if self.layer_norm is not None:
            bins = self.layer_norm(bins)
        return F.dropout(bins, self.settings.dropout, self.training)


class _SessionMaps(torch.autograd.Function):
    """The maps and the activation in one: no (B, C, C) copy of weights, and only input and output kept.

    Softsign y = x / (1 + |x|) has the derivative (1 - |y|)^2, so its input need not be kept. In mixed precision bins
    come in fewer bits than the maps: products are taken in those of the bins, gradients of the maps added up in theirs.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, bins: Tensor, which: list[int], softsign: bool, *parameters: Tensor
    ) -> Tensor:
        n = len(parameters) // 2
        weights, biases = parameters[:n], parameters[n:]
        mapped = torch.empty_like(bins, memory_format=torch.contiguous_format)
        short, offsets = [w.to(bins.dtype) for w in weights], [b.to(bins.dtype) for b in biases]
        for trial, out, s in zip(bins, mapped, which, strict=True):
            torch.addmm(offsets[s], trial, short[s], out=out)
            if softsign:
                out.div_(out.abs().add_(1.0))
        ctx.which, ctx.softsign = which, softsign  # type: ignore[attr-defined]
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
        short = [w.to(bins.dtype) for w in weights]
        for i, s in enumerate(ctx.which):
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
                torch.mm(d, short[s].t(), out=d_bins[i])
        return d_bins, None, None, *d_weights, *d_biases
