"""Settings of a training run: optimizer, weight averaging, loop, validation, trackers, and checks across them."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

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
from arcuate.training.curriculum import Stage, StageLosses, drop_optional_stages, fill_length, find_stage_problems
from arcuate.training.schedule import AnySchedule, Constant, Plateau, Schedule, Steps, WarmupCosine

DESCRIPTIVE_KEYS = (  # keys of a recipe that do not affect training
    *("name", "extends", "summary", "notes", "purpose", "target"),
)

_Decay = Annotated[float, Field(ge=0.0, le=10.0)]
_Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
_Name = Annotated[str, Field(min_length=1, max_length=128)]
_Tag = Annotated[str, Field(min_length=1, max_length=64)]


class WeightDecay(Settings):
    """Weight decay of the three parameter groups of the '25 release."""

    weights: _Decay = Field(0.0, description="Weight decay of all parameters not listed below.")
    biases: _Decay = Field(0.0, description="Weight decay of the biases of encoder and output layer.")
    session_layers: _Decay = Field(0.0, description="Weight decay of the session layers.")


class Optimizer(Settings):
    """The optimizer; its learning rate is set by `schedule`."""

    kind: Literal["adam", "adamw"] = Field("adamw", description="Optimizer.")
    betas: tuple[_Beta, _Beta] = Field((0.9, 0.999), description="Decay of the moment estimates.")
    eps: float = Field(
        1e-8,
        gt=0.0,
        le=10.0,
        description="Term added to the denominator; gradients far below it give updates of (lr/eps) × gradient.",
    )
    weight_decay: WeightDecay = WeightDecay()
    absent_sessions: Literal["skip", "decay"] = Field(
        "skip",
        description="Session layers without a trial in the batch: `skip` leaves them unchanged ('25), `decay` updates"
        " them with a zero gradient ('24).",
    )
    session_lr_factor: float = Field(
        1.0, gt=0.0, le=1000.0, description="Ratio of the learning rate of the session layers to that of `schedule`."
    )
    fused: bool = Field(True, description="Use the fused kernel for the update if the device supports it.")


class Ema(Settings):
    """Exponential moving average of the weights; if enabled, the averaged weights are validated and saved."""

    decay: float = Field(0.0, ge=0.0, lt=1.0, description="Decay per step; 0 = off, 0.999 averages about 1,000 steps.")


class Stuck(Settings):
    """A loss that stays at chance level, because the updates are too large or too small to learn from.

    Updates are too small if norm of the update / norm of the weights was below 0.003 at every measured step, or if a
    large eps keeps the sum of all updates of the run below the norm of the weights. In the official recipes the output
    is all blanks for the first 500 to 1,600 steps, which is normal.
    """

    patience: int = Field(2000, ge=50, le=10_000_000, description="Number of steps without a drop before a rewind.")


class Collapse(Settings):
    """Blanks only, or the same output for every trial, after the model had left the all-blank solution."""

    action: Literal["warn", "rewind", "stop", "ignore"] = Field("warn", description="Action on a collapse.")


class Adaptive(Settings):
    """Reduction of the learning rate while the mean gradient norm exceeds `threshold`; off without a threshold.

    `factor`, `min_lr` and `max_reductions` also apply to the reduction after too many skipped updates.
    """

    threshold: float | None = Field(
        None, gt=0.0, le=1e9, description="Mean gradient norm above which the learning rate is reduced; null = off."
    )
    factor: float = Field(0.8, gt=0.0, lt=1.0, description="Factor on all learning rates at a reduction.")
    min_lr: float = Field(0.0, ge=0.0, le=100.0, description="Lower bound of the learning rate in these reductions.")
    max_reductions: int = Field(5, ge=1, le=1000, description="Maximum number of reductions.")


class GuardSettings(Settings):
    """Responses to non-finite updates, divergence, stuck training and collapse."""

    enabled: bool = Field(True, description="Enable the guard.")
    max_rewinds: int = Field(5, ge=0, le=1000, description="Number of rewinds after which training stops.")
    stuck: Stuck = Stuck()
    collapse: Collapse = Collapse()
    adaptive: Adaptive = Adaptive()


class Precision(Settings):
    """Mixed precision on a GPU that computes it; elsewhere training stays in fp32."""

    kind: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="Precision of the forward pass.")
    below_per: float | None = Field(
        None, gt=0.0, le=1.0, description="Validation PER below which mixed precision is used; null = from the start."
    )

    @model_validator(mode="after")
    def _has_a_mixed_precision(self) -> "Precision":
        if self.below_per is not None and self.kind == "fp32":
            raise ValueError(
                f"below_per {self.below_per:g} needs a mixed precision, but kind is fp32; set kind to bf16 or fp16, or"
                " below_per to null"
            )
        return self


