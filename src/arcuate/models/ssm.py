"""Selective state-space encoder: Mamba-2 / SSD (Dao & Gu 2024), linear in time with a state of constant size.

A block is a short causal convolution, the selective scan (with input-dependent decay, input map and output map), and a
gate. Differences from the published block: expansion 1 (inner width equals outer width), layer norm instead of RMS norm
after the gate, and in the bidirectional model half of the heads run backwards in time. `ssd_scan` is the recurrence,
computed in chunks; the rest of the file is the network around it.
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
from arcuate.models.convolution import depthwise_conv, project_patches
from arcuate.models.interfaces import Encoder

_DT_MIN, _DT_MAX = 1e-3, 0.1  # range of the initial step sizes: from slowly to quickly decaying heads
_CHUNK = 32  # frames per chunk of the scan; see `ssd_scan` for its effect on cost


@dataclass(frozen=True)
class _MixerState:
    """Streaming state of one block."""

    conv_inputs: Tensor  # (B, kernel - 1, D + 2N) last inputs of the convolution
    ssm_state: Tensor  # (B, H, P, N) at least float32


SSMState = tuple[_MixerState, ...]  # one per block


class SSM(Encoder):
    """Bins to frames: patches, then `depth` blocks."""

    settings: SSMSettings

    def __init__(self, settings: SSMSettings, patch: Patch, n_channels: int) -> None:
        super().__init__()
        self.settings = settings
        self.patch = patch
        self.input = nn.Linear(n_channels * patch.bins, settings.width)
        self.input_norm = nn.LayerNorm(settings.width)
        self.blocks = nn.ModuleList(_Block(settings) for _ in range(settings.depth))
        self.output_norm = nn.LayerNorm(settings.width)

    def start(self, n_trials: int) -> SSMState:
        return tuple(cast(_Block, block).mixer.start(n_trials) for block in self.blocks)

    def finish(self, state: SSMState) -> Tensor:
        """No frames are held back. (B, 0, W)"""
        return state[0].conv_inputs.new_zeros(len(state[0].conv_inputs), 0, self.n_outputs)

    def forward_with_layers(
        self,
        bins: Tensor,
        n_frames: Tensor | None,
        state: SSMState,
        layers: Collection[int],
        lengths: tuple[int, ...] | None = None,
    ) -> tuple[Tensor, SSMState, dict[int, Tensor]]:
        """`forward`, and the normalised outputs of the given layers (1 = the first)."""
        frames = project_patches(bins, self.input.weight, self.input.bias, self.patch).transpose(0, 1)
        frames = F.dropout(self.input_norm(frames), self.settings.dropout, self.training)
        reversal = None if self.settings.causal else _reversal(frames, n_frames)
        states, inner = [], {}
        for layer, (block, before) in enumerate(zip(self.blocks, state, strict=True), start=1):
            frames, after = block(frames, reversal, before)
            states.append(after)
            if layer in layers:
                inner[layer] = self.output_norm(frames)
        return self.output_norm(frames), tuple(states), inner


class _Block(nn.Module):
    """Norm, one mixer per direction, output projection, residual; two directions share the width."""

    def __init__(self, settings: SSMSettings) -> None:
        super().__init__()
        n = settings.n_directions
        self.dropout = settings.dropout
        self.norm = nn.LayerNorm(settings.width)
        sizes = (settings.width, settings.width // n, settings.n_heads // n, settings.state_dim, settings.conv_kernel)
        self.mixer = _Mixer(*sizes)
        self.reverse_mixer = _Mixer(*sizes) if settings.bidirectional else None
        self.output = nn.Linear(settings.width, settings.width, bias=False)
        if not self.output.weight.is_meta:
            with torch.no_grad():
                # Keeps the variance of the residual stream independent of depth.
                self.output.weight /= math.sqrt(settings.depth)

    def forward(self, frames: Tensor, reversal: Tensor | None, state: _MixerState) -> tuple[Tensor, _MixerState]:
        """`reversal` (B, F) holds the index of each frame in the time-reversed trial."""
        normed = self.norm(frames)
        mixed, state = self.mixer(normed, state)
        if self.reverse_mixer is not None and reversal is not None:
            backward, _ = self.reverse_mixer(_take_frames(normed, reversal), self.reverse_mixer.start(len(frames)))
            mixed = torch.cat([mixed, _take_frames(backward, reversal)], dim=-1)
        return frames + F.dropout(self.output(mixed), self.dropout, self.training), state


def _reversal(frames: Tensor, n_frames: Tensor | None) -> Tensor:
    """Indices that reverse each trial within its true length and leave padding in place. (B, F)"""
    n_trials, length = frames.shape[:2]
    index = torch.arange(length, device=frames.device).expand(n_trials, length)
    n = index.new_full((n_trials, 1), length) if n_frames is None else n_frames[:, None]
    return torch.where(index < n, n - 1 - index, index)


def _take_frames(frames: Tensor, index: Tensor) -> Tensor:
    return frames.gather(1, index[..., None].expand(-1, -1, frames.shape[-1]))


class _Mixer(nn.Module):
    """One direction of a block: projection, convolution, scan, gate. (B, F, W) -> (B, F, D)

    As in Mamba-2, one projection yields the gate (D), the inputs of the convolution (x: D, b: N, c: N) and the step
    size dt of each head (H).
    """

    def __init__(self, n_inputs: int, width: int, n_heads: int, state_dim: int, conv_kernel: int) -> None:
        super().__init__()
        self.width, self.n_heads, self.state_dim, self.conv_kernel = width, n_heads, state_dim, conv_kernel
        self.in_proj = nn.Linear(n_inputs, 2 * width + 2 * state_dim + n_heads, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(conv_kernel, width + 2 * state_dim))
        self.conv_bias = nn.Parameter(torch.zeros(width + 2 * state_dim))
        self.dt_bias = nn.Parameter(torch.empty(n_heads))
        self.a_log = nn.Parameter(torch.empty(n_heads))  # decay rate A = -exp(a_log), negative for every value
        self.skip = nn.Parameter(torch.ones(n_heads))
        self.norm = nn.LayerNorm(width)
        if not self.conv_weight.is_meta:
            self._initialise()

    def _initialise(self) -> None:
        bound = 1 / math.sqrt(self.conv_kernel)
        nn.init.uniform_(self.conv_weight, -bound, bound)
        with torch.no_grad():
            dt = torch.empty(self.n_heads).uniform_(math.log(_DT_MIN), math.log(_DT_MAX)).exp()
            self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
            self.a_log.uniform_(1.0, 16.0).log_()

    @property
    def _scan_dtype(self) -> torch.dtype:
        return torch.promote_types(self.a_log.dtype, torch.float32)

    def start(self, n_trials: int) -> _MixerState:
        conv_inputs = self.conv_bias.new_zeros(n_trials, self.conv_kernel - 1, self.width + 2 * self.state_dim)
        shape = (n_trials, self.n_heads, self.width // self.n_heads, self.state_dim)
        return _MixerState(conv_inputs, torch.zeros(shape, dtype=self._scan_dtype, device=conv_inputs.device))

    def forward(self, frames: Tensor, state: _MixerState) -> tuple[Tensor, _MixerState]:
        sizes = (self.width, self.width + 2 * self.state_dim, self.n_heads)
        gate, inputs, dt = self.in_proj(frames).split(sizes, dim=-1)
        inputs = torch.cat([state.conv_inputs.to(inputs.dtype), inputs], dim=1)
        conv_inputs = inputs[:, inputs.shape[1] - self.conv_kernel + 1 :]
        convolved = F.silu(depthwise_conv(inputs, self.conv_weight, self.conv_bias))
        x, b, c = convolved.split((self.width, self.state_dim, self.state_dim), dim=-1)
        y, ssm_state = self._scan(x, b, c, dt, state.ssm_state)
        return self.norm(y * F.silu(gate)), _MixerState(conv_inputs, ssm_state)

    def _scan(self, x: Tensor, b: Tensor, c: Tensor, dt: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The scan in at least float32, even under autocast: products of many decays need the precision."""
        with torch.autocast(x.device.type, enabled=False):
            x, b, c = (t.to(self._scan_dtype) for t in (x, b, c))
            dt = F.softplus(dt.to(self._scan_dtype) + self.dt_bias)  # (B, F, H)
            heads = x.unflatten(-1, (self.n_heads, -1))  # (B, F, H, P)
            y, state = ssd_scan(heads, dt, -dt * self.a_log.exp(), b, c, self.skip, state)
            return y.flatten(2), state


