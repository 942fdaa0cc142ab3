"""Speaking mode: was a trial voiced or silent? Told from how strongly each channel swings, and for how long.

A frame of this head is the mean of a few normalised bins; its evidence are the products of every channel with itself,
now and some frames ago, averaged over time. In a causal model the average runs over the past alone, so that the answer
changes while a trial is heard; otherwise it is that of the whole trial. Before anything was heard it is the average
trial, which counts as `prior_frames` frames. Nothing random reaches this head: training shows it clean bins.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from arcuate.models.config import Patch, SpeakingModeSettings

MODES = ("silent", "vocalised")


@dataclass(frozen=True)
class ModeState:
    """What a stream remembers: bins of an unfinished frame, the last frames, and sums over all of them."""

    bins: Tensor  # (B, <stride, C)
    recent: Tensor  # (B, lags - 1, C)
    total: Tensor  # (B, 1, lags * C) float64, so that chunks add up
    n_frames: int
    logits: Tensor  # (B, 1, 2) after the last whole frame
    waiting: Tensor  # (B, w, 2) answers for bins that smoothing still holds back


class SpeakingMode(nn.Module):
    centre: Tensor  # mean and SD of the evidence over training trials: `fit`
    spread: Tensor

    def __init__(self, settings: SpeakingModeSettings, patch: Patch, n_channels: int, causal: bool) -> None:
        super().__init__()
        self.settings, self.n_channels, self.causal = settings, n_channels, causal
        self.stride = patch.stride
        n = settings.lags * n_channels
        self.register_buffer("centre", torch.zeros(n))
        self.register_buffer("spread", torch.ones(n))
        self.answer = nn.Linear(n, len(MODES))
        self.gain = nn.Parameter(torch.zeros(len(MODES), n_channels)) if settings.film else None
        self.shift = nn.Parameter(torch.zeros(len(MODES), n_channels)) if settings.film else None
        if not self.answer.weight.is_meta:
            nn.init.zeros_(self.answer.weight)
            nn.init.zeros_(self.answer.bias)

    def fit(self, mean: Tensor, sd: Tensor) -> None:
        """What the evidence of a training trial looks like on average."""
        self.centre.copy_(mean)
        self.spread.copy_(sd.clamp(min=1e-6))

    def forward(self, bins: Tensor, n_bins: Tensor) -> tuple[Tensor, Tensor]:
        """Whole trials of normalised bins (B, T, C) -> logits (B, 2) of each trial, and for every bin (B, T, 2)."""
        n_frames = self.count_frames(n_bins)
        products = self.evidence(self._frames(bins), None)  # (B, M, lags * C)
        if self.causal:
            sums = products.double().cumsum(1)
            heard = self._answer(sums, torch.arange(1, sums.shape[1] + 1, device=bins.device)[:, None])
            before = self._answer(sums[:, :1] * 0, bins.new_zeros(1, 1))
            heard = torch.cat([before, heard], dim=1)  # (B, M + 1, 2) after 0, 1, … frames
            last = heard[torch.arange(len(bins), device=bins.device), n_frames]
            return last, heard[:, self._frames_before(0, bins.shape[1], bins.device)]
        true = torch.arange(products.shape[1], device=bins.device) < n_frames[:, None]
        total = (products.double() * true[..., None]).sum(1, keepdim=True)
        last = self._answer(total, n_frames[:, None, None])  # (B, 1, 2)
        return last[:, 0], last.expand(-1, bins.shape[1], -1)

    def pool(self, bins: Tensor, n_bins: Tensor) -> Tensor:
        """Mean evidence over the true frames of each trial. (B, lags * C) float64"""
        products, n_frames = self.evidence(self._frames(bins), None), self.count_frames(n_bins)
        true = torch.arange(products.shape[1], device=bins.device) < n_frames[:, None]
        total = (products.double() * true[..., None]).sum(1)
        return total / n_frames.clamp(min=1)[:, None]

    def start(self, like: Tensor) -> ModeState:
        """`like` (B, …, C) tells how many streams, where and in which precision."""
        zeros = like.new_zeros(len(like), 0, self.n_channels)
        recent = like.new_zeros(len(like), self.settings.lags - 1, self.n_channels)
        total = torch.zeros(len(like), 1, self.centre.numel(), dtype=torch.float64, device=like.device)
        logits = self._answer(total, like.new_zeros(1, 1))
        return ModeState(zeros, recent, total, 0, logits, logits[:, :0])

    def step(self, state: ModeState, bins: Tensor) -> ModeState:
        """The next bins (B, t, C); an answer for each of them joins those that wait."""
        held = torch.cat([state.bins, bins], dim=1)
        first = state.n_frames * self.stride + state.bins.shape[1]
        frames = self._frames(held)
        n_new = frames.shape[1]
        sums = self.evidence(frames, state.recent).double().cumsum(1) + state.total
        counts = torch.arange(state.n_frames + 1, state.n_frames + n_new + 1, device=bins.device)
        answers = torch.cat([state.logits, self._answer(sums, counts[:, None])], dim=1)
        places = self._frames_before(first, bins.shape[1], bins.device) - state.n_frames
        recent = torch.cat([state.recent, frames], dim=1)
        return ModeState(
            held[:, n_new * self.stride :],
            recent[:, recent.shape[1] - self.settings.lags + 1 :],
            sums[:, -1:] if n_new else state.total,
            state.n_frames + n_new,
            answers[:, -1:],
            torch.cat([state.waiting, answers[:, places]], dim=1),
        )

    def condition(self, bins: Tensor, logits: Tensor) -> Tensor:
        """Channels scaled and shifted by the mode (B, T, C); the answer itself is not pulled at by other losses."""
        if self.gain is None or self.shift is None:
            return bins
        posterior = logits.detach().softmax(-1).to(bins.dtype)  # (B, T, 2)
        return bins * (1 + posterior @ self.gain) + posterior @ self.shift

    def count_frames(self, n_bins: Tensor) -> Tensor:
        return torch.div(n_bins, self.stride, rounding_mode="floor")

    def evidence(self, frames: Tensor, recent: Tensor | None) -> Tensor:
        """Every frame times itself and each of the frames before it. (B, M, C) -> (B, M, lags * C)"""
        lags = self.settings.lags
        if recent is None:
            recent = frames.new_zeros(len(frames), lags - 1, self.n_channels)
        line = torch.cat([recent, frames], dim=1)
        n = frames.shape[1]
        return torch.cat(
            [frames * line[:, lags - 1 - lag : lags - 1 - lag + n] for lag in range(lags)], dim=-1
        )

    def _frames(self, bins: Tensor) -> Tensor:
        """Means over the bins of every whole stride. (B, T, C) -> (B, M, C)"""
        n = bins.shape[1] // self.stride
        return bins[:, : n * self.stride].unflatten(1, (n, self.stride)).mean(2) if n else bins[:, :0]

    def _frames_before(self, first: int, n: int, device: torch.device) -> Tensor:
        """How many frames are whole once each of `n` bins from the `first` on has come."""
        return self.count_frames(torch.arange(first + 1, first + n + 1, device=device))

    def _answer(self, sums: Tensor, n_frames: Tensor) -> Tensor:
        """Logits of running means, drawn towards the average trial while little was heard."""
        prior = self.settings.prior_frames
        away = (sums - n_frames * self.centre.double()) / (n_frames + prior)
        standard = (away / self.spread).to(self.answer.weight.dtype)
        answer: Tensor = self.answer(standard)
        return answer
