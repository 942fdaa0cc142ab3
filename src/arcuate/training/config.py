"""Settings of the optimizer, its schedule, the averages of weights, and the loop."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from arcuate.config import Settings, parse_settings
from arcuate.data.config import AugmentationConfig, DataConfig
from arcuate.losses.config import LossSettings
from arcuate.models.config import (
    DenoiserSettings,
    EncoderSettings,
    FrontEndSettings,
    GRUSettings,
    ModelSettings,
    RuntimeSettings,
    SpeakingModeSettings,
    TransducerSettings,
)
from arcuate.run import Run
from arcuate.training.tracking.config import Track

ABOUT = ("name", "extends", "summary", "notes")  # what a recipe says about itself; not settings

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


# Settings of the guard, the judge in the training loop. It watches numbers and never touches the model.


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


# Settings of a curriculum: stages one after the other, each with what it trains and which losses count.

Component = Literal["front_end", "encoder", "ctc", "transducer", "mode", "denoiser"]
Weight = Annotated[float, Field(ge=0.0, le=1000.0)]

# Which components a loss can move.
REACHES: dict[str, tuple[Component, ...]] = {
    "ctc": ("front_end", "encoder", "ctc", "mode", "denoiser"),
    "rnnt": ("front_end", "encoder", "transducer", "mode", "denoiser"),
    "mode": ("mode",),
    "denoise": ("denoiser",),
}
NEEDS: dict[str, Component] = {"rnnt": "transducer", "mode": "mode", "denoise": "denoiser"}


class StageLosses(Settings):
    """Weights of the losses in a stage, in place of `loss.*.weight`; a loss that is not named does not count."""

    ctc: Weight = Field(0.0, description="of the CTC loss")
    rnnt: Weight = Field(0.0, description="of the transducer's loss")
    mode: Weight = Field(0.0, description="of the speaking mode's loss")
    denoise: Weight = Field(0.0, description="of the denoiser's loss")

    @property
    def counted(self) -> dict[str, float]:
        return {name: weight for name, weight in self if weight > 0}


class Stage(Settings):
    """One stage of a curriculum; on the command line stages.0.epochs=2 or stages.ctc.epochs=2."""

    name: str = Field(
        pattern=r"^[a-z][a-z0-9_-]{0,31}$", description="by which rows of metrics.jsonl call it"
    )
    steps: Steps | None = Field(None, description="how long it lasts in optimizer steps; or `epochs`")
    epochs: float | None = Field(
        None,
        gt=0.0,
        le=1e6,
        description="or in passes over the training trials; made steps when training starts",
    )
    losses: StageLosses = StageLosses()
    train: tuple[Component, ...] = Field((), description="components that learn; empty = all there are")
    rate: float = Field(1.0, gt=0.0, le=1000.0, description="what the rate of the schedule is multiplied by")
    schedule: Literal["anew", "on"] = Field(
        "anew", description="the schedule starts again and spans the stage, or goes on and spans the run"
    )
    plateau: int | None = Field(
        None,
        ge=1,
        le=10_000,
        description="ends early after so many validations without improvement; null = by length alone",
    )
    gain: float = Field(0.0, ge=0.0, lt=1.0, description="plateau: relative gain in PER that counts")

    @model_validator(mode="before")
    @classmethod
    def _on_is_a_word(cls, given: Any) -> Any:
        """YAML takes a bare `on` for true, and `schedule: on` can mean one thing only."""
        if isinstance(given, dict) and given.get("schedule") is True:
            return {**given, "schedule": "on"}
        return given

    @model_validator(mode="after")
    def _one_length(self) -> "Stage":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"stage {self.name!r} needs a length: give steps or epochs, one of them")
        if not self.losses.counted:
            raise ValueError(
                f"all losses of stage {self.name!r} weigh 0, so nothing would be learnt; set losses.ctc,"
                " losses.rnnt, losses.mode or losses.denoise above 0"
            )
        if len(set(self.train)) != len(self.train):
            raise ValueError(f"stage {self.name!r} names a component twice in train")
        reached = list(dict.fromkeys(part for loss in self.losses.counted for part in REACHES[loss]))
        if self.train and not set(self.train) & set(reached):
            raise ValueError(
                f"stage {self.name!r} trains {', '.join(self.train)}, which none of its losses"
                f" ({', '.join(self.losses.counted)}) reaches; add one of {', '.join(reached)} to train, or weigh"
                " another loss"
            )
        return self


# What makes a curriculum whole: its length, and components that are there.


def fill_length(tree: Any) -> Any:
    """A run with stages lasts as long as they do, unless train.steps ends it earlier; null = as long as they do.

    Stages in epochs are made steps when the data are known; until then the run counts as of any length.
    """
    if not isinstance(tree, Mapping) or not isinstance(train := tree.get("train") or {}, Mapping):
        return tree
    stages = tree.get("stages")
    if not stages:
        if "steps" in train and train["steps"] is None:
            raise ValueError(
                "train.steps is null, and there are no stages to tell the length of the run; set train.steps"
            )
        return tree
    steps = [
        stage.get("steps") if isinstance(stage, Mapping) else getattr(stage, "steps", None)
        for stage in stages
    ]
    known = all(type(n) is int for n in steps)
    whole = min(sum(n for n in steps if n), MAX_STEPS) if known else MAX_STEPS
    asked = train.get("steps")
    if asked is not None and type(asked) is not int:
        return tree  # refused with its own words
    return {**tree, "train": {**train, "steps": whole if asked is None else min(asked, whole)}}


def stage_problems(stages: Sequence[Stage], components: Sequence[str]) -> Iterator[str]:
    """Stages that name what is not there, each with what to change."""
    names = [stage.name for stage in stages]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"two stages are called {twice[0]!r}; give each a name of its own"
    for stage in stages:
        for component in stage.train:
            if component not in components:
                yield (
                    f"stage {stage.name!r} trains {component!r}, which this model does not have; set"
                    f" {component}.enabled=true, or take it out of train"
                )
        for loss in stage.losses.counted:
            if NEEDS.get(loss, "ctc") not in components:
                part = NEEDS[loss]
                yield (
                    f"stage {stage.name!r} weighs the {loss} loss, and the model has no {part}; set"
                    f" {part}.enabled=true, or stages.{stage.name}.losses.{loss}=0"
                )


def too_short(name: str, schedule: Any, steps: int, stages: Sequence[Stage]) -> Iterator[str]:
    """A warm-up that does not fit into the run, or into a stage over which it starts again."""
    for part, length in lead_in(schedule):
        if length > steps:
            yield (
                f"{name}.{part} {length} is longer than train.steps {steps}; lower {name}.{part} or raise"
                " train.steps"
            )
        for stage in stages:
            if stage.schedule == "anew" and stage.steps is not None and length > stage.steps:
                yield (
                    f"{name}.{part} {length} is longer than stage {stage.name!r} of {stage.steps} steps; lower"
                    f" it, lengthen the stage, or set stages.{stage.name}.schedule=on"
                )


def lead_in(schedule: Any) -> Iterator[tuple[str, int]]:
    """Lengths that have to fit into the run. A schedule laid out for longer than this run may be cut anywhere."""
    if isinstance(schedule, Restarts):
        yield "warmup", schedule.warmup
    if isinstance(schedule, WarmupCosine) and schedule.decay_steps is None:
        yield "warmup", schedule.warmup
    if isinstance(schedule, HoldDecay) and schedule.decay_steps is None:
        yield "hold", schedule.hold


class TrainingConfig(Settings):
    """Everything that determines a training run; a recipe adds a name and a description."""

    data: DataConfig = DataConfig()
    front_end: FrontEndSettings = FrontEndSettings()
    encoder: EncoderSettings = GRUSettings()
    transducer: TransducerSettings = TransducerSettings()
    mode: SpeakingModeSettings = SpeakingModeSettings()
    denoiser: DenoiserSettings = DenoiserSettings()
    output_init: Literal["default", "xavier"] = Field(
        "default", description="how the output layer starts; the '25 release uses xavier"
    )
    augment: AugmentationConfig = AugmentationConfig()
    loss: LossSettings = LossSettings()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Constant(rate=1e-3)
    session_schedule: Schedule | None = Field(
        None, description="for the session layers; null = as `schedule`"
    )
    ema: Ema = Ema()
    average: Average = Average()
    guard: Guard = Guard()
    train: Train = Train()
    stages: tuple[Stage, ...] = ()
    validate_: Validate = Field(Validate(), alias="validate")
    runtime: RuntimeSettings = RuntimeSettings()
    track: Track = Track()

    @property
    def model(self) -> ModelSettings:
        return ModelSettings(
            front_end=self.front_end,
            encoder=self.encoder,
            transducer=self.transducer,
            mode=self.mode,
            denoiser=self.denoiser,
            output_init=self.output_init,
        )

    @property
    def components(self) -> tuple[str, ...]:
        """The parts of the model that stages can name."""
        asked = (self.transducer.enabled, self.mode.enabled, self.denoiser.enabled)
        more = zip(("transducer", "mode", "denoiser"), asked, strict=True)
        return ("front_end", "encoder", "ctc", *(name for name, enabled in more if enabled))

    @model_validator(mode="before")
    @classmethod
    def _as_long_as_its_stages(cls, tree: Any) -> Any:
        return fill_length(tree)

    @model_validator(mode="after")
    def _something_is_learnt(self) -> "TrainingConfig":
        if self.loss.ctc.weight == 0 and not (self.transducer.enabled and self.loss.rnnt.weight > 0):
            raise ValueError(
                "all losses weigh 0, so nothing would be learnt; set loss.ctc.weight, or transducer.enabled"
                " with loss.rnnt.weight, above 0"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> "TrainingConfig":
        if problems := list(contradictions(self)):
            raise ValueError("; ".join(problems))
        return self


def contradictions(config: TrainingConfig) -> Iterator[str]:
    """Settings that are right on their own and wrong together, each with what to change."""
    steps, average, precision = config.train.steps, config.average, config.train.precision
    yield from stage_problems(config.stages, config.components)
    for name in ("schedule", "session_schedule"):
        yield from too_short(name, getattr(config, name), steps, config.stages)
    if average.start is not None and average.start > steps:
        yield (
            f"average.start {average.start} lies beyond train.steps {steps}, so that nothing would be averaged;"
            " lower average.start, raise train.steps, or set average.start=null"
        )
    if precision.kind == "fp16" and config.runtime.device in ("cpu", "mps"):
        yield (
            f"train.precision.kind=fp16 needs CUDA and runtime.device is {config.runtime.device};"
            " set train.precision.kind=fp32 or runtime.device=cuda"
        )
    if max(config.loss.intermediate.layers, default=0) >= (depth := config.encoder.depth):
        yield f"loss.intermediate.layers may name layers 1 to {depth - 1} of this encoder of {depth}"
    adaptive = config.guard.adaptive
    if adaptive.threshold is not None and adaptive.floor > config.schedule.peak:
        yield (
            f"guard.adaptive.floor {adaptive.floor:g} lies above the highest rate {config.schedule.peak:g} of the"
            " schedule; lower guard.adaptive.floor or raise the rate"
        )


def read_config(run: Run) -> TrainingConfig:
    """The training settings of a run folder, from its recipe.yaml."""
    tree = {key: value for key, value in run.recipe_tree().items() if key not in ABOUT}
    return parse_settings(TrainingConfig, tree, str(run.recipe_file), migrate=True)