def ssd_scan(
    x: Tensor,  # (B, F, H, P)
    dt: Tensor,  # (B, F, H) step sizes
    log_decay: Tensor,  # (B, F, H), at most 0
    b: Tensor,  # (B, F, N) shared by the heads
    c: Tensor,  # (B, F, N)
    skip: Tensor,  # (H,)
    state: Tensor,  # (B, H, P, N)
    chunk: int = _CHUNK,
) -> tuple[Tensor, Tensor]:
    """Selective scan in chunks (state-space duality, Dao & Gu 2024): outputs (B, F, H, P) and the final state.

    For each head, with a_t = exp(log_decay_t), the recurrence is

        S_t = a_t S_{t-1} + dt_t x_t b_t^T          (P, N)
        y_t = S_t c_t + skip x_t                    (P,)

    Within a chunk of L frames let s_i be the sum of log decays up to and including frame i. Unrolling gives

        y_i = sum over j <= i of (c_i . b_j) exp(s_i - s_j) dt_j x_j       from the chunk itself
              + exp(s_i) S_before c_i                                      from earlier chunks
        S_after = exp(s_L) S_before + sum over j of exp(s_L - s_j) dt_j x_j b_j^T

    so that everything is matrix products, except for one short loop over the F / L chunks that carries S.

    Stability: every exponent is at most 0. Decays between frames are computed as exp(s_i - s_j), never as a quotient
    exp(s_i) / exp(s_j), which would underflow for quickly decaying heads; pairs j > i are masked before exp.

    Cost per trial: F L (N + H P) within chunks plus 2 F H P N for states and outputs, in F / L sequential steps; the
    plain recurrence needs F sequential steps. Larger L means more work within chunks and fewer sequential steps.
    """
    n_frames = x.shape[1]
    length = min(chunk, n_frames)
    if missing := -n_frames % length:  # padding frames with decay 1 and input 0
        x = F.pad(x, (0, 0, 0, 0, 0, missing))
        dt, log_decay, b, c = (F.pad(t, (0, 0, 0, missing)) for t in (dt, log_decay, b, c))
    y, state = _SSDScan.apply(x, dt, log_decay, b, c, skip, state, length)
    return y[:, :n_frames], state


