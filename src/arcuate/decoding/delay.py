"""Algorithmic delay of a causal model."""

import torch

from arcuate.data.batching import BatchStatistics
from arcuate.data.trial import BIN_MS
from arcuate.models.layout import ModelDelay
from arcuate.models.model import Model


def model_delay(model: Model) -> ModelDelay:
    """Delay of a model: smoothing and stride from its settings, the encoder by measurement."""
    smoothing, stride = model.front_end.right, model.config.settings.front_end.patch.stride
    encoder = max(0, _measure_delay(model) - smoothing)
    return ModelDelay(*(float(n * BIN_MS) for n in (smoothing, stride - 1, encoder)))


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
