"""The flow bridge: carries the frames of noisy bins towards those the same encoder makes of clean bins.

A small network says how fast a frame should move, given where it and its neighbours are and how far along they are; a
few Euler steps from the encoder's own frames give the frames that the heads read. It is trained on straight lines
between the two (conditional flow matching, with the noisy frames as the start), nothing is drawn when it is used, and
at the start of its training it moves nothing. Where a frame started it is not told: with both ends of a stretch known,
the direction would be no riddle in training, and a riddle again in use. Causal where the encoder is.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arcuate.models.config import DenoiserSettings
from arcuate.models.interfaces import Flow

DenoiserState = tuple[Tensor, ...]  # per step, the last taps - 1 hidden frames (B, taps - 1, W)


class Denoiser(nn.Module):
    def __init__(self, settings: DenoiserSettings, n_features: int, causal: bool) -> None:
        super().__init__()
        self.settings, self.causal = settings, causal
        self.here = nn.Linear(n_features, settings.width)
        self.time = nn.Linear(1, settings.width, bias=False)
        self.mix = nn.Parameter(torch.empty(settings.width, settings.width * settings.conv_kernel))
        self.mix_bias = nn.Parameter(torch.zeros(settings.width))
        self.output = nn.Linear(settings.width, n_features)
        if not self.mix.is_meta:
            bound = 1 / math.sqrt(settings.width * settings.conv_kernel)
            nn.init.uniform_(self.mix, -bound, bound)
            nn.init.zeros_(self.output.weight)
            nn.init.zeros_(self.output.bias)

    def start(self, like: Tensor) -> DenoiserState:
        shape = (len(like), self.settings.conv_kernel - 1, self.settings.width)
        return tuple(like.new_zeros(shape) for _ in range(self.settings.steps))

    def step(self, state: DenoiserState, frames: Tensor) -> tuple[Tensor, DenoiserState]:
        """The next frames of a causal stream, along the whole flow."""
        if not frames.shape[1]:
            return frames, state
        at, after = frames, []
        for i, recent in enumerate(state):
            hidden = torch.cat([recent, self._hidden(at, i / len(state))], dim=1)
            at = at + self._speed(hidden) / len(state)
            after.append(hidden[:, hidden.shape[1] - self.settings.conv_kernel + 1 :])
        return at, tuple(after)

    def forward(self, frames: Tensor, n_frames: Tensor) -> Tensor:
        """Whole trials. (B, F, D) -> (B, F, D)"""
        if self.causal:
            return self.step(self.start(frames), frames)[0]
        at, n_steps = frames, self.settings.steps
        for i in range(n_steps):
            at = at + self._around(at, i / n_steps, n_frames) / n_steps
        return at

    def match(self, noisy: Tensor, clean: Tensor, n_frames: Tensor, times: Tensor) -> Flow:
        """What it says and should say somewhere (B,) along the lines from noisy to clean frames (B, F, D)."""
        noisy, clean = noisy.detach(), clean.detach()
        along = times[:, None, None]
        between = noisy + along * (clean - noisy)
        said = self._around(between, along, n_frames)
        return Flow(said, clean - noisy)

    def _around(self, at: Tensor, time: float | Tensor, n_frames: Tensor) -> Tensor:
        hidden = self._hidden(at, time)
        beyond = torch.arange(at.shape[1], device=at.device) >= n_frames[:, None]
        hidden = hidden.masked_fill(beyond[..., None], 0.0)
        left = self.settings.conv_kernel - 1 if self.causal else (self.settings.conv_kernel - 1) // 2
        return self._speed(F.pad(hidden, (0, 0, left, self.settings.conv_kernel - 1 - left)))

    def _hidden(self, at: Tensor, time: float | Tensor) -> Tensor:
        when = torch.as_tensor(time, dtype=at.dtype, device=at.device).reshape(-1, 1, 1)
        return F.silu(self.here(at) + self.time(when))

    def _speed(self, hidden: Tensor) -> Tensor:
        """(B, F + taps - 1, W) -> (B, F, D)"""
        windows = hidden.unfold(1, self.settings.conv_kernel, 1).flatten(2)  # (B, F, W * taps)
        speed: Tensor = self.output(F.silu(F.linear(windows, self.mix, self.mix_bias)))
        return speed