class _SSDScan(torch.autograd.Function):
    """Frames are viewed as chunks (B, K, L, ...); only the (L, L) products within a chunk need a matrix per head.

    Backward pass. Let s_t be the sum of log decays over all frames up to t. The decay from j to i enters as
    exp(s_i) exp(-s_j), so s_t acts only as a factor on the output of frame t and as an inverse factor on its input:

        ds_t = <dy_t, y_t - skip x_t> - <d(dt_t x_t), dt_t x_t>,    plus <dS, S> of the final state at the last frame

    and the gradient of log_decay_k is the sum of ds_t over t >= k. The (L, L) decay matrices are recomputed instead of
    saved, and never differentiated.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, *inputs) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        *framed, skip, state, length = inputs
        x, dt, log_decay, b, c = (t.unflatten(1, (-1, length)) for t in framed)
        sums = log_decay.cumsum(2)  # (B, K, L, H)
        weights = _decay_matrix(sums).mul_((c @ b.mT)[:, :, None]).mul_(dt.mT[..., None, :])
        weights.diagonal(dim1=-2, dim2=-1).add_(skip[:, None])  # (B, K, H, L, L)
        y = _swap_heads(weights @ _swap_heads(x))  # (B, K, L, H, P)
        decayed_x = x * (dt * _decay_to_end(sums))[..., None]
        before, after = _carry_states(decayed_x.flatten(3).mT @ b, sums[:, :, -1].exp(), state)  # (B, K, HP, N)
        y.addcmul_((c @ before.mT).view_as(y), sums.exp()[..., None])
        ctx.save_for_backward(x, dt, sums, b, c, skip, y, before, after)
        return y.flatten(1, 2), after

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y: Tensor, d_after: Tensor):  # type: ignore[no-untyped-def]
        x, dt, sums, b, c, skip, y, before, after = ctx.saved_tensors
        d_y = d_y.view_as(y) if d_y.is_contiguous() else d_y.reshape(y.shape)
        # Within chunks: gradients of c_i . b_j and of the inputs dt x.
        d_y_heads, decay = _swap_heads(d_y), _decay_matrix(sums)
        d_cb = (d_y_heads @ _swap_heads(x).mT).mul_(decay).mul_(dt.mT[..., None, :]).sum(2)  # (B, K, L, L)
        d_input = _swap_heads(decay.mul_((c @ b.mT)[:, :, None]).mT @ d_y_heads)

        # Through the states between chunks.
        decayed_d_y = (d_y * sums.exp()[..., None]).flatten(3)  # (B, K, L, HP)
        d_added, d_state = _carry_states_back(decayed_d_y.mT @ c, sums[:, :, -1].exp(), d_after)
        to_end = _decay_to_end(sums)
        d_input.addcmul_((b @ d_added.mT).view_as(x), to_end[..., None])
        d_c = d_cb @ b + decayed_d_y @ before
        d_b = d_cb.mT @ c + (x * (dt * to_end)[..., None]).flatten(3) @ d_added

        d_dt, d_skip = (x * d_input).sum(-1), (d_y * x).sum(-1)  # (B, K, L, H)
        d_sums = ((d_y * y).sum(-1) - skip * d_skip - dt * d_dt).flatten(1, 2)  # (B, F, H)
        d_sums[:, -1] += (d_after * after).sum((-1, -2))
        d_log_decay = d_sums.flip(1).cumsum(1).flip(1)
        d_x = d_input.mul_(dt[..., None]).addcmul_(d_y, skip[:, None])
        d_x, d_dt, d_b, d_c = (t.flatten(1, 2) for t in (d_x, d_dt, d_b, d_c))
        return d_x, d_dt, d_log_decay, d_b, d_c, d_skip.sum((0, 1, 2)), d_state, None


def _swap_heads(t: Tensor) -> Tensor:
    """Swap the axes of heads and frames. (B, K, L, H, …) <-> (B, K, H, L, …)"""
    return t.transpose(2, 3).contiguous()


def _decay_matrix(sums: Tensor) -> Tensor:
    """Decay from frame j to frame i >= j, 0 above the diagonal. (B, K, L, H) -> (B, K, H, L, L)"""
    sums = _swap_heads(sums)
    length = sums.shape[-1]
    future = torch.ones(length, length, dtype=torch.bool, device=sums.device).triu(1)
    return (sums[..., :, None] - sums[..., None, :]).masked_fill_(future, -torch.inf).exp_()


def _decay_to_end(sums: Tensor) -> Tensor:
    """Decay from each frame to the end of its chunk. (B, K, L, H)"""
    return (sums[:, :, -1:] - sums).exp_()


def _carry_states(added: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Contributions (B, K, HP, N) and decays (B, K, H) of the chunks -> states before each chunk, and the last."""
    before = torch.empty_like(added)
    for k in range(added.shape[1]):
        before[:, k] = state.flatten(1, 2)
        state = torch.addcmul(added[:, k].view_as(state), state, decay[:, k, :, None, None])
    return before, state


def _carry_states_back(d_before: Tensor, decay: Tensor, d_after: Tensor) -> tuple[Tensor, Tensor]:
    """Adjoint of `_carry_states`: gradients of the contributions, and of the first state."""
    d_added = torch.empty_like(d_before)
    for k in reversed(range(d_before.shape[1])):
        d_added[:, k] = d_after.flatten(1, 2)
        d_after = torch.addcmul(d_before[:, k].view_as(d_after), d_after, decay[:, k, :, None, None])
    return d_added, d_after
