"""One frame of a GRU for one stream, with most of its work done before its last bin is there.

A frame of one stream is bound by memory: every weight is read once. But the recurrent products need only the frame
before, and most bins of a patch are there long before its last one. What is done ahead is a value beside the state;
dropping it costs time and changes nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
