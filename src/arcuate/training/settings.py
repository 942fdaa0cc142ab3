"""Settings of the optimizer, its schedule and the loop."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from arcuate.settings import Settings

Rate = Annotated[float, Field(ge=0.0, le=100.0)]
Decay = Annotated[float, Field(ge=0.0, le=10.0)]


class WeightDecay(Settings):
    """Three parameter groups, as the '25 release has them."""

    weights: Decay = 0.0
    biases: Decay = 0.0
    session_layers: Decay = 0.0


class Optimizer(Settings):
    kind: Literal["adam", "adamw"] = "adamw"
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: float = Field(
        1e-8,
        gt=0.0,
        le=10.0,
        description="belongs to the learning rate: at 0.1 small gradients move weights by rate/eps",
    )
    weight_decay: WeightDecay = WeightDecay()
    absent_sessions: Literal["skip", "decay"] = Field(
        "skip",
        description="session layers without a trial in the batch: left alone ('25) or moved on by momentum ('24)",
    )


class Constant(Settings):
    kind: Literal["constant"] = "constant"
    rate: Rate

    @property
    def peak(self) -> float:
        return self.rate


class WarmupCosine(Settings):
    """Linear from 0 to `peak` over `warmup` steps, then half a cosine down to `floor` at `decay_steps`."""

    kind: Literal["warmup_cosine"] = "warmup_cosine"
    peak: Rate
    floor: Rate = 0.0
    warmup: int = Field(0, ge=0, description="steps")
    warmup_share: float = Field(0.0, ge=0.0, le=1.0, description="or as a share of the whole schedule")
    decay_steps: int | None = Field(None, ge=1, description="null = the length of the run")

    @model_validator(mode="after")
    def _ordered(self) -> "WarmupCosine":
        if self.floor > self.peak:
            raise ValueError(f"floor {self.floor} lies above peak {self.peak}; lower one or raise the other")
        if self.warmup and self.warmup_share:
            raise ValueError("give warmup in steps or warmup_share as a fraction, not both")
        if self.decay_steps is not None and self.warmup > self.decay_steps:
            raise ValueError(f"warmup {self.warmup} is longer than decay_steps {self.decay_steps}")
        return self


Schedule = Annotated[Constant | WarmupCosine, Field(discriminator="kind")]


class Train(Settings):
    steps: int = Field(1000, ge=1, le=100_000_000, description="optimizer steps")
    seed: int = Field(0, ge=0)
    clip_norm: float | None = Field(None, gt=0.0, description="null = no clipping")
    precision: Literal["fp32", "bf16"] = "fp32"
    log_every: int = Field(50, ge=1)
    validate_every: int = Field(500, ge=1)
    checkpoint_every: int = Field(1000, ge=1)
    keep_checkpoints: int = Field(2, ge=1, description="how many of the newest to keep, beside the best")


class Validate(Settings):
    batch_size: int = Field(32, ge=1, le=4096)


class Runtime(Settings):
    threads: int | None = Field(None, ge=1, le=1024, description="null = found by a short probe at start")
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$")
    compile: bool = Field(False, description="torch.compile, on CUDA only")
