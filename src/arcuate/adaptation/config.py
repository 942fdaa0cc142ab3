"""Settings of adaptation without labels."""

from typing import Literal

from pydantic import Field

from arcuate.config import Settings

Method = Literal["none", "statistics", "one-step", "replay", "entropy"]
METHODS: tuple[Method, ...] = ("none", "statistics", "one-step", "replay", "entropy")


class Safety(Settings):
    """When not to learn, and when to take back what was learned."""

    min_confidence: float = Field(
        0.35, ge=0.0, le=1.0, description="a trial read less surely than this teaches nothing"
    )
    max_disagreement: float = Field(
        0.4,
        ge=0.0,
        le=10.0,
        description="a sentence with more edits than this per phoneme heard teaches nothing (labels through words)",
    )
    full_doubt: float = Field(
        0.5,
        gt=0.0,
        le=100.0,
        description="how much more doubt than on known days calls for whole steps (0.5 = half more); none, for none",
    )
    evidence: float = Field(
        1.0,
        ge=0.0,
        le=100.0,
        description="standard errors by which a day must be read less surely than known days to teach anything",
    )
    window: int = Field(8, ge=1, le=1000, description="trials over which adapted and unadapted are compared")
    max_drop: float = Field(
        0.02,
        ge=0.0,
        le=1.0,
        description="confidence below that of the unadapted model at which it falls back",
    )
    min_length: float = Field(
        0.7,
        ge=0.0,
        le=1.0,
        description="tokens read per token of the unadapted model below which it falls back",
    )
    cool: float = Field(0.5, gt=0.0, le=1.0, description="factor on the rate after each fall-back")
    max_falls: int = Field(
        3, ge=0, le=100, description="fall-backs that are forgiven; after one more the day is left unadapted"
    )


class Adaptation(Settings):
    """How a day is followed. A step moves no weight by more than `rate`; all of them together stay within `reach`."""

    method: Method = "one-step"
    rate: float = Field(1e-3, ge=0.0, le=0.1, description="most that one step moves a weight")
    reach: float = Field(
        0.5, gt=0.0, le=10.0, description="most that a layer may move, relative to the norm it began with"
    )
    copies: int = Field(16, ge=1, le=1024, description="noisy copies of the last trial in a step")
    past: int = Field(16, ge=1, le=1024, description="replay: past trials beside them")
    memory: int = Field(200, ge=1, le=10_000, description="replay: trials of the day that are remembered")
    prior_bins: int = Field(
        10_000, ge=1, le=10_000_000, description="statistics: bins that the nearest known day counts as"
    )
    own_input: bool = Field(
        True,
        description="statistics: a trial's own input counts before it is read; in a stream it is not there yet",
    )
    seed: int = Field(0, ge=0, lt=2**63)
    safety: Safety = Safety()


# Settings of calibration.


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