class Train(Settings):
    """The training loop."""

    steps: Steps = Field(1000, description="Number of optimizer steps.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of weights, augmentation and dropout.")
    accumulate: int = Field(1, ge=1, le=4096, description="Number of batches per optimizer step.")
    clip_norm: float | None = Field(
        None,
        gt=0.0,
        le=1e6,
        description="Gradients with a larger norm are clipped to this norm; null = no clipping.",
    )
    precision: Precision = Precision()
    log_every: Steps = Field(50, description="Steps between training rows of metrics.jsonl.")
    validate_every: Steps = Field(500, description="Steps between validations.")
    checkpoint_every: Steps = Field(1000, description="Steps between checkpoints.")
    select_by: Literal["per", "wer"] = Field(
        "per",
        description="Validation error rate that selects the best checkpoint and controls plateau schedules and the"
        " patience of stages; `wer` needs validate.lm.",
    )
    keep_checkpoints: int = Field(
        2, ge=1, le=1_000_000, description="Number of latest checkpoints to keep, in addition to the best."
    )
    keep_optimizer: bool = Field(False, description="With --from: load the optimizer state of the other run too.")


class Validate(Settings):
    """Validation during training."""

    batch_size: ClassVar[int] = 32  # trials
    beam: ClassVar[int] = 20  # prefixes kept per frame by the prefix beam search
    predictions: ClassVar[int] = 8  # trials whose predictions are kept per validation
    search: Literal["greedy", "beam"] = Field(
        "greedy", description="Phoneme search; `beam` is a prefix beam search, which sums over alignments."
    )
    lm: str = Field(
        "none", min_length=1, description="Language model with which the WER is measured: default, a file, or none."
    )
    lexicon: str = Field("default", min_length=1, description="Pronunciation lexicon of the word search.")


class TensorBoard(Settings):
    """TensorBoard; its files go to RUN/tensorboard."""

    enabled: bool = Field(False, description="Write TensorBoard event files.")


class Wandb(Settings):
    """Weights & Biases; its files go to RUN/wandb."""

    enabled: bool = Field(False, description="Send metrics to Weights & Biases.")
    project: _Name = Field("arcuate", description="Project of the run.")
    entity: _Name | None = Field(None, description="User or team; null = the default of the account.")
    run_name: _Name | None = Field(None, description="Displayed name; null = the name of the run folder.")
    tags: tuple[_Tag, ...] = Field((), description="Tags of the run.")


class Track(Settings):
    """Experiment trackers that receive the metrics during training."""

    tensorboard: TensorBoard = TensorBoard()
    wandb: Wandb = Wandb()


class TrainingConfig(Settings):
    """Everything that determines a training run; a recipe adds a name and a description."""

    data: DataConfig = DataConfig()
    front_end: FrontEndSettings = FrontEndSettings()
    encoder: EncoderSettings = GRUSettings()
    transducer: TransducerSettings = TransducerSettings()
    mode: SpeakingModeSettings = SpeakingModeSettings()
    denoiser: DenoiserSettings = DenoiserSettings()
    output_init: Literal["default", "xavier"] = Field(
        "default", description="Initialisation of the output layer; the '25 release uses xavier."
    )
    augment: AugmentationConfig = AugmentationConfig()
    loss: LossSettings = LossSettings()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Constant(peak_lr=1e-3)
    ema: Ema = Ema()
    guard: GuardSettings = GuardSettings()
    train: Train = Train()
    stages: tuple[Stage, ...] = ()
    validate_: Validate = Field(Validate(), alias="validate")
    runtime: RuntimeSettings = RuntimeSettings()
    track: Track = Track()

    @property
    def model(self) -> ModelSettings:
        return ModelSettings(**{name: getattr(self, name) for name in ModelSettings.model_fields})

    @property
    def components(self) -> tuple[str, ...]:
        """Components of the model that a stage can train."""
        optional = [name for name in ("transducer", "mode", "denoiser") if getattr(self, name).enabled]
        return ("front_end", "encoder", "ctc", *optional)

    @model_validator(mode="before")
    @classmethod
    def _fill_length(cls, tree: Any) -> Any:
        return fill_length(drop_optional_stages(tree))

    @model_validator(mode="after")
    def _is_consistent(self) -> "TrainingConfig":
        if problems := list(_find_contradictions(self)):
            raise ValueError("; ".join(problems))
        return self


