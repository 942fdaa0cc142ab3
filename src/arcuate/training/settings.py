"""Settings of the optimizer, its schedule, the averages of weights, and the loop."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from arcuate.settings import Settings

Rate = Annotated[float, Field(ge=0.0, le=100.0)]
Decay = Annotated[float, Field(ge=0.0, le=10.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Steps = Annotated[int, Field(ge=1, le=100_000_000)]


class WeightDecay(Settings):
    """Three parameter groups, as the '25 release has them."""

    weights: Decay = 0.0
    biases: Decay = 0.0
    session_layers: Decay = 0.0


class Optimizer(Settings):
    kind: Literal["adam", "adamw", "sgd"] = "adamw"
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="adam, adamw")
    eps: float = Field(
        1e-8,
        gt=0.0,
        le=10.0,
        description="belongs to the learning rate: at 0.1 small gradients move weights by rate/eps",
    )
    momentum: Beta = Field(0.0, description="sgd")
    nesterov: bool = Field(False, description="sgd with momentum")
    weight_decay: WeightDecay = WeightDecay()
    absent_sessions: Literal["skip", "decay"] = Field(
        "skip",
        description="session layers without a trial in the batch: left alone ('25), or moved on by momentum ('24)",
    )
    fused: bool = Field(True, description="one kernel for the whole update where the device has it")

    @model_validator(mode="after")
    def _fits_its_kind(self) -> "Optimizer":
        if self.nesterov and (self.kind != "sgd" or self.momentum == 0):
            raise ValueError("nesterov needs kind: sgd and a momentum above 0")
        if self.momentum and self.kind != "sgd":
            raise ValueError("momentum belongs to kind: sgd; adam and adamw have betas")
        return self


class Constant(Settings):
    kind: Literal["constant"] = "constant"
    rate: Rate

    @property
    def peak(self) -> float:
        return self.rate


class Linear(Settings):
    """From `peak` to `floor` in a straight line over `decay_steps`."""

    kind: Literal["linear"] = "linear"
    peak: Rate
    floor: Rate
    decay_steps: Steps | None = Field(None, description="null = the length of the run")


class WarmupCosine(Settings):
    """Linear from 0 to `peak` over the warm-up, then half a cosine down to `floor` at `decay_steps`."""

    kind: Literal["warmup_cosine"] = "warmup_cosine"
    peak: Rate
    floor: Rate = 0.0
    warmup: int = Field(0, ge=0, description="steps")
    warmup_share: float = Field(0.0, ge=0.0, le=1.0, description="or as a share of the whole schedule")
    decay_steps: Steps | None = Field(None, description="null = the length of the run")

    @model_validator(mode="after")
    def _ordered(self) -> "WarmupCosine":
        if self.floor > self.peak:
            raise ValueError(f"floor {self.floor} lies above peak {self.peak}; lower one or raise the other")
        if self.warmup and self.warmup_share:
            raise ValueError("give warmup in steps or warmup_share as a fraction, not both")
        if self.decay_steps is not None and self.warmup > self.decay_steps:
            raise ValueError(f"warmup {self.warmup} is longer than decay_steps {self.decay_steps}")
        return self


class OneCycle(Settings):
    """Up from peak / div_factor to `peak` and down to that start / final_div_factor, as torch's OneCycleLR."""

    kind: Literal["one_cycle"] = "one_cycle"
    peak: Rate
    pct_start: float = Field(0.3, gt=0.0, lt=1.0, description="share of the cycle spent going up")
    div_factor: float = Field(25.0, ge=1.0, le=1e6)
    final_div_factor: float = Field(1e4, ge=1.0, le=1e9)
    anneal: Literal["cosine", "linear"] = "cosine"
    cycle_steps: Steps | None = Field(None, description="null = the length of the run")


