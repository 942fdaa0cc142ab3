"""GRU encoder: `torch.nn.GRU` parameter for parameter, with CPU kernels for small batches and single streams.

For gates r (reset) and z (update), candidate n and state h, one layer computes at frame t

    r = sigmoid(W_r x_t + U_r h_{t-1} + b_r)
    z = sigmoid(W_z x_t + U_z h_{t-1} + b_z)
    n = tanh(W_n x_t + b_n + r * (U_n h_{t-1} + c_n))
    h_t = (1 - z) * n + z * h_{t-1}

On a CPU the input products W x of all frames are one matrix product per layer, the recurrence runs frame by frame
(`gru_recurrence`), and a single stream uses `_step_one_frame`. Other devices use torch's own kernels.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from arcuate.data.batching import to_device
from arcuate.models.config import GRUSettings, Patch
from arcuate.models.convolution import extract_patches, project_patches
from arcuate.models.interfaces import Encoder, require_causal

_TRANSPOSE_MIN_FRAMES = 16  # minimum number of frames for which transposing the recurrent weights pays off
_KEEP_STATE = 1e4  # pre-activation of the update gate for which sigmoid is exactly 1: the state stays unchanged


@dataclass(frozen=True)
class Precomputed:
    """The part of the next frame that does not depend on bins still to come."""

    n_bins: int  # bins of the patch included in `projected`
    projected: Tensor  # (1, 3H) partial input product of the first layer, with its bias
    recurrent: Tensor  # (depth, 1, 3H) recurrent products of all layers, with their biases


def recurs_in_full_precision(device: str) -> bool:
    """Whether autocast has to be off for recurrent layers, which then compute in the precision of their weights.

    The CPU kernels support no other precision. On a GPU, torch casts the arguments of cuDNN's recurrent layers to
    fp16 even if autocast is set to bf16, where gradients are not scaled and would vanish.
    """
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return False
    return device == "cpu" or torch.get_autocast_dtype(device) == torch.bfloat16


class GRU(Encoder):
    """Bins to frames: patches, then `depth` layers in one or both directions.

    Only the backward direction uses the true lengths of the trials.
    """

    settings: GRUSettings

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
        """As in both official baselines: orthogonal recurrent weights, Xavier input weights, default biases."""
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
        """State before the first frame. (depth * directions, B, H)"""
        shape = (self.settings.depth * self.n_directions, n_trials, self.settings.width)
        if self.h0 is not None:
            return self.h0.expand(shape)
        return next(self.gru.parameters()).new_zeros(shape)

    def forward_with_layers(
        self,
        bins: Tensor,
        n_frames: Tensor | None,
        state: Tensor,
        layers: Collection[int],
        lengths: tuple[int, ...] | None = None,
    ) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """`forward`, and the outputs of the given layers (1 = the first)."""
        device = bins.device.type
        if recurs_in_full_precision(device):
            with torch.autocast(device, enabled=False):
                return self.forward_with_layers(bins.to(state.dtype), n_frames, state, layers, lengths)
        if device != "cpu":
            return self._forward_torch(bins, n_frames, state, layers, lengths)
        padding = None
        if self.settings.bidirectional and n_frames is not None:
            length = self.patch.count_frames(bins.shape[1])
            if min(n_frames.tolist() if lengths is None else lengths) < length:
                padding = torch.arange(length)[:, None] >= n_frames  # (F, B)
        x, last, inner = bins, [], {}
        for layer in range(self.settings.depth):
            if layer:
                x = F.dropout(x, self.settings.dropout, self.training)
            outputs = []
            for direction in range(self.n_directions):
                h0 = state[layer * self.n_directions + direction]
                outputs.append(self._run_layer(x, h0, layer, direction, padding if direction else None))
                last.append(outputs[-1][0 if direction else -1])
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)  # (F, B, D)
            if layer + 1 in layers:
                inner[layer + 1] = x.transpose(0, 1)
        return x.transpose(0, 1), torch.stack(last), inner

    def step(self, state: Tensor, bins: Tensor, precomputed: Precomputed | None = None) -> tuple[Tensor, Tensor]:
        """Frames completed by these bins, and the state after them; `precomputed` comes from `precompute`."""
        require_causal(self.settings.causal)
        one_frame = len(bins) == 1 and self.patch.count_frames(bins.shape[1]) == 1
        if one_frame and not torch.is_grad_enabled():
            return _step_one_frame(self.gru, self.patch.bins, state, bins, precomputed)
        return self(bins, None, state)

    def precompute(self, state: Tensor, bins: Tensor, precomputed: Precomputed | None) -> Precomputed | None:
        """The part of the next frame that its first bins (B, t, C) determine; kept beside the state of a stream."""
        if len(bins) != 1 or torch.is_grad_enabled():
            return None
        return _precompute_frame(self.gru, self.patch.bins, state, bins, precomputed)

    def finish(self, state: Tensor) -> Tensor:
        """No remaining frames: a GRU buffers none. (B, 0, D)"""
        return state.new_zeros(state.shape[1], 0, self.n_outputs)

    def _run_layer(self, x: Tensor, h0: Tensor, layer: int, direction: int, padding: Tensor | None) -> Tensor:
        """One layer in one direction; `padding` (F, B) marks frames that leave the state unchanged. -> (F, B, H)"""
        suffix = f"_l{layer}" + "_reverse" * direction
        w_ih, w_hh = getattr(self.gru, "weight_ih" + suffix), getattr(self.gru, "weight_hh" + suffix)
        b_ih, b_hh = getattr(self.gru, "bias_ih" + suffix), getattr(self.gru, "bias_hh" + suffix)
        width = self.settings.width
        bias = b_ih + F.pad(b_hh[: 2 * width], (0, width))  # the two biases of the candidate stay separate
        projected = F.linear(x, w_ih, bias) if layer else project_patches(x, w_ih, bias, self.patch)
        if padding is not None:
            projected[..., width : 2 * width].masked_fill_(padding[..., None], _KEEP_STATE)
        return gru_recurrence(projected, h0, w_hh, b_hh[2 * width :], reverse=bool(direction))

    def _forward_torch(
        self,
        bins: Tensor,
        n_frames: Tensor | None,
        state: Tensor,
        layers: Collection[int],
        known_lengths: tuple[int, ...] | None = None,
    ) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """torch's kernels: all layers in one call, or layer by layer for dropout or outputs of intermediate layers.

        cuDNN draws the dropout between its layers from its own RNG state, which `torch.manual_seed` does not reset
        (pytorch/pytorch#104697), so a resumed run would differ from an uninterrupted one. Nor does it compute gradients
        of an `nn.GRU` in evaluation mode (pytorch/pytorch#5878), which adaptation needs.
        """
        frames = extract_patches(bins, self.patch).transpose(0, 1)  # (F, B, D)
        lengths = None
        if self.settings.bidirectional and n_frames is not None:
            lengths = n_frames.cpu() if known_lengths is None else torch.tensor(known_lengths)
        packing = _Packing(lengths, len(frames), frames.device)
        x, state = packing.pack(frames), packing.sort(state)
        drops = self.training and self.settings.dropout > 0 and self.settings.depth > 1
        differentiates_evaluation = torch.is_grad_enabled() and not self.training
        inner: dict[int, Tensor] = {}
        if not layers and not drops and not differentiates_evaluation:
            x, after = self.gru(x, state.contiguous())
        else:
            last = []
            for layer, before in enumerate(state.unflatten(0, (-1, self.n_directions)), start=1):
                if layer > 1:
                    x = _on_values(x, lambda values: F.dropout(values, self.settings.dropout, self.training))
                directions = slice((layer - 1) * self.n_directions, layer * self.n_directions)
                weights: list[Tensor] = [w for direction in self.gru.all_weights[directions] for w in direction]
                x, state = _run_torch_layer(x, before.contiguous(), weights)
                last.append(state)
                if layer in layers:
                    inner[layer] = packing.unpack(x).transpose(0, 1)
            after = torch.cat(last)
        return packing.unpack(x).transpose(0, 1), packing.restore(after), inner


def _run_torch_layer(
    x: Tensor | PackedSequence, state: Tensor, weights: list[Tensor]
) -> tuple[Tensor | PackedSequence, Tensor]:
    """One layer in one or both directions by torch's kernel. (F, B, D), (directions, B, H) -> (F, B, D)

    cuDNN computes gradients only for calls with `train=True`; without dropout the flag has no other effect.
    """
    train = torch.is_grad_enabled()
    options = (weights, True, 1, 0.0, train, len(state) == 2)  # biases, layers, dropout, train, bidirectional
    if isinstance(x, PackedSequence):
        values, state = torch.gru(x.data, x.batch_sizes, state, *options)
        return x._replace(data=values), state
    frames, state = torch.gru(x, state, *options, False)
    return frames, state


def _on_values(x: Tensor | PackedSequence, change: Callable[[Tensor], Tensor]) -> Tensor | PackedSequence:
    return x._replace(data=change(x.data)) if isinstance(x, PackedSequence) else change(x)


class _Packing:
    """Trials of different lengths (on the CPU) in the layout of torch's kernels; without lengths nothing is changed.

    All layers run on one packed batch. The trials are sorted by length here, because `pack_padded_sequence` and
    `pad_packed_sequence` would copy the order to the device and back, and wait for it both times.
    """

    def __init__(self, lengths: Tensor | None, n_frames: int, device: torch.device) -> None:
        self.n_frames, self.lengths = n_frames, lengths
        if lengths is not None:
            self.lengths, order = torch.sort(lengths, descending=True, stable=True)
            self.inverse, self.order = to_device(torch.argsort(order), device), to_device(order, device)

    def pack(self, x: Tensor) -> Tensor | PackedSequence:
        return x if self.lengths is None else pack_padded_sequence(x.index_select(1, self.order), self.lengths)

    def unpack(self, x: Tensor | PackedSequence) -> Tensor:
        if isinstance(x, Tensor):
            return x
        return pad_packed_sequence(x, total_length=self.n_frames)[0].index_select(1, self.inverse)

    def sort(self, state: Tensor) -> Tensor:
        return state if self.lengths is None else state.index_select(1, self.order)

    def restore(self, state: Tensor) -> Tensor:
        return state if self.lengths is None else state.index_select(1, self.inverse)


# One frame of one stream. The frame is bound by memory bandwidth, since every weight is loaded once. The recurrent
# products depend only on the previous frame, and most bins of a patch arrive long before its last one; so most of the
# work can be done while waiting (`_precompute_frame`). The result is stored alongside the state; discarding it only
# costs time.


def _step_one_frame(
    gru: nn.GRU, patch_bins: int, state: Tensor, bins: Tensor, precomputed: Precomputed | None
) -> tuple[Tensor, Tensor]:
    """State (depth, 1, H) and the bins of one patch (1, t, C) -> the frame (1, 1, H) and the state after it."""
    ready = _precompute_frame(gru, patch_bins, state, bins, precomputed)
    projected = ready.projected
    states: list[Tensor] = []
    for k in range(gru.num_layers):
        if k:
            projected = F.linear(states[-1], _weight(gru, f"weight_ih_l{k}"), _weight(gru, f"bias_ih_l{k}"))
        r, z, n = projected.chunk(3, dim=1)
        r_state, z_state, n_state = ready.recurrent[k].chunk(3, dim=1)
        candidate = torch.tanh(n + torch.sigmoid(r + r_state) * n_state)
        states.append(torch.lerp(candidate, state[k], torch.sigmoid(z + z_state)))
    return states[-1][:, None], torch.stack(states)


def _precompute_frame(
    gru: nn.GRU, patch_bins: int, state: Tensor, bins: Tensor, precomputed: Precomputed | None
) -> Precomputed:
    """Extend the precomputed part of the next frame by the bins (1, t, C) of its patch that have arrived."""
    if precomputed is None:
        recurrent = [
            F.linear(state[k], _weight(gru, f"weight_hh_l{k}"), _weight(gru, f"bias_hh_l{k}"))
            for k in range(gru.num_layers)
        ]
        precomputed = Precomputed(0, _weight(gru, "bias_ih_l0")[None].clone(), torch.stack(recurrent))
    n_bins = min(bins.shape[1], patch_bins)
    if n_bins <= precomputed.n_bins:
        return precomputed
    n_channels, first = bins.shape[2], precomputed.n_bins
    columns = _weight(gru, "weight_ih_l0")[:, first * n_channels : n_bins * n_channels]
    added = F.linear(bins[:, first:n_bins].flatten(1), columns)
    return Precomputed(n_bins, precomputed.projected + added, precomputed.recurrent)


def _weight(gru: nn.GRU, name: str) -> Tensor:
    weight: Tensor = getattr(gru, name)
    return weight


def gru_recurrence(projected: Tensor, h0: Tensor, weight: Tensor, bias: Tensor, reverse: bool = False) -> Tensor:
    """Recurrence of one layer and direction. (F, B, 3H), (B, H), (3H, H), (H,) -> (F, B, H)

    `projected` holds W x_t with all biases in the order r, z, n, except the recurrent bias c_n of the candidate
    (`bias`), which the reset gate scales as well.
    """
    if torch.is_grad_enabled():
        states: Tensor = _Recurrence.apply(projected, h0, weight, bias, reverse)
        return states
    return _run_recurrence(projected, h0, weight, bias, reverse)[0]


def _run_recurrence(
    projected: Tensor, h0: Tensor, weight: Tensor, bias: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States, states before each frame, parts (r, z, recurrent part of n) and candidates n for all frames.

    Every frame is one matrix product, one sigmoid, one tanh and two fused element-wise operations, all written in place
    into preallocated tensors; views are unbound once instead of indexed per frame, since for small batches the overhead
    of the Python loop would otherwise dominate. Cost: F products of (B, H) with (H, 3H).
    """
    n_frames, n_trials, width = projected.shape[0], projected.shape[1], h0.shape[1]
    all_states = projected.new_empty(n_frames + 1, n_trials, width)
    states, before = (all_states[:-1], all_states[1:]) if reverse else (all_states[1:], all_states[:-1])
    all_states[-1 if reverse else 0] = h0
    parts = projected.clone(memory_format=torch.contiguous_format)
    parts[..., 2 * width :] = bias
    candidates = projected.new_empty(n_frames, n_trials, width)
    weight = weight.t()
    if n_frames > _TRANSPOSE_MIN_FRAMES:
        weight = weight.contiguous()  # small products are twice as fast in this layout
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
    """Backpropagation through time; only the inherently sequential part runs frame by frame.

    With dh the gradient of h_t, the gradients of the four pre-activations are dh times factors known from the forward
    pass:

        input part of n:      (1 - z) (1 - n^2)
        recurrent part of n:  the above times r
        r:                    the above times (1 - r) times the recurrent part of n
        z:                    (h_{t-1} - n) z (1 - z)

    The factors of all frames are computed at once. The loop then only multiplies them by dh and carries
    dh_{t-1} = z dh + [d_recurrent, d_r, d_z] U: one product per frame. The gradient of U is one product over all
    frames.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, projected: Tensor, h0: Tensor, weight: Tensor, bias: Tensor, reverse: bool) -> Tensor:
        states, *kept = _run_recurrence(projected, h0, weight, bias, reverse)
        ctx.reverse = reverse  # type: ignore[attr-defined]
        ctx.save_for_backward(weight, *kept)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx, d_states: Tensor):  # type: ignore[no-untyped-def]
        weight, before, parts, n = ctx.saved_tensors
        n_frames, n_trials, width = n.shape
        r, z, recurrent = parts.unflatten(2, (3, width)).unbind(2)
        d = n.new_empty(n_frames, n_trials, 4, width)
        d_recurrent, d_r, d_z, d_n = d.unbind(2)
        torch.mul(1 - z, 1 - n * n, out=d_n)
        torch.mul(d_n, r, out=d_recurrent)
        torch.mul(d_recurrent, 1 - r, out=d_r).mul_(recurrent)
        torch.mul(before - n, z, out=d_z).mul_(1 - z)
        weight_nrz = torch.cat([weight[2 * width :], weight[: 2 * width]])  # rows in the order n, r, z
        dh = n.new_zeros(n_trials, width)
        dh_for_each = dh[:, None]  # (B, 1, H)
        frames = zip(d.unbind(0), d[:, :, :3].flatten(2).unbind(0), z.unbind(0), d_states.unbind(0), strict=True)
        for d_all, d_through_state, carried, d_state in frames if ctx.reverse else reversed(list(frames)):
            dh.add_(d_state)
            d_all.mul_(dh_for_each)
            dh.mul_(carried).addmm_(d_through_state, weight_nrz)
        d_flat, before_flat = d.view(-1, 4 * width), before.flatten(0, 1)
        d_weight = torch.empty_like(weight)
        torch.mm(d_flat[:, width : 3 * width].t(), before_flat, out=d_weight[: 2 * width])
        torch.mm(d_flat[:, :width].t(), before_flat, out=d_weight[2 * width :])
        d_projected = d_flat[:, width:].view(n_frames, n_trials, 3 * width)
        return d_projected, dh, d_weight, d_flat[:, :width].sum(0), None
