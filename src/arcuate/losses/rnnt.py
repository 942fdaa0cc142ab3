"""Transducer loss (RNN-T, Graves 2012), one value per trial, exact, with hand-derived gradients.

A lattice node (t, u) means: frame t is current and u tokens have been emitted. A blank leads to (t + 1, u), the next
token to (t, u + 1); a path starts at (0, 0) and ends with a blank from (T - 1, U). The loss is the negative log of the
summed probability of all paths. It is computed in two stages: log-probabilities of blank and next token at every node
(`_node_log_probs`), then the sum over paths (`_lattice_loss`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from arcuate.errors import UserError

# Lattice nodes joined at a time by `chunked_rnnt_loss`: on a CPU few enough for its cache, elsewhere enough for the
# kernels to take longer than their launch.
_NODES_ON_CPU, _NODES_ON_DEVICE = 4096, 65536


@dataclass(frozen=True)
class Lengths:
    """Frames and tokens of each trial on the host, where they are needed to cut the lattices."""

    n_frames: Tensor  # (B,)
    n_tokens: Tensor  # (B,)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.n_frames.tolist(), self.n_tokens.tolist(), strict=True))


Sizes = list[tuple[int, int]]  # frames and tokens of each trial
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

    With `reuse_logits` the backward pass overwrites the logits with their gradient, which avoids a second tensor of
    that size; only for callers that do not use the logits afterwards.
    """
    if logits.ndim != 4 or not logits.is_floating_point():
        raise UserError(
            f"transducer logits are {logits.dtype} of shape {tuple(logits.shape)}; expected floating-point numbers of"
            " shape (B, T, U + 1, V)"
        )
    frames = torch.as_tensor(n_frames, device=logits.device)
    tokens = torch.as_tensor(n_tokens, device=logits.device)
    on_host = Lengths(frames.cpu(), tokens.cpu())
    _check_inputs(logits.shape, targets, on_host)
    _check_classes(targets.cpu(), on_host.n_tokens, blank, logits.shape[3])
    if not len(logits):
        return logits.sum((1, 2, 3))  # an empty batch
    blanks, emissions = _node_log_probs(logits, targets, on_host.pairs, blank, reuse_logits)
    return _lattice_loss(blanks, emissions, frames, tokens)


