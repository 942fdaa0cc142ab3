"""Features and electrode arrays: which channels belong together.

Both Brain-to-Text layouts hold the threshold crossings of all electrodes, then their spike-band power, array by array.
"""

from dataclasses import dataclass

import numpy as np

from arcuate.data.releases import RELEASES
from arcuate.data.trial import Layout


@dataclass(frozen=True)
class Feature:
    """One kind of signal: a block of neighbouring channels, one per electrode."""

    name: str
    channels: range


@dataclass(frozen=True)
class ElectrodeArray:
    """One implanted array: a block of neighbouring electrodes."""

    name: str
    electrodes: range  # position within each feature
    features: tuple[Feature, ...]

    @property
    def channels(self) -> np.ndarray:
        """Channel indices of all features of this array's electrodes."""
        return np.concatenate([np.asarray(f.channels)[self.electrodes] for f in self.features])


def list_features(n_channels: int) -> tuple[Feature, ...]:
    """Threshold crossings and spike-band power; one unnamed feature if the number of channels is odd."""
    half, odd = divmod(n_channels, 2)
    if odd:
        return (Feature("channels", range(n_channels)),)
    return Feature("threshold crossings", range(half)), Feature("spike-band power", range(half, n_channels))


def list_arrays(layout: Layout, n_channels: int) -> tuple[ElectrodeArray, ...]:
    """The arrays of a layout; one array of all electrodes if there are too few to divide."""
    features = list_features(n_channels)
    n_electrodes, names = len(features[0].channels), RELEASES[layout].arrays if layout in RELEASES else ()
    if not names or len(features) == 1 or n_electrodes < 2 * len(names):
        return (ElectrodeArray("all channels", range(n_electrodes), features),)
    parts = np.array_split(np.arange(n_electrodes), len(names))
    return tuple(
        ElectrodeArray(name, range(int(part[0]), int(part[-1]) + 1), features)
        for name, part in zip(names, parts, strict=True)
    )
