"""Sums over all paths through a lattice of frames and tokens: the recursion under the transducer loss.

A path starts at (frame 0, token 0). From a node it takes a blank to the next frame or an emission to the next token,
and it ends by a blank out of (last frame, all tokens). All nodes with the same frame + token are one anti-diagonal;
those are reached together, so that the recursion takes frames + tokens steps whatever the number of nodes.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from arcuate.errors import UserError


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


# The transducer (RNN-T) loss, one number per trial, exact, with gradients that were derived rather than traced.

NODES = 4096  # of the lattice that are joined at a time
Join = Callable[[Tensor, Tensor], Tensor]  # (B, t, W), (B, U + 1, W) -> (B, t, U + 1, V)


def rnnt_loss(
    logits: Tensor,  # (B, T, U + 1, V), not normalised
    targets: Tensor,  # (B, U) padded
    n_frames: Tensor | Sequence[int],  # (B,) at least 1
    n_tokens: Tensor | Sequence[int],  # (B,) may be 0, and may exceed n_frames
    blank: int = 0,
    reuse_logits: bool = False,
) -> Tensor:
    """Negative log-likelihood of each trial's tokens. (B,)

    With `reuse_logits` the backward pass writes its gradient over the logits, for callers who need them no more:
    then there is no second tensor of that size at all.
    """
    if logits.ndim != 4 or not logits.is_floating_point():
        raise UserError(
            f"transducer logits are {logits.dtype} of shape {tuple(logits.shape)}; they should be floating-point"
            " numbers of shape (B, T, U + 1, V)"
        )
    frames = torch.as_tensor(n_frames, device=logits.device)
    tokens = torch.as_tensor(n_tokens, device=logits.device)
    check(logits.shape, targets, frames, tokens, blank)
    if not len(logits):
        return logits.sum((1, 2, 3))  # no trial, no loss
    scores = score_nodes(logits, targets, frames, tokens, blank, reuse_logits)
    return lattice_loss(*scores, frames, tokens)


def chunked_rnnt_loss(
    join: Join,
    frames: Tensor,  # (B, T, W) what the encoder says
    predicted: Tensor,  # (B, U + 1, W) what the prediction network says after 0, 1, … U tokens
    targets: Tensor,
    n_frames: Tensor,
    n_tokens: Tensor,
    blank: int = 0,
    nodes: int = NODES,
) -> Tensor:
    """The same for logits = join(frames, predicted), some frames at a time. (B,)"""
    check((*frames.shape[:2], predicted.shape[1]), targets, n_frames, n_tokens, blank)
    length = max(1, nodes // (predicted.shape[0] * predicted.shape[1]))

    def score(part: Tensor, predicted: Tensor, n_part: Tensor) -> tuple[Tensor, Tensor]:
        return score_nodes(join(part, predicted), targets, n_part, n_tokens, blank, reuse_logits=True)

    blanks, emits = [], []
    for first in range(0, frames.shape[1], length):
        part = frames[:, first : first + length]
        n_part = (n_frames - first).clamp(0, part.shape[1])
        if torch.is_grad_enabled():
            scores = checkpoint(score, part, predicted, n_part, use_reentrant=False)
        else:
            scores = score(part, predicted, n_part)
        blanks.append(scores[0])
        emits.append(scores[1])
    return lattice_loss(torch.cat(blanks, dim=1), torch.cat(emits, dim=1), n_frames, n_tokens)


def score_nodes(
    logits: Tensor, targets: Tensor, n_frames: Tensor, n_tokens: Tensor, blank: int, reuse_logits: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the blank and of the next token at every node. 2 x (B, T, U + 1)"""
    scores: tuple[Tensor, Tensor] = _NodeScores.apply(
        logits, targets, n_frames, n_tokens, blank, reuse_logits
    )
    return scores