def chunked_rnnt_loss(
    join: Join,
    frames: Tensor,  # (B, T, W) encoder outputs, projected
    predicted: Tensor,  # (B, U + 1, W) outputs of the prediction network after 0, 1, … U tokens, projected
    targets: Tensor,
    n_frames: Tensor,
    n_tokens: Tensor,
    blank: int = 0,
    nodes: int | None = None,
    on_host: Lengths | None = None,
) -> Tensor:
    """`rnnt_loss` of join(frames, predicted), without holding all logits (B, T, U + 1, V) at once. (B,)

    Logits are computed for about `nodes` lattice nodes at a time and recomputed in the backward pass (gradient
    checkpointing): memory falls from B T U V to nodes V at the cost of one additional joiner pass. With the lengths
    `on_host` nothing is read back from the device. The classes of the targets are not checked.

    A CPU leaves out the nodes beyond the length of each trial; other devices compute them with the others, in as many
    kernels as for one trial, and `_lattice_loss` ignores them.
    """
    on_host = on_host or Lengths(n_frames.cpu(), n_tokens.cpu())
    _check_inputs((*frames.shape[:2], predicted.shape[1]), targets, on_host)
    by_trial = frames.device.type == "cpu"
    nodes = nodes or (_NODES_ON_CPU if by_trial else _NODES_ON_DEVICE)
    length = max(1, nodes // (predicted.shape[0] * predicted.shape[1]))

    def node_log_probs(part: Tensor, predicted: Tensor, sizes: Sizes | None) -> tuple[Tensor, Tensor]:
        return _node_log_probs(join(part, predicted), targets, sizes, blank, reuse_logits=True)

    blanks, emissions = [], []
    for first in range(0, frames.shape[1], length):
        part = frames[:, first : first + length]
        n_part = [(min(max(t - first, 0), part.shape[1]), u) for t, u in on_host.pairs] if by_trial else None
        if torch.is_grad_enabled():  # the joiner draws no random numbers
            arguments = (part, predicted, n_part)
            log_probs = checkpoint(node_log_probs, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            log_probs = node_log_probs(part, predicted, n_part)
        blanks.append(log_probs[0])
        emissions.append(log_probs[1])
    return _lattice_loss(torch.cat(blanks, dim=1), torch.cat(emissions, dim=1), n_frames, n_tokens)


def _node_log_probs(
    logits: Tensor, targets: Tensor, sizes: Sizes | None, blank: int, reuse_logits: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the blank and of the next token at every node; `sizes` are frames and tokens per trial.

    Without `sizes`, those of nodes beyond the length of a trial are computed as well. 2 x (B, T, U + 1)
    """
    parts: list[tuple[int | slice, int, int]] = [(slice(None), logits.shape[1], targets.shape[1])]
    if sizes is not None:
        parts = [(i, t, u) for i, (t, u) in enumerate(sizes)]
    log_probs: tuple[Tensor, Tensor] = _NodeLogProbs.apply(logits, targets, parts, blank, reuse_logits)
    return log_probs


class _NodeLogProbs(torch.autograd.Function):
    """Fused log-softmax and gather of blank and next token, on each trial's valid nodes only, or on all at once.

    With p the softmax of the logits at a node, the gradient is d_blank (onehot(blank) - p) + d_emit (onehot(next) - p).
    So the normaliser (log-sum-exp) of each node is all that is saved in addition to the logits.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, *rest):  # type: ignore[no-untyped-def]
        ctx.parts, ctx.blank, ctx.reuse = rest
        dtype = torch.promote_types(logits.dtype, torch.float32)
        norms, blanks, emissions = logits.new_zeros((3, *logits.shape[:3]), dtype=dtype)
        for i, t, u in ctx.parts:
            nodes = logits[i, :t, : u + 1].to(dtype)  # (t, u + 1, V), or of all trials (B, t, u + 1, V)
            norm = norms[i, :t, : u + 1] = nodes.logsumexp(-1)
            blanks[i, :t, : u + 1] = nodes[..., ctx.blank] - norm
            tokens = nodes[..., :u, :].gather(-1, _next_token_index(targets[i, :u], t))[..., 0]
            emissions[i, :t, :u] = tokens - norm[..., :u]
        ctx.save_for_backward(logits, targets, norms)
        return blanks, emissions

    @staticmethod
    @once_differentiable
    def backward(ctx, d_blanks: Tensor, d_emissions: Tensor):  # type: ignore[no-untyped-def]
        logits, targets, norms = ctx.saved_tensors
        d_logits = logits.detach() if ctx.reuse else torch.zeros_like(logits)
        for i, t, u in ctx.parts:
            nodes, d_blank, d_emit = (x[i, :t, : u + 1] for x in (logits, d_blanks, d_emissions))
            d_nodes = (nodes - norms[i, :t, : u + 1, None]).exp_().mul_(-(d_blank + d_emit)[..., None])
            d_nodes[..., ctx.blank] += d_blank
            d_nodes[..., :u, :].scatter_add_(-1, _next_token_index(targets[i, :u], t), d_emit[..., :u, None])
            d_logits[i, :t, : u + 1] = d_nodes
            d_logits[i, t:], d_logits[i, :, u + 1 :] = 0.0, 0.0
        return d_logits, *[None] * 4


def _next_token_index(targets: Tensor, n_frames: int) -> Tensor:
    """The class of the next token at each node. (…, U) -> (…, T, U, 1)"""
    return targets.long()[..., None, :].expand(*targets.shape[:-1], n_frames, -1)[..., None]


def _lattice_loss(
    blank: Tensor,  # (B, T, U + 1) log-probability of a blank at each node
    emit: Tensor,  # (B, T, U + 1) of the next token; the last column is ignored
    n_frames: Tensor,  # (B,) at least 1
    n_tokens: Tensor,  # (B,)
) -> Tensor:
    """Negative log of the summed probability of all paths. (B,)"""
    loss: Tensor = _Lattice.apply(blank, emit, n_frames, n_tokens)
    return loss


class _Lattice(torch.autograd.Function):
    """Forward-backward recursion over the lattice, one anti-diagonal at a time.

    With alpha(t, u) the log-probability of reaching a node and beta(t, u) that of completing a path from it,

        alpha(t, u) = logaddexp(alpha(t - 1, u) + blank(t - 1, u), alpha(t, u - 1) + emit(t, u - 1))
        beta(t, u)  = logaddexp(blank(t, u) + beta(t + 1, u), emit(t, u) + beta(t, u + 1))

    All nodes with the same t + u depend only on the previous anti-diagonal, so the recursion takes T + U vectorised
    steps instead of T U. Everything stays in log space: path probabilities underflow within a few frames otherwise, and
    logaddexp subtracts the larger term before it exponentiates. Nodes outside a trial's lattice are -inf, which
    logaddexp treats as probability 0.

    The gradient of the loss with respect to a transition's log-probability is minus the posterior probability that a
    path takes the transition, exp(alpha + log-probability + beta - total), so these posteriors are all that is saved.
    """

    @staticmethod
    def forward(ctx, blank: Tensor, emit: Tensor, n_frames: Tensor, n_tokens: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        length = blank.shape[1]
        blank, emit = _mask_outside(blank, n_frames, n_tokens + 1), _mask_outside(emit, n_frames, n_tokens)
        blank, emit = _by_diagonal(blank), _by_diagonal(emit)  # (N, B, U + 1)
        trials = torch.arange(len(n_frames), device=blank.device)
        end = (n_frames + n_tokens, trials, n_tokens)
        alphas = _forward_recursion(blank, emit)  # (N + 1, B, U + 1)
        total = alphas[end]  # (B,)
        if any(ctx.needs_input_grad[:2]):
            betas = _backward_recursion(blank, emit, end)
            blank = blank.add_(alphas[:-1]).add_(betas[1:])
            emit = emit.add_(alphas[:-1])
            emit[..., :-1] += betas[1:, :, 1:]
            # NaN arises as -inf - (-inf), in trials without a valid path.
            posteriors = [(t - total[:, None]).exp_().nan_to_num_(nan=0.0) for t in (blank, emit)]
            ctx.save_for_backward(*(_diagonal_view(t, length).contiguous() for t in posteriors))
        return -total

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss: Tensor):  # type: ignore[no-untyped-def]
        blank, emit = ctx.saved_tensors
        scale = -d_loss[:, None, None]
        return blank * scale, emit * scale, None, None


def _mask_outside(log_probs: Tensor, n_frames: Tensor, n_columns: Tensor) -> Tensor:
    """Set nodes outside a trial's lattice to -inf."""
    frame = torch.arange(log_probs.shape[1], device=log_probs.device)[:, None]
    column = torch.arange(log_probs.shape[2], device=log_probs.device)
    outside = (frame >= n_frames[:, None, None]) | (column >= n_columns[:, None, None])
    return log_probs.masked_fill(outside, -torch.inf)


def _by_diagonal(log_probs: Tensor) -> Tensor:
    """(B, T, U + 1) -> (T + U, B, U + 1): row n holds the nodes with t + u = n, -inf if there are none."""
    n_trials, length, columns = log_probs.shape
    rows = log_probs.new_full((length + columns - 1, n_trials, columns), -torch.inf)
    _diagonal_view(rows, length).copy_(log_probs)
    return rows


def _diagonal_view(rows: Tensor, length: int) -> Tensor:
    """Lattice as a view of its anti-diagonals: (t, u) is column u of row t + u. (N, B, U + 1) -> (B, T, U + 1)"""
    _, n_trials, columns = rows.shape
    diagonal = n_trials * columns
    return rows.as_strided((n_trials, length, columns), (columns, diagonal, diagonal + 1))


def _forward_recursion(blank: Tensor, emit: Tensor) -> Tensor:
    """alpha of every node, by anti-diagonal. (N + 1, B, U + 1)"""
    n, n_trials, columns = blank.shape
    alphas = blank.new_full((n + 1, n_trials, columns), -torch.inf)
    alphas[0, :, 0] = 0.0
    for here, there, blank_row, emit_row in zip(alphas[:-1], alphas[1:], blank, emit, strict=True):
        torch.add(here, blank_row, out=there)
        there[:, 1:] = torch.logaddexp(there[:, 1:], here[:, :-1] + emit_row[:, :-1])
    return alphas


def _backward_recursion(blank: Tensor, emit: Tensor, end: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """beta of every node, by anti-diagonal; `end` indexes the node after the final blank. (N + 1, B, U + 1)"""
    n, n_trials, columns = blank.shape
    betas = blank.new_full((n + 1, n_trials, columns), -torch.inf)
    betas.index_put_(end, betas.new_zeros(()))  # assigning a number would copy it to the device, and wait for it
    for i in reversed(range(n)):
        beta = betas[i + 1] + blank[i]
        beta[:, :-1] = torch.logaddexp(beta[:, :-1], betas[i + 1, :, 1:] + emit[i, :, :-1])
        torch.maximum(betas[i], beta, out=betas[i])  # keeps the 0 of an end node, which has no transitions
    return betas


def _check_inputs(shape: Sequence[int], targets: Tensor, lengths: Lengths) -> None:
    """Check shapes and lengths, which would otherwise fail as an index error in a kernel.

    `shape` is that of the logits, with or without V.
    """
    n_trials, length, columns = shape[:3]
    if targets.ndim != 2 or len(targets) != n_trials or columns != targets.shape[1] + 1:
        raise UserError(
            f"transducer logits are for {n_trials} trials and {columns} token positions, targets have shape"
            f" {tuple(targets.shape)}; logits need one position more than targets: (B, T, U + 1, V) with targets (B, U)"
        )
    _check_lengths("n_frames", lengths.n_frames, n_trials, 1, length)
    _check_lengths("n_tokens", lengths.n_tokens, n_trials, 0, targets.shape[1])
    if targets.is_floating_point() or targets.is_complex():
        raise UserError(f"targets are {targets.dtype}; expected integers, the class of each token")


def _check_classes(targets: Tensor, n_tokens: Tensor, blank: int, n_classes: int) -> None:
    """Check that every target within its length is a class, and not the blank."""
    real = targets[torch.arange(targets.shape[1]) < n_tokens[:, None]]
    if bool((real == blank).any()):
        raise UserError(f"a target is {blank}, the blank; pass the true n_tokens instead of the padded length")
    if not 0 <= blank < n_classes or (len(real) and not 0 <= int(real.min()) <= int(real.max()) < n_classes):
        raise UserError(f"blank {blank} or a target is not a class; there are {n_classes}, numbered from 0")


def _check_lengths(name: str, lengths: Tensor, n_trials: int, least: int, most: int) -> None:
    valid = not (lengths.is_floating_point() or lengths.is_complex()) and lengths.shape == (n_trials,)
    if valid and bool(((lengths >= least) & (lengths <= most)).all()):
        return
    raise UserError(
        f"{name} is {lengths.tolist()}; expected one integer from {least} to {most} for each of {n_trials} trials"
    )
