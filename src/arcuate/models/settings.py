"""Settings of the model: everything deterministic between stored bins and token scores."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from arcuate.batches.settings import Wanted
from arcuate.frames import Patch
from arcuate.settings import Settings

Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


class Smoothing(Settings):
    """Gaussian smoothing over time; sd 0 switches it off. '25 uses 9 taps, '24 uses 20 (centre at 9.5)."""

    sd: float = Field(2.0, ge=0.0, le=50.0, description="bins")
    taps: int = Field(9, ge=1, le=101)


class SessionLayer(Settings):
    """One affine map per recording session, starting at the identity."""

    enabled: bool = Field(True, description="false removes the maps and keeps activation, norm and dropout")
    activation: Literal["softsign", "none"] = "softsign"
    layer_norm: bool = False
    dropout: Probability = 0.0


class FrontEnd(Settings):
    normalise: Literal["none", "block", "rolling"] = "none"
    log: bool = Field(False, description="log(1 + x) before normalising; for raw, non-negative features")
    rolling_bins: int = Field(
        1500, ge=50, le=100_000, description="rolling: at most this many past bins count (1500 = 30 s)"
    )
    smoothing: Smoothing = Smoothing()
    session_layer: SessionLayer = SessionLayer()
    patch: Patch = Patch()

    @property
    def wanted(self) -> Wanted:
        """Which statistics of a trial's surroundings normalisation needs."""
        return Wanted(self.normalise, self.log)


class GRUEncoder(Settings):
    kind: Literal["gru"] = "gru"
    width: int = Field(768, ge=1, le=8192)
    depth: int = Field(5, ge=1, le=64)
    dropout: Probability = 0.4
    bidirectional: bool = False
    learned_start: bool = Field(True, description="a learned initial state shared by all layers")

    @property
    def causal(self) -> bool:
        return not self.bidirectional


Encoder = GRUEncoder  # becomes a union discriminated by `kind` when a second encoder arrives


class ModelSettings(Settings):
    front_end: FrontEnd = FrontEnd()
    encoder: Encoder = GRUEncoder()
    output_init: Literal["default", "xavier"] = "default"


class ModelCard(Settings):
    """What a checkpoint says about its model: with it, loading needs a path and nothing else."""

    settings: ModelSettings
    n_channels: int = Field(ge=1, le=65536)
    sessions: tuple[str, ...] = Field(max_length=10_000)
    classes: tuple[str, ...] = Field(min_length=2, max_length=10_000)

    @model_validator(mode="after")
    def _sessions_unique(self) -> "ModelCard":
        if len(set(self.sessions)) != len(self.sessions):
            raise ValueError("sessions must be distinct")
        return self
