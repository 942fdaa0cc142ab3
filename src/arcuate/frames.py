"""How many frames a trial has: the one formula, shared by the quality gate and the model."""

from typing import Any

PATCH_BINS = 14
PATCH_STRIDE = 4


def count_frames(n_bins: Any, patch_bins: int, stride: int) -> Any:
    """floor((max(T, k) - k) / s) + 1 for an int, an array or a tensor of lengths.

    A trial shorter than one patch is padded to it, so every trial has at least one frame.
    """
    beyond = n_bins - patch_bins
    return (beyond * (beyond > 0)) // stride + 1
