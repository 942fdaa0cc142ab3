"""How much later a frame comes out than its last bin went in, by design of the model."""

from dataclasses import dataclass

import torch

from arcuate.batches.statistics import BatchStatistics
from arcuate.frames import count_frames
from arcuate.models.model import Model
from arcuate.trial import BIN_S

MS = 1000 * BIN_S  # per bin


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
    patch = model.card.settings.front_end.patch
    ahead = model.front_end.right
    return Delay(ahead * MS, (patch.stride - 1) * MS, max(0, watch(model) - ahead) * MS)


def watch(model: Model) -> int:
    """Bins between the last bin of a patch and its frame, at most."""
    patch = model.card.settings.front_end.patch
    state, n_out, late = model.start(0, _nothing(model)), 0, 0
    with torch.inference_mode():
        for n_in in range(1, patch.bins + 40 * patch.stride + model.front_end.right):
            bins = torch.zeros(1, 1, model.card.n_channels, device=model.head.weight.device)
            outputs, state = model.step(state, bins)
            for frame in range(n_out, n_out + outputs.frames.shape[1]):
                late = max(late, n_in - (frame * patch.stride + patch.bins))
            n_out += outputs.frames.shape[1]
            due = count_frames(n_in, patch.bins, patch.stride) if n_in >= patch.bins else 0
            if due > n_out:  # still held back
                late = max(late, n_in - (n_out * patch.stride + patch.bins))
    return late


def _nothing(model: Model) -> BatchStatistics:
    zeros = torch.zeros(1, model.card.n_channels, device=model.head.weight.device)
    return BatchStatistics(zeros, zeros + 1, torch.zeros(1, dtype=torch.int64, device=zeros.device))
