"""Settings of online adaptation and of calibration."""

from typing import Literal

from pydantic import Field

from arcuate.config import Overrides, Settings, settings_from
from arcuate.errors import UserError

Method = Literal["none", "statistics", "one-step", "replay", "entropy"]
METHODS: tuple[Method, ...] = ("none", "statistics", "one-step", "replay", "entropy")
GRADIENT_METHODS: tuple[Method, ...] = ("one-step", "replay", "entropy")


class Safety(Settings):
    """When to skip an update, and when to fall back to the unadapted model."""

    min_confidence: float = Field(0.35, ge=0.0, le=1.0, description="Confidence below which a trial causes no update.")
    max_disagreement: float = Field(
        0.4,
        ge=0.0,
        le=10.0,
        description="Edits per greedily decoded phoneme above which a pseudo-label from words causes no update.",
    )
    full_step_uncertainty: float = Field(
        0.5,
        gt=0.0,
        le=100.0,
        description="Increase of uncertainty, relative to known sessions, at which steps have full length.",
    )
    min_standard_errors: float = Field(
        1.0,
        ge=0.0,
        le=100.0,
        description="Standard errors by which confidence must lie below that on known sessions before any update.",
    )
    window: int = Field(
        8, ge=1, le=1000, description="Trials over which the adapted and the unadapted model are compared."
    )
    max_confidence_drop: float = Field(
        0.02, ge=0.0, le=1.0, description="Drop in confidence relative to the unadapted model that causes a fall-back."
    )
    min_length_ratio: float = Field(
        0.7,
        ge=0.0,
        le=1.0,
        description="Ratio of decoded tokens, adapted to unadapted, below which the session falls back.",
    )
    lr_factor: float = Field(0.5, gt=0.0, le=1.0, description="Factor on the learning rate after each fall-back.")
    max_fallbacks: int = Field(
        3, ge=0, le=100, description="Maximum number of fall-backs; one more ends adaptation of the session."
    )


class Adaptation(Settings):
    """Online adaptation. A step moves no weight by more than `lr`; all steps together stay within `max_distance`."""

    method: Method = Field("one-step", description="Adaptation method.")
    lr: float = Field(1e-3, ge=0.0, le=0.1, description="Learning rate: upper bound on a weight's step.")
    max_distance: float = Field(
        0.5,
        gt=0.0,
        le=10.0,
        description="Maximum distance of a layer from its initial value, relative to the norm of the initial layer.",
    )
    copies: int = Field(16, ge=1, le=1024, description="Number of augmented copies of the current trial in a step.")
    replay_trials: int = Field(16, ge=1, le=1024, description="Number of past trials in a step (replay).")
    replay_buffer: int = Field(
        200, ge=1, le=10_000, description="Number of trials of the session kept for replay (replay)."
    )
    prior_bins: int = Field(
        10_000,
        ge=1,
        le=10_000_000,
        description="Weight of the nearest known session's statistics, in bins (statistics).",
    )
    use_current_trial: bool = Field(
        True,
        description="Update the statistics with a trial before it is decoded; not possible in a stream (statistics).",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of augmentation and replay.")
    safety: Safety = Safety()


def resolve_adaptation(adapt: str | Adaptation, settings: Overrides | None = None) -> Adaptation:
    """Return the settings of a method given by name, changed by `settings`, or complete settings as they are."""
    if isinstance(adapt, Adaptation):
        if settings:
            raise UserError("adapt is a complete Adaptation, so settings must be empty; change the Adaptation instead")
        return adapt
    if adapt not in METHODS:
        raise UserError(f"--adapt {adapt!r} is unknown; choose {', '.join(METHODS)}")
    return settings_from(Adaptation, settings, "adaptation", method=adapt)


def optional_adaptation(adapt: str | Adaptation | None, settings: Overrides | None = None) -> Adaptation | None:
    """`resolve_adaptation`, or None without a method."""
    if adapt is None and settings:
        raise UserError("--set requires --adapt METHOD, such as --adapt one-step")
    return None if adapt is None else resolve_adaptation(adapt, settings)


class Calibration(Settings):
    """How a session layer is fitted to a new session. Learning rates are for AdamW on a loss per token."""

    init: Literal["nearest", "mean"] = Field(
        "nearest",
        description="Initial value of the new layer: that of the nearest known session, or the mean of all layers.",
    )
    steps: int = Field(150, ge=1, le=100_000, description="Number of optimizer steps.")
    lr: float = Field(3e-3, gt=0.0, le=1.0, description="Learning rate of the new layer, decaying to 0.")
    other_lr_factor: float = Field(
        0.1, ge=0.0, le=1.0, description="Learning rate of all other weights relative to `lr`; 0 freezes them."
    )
    replay_fraction: float = Field(
        0.5,
        ge=0.0,
        le=0.9,
        description="Fraction of trials from known sessions in a batch when other weights are trained.",
    )
    batch_size: int = Field(16, ge=2, le=1024, description="Trials per step.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of batches and augmentation.")
