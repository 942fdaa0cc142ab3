"""Which channels belong to which array, as far as the layout of a release says."""

from dataclasses import dataclass

import numpy as np

B2T25 = ("ventral 6v", "area 4", "55b", "dorsal 6v")
B2T24 = ("6v, first array", "6v, second array")


@dataclass(frozen=True, eq=False)
class Group:
    """Channels of one array: crossings and power of the same electrodes."""

    name: str
    channels: np.ndarray  # indices


def array_groups(layout: str, n_channels: int) -> list[Group]:
    """Both layouts hold crossings of all electrodes, then their power; '25 has four arrays, '24 (area 6v) two."""
    names = B2T25 if layout == "b2t25" else B2T24
    half, odd = divmod(n_channels, 2)
    if odd or half < 2 * len(names):
        return [Group("all channels", np.arange(n_channels))]
    parts = np.array_split(np.arange(half), len(names))
    return [Group(name, np.concatenate([p, p + half])) for name, p in zip(names, parts, strict=True)]
