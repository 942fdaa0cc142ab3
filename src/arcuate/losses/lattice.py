"""Sums over all paths through a lattice of frames and tokens: the recursion under the transducer loss.

A path starts at (frame 0, token 0). From a node it takes a blank to the next frame or an emission to the next token,
and it ends by a blank out of (last frame, all tokens). All nodes with the same frame + token are one anti-diagonal;
those are reached together, so that the recursion takes frames + tokens steps whatever the number of nodes.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def lattice_loss(
    blank: Tensor,  # (B, T, U + 1) log-probability of a blank at each node
    emit: Tensor,  # (B, T, U + 1) of the next token; the last column means nothing
    n_frames: Tensor,  # (B,) at least 1
    n_tokens: Tensor,  # (B,)
) -> Tensor:
    """Negative log of the summed probability of all paths. (B,)"""
    loss: Tensor = _Lattice.apply(blank, emit, n_frames, n_tokens)
    return loss


class _Lattice(torch.autograd.Function):
    """The gradient of a node's score is minus the probability that a path takes it: nothing else need be kept."""

    @staticmethod
    def forward(ctx, blank: Tensor, emit: Tensor, n_frames: Tensor, n_tokens: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        length = blank.shape[1]
        blank, emit = mask(blank, n_frames, n_tokens + 1), mask(emit, n_frames, n_tokens)
        blank, emit = by_diagonal(blank), by_diagonal(emit)  # (N, B, U + 1)
        trials = torch.arange(len(n_frames), device=blank.device)
        end = (n_frames + n_tokens, trials, n_tokens)
        alphas = run_forward(blank, emit)  # (N + 1, B, U + 1)
        total = alphas[end]  # (B,)
        if any(ctx.needs_input_grad[:2]):
            betas = run_backward(blank, emit, end)
            blank = blank.add_(alphas[:-1]).add_(betas[1:])
            emit = emit.add_(alphas[:-1])
            emit[..., :-1] += betas[1:, :, 1:]
            taken = [(t - total[:, None]).exp_().nan_to_num_(nan=0.0) for t in (blank, emit)]
            ctx.save_for_backward(*(along(t, length).contiguous() for t in taken))
        return -total

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss: Tensor):  # type: ignore[no-untyped-def]
        blank, emit = ctx.saved_tensors
        scale = -d_loss[:, None, None]
        return blank * scale, emit * scale, None, None


def mask(scores: Tensor, n_frames: Tensor, n_columns: Tensor) -> Tensor:
    """Nodes outside a trial's lattice can not be taken."""
    frame = torch.arange(scores.shape[1], device=scores.device)[:, None]
    column = torch.arange(scores.shape[2], device=scores.device)
    outside = (frame >= n_frames[:, None, None]) | (column >= n_columns[:, None, None])
    return scores.masked_fill(outside, -torch.inf)


def by_diagonal(scores: Tensor) -> Tensor:
    """(B, T, U + 1) -> (T + U, B, U + 1): row n holds the nodes with frame + token = n, -inf where there are none."""
    n_trials, length, columns = scores.shape
    rows = scores.new_full((length + columns - 1, n_trials, columns), -torch.inf)
    along(rows, length).copy_(scores)
    return rows


def along(rows: Tensor, length: int) -> Tensor:
    """The nodes among diagonals, as a view. (N, B, U + 1) -> (B, T, U + 1)"""
    _, n_trials, columns = rows.shape
    diagonal = n_trials * columns
    return rows.as_strided((n_trials, length, columns), (columns, diagonal, diagonal + 1))


def run_forward(blank: Tensor, emit: Tensor) -> Tensor:
    """Log of the summed probability of all ways to each node. (N + 1, B, U + 1)"""
    n, n_trials, columns = blank.shape
    alphas = blank.new_full((n + 1, n_trials, columns), -torch.inf)
    alphas[0, :, 0] = 0.0
    for here, there, across, up in zip(alphas[:-1], alphas[1:], blank, emit, strict=True):
        torch.add(here, across, out=there)
        there[:, 1:] = torch.logaddexp(there[:, 1:], here[:, :-1] + up[:, :-1])
    return alphas


def run_backward(blank: Tensor, emit: Tensor, end: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Log of the summed probability of all ways from each node to its trial's end. (N + 1, B, U + 1)"""
    n, n_trials, columns = blank.shape
    betas = blank.new_full((n + 1, n_trials, columns), -torch.inf)
    betas[end] = 0.0
    for i in reversed(range(n)):
        ways = betas[i + 1] + blank[i]
        ways[:, :-1] = torch.logaddexp(ways[:, :-1], betas[i + 1, :, 1:] + emit[i, :, :-1])
        torch.maximum(
            betas[i], ways, out=betas[i]
        )  # an end stands here already, and nothing leads on from it
    return betas
