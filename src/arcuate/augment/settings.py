"""Settings of the augmentations, listed in the order in which they are applied; 0 switches one off."""

from typing import Literal

from pydantic import Field, model_validator

from arcuate.settings import Settings


class TimeMasks(Settings):
    """Stretches of bins set to 0 (SpecAugment). Heavy masking is twenty masks of up to 7.5 % of the trial."""

    n_masks: int = Field(
        0, ge=0, le=1000, description="at most; each trial draws 1 … n of them unless `exactly`"
    )
    exactly: bool = Field(False, description="always n masks")
    probability: float = Field(1.0, ge=0.0, le=1.0, description="that a trial is masked at all")
    max_bins: int | None = Field(None, ge=1, le=10_000, description="widest mask in bins")
    max_share: float | None = Field(None, gt=0.0, le=1.0, description="or as a share of the trial")

    @model_validator(mode="after")
    def _has_a_width(self) -> "TimeMasks":
        if self.n_masks and (self.max_bins is None) == (self.max_share is None):
            raise ValueError("masks need a width: give either max_bins or max_share")
        return self


class FeatureMasks(Settings):
    """Neighbouring channels set to 0 for the whole trial."""

    n_masks: int = Field(0, ge=0, le=1000, description="at most; each trial draws 1 … n of them")
    probability: float = Field(1.0, ge=0.0, le=1.0, description="that a trial is masked at all")
    max_channels: int = Field(12, ge=1, le=65536, description="widest mask")


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
    time_masks: TimeMasks = TimeMasks()
    feature_masks: FeatureMasks = FeatureMasks()
    speckle: float = Field(0.0, ge=0.0, lt=1.0, description="share of single values set to 0")
