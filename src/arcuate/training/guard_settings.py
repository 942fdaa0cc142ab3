"""Settings of the guard, the judge in the training loop. It watches numbers and never touches the model."""

from typing import Literal

from pydantic import Field

from arcuate.settings import Settings


class Spike(Settings):
    """A loss that leaves its running statistics and stays away. A single spike is no failure."""

    window: int = Field(50, ge=20, le=100_000, description="kept steps that the statistics look back on")
    warmup: int = Field(50, ge=0, le=99_999_999, description="steps before the first judgement")
    deviations: float = Field(
        4.0, gt=1.0, le=1000.0, description="robust SDs of log loss above the lowest median so far"
    )
    ratio: float = Field(2.0, gt=1.0, le=1e6, description="and at least so many times that median")
    patience: int = Field(20, ge=1, le=10_000, description="steps in a row before it counts")


class Stuck(Settings):
    """A loss that stays at the level of guessing: a rate too high from the start leaves weights that cannot learn.

    Some 500 to 1,600 steps of nothing but blanks are the normal beginning of the official recipes.
    """

    action: Literal["rewind", "warn", "stop", "ignore"] = "rewind"
    patience: int = Field(2000, ge=50, le=10_000_000, description="steps without a fall before it counts")
    cool: float = Field(
        0.15,
        gt=0.0,
        lt=1.0,
        description="factor on all rates: one that taught nothing is further off than one that exploded late",
    )
    fall: float = Field(
        0.1, gt=0.0, lt=1.0, description="how far the median loss has to fall to count as one"
    )


class Collapse(Settings):
    """Nothing but blanks, or always the same output, after the model had once begun to speak."""

    action: Literal["warn", "rewind", "stop", "ignore"] = "warn"
    blank_share: float = Field(0.98, gt=0.5, le=1.0, description="of frames")
    n_distinct: int = Field(3, ge=0, le=40, description="or at most so many different phonemes in a batch")
    length_ratio: float = Field(0.1, ge=0.0, le=1.0, description="or output this short against its target")
    patience: int = Field(50, ge=1, le=10_000, description="steps in a row before it counts")


class Adaptive(Settings):
    """Lower the rate whenever the gradient norm stands above a fixed threshold. Off unless `threshold` is set."""

    threshold: float | None = Field(
        None, gt=0.0, le=1e9, description="mean gradient norm over `window` steps"
    )
    window: int = Field(100, ge=1, le=100_000)
    factor: float = Field(0.8, gt=0.0, lt=1.0)
    floor: float = Field(0.0, ge=0.0, le=100.0, description="never below this rate")
    max_times: int = Field(5, ge=1, le=1000)


class Guard(Settings):
    enabled: bool = True
    max_skips: int = Field(10, ge=1, le=100_000, description="non-finite updates in a row before a rewind")
    cool: float = Field(0.3, gt=0.0, lt=1.0, description="factor on all rates after a rewind")
    max_rewinds: int = Field(5, ge=0, le=1000, description="then stop and say why")
    keep_batches: bool = Field(False, description="keep the bins of offending batches under bad_steps/")
    spike: Spike = Spike()
    stuck: Stuck = Stuck()
    collapse: Collapse = Collapse()
    adaptive: Adaptive = Adaptive()
