"""Denoiser: a flow-matching bridge from the encoder frames of noisy bins to those of clean bins.

A small convolutional network predicts the velocity v(x, t) of a frame x at time t in [0, 1]. Training uses straight
lines between paired frames (conditional flow matching, Lipman et al. 2023, with the noisy frames as the source instead
of Gaussian noise): at x_t = (1 - t) noisy + t clean the target velocity is clean - noisy. Inference integrates
dx/dt = v from the encoder's own frames with a few Euler steps; it is deterministic. The output layer is initialised to
zero, so an untrained denoiser is the identity.

The network does not receive the source frame. With x_t and the source it could compute the target velocity in training
as (x_t - source) / t, which gives no information at inference, where integration starts at the source itself. The
denoiser is causal if the encoder is.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arcuate.models.config import DenoiserSettings
from arcuate.models.interfaces import Flow

DenoiserState = tuple[Tensor, ...]  # per Euler step, the last kernel - 1 hidden frames (B, kernel - 1, W)


class Denoiser(nn.Module):
    def __init__(self, settings: DenoiserSettings, n_features: int, causal: bool) -> None:
        super().__init__()
        self.settings, self.causal = settings, causal
        self.input = nn.Linear(n_features, settings.width)
        self.time = nn.Linear(1, settings.width, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(settings.width, settings.width * settings.conv_kernel))
        self.conv_bias = nn.Parameter(torch.zeros(settings.width))
        self.output = nn.Linear(settings.width, n_features)
        if not self.conv_weight.is_meta:
            bound = 1 / math.sqrt(settings.width * settings.conv_kernel)
            nn.init.uniform_(self.conv_weight, -bound, bound)
            nn.init.zeros_(self.output.weight)
            nn.init.zeros_(self.output.bias)

    def start(self, like: Tensor) -> DenoiserState:
        """State before the first frame; `like` (B, …) gives batch size, device and dtype."""
        shape = (len(like), self.settings.conv_kernel - 1, self.settings.width)
        return tuple(like.new_zeros(shape) for _ in range(self.settings.steps))

    def step(self, state: DenoiserState, frames: Tensor) -> tuple[Tensor, DenoiserState]:
        """Denoise the next frames of a causal stream. (B, F, D) -> (B, F, D)"""
        if not frames.shape[1]:
            return frames, state
        x, after = frames, []
        for i, recent in enumerate(state):
            hidden = torch.cat([recent, self._hidden(x, i / len(state))], dim=1)
            x = x + self._velocity(hidden) / len(state)
            after.append(hidden[:, hidden.shape[1] - self.settings.conv_kernel + 1 :])
        return x, tuple(after)

    def forward(self, frames: Tensor, n_frames: Tensor) -> Tensor:
        """Denoise complete trials. (B, F, D) -> (B, F, D)"""
        if self.causal:
            return self.step(self.start(frames), frames)[0]
        x, n_steps = frames, self.settings.steps
        for i in range(n_steps):
            x = x + self._padded_velocity(x, i / n_steps, n_frames) / n_steps
        return x

    def match(self, noisy: Tensor, clean: Tensor, n_frames: Tensor, times: Tensor) -> Flow:
        """Predicted and target velocity at the given times (B,) between noisy and clean frames (B, F, D)."""
        noisy, clean = noisy.detach(), clean.detach()
        t = times[:, None, None]
        x = noisy + t * (clean - noisy)
        return Flow(self._padded_velocity(x, t, n_frames), clean - noisy)

    def _padded_velocity(self, x: Tensor, time: float | Tensor, n_frames: Tensor) -> Tensor:
        """Velocity for complete trials, with zeros as context beyond their true length."""
        hidden = self._hidden(x, time)
        is_padding = torch.arange(x.shape[1], device=x.device) >= n_frames[:, None]
        hidden = hidden.masked_fill(is_padding[..., None], 0.0)
        n_context = self.settings.conv_kernel - 1
        left = n_context if self.causal else n_context // 2
        return self._velocity(F.pad(hidden, (0, 0, left, n_context - left)))

    def _hidden(self, x: Tensor, time: float | Tensor) -> Tensor:
        t = time.reshape(-1, 1, 1) if isinstance(time, Tensor) else x.new_full((1, 1, 1), time)
        return F.silu(self.input(x) + self.time(t))

    def _velocity(self, hidden: Tensor) -> Tensor:
        """(B, F + kernel - 1, W) -> (B, F, D)"""
        windows = hidden.unfold(1, self.settings.conv_kernel, 1).flatten(2)  # (B, F, W * kernel)
        velocity: Tensor = self.output(F.silu(F.linear(windows, self.conv_weight, self.conv_bias)))
        return velocity
