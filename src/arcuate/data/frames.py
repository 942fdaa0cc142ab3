"""How many frames a trial has: the one formula, shared by the quality gate and the model."""

from typing import Any

from pydantic import Field, model_validator

from arcuate.config import Settings

PATCH_BINS = 14
PATCH_STRIDE = 4


class Patch(Settings):
    """How many bins make a frame, laid out bin after bin, and how far apart frames are."""

    bins: int = Field(14, ge=1, le=200, description="bins in a frame")
    stride: int = Field(4, ge=1, le=200, description="bins from one frame to the next")

    @model_validator(mode="after")
    def _no_gaps(self) -> "Patch":
        if self.stride > self.bins:
            raise ValueError("stride must not exceed bins, or bins between patches would never be read")
        return self


def count_frames(n_bins: Any, patch_bins: int, stride: int) -> Any:
    """floor((max(T, k) - k) / s) + 1 for an int, an array or a tensor of lengths.

    A trial shorter than one patch is padded to it, so every trial has at least one frame.
    """
    beyond = n_bins - patch_bins
    return (beyond * (beyond > 0)) // stride + 1
