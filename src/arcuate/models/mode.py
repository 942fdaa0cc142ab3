"""Speaking mode: classification of a trial as vocalised or silent, and mode-dependent channel gains.

A frame of this head is the mean of a few normalised bins. Its evidence is the autocorrelation of every channel at a few
lags, averaged over time; a linear classifier maps it to the logits of the two modes. In a causal model the average runs
over the past only, so the posterior changes in the course of a trial; otherwise it covers the complete trial. The
average training trial acts as a prior worth `prior_frames` frames. The classifier is deterministic and trained on bins
without augmentation.

The mode conditions the encoder as FiLM does (feature-wise linear modulation, Perez et al. 2018): every channel gets a
gain and an offset that are linear in the posterior.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from arcuate.models.config import Patch, SpeakingModeSettings

MODES = ("silent", "vocalised")


@dataclass(frozen=True)
class ModeState:
    """Streaming state: bins of an incomplete frame, the last frames, and sums over all frames."""

    bins: Tensor  # (B, <stride, C)
    recent: Tensor  # (B, lags - 1, C)
    total: Tensor  # (B, 1, lags * C) float64, so that the result does not depend on the chunks
    n_frames: int
    logits: Tensor  # (B, 1, 2) after the last complete frame
    pending: Tensor  # (B, w, 2) logits of bins that smoothing still holds back


class SpeakingMode(nn.Module):
    evidence_mean: Tensor  # over training trials, see `set_evidence_statistics`
    evidence_sd: Tensor

    def __init__(self, settings: SpeakingModeSettings, patch: Patch, n_channels: int, causal: bool) -> None:
        super().__init__()
        self.settings, self.n_channels, self.causal = settings, n_channels, causal
        self.stride = patch.stride
        n = settings.lags * n_channels
        self.register_buffer("evidence_mean", torch.zeros(n))
        self.register_buffer("evidence_sd", torch.ones(n))
        self.classifier = nn.Linear(n, len(MODES))
        self.gain = nn.Parameter(torch.zeros(len(MODES), n_channels))
        self.shift = nn.Parameter(torch.zeros(len(MODES), n_channels))
        if not self.classifier.weight.is_meta:
            nn.init.zeros_(self.classifier.weight)
            nn.init.zeros_(self.classifier.bias)

    def set_evidence_statistics(self, mean: Tensor, sd: Tensor) -> None:
        """Store mean and SD of the evidence over training trials, which standardise the classifier's input."""
        self.evidence_mean.copy_(mean)
        self.evidence_sd.copy_(sd.clamp(min=1e-6))

    def forward(self, bins: Tensor, n_bins: Tensor) -> tuple[Tensor, Tensor]:
        """Complete trials of normalised bins (B, T, C) -> logits per trial (B, 2) and per bin (B, T, 2)."""
        n_frames = self.count_frames(n_bins)
        evidence = self._evidence(self._frames(bins), None)  # (B, M, lags * C)
        if self.causal:
            sums = evidence.double().cumsum(1)
            after = self._classify(sums, torch.arange(1, sums.shape[1] + 1, device=bins.device)[:, None])
            before = self._classify(sums[:, :1] * 0, bins.new_zeros(1, 1))
            logits = torch.cat([before, after], dim=1)  # (B, M + 1, 2) after 0, 1, … frames
            last = logits[torch.arange(len(bins), device=bins.device), n_frames]
            return last, logits[:, self._complete_frames(0, bins.shape[1], bins.device)]
        last = self._classify(self._total(evidence, n_frames), n_frames[:, None, None])  # (B, 1, 2)
        return last[:, 0], last.expand(-1, bins.shape[1], -1)

    def mean_evidence(self, bins: Tensor, n_bins: Tensor) -> Tensor:
        """Mean evidence over the true frames of each trial. (B, lags * C) float64"""
        n_frames = self.count_frames(n_bins)
        total = self._total(self._evidence(self._frames(bins), None), n_frames)[:, 0]
        return total / n_frames.clamp(min=1)[:, None]

    def start(self, like: Tensor) -> ModeState:
        """State before the first bin; `like` (B, …) gives batch size, device and dtype."""
        zeros = like.new_zeros(len(like), 0, self.n_channels)
        recent = like.new_zeros(len(like), self.settings.lags - 1, self.n_channels)
        total = torch.zeros(len(like), 1, self.evidence_mean.numel(), dtype=torch.float64, device=like.device)
        logits = self._classify(total, like.new_zeros(1, 1))
        return ModeState(zeros, recent, total, 0, logits, logits[:, :0])

    def step(self, state: ModeState, bins: Tensor) -> ModeState:
        """Next bins (B, t, C) of a stream; the logits of each are appended to the pending ones."""
        waiting = torch.cat([state.bins, bins], dim=1)
        first = state.n_frames * self.stride + state.bins.shape[1]
        frames = self._frames(waiting)
        n_new = frames.shape[1]
        sums = self._evidence(frames, state.recent).double().cumsum(1) + state.total
        counts = torch.arange(state.n_frames + 1, state.n_frames + n_new + 1, device=bins.device)
        logits = torch.cat([state.logits, self._classify(sums, counts[:, None])], dim=1)
        index = self._complete_frames(first, bins.shape[1], bins.device) - state.n_frames
        recent = torch.cat([state.recent, frames], dim=1)
        return ModeState(
            waiting[:, n_new * self.stride :],
            recent[:, recent.shape[1] - self.settings.lags + 1 :],
            sums[:, -1:] if n_new else state.total,
            state.n_frames + n_new,
            logits[:, -1:],
            torch.cat([state.pending, logits[:, index]], dim=1),
        )

    def condition(self, bins: Tensor, logits: Tensor) -> Tensor:
        """FiLM: bins * (1 + gain) + shift for the posterior of each bin. (B, T, C), (B, T, 2) -> (B, T, C)

        The posterior is detached, so that only the mode loss trains the classifier.
        """
        posterior = logits.detach().softmax(-1).to(bins.dtype)  # (B, T, 2)
        return bins * (1 + posterior @ self.gain) + posterior @ self.shift

    def count_frames(self, n_bins: Tensor) -> Tensor:
        return torch.div(n_bins, self.stride, rounding_mode="floor")

    def _frames(self, bins: Tensor) -> Tensor:
        """Means over every complete stride. (B, T, C) -> (B, M, C)"""
        n = bins.shape[1] // self.stride
        return bins[:, : n * self.stride].unflatten(1, (n, self.stride)).mean(2) if n else bins[:, :0]

    def _complete_frames(self, first: int, n: int, device: torch.device) -> Tensor:
        """Number of complete frames after each of the `n` bins from index `first` on. (n,)"""
        return self.count_frames(torch.arange(first + 1, first + n + 1, device=device))

    def _evidence(self, frames: Tensor, recent: Tensor | None) -> Tensor:
        """Products of every frame with itself and the lags - 1 frames before it. (B, M, C) -> (B, M, lags * C)"""
        lags = self.settings.lags
        if recent is None:
            recent = frames.new_zeros(len(frames), lags - 1, self.n_channels)
        padded = torch.cat([recent, frames], dim=1)
        n = frames.shape[1]
        return torch.cat([frames * padded[:, lags - 1 - lag : lags - 1 - lag + n] for lag in range(lags)], dim=-1)

    def _total(self, evidence: Tensor, n_frames: Tensor) -> Tensor:
        """Sum over the true frames of each trial. (B, M, E) -> (B, 1, E) float64"""
        is_true = torch.arange(evidence.shape[1], device=evidence.device) < n_frames[:, None]
        return (evidence.double() * is_true[..., None]).sum(1, keepdim=True)

    def _classify(self, sums: Tensor, n_frames: Tensor) -> Tensor:
        """Logits of the mean evidence, shrunk towards the average trial by `prior_frames`."""
        prior = self.settings.prior_frames
        deviation = (sums - n_frames * self.evidence_mean.double()) / (n_frames + prior)
        standardised = (deviation / self.evidence_sd).to(self.classifier.weight.dtype)
        logits: Tensor = self.classifier(standardised)
        return logits
