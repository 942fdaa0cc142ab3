"""Settings of data selection, batching and augmentation."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field, SerializeAsAny, model_validator

from arcuate.config import PluginSettings, Settings, plugin_validator
from arcuate.data.releases import RELEASES, Release


class SessionBatching(Settings):
    """Batches as in the '25 baseline: sessions drawn without replacement, and trials of each with replacement."""

    kind: Literal["sessions"] = "sessions"
    n_sessions: int = Field(4, ge=1, le=1000, description="Number of sessions in one batch.")
    n_trials: int = Field(16, ge=1, le=4096, description="Number of trials per session.")

    @property
    def batch_size(self) -> int:
        return self.n_sessions * self.n_trials


class ShuffledBatching(Settings):
    """Batches as in the '24 baseline: trials drawn from all sessions, without replacement within a batch."""

    kind: Literal["shuffled"] = "shuffled"
    batch_size: int = Field(64, ge=1, le=4096, description="Number of trials in one batch.")


class BucketedBatching(Settings):
    """Batches of trials of similar length; every trial once per epoch, in a new order each time."""

    kind: Literal["bucketed"] = "bucketed"
    batch_size: int = Field(16, ge=1, le=4096, description="Number of trials in one batch.")
    pool: ClassVar[int] = 16  # batches whose shuffled trials are sorted by length


Batching = Annotated[SessionBatching | ShuffledBatching | BucketedBatching, Field(discriminator="kind")]


@dataclass(frozen=True)
class StatisticsSpec:
    """Which statistics a batch carries for normalisation: of the block, of earlier trials, or none."""

    kind: Literal["none", "block", "rolling"] = "none"
    log: bool = False  # statistics of log(1 + x) instead of the bins


class DataConfig(Settings):
    """Selection and batching of trials."""

    release: Literal["b2t24", "b2t25", "falcon-h2"] | None = Field(
        None, description="Public data set of the recipe, whose number of channels the data must have; null = any data."
    )
    sessions: tuple[str, ...] | None = Field(
        None, min_length=1, description="Names of the sessions to use; null uses all."
    )
    max_sessions: int | None = Field(
        None, ge=1, le=10_000, description="Number of sessions to use, starting with the first; null uses all."
    )
    dev_fraction: float = Field(
        0.0, ge=0.0, le=0.5, description="Fraction of the training split held out to select checkpoints on."
    )
    seed: int = Field(1, ge=0, lt=2**63, description="Seed of the batches and of the dev split.")
    batching: Batching = BucketedBatching()
    workers: int = Field(
        0, ge=0, le=256, description="Number of loader processes, at most one per core; does not affect results."
    )

    @property
    def size(self) -> Release:
        """The data set of the recipe, whose size parameter counts refer to; the '25 release without one."""
        return RELEASES[self.release or "b2t25"]


# Augmentation, in the order of application; 0 disables an augmentation.


class TimeMasks(Settings):
    """Spans of bins set to 0 (SpecAugment, Park et al. 2019). Heavy masking: 20 masks of up to 7.5 % of the trial."""

    n_masks: int = Field(
        0, ge=0, le=1000, description="Maximum number of masks; the number per trial is drawn from 1 … n_masks."
    )
    fixed_count: bool = Field(False, description="Always draw exactly n_masks masks.")
    probability: float = Field(1.0, ge=0.0, le=1.0, description="Probability that a trial is masked.")
    max_bins: int | None = Field(None, ge=1, le=10_000, description="Maximum mask width in bins.")
    max_fraction: float | None = Field(
        None, gt=0.0, le=1.0, description="Maximum mask width as a fraction of the trial."
    )

    @model_validator(mode="after")
    def _has_a_width(self) -> "TimeMasks":
        if self.n_masks and (self.max_bins is None) == (self.max_fraction is None):
            raise ValueError("masks need a width: set either max_bins or max_fraction")
        return self


class FeatureMasks(Settings):
    """Neighbouring channels set to 0 for the entire trial."""

    n_masks: int = Field(
        0, ge=0, le=1000, description="Maximum number of masks; the number per trial is drawn from 1 … n_masks."
    )
    probability: float = Field(1.0, ge=0.0, le=1.0, description="Probability that a trial is masked.")
    max_channels: int = Field(12, ge=1, le=65536, description="Maximum mask width in channels.")


class AugmentationConfig(Settings):
    """Random changes to training trials."""

    white_noise_sd: float = Field(0.0, ge=0.0, le=100.0, description="SD of noise per bin and channel.")
    offset_sd: float = Field(0.0, ge=0.0, le=100.0, description="SD of an offset per trial and channel.")
    random_cut: int = Field(
        0, ge=0, le=1000, description="Upper limit (exclusive) on leading bins to drop, drawn per batch; 0 = off."
    )
    time_masks: TimeMasks = TimeMasks()
    feature_masks: FeatureMasks = FeatureMasks()
    custom: tuple[Annotated[SerializeAsAny[PluginSettings], plugin_validator("augmentations")], ...] = Field(
        (), description="User-defined augmentations, applied last and in this order."
    )
