"""Settings of calibration."""

from typing import Literal

from pydantic import Field

from arcuate.settings import Settings


class Calibration(Settings):
    """How a session layer is fitted to a new day. Rates are for AdamW on a loss per token, whatever the recipe had."""

    like: Literal["nearest", "mean"] = Field(
        "nearest", description="begin with the layer of the nearest known day, or with the mean of all layers"
    )
    steps: int = Field(150, ge=1, le=100_000, description="optimizer steps")
    rate: float = Field(3e-3, gt=0.0, le=1.0, description="of the new layer, falling to 0")
    rest: float = Field(
        0.1, ge=0.0, le=1.0, description="rate of all other weights as a share of that; 0 freezes them"
    )
    old_share: float = Field(
        0.5, ge=0.0, le=0.9, description="share of old trials in a batch, where other weights move"
    )
    batch_size: int = Field(16, ge=2, le=1024, description="trials in one step")
    seed: int = Field(0, ge=0, lt=2**63)