def _find_contradictions(config: TrainingConfig) -> Iterator[str]:
    """Yield a sentence for each pair of settings that are valid alone but not together."""
    steps, precision = config.train.steps, config.train.precision
    if config.loss.ctc.weight == 0 and not (config.transducer.enabled and config.loss.rnnt.weight > 0):
        yield (
            "all losses have weight 0, so nothing would be learnt; set loss.ctc.weight, or transducer.enabled with"
            " loss.rnnt.weight, above 0"
        )
    yield from find_stage_problems(config.stages, config.components)
    yield from _find_long_warmups(config.schedule, steps, config.stages)
    if precision.kind == "fp16" and config.runtime.device in ("cpu", "mps"):
        yield (
            f"train.precision.kind=fp16 needs CUDA, but runtime.device is {config.runtime.device};"
            " set train.precision.kind=fp32 or runtime.device=cuda"
        )
    if config.train.select_by == "wer" and config.validate_.lm == "none":
        yield "train.select_by=wer needs the WER of validations; set validate.lm=default, or train.select_by=per"
    if max(config.loss.intermediate.layers, default=0) >= (depth := config.encoder.depth):
        yield f"loss.intermediate.layers must name layers 1 to {depth - 1} of this encoder of depth {depth}"
    adaptive = config.guard.adaptive
    if adaptive.threshold is not None and adaptive.min_lr > config.schedule.peak_lr:
        yield (
            f"guard.adaptive.min_lr {adaptive.min_lr:g} is above the highest learning rate"
            f" {config.schedule.peak_lr:g} of the schedule; lower guard.adaptive.min_lr or raise the learning rate"
        )


def _find_long_warmups(schedule: AnySchedule, steps: int, stages: Sequence[Stage]) -> Iterator[str]:
    """Yield a sentence for each warm-up that does not fit into the run, or into a stage that restarts it.

    A schedule with its own length (`decay_steps`) may be cut off anywhere.
    """
    if not isinstance(schedule, WarmupCosine) or schedule.decay_steps is not None:
        return
    key, length = "schedule.warmup_steps", schedule.warmup_steps
    if length > steps:
        yield f"{key} {length} is longer than train.steps {steps}; lower {key} or raise train.steps"
    for stage in stages:
        if stage.schedule == "restart" and stage.steps is not None and length > stage.steps:
            yield (
                f"{key} {length} is longer than stage {stage.name!r} of {stage.steps} steps; lower it, lengthen"
                f" the stage, or set stages.{stage.name}.schedule=continue"
            )


def read_config(run: Run) -> TrainingConfig:
    """Read the training settings of a run folder from its recipe.yaml."""
    tree = {key: value for key, value in run.recipe_tree().items() if key not in DESCRIPTIVE_KEYS}
    return parse_settings(TrainingConfig, tree, str(run.recipe_file))


# --- warnings before training ------------------------------------------------------------------------------------


def find_ineffective_settings(recipe: TrainingConfig, validates: bool, device: str) -> Iterator[str]:
    """Yield a sentence for each valid setting that has no effect in this run, or only part of its effect."""
    steps, schedule, runtime = recipe.train.steps, recipe.schedule, recipe.runtime
    if isinstance(schedule, WarmupCosine) and schedule.warmup_steps > steps:  # it has a `decay_steps`
        yield (
            f"schedule.warmup_steps {schedule.warmup_steps} is longer than this run of {steps} steps, so the learning"
            " rate never reaches its peak; lower schedule.warmup_steps or raise train.steps"
        )
    planned = sum(stage.steps or 0 for stage in recipe.stages)
    if planned > steps:
        yield f"train.steps {steps} ends this run before its stages, which add up to {planned} steps"
    for name, _ in StageLosses() if recipe.stages else ():
        weight = getattr(recipe.loss, name).weight
        if weight != getattr(LossSettings(), name).weight:
            yield (
                f"loss.{name}.weight {weight:g} has no effect, because every stage sets the weights of the losses; set"
                f" stages.NAME.losses.{name}"
            )
    for effect in () if validates else _find_effects_of_validation(recipe):
        yield f"{effect}, because there are no validation trials"
    for name in ("compile", "cudnn_benchmark", "tf32"):
        if getattr(runtime, name) and device != "cuda":
            yield f"runtime.{name} needs CUDA and has no effect on {device}"
    if runtime.compile and device == "cuda" and recipe.encoder.kind in ("gru", "ssm"):
        yield f"runtime.compile has no effect on encoder.kind={recipe.encoder.kind}: it compiles blocks of Transformers"


def _find_effects_of_validation(recipe: TrainingConfig) -> Iterator[str]:
    if isinstance(recipe.schedule, Plateau):
        yield "schedule.kind=plateau never reduces the learning rate"
    for stage in recipe.stages:
        if stage.patience is not None:
            yield f"stages.{stage.name}.patience has no effect"
    if recipe.train.precision.below_per is not None:
        yield "train.precision.below_per never enables mixed precision"
