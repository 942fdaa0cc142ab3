"""Settings of online adaptation and of calibration."""

from pydantic import Field

from arcuate.config import Settings


class Adaptation(Settings):
    """Online adaptation of a session layer; `state.py` has the rules that skip or undo an update."""

    lr: float = Field(1e-3, ge=0.0, le=0.1, description="Learning rate: upper bound on a weight's step.")
    copies: int = Field(16, ge=1, le=1024, description="Number of augmented copies of a trial in a step.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of augmentation.")


class Calibration(Settings):
    """How a session layer is fitted to a new session. Learning rates are for AdamW on a loss per token."""

    steps: int = Field(150, ge=1, le=100_000, description="Number of optimizer steps.")
    lr: float = Field(3e-3, gt=0.0, le=1.0, description="Learning rate of the new layer, decaying to 0.")
    other_lr_factor: float = Field(
        0.1, ge=0.0, le=1.0, description="Learning rate of all other weights relative to `lr`; 0 freezes them."
    )