class Plateau(Settings):
    """Multiply by `factor` when validation PER has not improved for more than `patience` validations."""

    kind: Literal["plateau"] = "plateau"
    peak: Rate
    factor: float = Field(0.5, gt=0.0, lt=1.0)
    patience: int = Field(8, ge=0, le=10_000, description="validations without improvement that are borne")
    threshold: float = Field(0.0, ge=0.0, lt=1.0, description="relative improvement that counts")
    cooldown: int = Field(
        0, ge=0, le=10_000, description="validations after a reduction that are not counted"
    )
    floor: Rate = 0.0


class Restarts(Settings):
    """SGDR: half a cosine from `peak` to `floor` over `period` steps, then again, each `multiply` times longer."""

    kind: Literal["restarts"] = "restarts"
    peak: Rate
    floor: Rate = 0.0
    period: Steps
    multiply: int = Field(1, ge=1, le=100)
    warmup: int = Field(0, ge=0, description="steps before the first period")


class HoldDecay(Settings):
    """`peak` for `hold` steps, then down to `floor` at `decay_steps`."""

    kind: Literal["hold_decay"] = "hold_decay"
    peak: Rate
    floor: Rate = 0.0
    hold: int = Field(0, ge=0)
    shape: Literal["linear", "cosine"] = "linear"
    decay_steps: Steps | None = Field(None, description="null = the length of the run")


class StepDecay(Settings):
    """Multiply by `factor` at each of the given steps, or every `every` steps."""

    kind: Literal["step_decay"] = "step_decay"
    peak: Rate
    factor: float = Field(0.1, gt=0.0, lt=1.0)
    at: tuple[Steps, ...] = ()
    every: Steps | None = None
    floor: Rate = 0.0

    @model_validator(mode="after")
    def _one_way(self) -> "StepDecay":
        if bool(self.at) == (self.every is not None):
            raise ValueError("give either `at` (a list of steps) or `every`, one of them")
        return self


AnySchedule = Constant | Linear | WarmupCosine | OneCycle | Plateau | Restarts | HoldDecay | StepDecay
Schedule = Annotated[AnySchedule, Field(discriminator="kind")]


class Ema(Settings):
    """Exponential moving average of the weights; where it is on, the average is what is validated and kept."""

    decay: float = Field(0.0, ge=0.0, lt=1.0, description="0 = off; 0.999 remembers about 1,000 steps")
    warmup: bool = Field(True, description="a shorter memory at first: min(decay, (1 + n) / (10 + n))")


class Average(Settings):
    """Plain mean of the weights at regular points of the last stretch (SWA)."""

    start: Steps | None = Field(None, description="first step that counts; null = off")
    every: Steps = 100


class Precision(Settings):
    """Mixed precision where it is truly supported and worth it; a probe runs it, nobody asks the device."""

    kind: Literal["fp32", "bf16", "fp16"] = "fp32"
    below_per: float | None = Field(
        None, gt=0.0, le=1.0, description="stay in fp32 until validation PER is below this"
    )


class Train(Settings):
    steps: Steps = Field(1000, description="optimizer steps")
    seed: int = Field(0, ge=0, lt=2**63)
    accumulate: int = Field(1, ge=1, le=4096, description="batches per optimizer step")
    clip_norm: float | None = Field(None, gt=0.0, le=1e6, description="null = no clipping")
    precision: Precision = Precision()
    log_every: int = Field(50, ge=1)
    validate_every: int = Field(500, ge=1)
    checkpoint_every: int = Field(1000, ge=1)
    keep_checkpoints: int = Field(2, ge=1, description="how many of the newest to keep, beside the best")


class Validate(Settings):
    batch_size: int = Field(32, ge=1, le=4096)
    search: Literal["greedy", "beam"] = Field(
        "greedy", description="how phonemes are read; beam sums over alignments"
    )
    beam: int = Field(20, ge=1, le=100_000, description="prefixes kept per frame, for beam")


class Runtime(Settings):
    threads: int | None = Field(None, ge=1, le=1024, description="null = found by a short probe at start")
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$")
    compile: bool = Field(False, description="torch.compile, on CUDA only")
    cudnn_benchmark: bool = Field(False, description="let cuDNN try its kernels; faster, not reproducible")
    tf32: bool = Field(False, description="float32 products with TF32 on CUDA")
