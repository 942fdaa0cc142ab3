"""The selective scan: a linear recurrence whose pace, input and output maps depend on the frame.

Per head, with a state S of P numbers by N and step sizes s_t:

    S_t = exp(log_decay_t) S_{t-1} + s_t x_t b_t'        y_t = S_t c_t + skip x_t

In chunks of L frames: within a chunk everything is one small product of matrices (each frame with each earlier
one, weighted by the decay between them), and only one state per chunk passes on. Products of decays are
differences of a running sum of logarithms, never above 0, so that nothing overflows however strong they are.

The gradients are written out: they need no more than what is kept, and the one of the decays, which every later
output depends on, is a running sum over d_y y - d_x x instead of a product over all pairs of frames.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

CHUNK = 32  # frames; the work within a chunk grows with it, the work between chunks shrinks


def scan(
    x: Tensor,  # (B, F, H, P)
    step: Tensor,  # (B, F, H)
    log_decay: Tensor,  # (B, F, H), at most 0
    b: Tensor,  # (B, F, N) shared by the heads
    c: Tensor,  # (B, F, N)
    skip: Tensor,  # (H,)
    state: Tensor,  # (B, H, P, N)
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """All outputs (B, F, H, P) and the state after the last frame, as the recurrence gives them."""
    n_frames = x.shape[1]
    length = min(chunk, n_frames)
    if missing := -n_frames % length:  # frames that decay nothing and add nothing
        x = F.pad(x, (0, 0, 0, 0, 0, missing))
        step, log_decay, b, c = (F.pad(t, (0, 0, 0, missing)) for t in (step, log_decay, b, c))
    y, state = _Scan.apply(x, step, log_decay, b, c, skip, state, length)
    return y[:, :n_frames], state


class _Scan(torch.autograd.Function):
    """Frames are cut into chunks as (B, K, L, ...); only products of frames with frames go head by head."""

    @staticmethod
    def forward(ctx: FunctionCtx, *inputs) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        *framed, skip, state, length = inputs
        x, step, log_decay, b, c = (t.unflatten(1, (-1, length)) for t in framed)
        sums = log_decay.cumsum(2)  # (B, K, L, H)
        weights = decays_between(sums).mul_((c @ b.mT)[:, :, None]).mul_(step.mT[..., None, :])
        weights.diagonal(dim1=-2, dim2=-1).add_(skip[:, None])  # (B, K, H, L, L)
        y = swap(weights @ swap(x))  # (B, K, L, H, P)
        taken = x * (step * to_end(sums))[..., None]
        before, after = carry(taken.flatten(3).mT @ b, sums[:, :, -1].exp(), state)  # (B, K, HP, N)
        y.addcmul_((c @ before.mT).view_as(y), sums.exp()[..., None])
        ctx.save_for_backward(x, step, sums, b, c, skip, y, before, after)
        return y.flatten(1, 2), after

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y: Tensor, d_after: Tensor):  # type: ignore[no-untyped-def]
        x, step, sums, b, c, skip, y, before, after = ctx.saved_tensors
        d_y = d_y.view_as(y) if d_y.is_contiguous() else d_y.reshape(y.shape)
        by_head, between = swap(d_y), decays_between(sums)
        d_pairs = (by_head @ swap(x).mT).mul_(between).mul_(step.mT[..., None, :]).sum(2)  # (B, K, L, L)
        d_taken = swap(between.mul_((c @ b.mT)[:, :, None]).mT @ by_head)  # of step * x; from its own chunk

        faded = (d_y * sums.exp()[..., None]).flatten(3)  # (B, K, L, HP)
        d_added, d_state = carry_back(faded.mT @ c, sums[:, :, -1].exp(), d_after)
        kept = to_end(sums)
        d_taken.addcmul_((b @ d_added.mT).view_as(x), kept[..., None])  # and from later ones
        d_c = d_pairs @ b + faded @ before
        d_b = d_pairs.mT @ c + (x * (step * kept)[..., None]).flatten(3) @ d_added

        d_step, skipped = (x * d_taken).sum(-1), (d_y * x).sum(-1)  # (B, K, L, H)
        d_sums = ((d_y * y).sum(-1) - skip * skipped - step * d_step).flatten(1, 2)  # (B, F, H)
        d_sums[:, -1] += (d_after * after).sum((-1, -2))
        d_decay = d_sums.flip(1).cumsum(1).flip(1)
        d_x = d_taken.mul_(step[..., None]).addcmul_(d_y, skip[:, None])
        d_x, d_step, d_b, d_c = (t.flatten(1, 2) for t in (d_x, d_step, d_b, d_c))
        return d_x, d_step, d_decay, d_b, d_c, skipped.sum((0, 1, 2)), d_state, None


def swap(t: Tensor) -> Tensor:
    """Heads before frames, or back. (B, K, L, H, P) <-> (B, K, H, L, P)"""
    return t.transpose(2, 3).contiguous()


def decays_between(sums: Tensor) -> Tensor:
    """How much of frame j is left at frame i, 0 where j is later. (B, K, L, H) -> (B, K, H, L, L)"""
    sums = swap(sums)
    length = sums.shape[-1]
    later = torch.ones(length, length, dtype=torch.bool, device=sums.device).triu(1)
    return (sums[..., :, None] - sums[..., None, :]).masked_fill_(later, -torch.inf).exp_()


def to_end(sums: Tensor) -> Tensor:
    """How much of each frame is left at the end of its chunk. (B, K, L, H)"""
    return (sums[:, :, -1:] - sums).exp_()


def carry(added: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """What chunks add (B, K, HP, N) and leave of the past (B, K, H) -> states before each, and after all."""
    before = torch.empty_like(added)
    for k in range(added.shape[1]):
        before[:, k] = state.flatten(1, 2)
        state = torch.addcmul(added[:, k].view_as(state), state, decay[:, k, :, None, None])
    return before, state


def carry_back(d_before: Tensor, decay: Tensor, d_after: Tensor) -> tuple[Tensor, Tensor]:
    """The same in reverse: gradients of what each chunk adds, and of the first state."""
    d_added = torch.empty_like(d_before)
    for k in reversed(range(d_before.shape[1])):
        d_added[:, k] = d_after.flatten(1, 2)
        d_after = torch.addcmul(d_before[:, k].view_as(d_after), d_after, decay[:, k, :, None, None])
    return d_added, d_after
