"""Running statistics: the layer's outputs keep the mean and SD that they had on the known day.

Only mean and SD of each output channel. Matching the whole covariance was tried and made things worse: a rotation
of the tuning cannot be seen in it, and the map of least change that fits it is a wrong one (docs/new-days.md).
"""

import torch
from torch import Tensor

from arcuate.adapt.day import Layer, Sums
from arcuate.models.front_end import smooth
from arcuate.models.model import Model

FLOOR = 1e-6  # of a variance: a channel that never moves is left as it is
WIDEST = 4.0  # a gain further from 1 than this factor is not believed


def input_sums(model: Model, bins: Tensor) -> Sums:
    """Of what the session layer reads, from normalised bins (T, C)."""
    kernel = model.front_end.kernel
    ready = smooth(bins[None], kernel)[0] if len(bins) >= len(kernel) else bins
    return Sums.of(ready)


def matched(start: Layer, reference: Sums, today: Sums) -> Layer:
    """The layer under which today's outputs have the mean and SD of the reference day's."""
    weight, bias = start.weight.double(), start.bias.double()
    before, now = output_variance(reference, weight), output_variance(today, weight)
    gain = torch.where(
        (before > FLOOR) & (now > FLOOR), (before / now.clamp(min=FLOOR)).sqrt(), torch.ones_like(now)
    ).clamp(1 / WIDEST, WIDEST)
    scaled = weight * gain
    offset = bias + reference.mean @ weight - today.mean @ scaled
    return Layer(scaled.to(start.weight.dtype), offset.to(start.bias.dtype))


def output_variance(sums: Sums, weight: Tensor) -> Tensor:
    """Of every output channel of x W. (C,)"""
    return ((sums.covariance @ weight) * weight).sum(0).clamp(min=0.0)
