"""Electrode arrays: which channels belong to which feature and to which array, as the releases order them.

Both layouts hold the threshold crossings of all electrodes, then their spike-band power, array by array.
"""

from dataclasses import dataclass

import numpy as np

from arcuate.data.trial import Layout

# The '25 release documents its four arrays; for the two arrays in area 6v of the '24 release only the order is known.
_ARRAY_NAMES: dict[Layout, tuple[str, ...]] = {
    "b2t25": ("ventral 6v", "area 4", "55b", "dorsal 6v"),
    "b2t24": ("6v array 1", "6v array 2"),
}


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
    n_electrodes, names = len(features[0].channels), _ARRAY_NAMES[layout]
    if len(features) == 1 or n_electrodes < 2 * len(names):
        return (ElectrodeArray("all channels", range(n_electrodes), features),)
    parts = np.array_split(np.arange(n_electrodes), len(names))
    return tuple(
        ElectrodeArray(name, range(int(part[0]), int(part[-1]) + 1), features)
        for name, part in zip(names, parts, strict=True)
    )


def layout_of_session(session: str) -> Layout:
    """The layout implied by a session's name: participant t12 is the '24 release, any other the '25 release."""
    return "b2t24" if session.lower().startswith("t12") else "b2t25"
