"""One frame of a GRU for one stream, with most of its work done before its last bin is there.

A frame of one stream is bound by memory: every weight is read once. But the recurrent products need only the frame
before, and most bins of a patch are there long before its last one. What is done ahead is a value beside the state;
dropping it costs time and changes nothing.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from arcuate.models.config import GRUSettings, Patch
from arcuate.models.front_end import extract_patches, project_patches
from arcuate.models.interfaces import require_causal


@dataclass(frozen=True)
class Ahead:
    """What is known of the next frame."""

    n_bins: int  # of its patch that are in `projected`
    projected: Tensor  # (1, 3H) what the first layer reads off them, with its bias
    recurrent: Tensor  # (depth, 1, 3H) what all layers read off their states, with their biases


def work_ahead(gru: nn.GRU, patch_bins: int, state: Tensor, bins: Tensor, done: Ahead | None) -> Ahead:
    """As much of the next frame as its first bins (1, t, C) allow; goes on from what was done before."""
    if done is None:
        recurrent = [
            F.linear(state[k], weight(gru, f"weight_hh_l{k}"), weight(gru, f"bias_hh_l{k}"))
            for k in range(gru.num_layers)
        ]
        done = Ahead(0, weight(gru, "bias_ih_l0")[None].clone(), torch.stack(recurrent))
    n_bins = min(bins.shape[1], patch_bins)
    if n_bins <= done.n_bins:
        return done
    return Ahead(n_bins, done.projected + _read(gru, bins, done.n_bins, n_bins), done.recurrent)


def step_one(
    gru: nn.GRU, patch_bins: int, state: Tensor, bins: Tensor, done: Ahead | None
) -> tuple[Tensor, Tensor]:
    """State (depth, 1, H) and the bins of one patch (1, t, C) -> the frame (1, 1, H), and the state after it."""
    ready = work_ahead(gru, patch_bins, state, bins, done)
    projected = ready.projected
    states: list[Tensor] = []
    for k in range(gru.num_layers):
        if k:
            projected = F.linear(states[-1], weight(gru, f"weight_ih_l{k}"), weight(gru, f"bias_ih_l{k}"))
        r, z, n = projected.chunk(3, dim=1)
        r_state, z_state, n_state = ready.recurrent[k].chunk(3, dim=1)
        candidate = torch.tanh(n + torch.sigmoid(r + r_state) * n_state)
        states.append(torch.lerp(candidate, state[k], torch.sigmoid(z + z_state)))
    return states[-1][:, None], torch.stack(states)


def _read(gru: nn.GRU, bins: Tensor, first: int, last: int) -> Tensor:
    """What the first layer reads off some bins of a patch. (1, 3H)"""
    n_channels = bins.shape[2]
    columns = weight(gru, "weight_ih_l0")[:, first * n_channels : last * n_channels]
    return F.linear(bins[:, first:last].flatten(1), columns)


def weight(gru: nn.GRU, name: str) -> Tensor:
    found: Tensor = getattr(gru, name)
    return found


# The GRU encoder: torch.nn.GRU parameter for parameter, with a recurrence made for small batches on a CPU.

FEW = 16  # frames for which another layout of the weights does not pay
HELD = 1e4  # an update gate this far up is exactly 1: the state passes unchanged


class GRU(nn.Module):
    """Bins to frames: patches, then `depth` layers in one or both directions."""

    def __init__(self, settings: GRUSettings, patch: Patch, n_channels: int) -> None:
        super().__init__()
        self.settings = settings
        self.patch = patch
        self.gru = nn.GRU(
            n_channels * patch.bins,
            settings.width,
            settings.depth,
            dropout=settings.dropout if settings.depth > 1 else 0.0,
            bidirectional=settings.bidirectional,
        )
        self.h0 = nn.Parameter(torch.empty(1, 1, settings.width)) if settings.learned_initial_state else None
        if not self.gru.weight_hh_l0.is_meta:
            self._initialise()

    def _initialise(self) -> None:
        """As both official models: recurrent weights orthogonal, others Xavier, biases torch's default."""
        for name, parameter in self.named_parameters():
            if name.startswith("gru.weight_hh"):
                nn.init.orthogonal_(parameter)
            elif name.startswith("gru.weight_ih") or name == "h0":
                nn.init.xavier_uniform_(parameter)

    @property
    def n_outputs(self) -> int:
        return self.settings.width * self.n_directions

    @property
    def n_directions(self) -> int:
        return 2 if self.settings.bidirectional else 1

    def start(self, n_trials: int) -> Tensor:
        """The state before the first frame. (depth * directions, B, H)"""
        shape = (self.settings.depth * self.n_directions, n_trials, self.settings.width)
        if self.h0 is not None:
            return self.h0.expand(shape)
        return next(self.gru.parameters()).new_zeros(shape)

    def forward(self, bins: Tensor, n_frames: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
        """Bins (B, T, C), T at least one patch -> frames (B, F, D) and the state after the last frame.

        `n_frames` are the true lengths, which only a backward direction needs to know.
        """
        frames, last, _ = self.layered(bins, n_frames, state, ())
        return frames, last

    def layered(
        self, bins: Tensor, n_frames: Tensor | None, state: Tensor, layers: Collection[int]
    ) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        if bins.device.type != "cpu":
            return self._layered_torch(bins, n_frames, state, layers)
        if torch.is_autocast_enabled("cpu"):  # this recurrence is made for one precision, that of its weights
            with torch.autocast("cpu", enabled=False):
                return self.layered(bins.to(state.dtype), n_frames, state, layers)
        held = None
        if self.settings.bidirectional and n_frames is not None:
            length = self.patch.count_frames(bins.shape[1])
            if bool((n_frames < length).any()):
                held = torch.arange(length)[:, None] >= n_frames  # (F, B)
        x, last, inner = bins, [], {}
        for layer in range(self.settings.depth):
            if layer:
                x = F.dropout(x, self.settings.dropout, self.training)
            outputs = []
            for direction in range(self.n_directions):
                h0 = state[layer * self.n_directions + direction]
                outputs.append(self._run_layer(x, h0, layer, direction, held if direction else None))
                last.append(outputs[-1][0 if direction else -1])
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)  # (F, B, D)
            if layer + 1 in layers:
                inner[layer + 1] = x.transpose(0, 1)
        return x.transpose(0, 1), torch.stack(last), inner

    def step(self, state: Tensor, bins: Tensor, done: Ahead | None = None) -> tuple[Tensor, Tensor]:
        """The frames that these bins complete, and the state after them; `done` is what `ahead` gave."""
        require_causal(self.settings.causal)
        one = len(bins) == 1 and self.patch.count_frames(bins.shape[1]) == 1
        if one and not torch.is_grad_enabled():
            return step_one(self.gru, self.patch.bins, state, bins, done)
        return self(bins, None, state)

    def ahead(self, state: Tensor, bins: Tensor, done: Ahead | None) -> Ahead | None:
        """What can be done of the next frame with its first bins (B, t, C); a stream keeps it beside its state."""
        if len(bins) != 1 or torch.is_grad_enabled():
            return None
        return work_ahead(self.gru, self.patch.bins, state, bins, done)

    def finish(self, state: Tensor) -> Tensor:
        """Nothing waits for bins to come. (B, 0, D)"""
        return state.new_zeros(state.shape[1], 0, self.n_outputs)

    def _run_layer(self, x: Tensor, h0: Tensor, layer: int, direction: int, held: Tensor | None) -> Tensor:
        """One layer in one direction; `held` (F, B) marks frames that leave the state alone. -> (F, B, H)"""
        suffix = f"_l{layer}" + "_reverse" * direction
        w_ih, w_hh = getattr(self.gru, "weight_ih" + suffix), getattr(self.gru, "weight_hh" + suffix)
        b_ih, b_hh = getattr(self.gru, "bias_ih" + suffix), getattr(self.gru, "bias_hh" + suffix)
        width = self.settings.width
        bias = b_ih + F.pad(b_hh[: 2 * width], (0, width))  # only the candidate keeps its two biases apart
        project = F.linear(x, w_ih, bias) if layer else project_patches(x, w_ih, bias, self.patch)
        if held is not None:
            project[..., width : 2 * width].masked_fill_(held[..., None], HELD)
        return gru_recurrence(project, h0, w_hh, b_hh[2 * width :], reverse=bool(direction))

    def _layered_torch(
        self, bins: Tensor, n_frames: Tensor | None, state: Tensor, layers: Collection[int]
    ) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """torch's own kernels: all layers in one call, or one after the other where inner ones are asked for."""
        if not layers:
            return *self._forward_torch(bins, n_frames, state), {}
        x = extract_patches(bins, self.patch).transpose(0, 1)  # (F, B, D)
        lengths = None
        if self.settings.bidirectional and n_frames is not None:
            lengths = n_frames.cpu()
        states, last, inner = state.unflatten(0, (-1, self.n_directions)), [], {}
        for layer, before in enumerate(states, start=1):
            if layer > 1:
                x = F.dropout(x, self.settings.dropout, self.training)
            mine = slice((layer - 1) * self.n_directions, layer * self.n_directions)
            weights: list[Tensor] = [w for direction in self.gru.all_weights[mine] for w in direction]
            x, after = run_torch(x, lengths, before.contiguous(), weights)
            last.append(after)
            if layer in layers:
                inner[layer] = x.transpose(0, 1)
        return x.transpose(0, 1), torch.cat(last), inner

    def _forward_torch(self, bins: Tensor, n_frames: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
        x = extract_patches(bins, self.patch).transpose(0, 1)  # (F, B, D)
        if not self.settings.bidirectional or n_frames is None:
            frames, state = self.gru(x, state.contiguous())
            return frames.transpose(0, 1), state
        packed, state = self.gru(
            pack_padded_sequence(x, n_frames.cpu(), enforce_sorted=False), state.contiguous()
        )
        frames, _ = pad_packed_sequence(packed, total_length=x.shape[0])
        return frames.transpose(0, 1), state


def run_torch(
    x: Tensor, lengths: Tensor | None, state: Tensor, weights: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """One layer in one or both directions by torch's kernel. (F, B, D), (directions, B, H) -> (F, B, D)"""
    rest = (weights, True, 1, 0.0, False, len(state) == 2)  # with biases, one layer, no dropout, directions
    if lengths is None:
        frames, state = torch.gru(x, state, *rest, False)
        return frames, state
    packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
    order = packed.sorted_indices
    if order is not None:
        state = state.index_select(1, order)
    data, state = torch.gru(packed.data, packed.batch_sizes, state, *rest)
    if packed.unsorted_indices is not None:
        state = state.index_select(1, packed.unsorted_indices)
    frames, _ = pad_packed_sequence(packed._replace(data=data), total_length=x.shape[0])
    return frames, state


def gru_recurrence(
    projected: Tensor, h0: Tensor, weight: Tensor, bias: Tensor, reverse: bool = False
) -> Tensor:
    """The recurrence of one layer and direction. (F, B, 3H), (B, H), (3H, H), (H,) -> (F, B, H)

    `projected` holds all biases but the recurrent one of the candidate, which the reset gate scales too.
    """
    if torch.is_grad_enabled():
        states: Tensor = _Recurrence.apply(projected, h0, weight, bias, reverse)
        return states
    return _run(projected, h0, weight, bias, reverse)[0]


def _run(
    projected: Tensor, h0: Tensor, weight: Tensor, bias: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States, states before each frame, parts (gates r and z, recurrent part of n), and candidates n."""
    n_frames, n_trials, width = projected.shape[0], projected.shape[1], h0.shape[1]
    all_states = projected.new_empty(n_frames + 1, n_trials, width)
    states, before = (all_states[:-1], all_states[1:]) if reverse else (all_states[1:], all_states[:-1])
    all_states[-1 if reverse else 0] = h0
    parts = projected.clone(memory_format=torch.contiguous_format)
    parts[..., 2 * width :] = bias
    candidates = projected.new_empty(n_frames, n_trials, width)
    weight = weight.t()
    if n_frames > FEW:
        weight = weight.contiguous()  # a small product is twice as fast this way round
    frames = zip(
        before.unbind(0),
        parts.unbind(0),
        parts[..., : 2 * width].unbind(0),
        parts[..., :width].unbind(0),
        parts[..., width : 2 * width].unbind(0),
        parts[..., 2 * width :].unbind(0),
        projected[..., 2 * width :].unbind(0),
        candidates.unbind(0),
        states.unbind(0),
        strict=True,
    )
    for h, part, gates, r, z, recurrent, inputs, n, out in reversed(list(frames)) if reverse else frames:
        part.addmm_(h, weight)
        gates.sigmoid_()
        torch.addcmul(inputs, r, recurrent, out=n).tanh_()
        torch.lerp(n, h, z, out=out)
    return states, before, parts, candidates


class _Recurrence(torch.autograd.Function):
    """Backward frame by frame only where it must be; weight gradients of all frames in one product."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, projected: Tensor, h0: Tensor, weight: Tensor, bias: Tensor, reverse: bool
    ) -> Tensor:
        states, *kept = _run(projected, h0, weight, bias, reverse)
        ctx.reverse = reverse  # type: ignore[attr-defined]
        ctx.save_for_backward(weight, *kept)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx, d_states: Tensor):  # type: ignore[no-untyped-def]
        weight, before, parts, n = ctx.saved_tensors
        n_frames, n_trials, width = n.shape
        r, z, recurrent = parts.unflatten(2, (3, width)).unbind(2)
        # How the four pre-activations move with the state: recurrent part of n, r, z, input part of n.
        d = n.new_empty(n_frames, n_trials, 4, width)
        d_recurrent, d_r, d_z, d_n = d.unbind(2)
        torch.mul(1 - z, 1 - n * n, out=d_n)
        torch.mul(d_n, r, out=d_recurrent)
        torch.mul(d_recurrent, 1 - r, out=d_r).mul_(recurrent)
        torch.mul(before - n, z, out=d_z).mul_(1 - z)
        rolled = torch.cat([weight[2 * width :], weight[: 2 * width]])  # rows in the order n, r, z
        dh = n.new_zeros(n_trials, width)
        dh_for_each = dh[:, None]  # (B, 1, H)
        frames = zip(
            d.unbind(0), d[:, :, :3].flatten(2).unbind(0), z.unbind(0), d_states.unbind(0), strict=True
        )
        for d_all, d_through_state, carried, d_state in frames if ctx.reverse else reversed(list(frames)):
            dh.add_(d_state)
            d_all.mul_(dh_for_each)
            dh.mul_(carried).addmm_(d_through_state, rolled)
        d_flat, before_flat = d.view(-1, 4 * width), before.flatten(0, 1)
        d_weight = torch.empty_like(weight)
        torch.mm(d_flat[:, width : 3 * width].t(), before_flat, out=d_weight[: 2 * width])
        torch.mm(d_flat[:, :width].t(), before_flat, out=d_weight[2 * width :])
        d_projected = d_flat[:, width:].view(n_frames, n_trials, 3 * width)
        return d_projected, dh, d_weight, d_flat[:, :width].sum(0), None
