"""Depthwise convolution over time, channels last: every channel with a few weights of its own.

Time runs along the second axis as everywhere else, so that nothing is transposed; one pass over the input per tap.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


def depthwise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
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