class _NodeScores(torch.autograd.Function):
    """Log-softmax and the choice of two classes in one, trial by trial on its true nodes."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, *rest):  # type: ignore[no-untyped-def]
        n_frames, n_tokens, ctx.blank, ctx.reuse = rest
        ctx.nodes = list(zip(n_frames.tolist(), n_tokens.tolist(), strict=True))
        dtype = torch.promote_types(logits.dtype, torch.float32)
        norms, blanks, emits = logits.new_zeros((3, *logits.shape[:3]), dtype=dtype)
        for i, (t, u) in enumerate(ctx.nodes):
            nodes = logits[i, :t, : u + 1].to(dtype)  # (t, u + 1, V)
            norm = norms[i, :t, : u + 1] = nodes.logsumexp(-1)
            blanks[i, :t, : u + 1] = nodes[..., ctx.blank] - norm
            emits[i, :t, :u] = nodes.gather(-1, following(targets[i, :u], t))[..., 0] - norm[:, :u]
        ctx.save_for_backward(logits, targets, norms)
        return blanks, emits

    @staticmethod
    @once_differentiable
    def backward(ctx, d_blanks: Tensor, d_emits: Tensor):  # type: ignore[no-untyped-def]
        logits, targets, norms = ctx.saved_tensors
        d_logits = logits.detach() if ctx.reuse else torch.zeros_like(logits)
        for i, (t, u) in enumerate(ctx.nodes):
            nodes, d_blank, d_emit = (x[i, :t, : u + 1] for x in (logits, d_blanks, d_emits))
            d_nodes = (nodes - norms[i, :t, : u + 1, None]).exp_().mul_(-(d_blank + d_emit)[..., None])
            d_nodes[..., ctx.blank] += d_blank
            d_nodes[:, :u].scatter_add_(-1, following(targets[i, :u], t), d_emit[:, :u, None])
            d_logits[i, :t, : u + 1] = d_nodes
            d_logits[i, t:], d_logits[i, :, u + 1 :] = 0.0, 0.0
        return d_logits, *[None] * 5


def following(targets: Tensor, n_frames: int) -> Tensor:
    """The next token at each node, as an index into its classes. (U,) -> (T, U, 1)"""
    return targets.long().expand(n_frames, -1)[..., None]


def check(shape: Sequence[int], targets: Tensor, n_frames: Tensor, n_tokens: Tensor, blank: int) -> None:
    """Refuse what does not fit before it becomes an index out of range somewhere inside.

    `shape` is that of the logits, (B, T, U + 1, V); classes are looked at where V is known already.
    """
    n_trials, length, columns, *n_classes = shape
    if targets.ndim != 2 or len(targets) != n_trials or columns != targets.shape[1] + 1:
        raise UserError(
            f"transducer logits are for {n_trials} trials and {columns} token positions, targets have shape"
            f" {tuple(targets.shape)}; logits need one more than targets are long: (B, T, U + 1, V) with targets (B, U)"
        )
    check_lengths("n_frames", n_frames, n_trials, 1, length)
    check_lengths("n_tokens", n_tokens, n_trials, 0, targets.shape[1])
    real = targets[torch.arange(targets.shape[1], device=targets.device) < n_tokens[:, None]]
    if targets.is_floating_point() or targets.is_complex():
        raise UserError(f"targets are {targets.dtype}; they should be whole numbers, the classes")
    if bool((real == blank).any()):
        raise UserError(
            f"a target is {blank}, the blank; give the true n_tokens instead of the padded length"
        )
    for n in n_classes:
        if not 0 <= blank < n or (len(real) and not 0 <= int(real.min()) <= int(real.max()) < n):
            raise UserError(f"blank {blank} or a target is no class; there are {n}, counted from 0")


def check_lengths(name: str, lengths: Tensor, n_trials: int, least: int, most: int) -> None:
    whole = not (lengths.is_floating_point() or lengths.is_complex()) and lengths.shape == (n_trials,)
    if whole and bool(((lengths >= least) & (lengths <= most)).all()):
        return
    what = name.removeprefix("n_")
    raise UserError(
        f"{name} should be one whole number for each of {n_trials} trials, {least} to {most} {what}; it holds"
        f" {lengths.tolist()}"
    )
