"""Settings of data selection and batching."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from arcuate.config import Settings


class Days(Settings):
    """The '25 composition: some sessions without replacement, from each some trials with replacement."""

    kind: Literal["days"] = "days"
    n_sessions: int = Field(4, ge=1, le=1000, description="sessions in one batch")
    n_trials: int = Field(16, ge=1, le=4096, description="trials from each of them")

    @property
    def batch_size(self) -> int:
        return self.n_sessions * self.n_trials


class Shuffled(Settings):
    """The '24 composition: a fresh draw from all sessions at every step, without replacement within it."""

    kind: Literal["shuffled"] = "shuffled"
    batch_size: int = Field(64, ge=1, le=4096, description="trials in one batch")


class Bucketed(Settings):
    """Trials of similar length together; every trial once per epoch, in a new order each time."""

    kind: Literal["bucketed"] = "bucketed"
    batch_size: int = Field(16, ge=1, le=4096, description="trials in one batch")
    pool: int = Field(
        16, ge=1, le=10_000, description="batches drawn at random and sorted by length together"
    )


Batching = Annotated[Days | Shuffled | Bucketed, Field(discriminator="kind")]


@dataclass(frozen=True)
class Wanted:
    """Which statistics travel with a batch: of the block, of the past, or none; of bins or of their logarithms."""

    kind: Literal["none", "block", "rolling"] = "none"
    log: bool = False


class Published(Settings):
    """The sizes of the published data set, for parameter counts where no data are at hand."""

    channels: int = Field(ge=1, le=65536, description="of the published data")
    n_sessions: int = Field(ge=1, le=10_000, description="of the published data")


class Data(Settings):
    channels: int | None = Field(
        None, ge=1, le=65536, description="refused where the data differ; null = any"
    )
    n_sessions: int | None = Field(None, ge=1, le=10_000, description="likewise for the number of sessions")
    published: Published = Published(channels=512, n_sessions=45)
    sessions: tuple[str, ...] | None = Field(None, min_length=1, description="use these sessions only")
    max_sessions: int | None = Field(None, ge=1, le=10_000, description="use the first so many sessions only")
    dev_fraction: float = Field(
        0.0, ge=0.0, le=0.5, description="share of train set aside to select checkpoints on"
    )
    seed: int = Field(1, ge=0, lt=2**63, description="decides batches and the dev split")
    batching: Batching = Bucketed()
    workers: int = Field(
        0, ge=0, le=256, description="loading processes, at most one per core; their number changes no result"
    )


# Settings of the augmentations, listed in the order in which they are applied; 0 switches one off.


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
