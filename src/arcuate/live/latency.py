"""How long frames take from their last bin to the text, and how many come too late."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from arcuate.data.batching import BatchStatistics
from arcuate.data.trial import BIN_MS
from arcuate.models.model import Model

RECENT = 2000  # frames that quantiles on screen are of


@dataclass(eq=False)
class Meter:
    """Milliseconds per frame; a frame misses its deadline when the next one is already due."""

    deadline_ms: float
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    n_frames: int = 0
    n_missed: int = 0
    max_ms: float = 0.0

    def add(self, ms: float) -> None:
        self.recent.append(ms)
        self.n_frames += 1
        self.n_missed += ms > self.deadline_ms
        self.max_ms = max(self.max_ms, ms)

    def summary(self) -> dict[str, float | int | None]:
        values = np.array(self.recent)
        known = len(values) > 0
        return {
            "frame_ms_p50": float(np.percentile(values, 50)) if known else None,
            "frame_ms_p99": float(np.percentile(values, 99)) if known else None,
            "frame_ms_max": self.max_ms if known else None,
            "missed_deadlines": self.n_missed,
            "n_frames": self.n_frames,
            "deadline_ms": self.deadline_ms,
        }


# How much later a frame comes out than its last bin went in, by design of the model.


@dataclass(frozen=True)
class Delay:
    """What the model waits for, in ms; computing comes on top."""

    smoothing_ms: float  # smoothing looks this far ahead
    patch_ms: float  # a bin waits at most this long for its stride to be full
    encoder_ms: float  # the encoder holds frames back this long

    @property
    def total_ms(self) -> float:
        return self.smoothing_ms + self.patch_ms + self.encoder_ms


def find_delay(model: Model) -> Delay:
    """Smoothing and stride by their settings; the encoder by watching when its frames come out."""
    patch = model.config.settings.front_end.patch
    ahead = model.front_end.right
    encoder = max(0, watch(model) - ahead)
    smoothing_ms, patch_ms, encoder_ms = (float(n * BIN_MS) for n in (ahead, patch.stride - 1, encoder))
    return Delay(smoothing_ms, patch_ms, encoder_ms)


def watch(model: Model) -> int:
    """Bins between the last bin of a patch and its frame, at most."""
    patch = model.config.settings.front_end.patch
    state, n_out, late = model.start(0, _nothing(model)), 0, 0
    with torch.inference_mode():
        for n_in in range(1, patch.bins + 40 * patch.stride + model.front_end.right):
            bins = torch.zeros(1, 1, model.config.n_channels, device=model.head.weight.device)
            outputs, state = model.step(state, bins)
            for frame in range(n_out, n_out + outputs.frames.shape[1]):
                late = max(late, n_in - (frame * patch.stride + patch.bins))
            n_out += outputs.frames.shape[1]
            due = patch.count_frames(n_in) if n_in >= patch.bins else 0
            if due > n_out:  # still held back
                late = max(late, n_in - (n_out * patch.stride + patch.bins))
    return late


def _nothing(model: Model) -> BatchStatistics:
    zeros = torch.zeros(1, model.config.n_channels, device=model.head.weight.device)
    return BatchStatistics(zeros, zeros + 1, torch.zeros(1, dtype=torch.int64, device=zeros.device))
