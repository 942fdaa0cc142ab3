"""Settings of the guard, one class per rule."""

from typing import Literal

from pydantic import Field

from arcuate.config import Settings
from arcuate.training.schedule import MAX_STEPS
from arcuate.training.search import SearchSettings


class SpikeSettings(Settings):
    """A loss that rises above its running statistics and stays there; a single spike is not a failure.

    A step is high if its loss exceeds the lowest running median by both `n_sd` and `ratio`. A smaller rise, by
    the ratio `rise`, also counts if it lasts for 2 × `patience` steps.
    """

    window: int = Field(
        50, ge=20, le=100_000, description="Number of steps in the running statistics; high steps are left out."
    )
    warmup: int = Field(50, ge=0, le=MAX_STEPS, description="Number of steps before the first decision.")
    n_sd: float = Field(
        4.0, gt=1.0, le=1000.0, description="Minimum rise of log loss above its lowest median, in robust SDs."
    )
    ratio: float = Field(
        2.0, gt=1.0, le=1e6, description="Minimum ratio of a high step's loss to the lowest median loss so far."
    )
    rise: float = Field(
        1.25,
        gt=1.0,
        le=1e6,
        description="Minimum ratio of the 20-step median loss to its lowest value for a lasting rise, which must also"
        " exceed the scatter of the loss; not used for schedules with restarts.",
    )
    patience: int = Field(20, ge=1, le=10_000, description="Number of consecutive high steps before a rewind.")


class StuckSettings(Settings):
    """A loss that stays at chance level, because the updates are too large or too small to learn from.

    Updates are too small if norm of the update / norm of the weights was below 0.003 at every measured step, or if
    a large eps keeps the sum of all updates of the run below the norm of the weights. In the official recipes
    the output is all blanks for the first 500 to 1,600 steps, which is normal.
    """

    action: Literal["rewind", "warn", "stop", "ignore"] = Field("rewind", description="Action when stuck.")
    patience: int = Field(2000, ge=50, le=10_000_000, description="Number of steps without a drop before the action.")
    lr_factor: float = Field(
        0.15,
        gt=0.0,
        lt=1.0,
        description="Factor on all learning rates after a rewind without a search; its inverse if updates are too"
        " small. Smaller than `guard.lr_factor`, because a learning rate at which nothing is learnt is further from a"
        " good one.",
    )
    min_drop: float = Field(
        0.1, gt=0.0, lt=1.0, description="Smallest relative drop of the median loss that counts as progress."
    )


class CollapseSettings(Settings):
    """Blanks only, or the same output for every trial, after the model had left the all-blank solution."""

    action: Literal["warn", "rewind", "stop", "ignore"] = Field("warn", description="Action on a collapse.")
    blank_fraction: float = Field(
        0.98, gt=0.5, le=1.0, description="Fraction of blank frames from which the output counts as collapsed."
    )
    n_distinct: int = Field(
        3, ge=0, le=40, description="Number of distinct phonemes in a batch up to which the output counts as collapsed."
    )
    length_ratio: float = Field(
        0.1, ge=0.0, le=1.0, description="Ratio of output to target length up to which the output counts as collapsed."
    )
    patience: int = Field(50, ge=1, le=10_000, description="Number of consecutive steps before the action.")


class SkipSettings(Settings):
    """Too many skipped updates, consecutive or not: reduce the learning rate, then rewind, then stop."""

    window: int = Field(200, ge=1, le=100_000, description="Number of steps in which skipped updates are counted.")
    share: float = Field(0.1, gt=0.0, le=1.0, description="Maximum fraction of skipped updates in the window; 1 = off.")


class AdaptiveSettings(Settings):
    """Reduction of the learning rate while the mean gradient norm exceeds `threshold`; off without a threshold.

    `factor`, `min_lr` and `max_reductions` also apply to the reduction after too many skipped updates.
    """

    threshold: float | None = Field(
        None, gt=0.0, le=1e9, description="Mean gradient norm above which the learning rate is reduced; null = off."
    )
    window: int = Field(100, ge=1, le=100_000, description="Number of steps in the mean.")
    factor: float = Field(0.8, gt=0.0, lt=1.0, description="Factor on all learning rates at a reduction.")
    min_lr: float = Field(0.0, ge=0.0, le=100.0, description="Lower bound of the learning rate in these reductions.")
    max_reductions: int = Field(5, ge=1, le=1000, description="Maximum number of reductions.")


class GuardSettings(Settings):
    """Responses to non-finite updates, divergence, stuck training and collapse."""

    enabled: bool = Field(True, description="Enable the guard.")
    max_skips: int = Field(10, ge=1, le=100_000, description="Number of consecutive non-finite steps before a rewind.")
    lr_factor: float = Field(
        0.3, gt=0.0, lt=1.0, description="Factor on all learning rates after a rewind without a search."
    )
    max_rewinds: int = Field(5, ge=0, le=1000, description="Number of rewinds after which training stops.")
    keep_batches: bool = Field(False, description="Save the bins of non-finite steps to bad_steps/.")
    skips: SkipSettings = SkipSettings()
    spike: SpikeSettings = SpikeSettings()
    stuck: StuckSettings = StuckSettings()
    search: SearchSettings = SearchSettings()
    collapse: CollapseSettings = CollapseSettings()
    adaptive: AdaptiveSettings = AdaptiveSettings()
