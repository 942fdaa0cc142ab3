"""The selective state-space encoder: linear in time, a state of constant size, parallel by chunks for training.

A block reads its frame through a short causal convolution, decides from it how fast each head forgets, what it takes
in and what it gives out, and passes the result through a gate. `scan` is the recurrence; this file is what stands
around it. Inner width equals outer width (expansion 1).
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from arcuate.models.config import Patch, SSMSettings
from arcuate.models.front_end import depthwise_conv, project_patches
from arcuate.models.interfaces import require_causal

SLOW, FAST = (
    1e-3,
    0.1,
)  # range of the step sizes at the start: heads that remember long, and heads that do not


@dataclass(frozen=True)
class MixerState:
    """What one block remembers: the last inputs of its convolution, and the state of its scan."""

    recent: Tensor  # (B, taps - 1, D + 2N)
    memory: Tensor  # (B, H, P, N) float32


SSMState = tuple[MixerState, ...]  # one per block


class Mixer(nn.Module):
    """One direction of a block: projection, convolution, scan, gate. (B, F, W) -> (B, F, D)"""

    def __init__(self, n_inputs: int, width: int, n_heads: int, n_state: int, taps: int) -> None:
        super().__init__()
        self.width, self.n_heads, self.n_state, self.taps = width, n_heads, n_state, taps
        self.project = nn.Linear(n_inputs, 2 * width + 2 * n_state + n_heads, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(taps, width + 2 * n_state))
        self.conv_bias = nn.Parameter(torch.zeros(width + 2 * n_state))
        self.step_bias = nn.Parameter(torch.empty(n_heads))
        self.log_rate = nn.Parameter(torch.empty(n_heads))
        self.skip = nn.Parameter(torch.ones(n_heads))
        self.norm = nn.LayerNorm(width)
        if not self.conv_weight.is_meta:
            self._initialise()

    def _initialise(self) -> None:
        bound = 1 / math.sqrt(self.taps)
        nn.init.uniform_(self.conv_weight, -bound, bound)
        with torch.no_grad():
            step = torch.empty(self.n_heads).uniform_(math.log(SLOW), math.log(FAST)).exp()
            self.step_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus gives the step back
            self.log_rate.uniform_(1.0, 16.0).log_()

    def start(self, n_trials: int) -> MixerState:
        recent = self.conv_bias.new_zeros(n_trials, self.taps - 1, self.width + 2 * self.n_state)
        shape = (n_trials, self.n_heads, self.width // self.n_heads, self.n_state)
        return MixerState(recent, torch.zeros(shape, dtype=self._dtype, device=recent.device))

    @property
    def _dtype(self) -> torch.dtype:
        return torch.promote_types(self.log_rate.dtype, torch.float32)

    def forward(self, frames: Tensor, state: MixerState) -> tuple[Tensor, MixerState]:
        sizes = (self.width, self.width + 2 * self.n_state, self.n_heads)
        gate, inputs, step = self.project(frames).split(sizes, dim=-1)
        inputs = torch.cat([state.recent.to(inputs.dtype), inputs], dim=1)
        recent = inputs[:, inputs.shape[1] - self.taps + 1 :]
        taken = F.silu(depthwise_conv(inputs, self.conv_weight, self.conv_bias))
        x, b, c = taken.split((self.width, self.n_state, self.n_state), dim=-1)
        y, memory = self._remember(x, b, c, step, state.memory)
        return self.norm(y * F.silu(gate)), MixerState(recent, memory)

    def _remember(
        self, x: Tensor, b: Tensor, c: Tensor, step: Tensor, memory: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The scan, in full precision whatever surrounds it: products of many decays need it."""
        with torch.autocast(x.device.type, enabled=False):
            x, b, c = (t.to(self._dtype) for t in (x, b, c))
            step = F.softplus(step.to(self._dtype) + self.step_bias)  # (B, F, H)
            heads = x.unflatten(-1, (self.n_heads, -1))  # (B, F, H, P)
            y, memory = ssd_scan(heads, step, -step * self.log_rate.exp(), b, c, self.skip, memory)
            return y.flatten(2), memory


