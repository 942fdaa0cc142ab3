"""From stored bins to the bins an encoder reads: normalisation, smoothing, session layer, frame count.

Every function here works on a whole padded batch and on one chunk of a stream alike; what a stream must
remember between chunks goes in and comes out as a value.
"""

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arcuate.batches.statistics import BatchStatistics
from arcuate.frames import count_frames as frames_of
from arcuate.models.session_layer import SessionLayer
from arcuate.models.settings import FrontEnd as FrontEndSettings
from arcuate.models.settings import Patch, Smoothing
from arcuate.models.stem import Stem, StemState

Count = TypeVar("Count", int, Tensor)
BAND = 32  # bins smoothed by one product


def count_frames(n_bins: Count, patch: Patch) -> Count:
    """Frames of a trial that is zero-padded to one patch where it is shorter."""
    frames: Count = frames_of(n_bins, patch.bins, patch.stride)
    return frames


@dataclass(frozen=True)
class Running:
    """Sums over the bins of a trial so far, around the past mean; float64, so that chunks add up exactly."""

    total: Tensor  # (B, 1, C)
    squares: Tensor  # (B, 1, C)
    n_bins: int


def normalise(
    bins: Tensor,  # (B, T, C)
    statistics: BatchStatistics | None,
    settings: FrontEndSettings,
    running: Running | None = None,
) -> tuple[Tensor, Running | None]:
    """Bins as the model sees them; a value that is not finite becomes 0, for every trial needs an answer."""
    if settings.log:
        bins = bins.sign() * bins.abs().log1p()
    if settings.normalise == "rolling":
        assert statistics is not None
        bins, running = _normalise_rolling(bins, statistics, settings.rolling_bins, running)
    elif settings.normalise == "block":
        assert statistics is not None
        bins = (bins - statistics.mean[:, None]) / (statistics.sd[:, None] + 1e-8)
    return torch.nan_to_num(bins, nan=0.0, posinf=0.0, neginf=0.0), running


def _normalise_rolling(
    bins: Tensor, past: BatchStatistics, rolling_bins: int, running: Running | None
) -> tuple[Tensor, Running]:
    """Causal z-scores: the past counts as at most `rolling_bins` bins, every bin of the trial as one."""
    weight = past.n_bins.clamp(max=rolling_bins).double()[:, None, None]  # (B, 1, 1)
    known = weight > 0
    mean = torch.where(known, past.mean[:, None].double().nan_to_num(), 0.0)  # (B, 1, C)
    sd = torch.where(known, past.sd[:, None].double().nan_to_num(), 0.0)
    if running is None:
        running = Running(torch.zeros_like(mean), torch.zeros_like(mean), 0)
    centred = torch.where(bins.isfinite(), bins - mean, 0.0)  # (B, T, C) float64
    total = centred.cumsum(1) + running.total
    squares = centred.square().cumsum(1) + running.squares
    n_bins = running.n_bins + bins.shape[1]
    seen = torch.arange(running.n_bins + 1, n_bins + 1, device=bins.device)[None, :, None]  # (1, T, 1)
    count = weight + seen
    shift = total / count
    variance = (weight * sd.square() + squares) / count - shift.square()
    scores = (centred - shift) / (variance.clamp(min=0.0).sqrt() + 1e-8)
    if bins.shape[1]:
        running = Running(total[:, -1:], squares[:, -1:], n_bins)
    return scores.to(bins.dtype), running


def kernel(settings: Smoothing) -> list[float]:
    """A Gaussian of `taps` weights around their middle, summing to one; [1] where smoothing is off."""
    if settings.sd == 0:
        return [1.0]
    offsets = torch.arange(settings.taps, dtype=torch.float64, device="cpu") - (settings.taps - 1) / 2
    weights = torch.exp(-0.5 * (offsets / settings.sd) ** 2)
    return (weights / weights.sum()).tolist()


def smooth(bins: Tensor, weights: list[float]) -> Tensor:
    """Weighted sums over neighbouring bins, where all of them exist. (B, T, C) -> (B, T - taps + 1, C)

    As products with a small banded matrix, some 32 bins at a time: on one CPU thread about ten times faster
    than a depthwise convolution, which would also want time last.
    """
    taps = len(weights)
    n_trials, n_bins = bins.shape[0], bins.shape[1] - taps + 1
    if taps == 1:
        return bins
    band = bins.new_zeros(BAND, BAND + taps - 1)  # row i holds the weights from column i on
    band.as_strided((BAND, taps), (BAND + taps, 1)).copy_(bins.new_tensor(weights))
    pieces = []
    for first in range(0, n_bins, BAND):
        n = min(BAND, n_bins - first)
        piece = bins[:, first : first + n + taps - 1]
        pieces.append(torch.bmm(band[:n, : n + taps - 1].expand(n_trials, -1, -1), piece))
    return torch.cat(pieces, dim=1)


