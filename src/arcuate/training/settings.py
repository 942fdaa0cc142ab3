"""Settings of the optimizer, its schedule, the averages of weights, and the loop."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from arcuate.settings import Settings

Rate = Annotated[float, Field(ge=0.0, le=100.0)]
Decay = Annotated[float, Field(ge=0.0, le=10.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
MAX_STEPS = 99_999_999  # eight digits in the names of checkpoints
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS)]
StepsOrNone = Annotated[int, Field(ge=0, le=MAX_STEPS)]


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


class Falling(Settings):
    """What schedules that come down have in common."""

    kind: str
    peak: Rate
    floor: Rate = 0.0

    @model_validator(mode="after")
    def _floor_below_peak(self) -> "Falling":
        if self.floor > self.peak:
            raise ValueError(
                f"floor {self.floor:g} lies above peak {self.peak:g}; lower one or raise the other"
            )
        return self


class Constant(Settings):
    kind: Literal["constant"] = "constant"
    rate: Rate

    @property
    def peak(self) -> float:
        return self.rate


class Linear(Falling):
    """From `peak` to `floor` in a straight line over `decay_steps`."""

    kind: Literal["linear"] = "linear"
    floor: Rate
    decay_steps: Steps | None = Field(None, description="null = the length of the run")


class WarmupCosine(Falling):
    """Linear from 0 to `peak` over the warm-up, then half a cosine down to `floor` at `decay_steps`."""

    kind: Literal["warmup_cosine"] = "warmup_cosine"
    warmup: StepsOrNone = Field(0, description="steps")
    warmup_share: float = Field(0.0, ge=0.0, le=1.0, description="or as a share of the whole schedule")
    decay_steps: Steps | None = Field(None, description="null = the length of the run")

    @model_validator(mode="after")
    def _ordered(self) -> "WarmupCosine":
        if self.warmup and self.warmup_share:
            raise ValueError("give warmup in steps or warmup_share as a fraction, not both")
        if self.decay_steps is not None and self.warmup > self.decay_steps:
            raise ValueError(
                f"warmup {self.warmup} is longer than decay_steps {self.decay_steps}, which count from the"
                " first step; shorten the warm-up or lengthen the decay"
            )
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


class Plateau(Falling):
    """Multiply by `factor` when validation PER has not improved for more than `patience` validations."""

    kind: Literal["plateau"] = "plateau"
    factor: float = Field(0.5, gt=0.0, lt=1.0)
    patience: int = Field(8, ge=0, le=10_000, description="validations without improvement that are borne")
    threshold: float = Field(0.0, ge=0.0, lt=1.0, description="relative improvement that counts")
    cooldown: int = Field(
        0, ge=0, le=10_000, description="validations after a reduction that are not counted"
    )


class Restarts(Falling):
    """SGDR: half a cosine from `peak` to `floor` over `period` steps, then again, each `multiply` times longer."""

    kind: Literal["restarts"] = "restarts"
    period: Steps
    multiply: int = Field(1, ge=1, le=100)
    warmup: StepsOrNone = Field(0, description="steps before the first period")

    @model_validator(mode="after")
    def _warmup_is_short(self) -> "Restarts":
        if self.warmup > self.period:
            raise ValueError(
                f"warmup {self.warmup} is longer than period {self.period}; shorten the warm-up or lengthen"
                " the period"
            )
        return self


class HoldDecay(Falling):
    """`peak` for `hold` steps, then down to `floor` at `decay_steps`."""

    kind: Literal["hold_decay"] = "hold_decay"
    hold: StepsOrNone = Field(0, description="steps at `peak`")
    shape: Literal["linear", "cosine"] = "linear"
    decay_steps: Steps | None = Field(
        None,
        description="step at which `floor` is reached, counted from the first; null = the length of the run",
    )

    @model_validator(mode="after")
    def _hold_is_short(self) -> "HoldDecay":
        if self.decay_steps is not None and self.hold > self.decay_steps:
            raise ValueError(
                f"hold {self.hold} is longer than decay_steps {self.decay_steps}, which count from the first"
                " step; shorten the hold or lengthen the decay"
            )
        return self


class StepDecay(Falling):
    """Multiply by `factor` at each of the given steps, or every `every` steps."""

    kind: Literal["step_decay"] = "step_decay"
    factor: float = Field(0.1, gt=0.0, lt=1.0)
    at: tuple[Steps, ...] = ()
    every: Steps | None = None

    @model_validator(mode="after")
    def _one_way(self) -> "StepDecay":
        if bool(self.at) == (self.every is not None):
            raise ValueError("give either `at` (a list of steps) or `every`, one of them")
        if list(self.at) != sorted(set(self.at)):
            raise ValueError(f"`at` {list(self.at)} must rise; put the steps in order, each once")
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

    @model_validator(mode="after")
    def _has_something_to_turn_on(self) -> "Precision":
        if self.below_per is not None and self.kind == "fp32":
            raise ValueError(
                f"below_per {self.below_per:g} turns mixed precision on, and kind is fp32; set kind to bf16 or fp16,"
                " or below_per to null"
            )
        return self


class Train(Settings):
    steps: Steps = Field(1000, description="optimizer steps")
    seed: int = Field(0, ge=0, lt=2**63)
    accumulate: int = Field(1, ge=1, le=4096, description="batches per optimizer step")
    clip_norm: float | None = Field(None, gt=0.0, le=1e6, description="null = no clipping")
    precision: Precision = Precision()
    log_every: Steps = 50
    validate_every: Steps = 500
    checkpoint_every: Steps = 1000
    keep_checkpoints: int = Field(
        2, ge=1, le=1_000_000, description="how many of the newest to keep, beside the best"
    )


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

    @model_validator(mode="after")
    def _fits_the_device(self) -> "Runtime":
        wanted = [name for name in ("compile", "cudnn_benchmark", "tf32") if getattr(self, name)]
        if self.device in ("cpu", "mps") and wanted:
            raise ValueError(
                f"{' and '.join(wanted)} act on CUDA only and device is {self.device}; set device to cuda or auto,"
                f" or {wanted[0]} to false"
            )
        return self