class Block(nn.Module):
    """Norm, one or two mixers, projection, residual; two directions share the width between them."""

    def __init__(self, settings: SSMSettings) -> None:
        super().__init__()
        n = settings.n_directions
        self.dropout = settings.dropout
        self.norm = nn.LayerNorm(settings.width)
        sizes = (
            settings.width,
            settings.width // n,
            settings.n_heads // n,
            settings.state_dim,
            settings.conv_kernel,
        )
        self.ahead = Mixer(*sizes)
        self.back = Mixer(*sizes) if settings.bidirectional else None
        self.output = nn.Linear(settings.width, settings.width, bias=False)
        if not self.output.weight.is_meta:
            with torch.no_grad():
                self.output.weight /= math.sqrt(settings.depth)  # the sum over blocks starts at a usual size

    def forward(self, frames: Tensor, turned: Tensor | None, state: MixerState) -> tuple[Tensor, MixerState]:
        """`turned` (B, F) tells for each frame where it stands in the reversed trial."""
        normed = self.norm(frames)
        mixed, state = self.ahead(normed, state)
        if self.back is not None and turned is not None:
            backward, _ = self.back(take(normed, turned), self.back.start(len(frames)))
            mixed = torch.cat([mixed, take(backward, turned)], dim=-1)
        return frames + F.dropout(self.output(mixed), self.dropout, self.training), state


class SSM(nn.Module):
    """Bins to frames: patches, then `depth` blocks."""

    def __init__(self, settings: SSMSettings, patch: Patch, n_channels: int) -> None:
        super().__init__()
        self.settings = settings
        self.patch = patch
        self.input = nn.Linear(n_channels * patch.bins, settings.width)
        self.input_norm = nn.LayerNorm(settings.width)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.depth))
        self.output_norm = nn.LayerNorm(settings.width)

    @property
    def n_outputs(self) -> int:
        return self.settings.width

    def start(self, n_trials: int) -> SSMState:
        return tuple(cast(Block, block).ahead.start(n_trials) for block in self.blocks)

    def step(self, state: SSMState, bins: Tensor) -> tuple[Tensor, SSMState]:
        """The frames that these bins complete, and the state after them."""
        require_causal(self.settings.causal)
        return self(bins, None, state)

    def finish(self, state: SSMState) -> Tensor:
        """Nothing waits for bins to come. (B, 0, W)"""
        return state[0].recent.new_zeros(len(state[0].recent), 0, self.n_outputs)

    def forward(self, bins: Tensor, n_frames: Tensor | None, state: SSMState) -> tuple[Tensor, SSMState]:
        """Bins (B, T, C), T at least one patch -> frames (B, F, W) and the state after the last frame."""
        frames, after, _ = self.layered(bins, n_frames, state, ())
        return frames, after

    def layered(
        self, bins: Tensor, n_frames: Tensor | None, state: SSMState, layers: Collection[int]
    ) -> tuple[Tensor, SSMState, dict[int, Tensor]]:
        frames = project_patches(bins, self.input.weight, self.input.bias, self.patch).transpose(0, 1)
        frames = F.dropout(self.input_norm(frames), self.settings.dropout, self.training)
        turned = None if self.settings.causal else reversed_places(frames, n_frames)
        after, inner = [], {}
        for layer, (block, before) in enumerate(zip(self.blocks, state, strict=True), start=1):
            frames, left = block(frames, turned, before)
            after.append(left)
            if layer in layers:
                inner[layer] = self.output_norm(frames)
        return self.output_norm(frames), tuple(after), inner


def reversed_places(frames: Tensor, n_frames: Tensor | None) -> Tensor:
    """Where each frame stands when every trial is read from its true end; padding stays behind. (B, F)"""
    n_trials, length = frames.shape[:2]
    places = torch.arange(length, device=frames.device).expand(n_trials, length)
    n = places.new_full((n_trials, 1), length) if n_frames is None else n_frames[:, None]
    return torch.where(places < n, n - 1 - places, places)


def take(frames: Tensor, places: Tensor) -> Tensor:
    return frames.gather(1, places[..., None].expand(-1, -1, frames.shape[-1]))


# The selective scan: a linear recurrence whose pace, input and output maps depend on the frame.

CHUNK = 32  # frames; the work within a chunk grows with it, the work between chunks shrinks


def ssd_scan(
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
