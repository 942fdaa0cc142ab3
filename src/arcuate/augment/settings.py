"""Settings of the augmentations, listed in the order in which they are applied; 0 switches one off."""

from typing import Literal

from pydantic import Field

from arcuate.settings import Settings


class Augment(Settings):
    gain_sd: float = Field(
        0.0, ge=0.0, le=10.0, description="random linear mixing of channels around identity"
    )
    white_noise_sd: float = Field(0.0, ge=0.0, le=100.0, description="a new draw for every bin and channel")
    offset_sd: float = Field(0.0, ge=0.0, le=100.0, description="one draw per trial and channel")
    random_walk_sd: float = Field(0.0, ge=0.0, le=100.0, description="cumulated draws")
    random_walk_axis: Literal["time", "channel"] = Field(
        "channel", description="the '25 release walks along channels (axis -1)"
    )
    random_cut: int = Field(
        0, ge=0, le=1000, description="drop the first 0 … n-1 bins, one draw per batch; 0 and 1 cut nothing"
    )