@dataclass(frozen=True)
class FrontEndState:
    """What a stream remembers between chunks."""

    session: Tensor  # (1,)
    statistics: BatchStatistics | None
    running: Running | None
    n_bins: int  # received so far
    normalised: Tensor  # (1, <taps, C) bins still needed by smoothing
    ready: Tensor  # (1, n, C) bins still needed by the next patch
    stem: StemState | None


class FrontEnd(nn.Module):
    def __init__(self, settings: FrontEndSettings, n_channels: int, n_sessions: int, causal: bool) -> None:
        super().__init__()
        self.settings = settings
        self.n_channels = n_channels
        self.kernel = kernel(settings.smoothing)
        self.left = (len(self.kernel) - 1) // 2  # zeros before the first bin
        self.right = len(self.kernel) - 1 - self.left  # and after the last: how far smoothing looks ahead
        self.session_layer = SessionLayer(settings.session_layer, n_channels, n_sessions)
        self.stem: Stem | None = None
        if settings.channel_gate.enabled or settings.stem.enabled:
            self.stem = Stem(settings.channel_gate, settings.stem, n_channels, causal)

    def forward(self, bins: Tensor, n_bins: Tensor, session: Tensor) -> Tensor:
        """Normalised bins to the bins that patches are cut from. (B, T, C) -> (B, max(T, patch), C)

        What a speaking mode changes is changed after this.
        """
        missing = max(self.settings.patch.bins - bins.shape[1], 0)
        bins = F.pad(bins, (0, 0, self.left, self.right + missing))
        beyond = torch.arange(bins.shape[1], device=bins.device) >= (n_bins + self.left)[:, None]  # (B, T)
        bins = bins.masked_fill_(beyond[..., None], 0.0)  # whatever the padding held
        bins = self.session_layer(smooth(bins, self.kernel), session)
        return bins if self.stem is None else self.stem(bins, n_bins.clamp(min=self.settings.patch.bins))

    def start(self, session: Tensor, statistics: BatchStatistics | None) -> FrontEndState:
        weight = next(self.session_layer.parameters(), torch.zeros(()))
        zeros = torch.zeros(1, self.left, self.n_channels, dtype=weight.dtype, device=session.device)
        stem = None if self.stem is None else self.stem.start(zeros)
        return FrontEndState(session, statistics, None, 0, zeros, zeros[:, :0], stem)

    def normalise(self, state: FrontEndState, bins: Tensor) -> tuple[Tensor, FrontEndState]:
        """The next raw bins of a stream as the model sees them."""
        normalised, running = normalise(bins, state.statistics, self.settings, state.running)
        return normalised, replace(state, running=running, n_bins=state.n_bins + bins.shape[1])

    def missing(self, state: FrontEndState) -> Tensor:
        """The zeros that a trial shorter than a patch is filled up with."""
        n = max(self.settings.patch.bins - state.n_bins, 0)
        return state.normalised.new_zeros(1, n, self.n_channels)

    def beyond(self, state: FrontEndState) -> Tensor:
        """The zeros that smoothing sees after the last bin."""
        return state.normalised.new_zeros(1, self.right, self.n_channels)

    def step(self, state: FrontEndState, normalised: Tensor) -> tuple[Tensor, FrontEndState]:
        """Normalised bins in; out the bins ready for patches that are new, (1, n, C)."""
        waiting = torch.cat([state.normalised, normalised], dim=1)
        n_smooth = max(waiting.shape[1] - len(self.kernel) + 1, 0)
        fresh, stem = state.ready[:, :0], state.stem
        if n_smooth:
            fresh = self.session_layer(smooth(waiting, self.kernel), state.session)
            if self.stem is not None and stem is not None:
                fresh, stem = self.stem.step(fresh, stem)
        return fresh, replace(state, normalised=waiting[:, n_smooth:], stem=stem)

    def cut(self, state: FrontEndState, fresh: Tensor) -> tuple[Tensor, FrontEndState]:
        """The bins of all complete patches (none: shorter than a patch), and what later ones still need."""
        ready, patch = torch.cat([state.ready, fresh], dim=1), self.settings.patch
        n_frames = count_frames(ready.shape[1], patch) if ready.shape[1] >= patch.bins else 0
        return ready, replace(state, ready=ready[:, n_frames * patch.stride :])
