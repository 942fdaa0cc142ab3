"""Latency: measured time per frame, and the delay that the model has by design."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from arcuate.data.batching import BatchStatistics
from arcuate.data.trial import BIN_MS
from arcuate.models.model import Model

_RECENT_FRAMES = 2000  # over which the quantiles on the page are taken


@dataclass(eq=False)
class LatencyMeter:
    """Milliseconds from the last bin of a frame to its text; a deadline is missed once the next frame is due."""

    deadline_ms: float
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_FRAMES))
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
        measured = len(values) > 0
        return {
            "frame_ms_p50": float(np.percentile(values, 50)) if measured else None,
            "frame_ms_p99": float(np.percentile(values, 99)) if measured else None,
            "frame_ms_max": self.max_ms if measured else None,
            "missed_deadlines": self.n_missed,
            "n_frames": self.n_frames,
            "deadline_ms": self.deadline_ms,
        }


@dataclass(frozen=True)
class ModelDelay:
    """Delay of a frame by design, in ms; computing time comes on top."""

    smoothing_ms: float  # look-ahead of smoothing
    patch_ms: float  # longest wait of a bin until its stride is complete
    encoder_ms: float  # frames held back by the encoder

    @property
    def total_ms(self) -> float:
        return self.smoothing_ms + self.patch_ms + self.encoder_ms


def model_delay(model: Model) -> ModelDelay:
    """Delay of a model: smoothing and stride from its settings, the encoder by measurement."""
    patch = model.config.settings.front_end.patch
    lookahead = model.front_end.right
    encoder = max(0, _measure_delay(model) - lookahead)
    smoothing_ms, patch_ms, encoder_ms = (float(n * BIN_MS) for n in (lookahead, patch.stride - 1, encoder))
    return ModelDelay(smoothing_ms, patch_ms, encoder_ms)


def _measure_delay(model: Model) -> int:
    """Largest number of bins between the last bin of a patch and its frame, over a stream of zeros."""
    patch = model.config.settings.front_end.patch
    device = model.head.weight.device
    zeros = torch.zeros(1, model.config.n_channels, device=device)
    statistics = BatchStatistics(zeros, zeros + 1, torch.zeros(1, dtype=torch.int64, device=device))
    state, n_out, delay = model.start(0, statistics), 0, 0
    with torch.inference_mode():
        for n_in in range(1, patch.bins + 40 * patch.stride + model.front_end.right):
            outputs, state = model.step(state, zeros[None])
            for frame in range(n_out, n_out + outputs.frames.shape[1]):
                delay = max(delay, n_in - (frame * patch.stride + patch.bins))
            n_out += outputs.frames.shape[1]
            due = patch.count_frames(n_in) if n_in >= patch.bins else 0
            if due > n_out:  # still held back
                delay = max(delay, n_in - (n_out * patch.stride + patch.bins))
    return delay
