"""Settings that are allowed and yet will not do here what they say; told before training begins."""

from collections.abc import Iterator

from arcuate.losses.settings import Loss
from arcuate.recipe import Recipe
from arcuate.training.settings import Plateau, WarmupCosine
from arcuate.training.stage_settings import StageLosses


def cautions(recipe: Recipe, validates: bool, device: str) -> Iterator[str]:
    steps = recipe.train.steps
    for name in ("schedule", "session_schedule"):
        schedule = getattr(recipe, name)
        if isinstance(schedule, WarmupCosine) and schedule.warmup > steps:  # of a schedule for a longer run
            yield (
                f"{name}.warmup {schedule.warmup} is longer than this run of {steps} steps, whose rate stays below"
                f" its peak; lower {name}.warmup or raise train.steps"
            )
        if isinstance(schedule, Plateau) and not validates:
            yield f"{name}.kind=plateau never lowers the rate, for there are no validation trials"
    planned = sum(stage.steps or 0 for stage in recipe.stages)
    if planned > steps:
        yield f"train.steps {steps} ends this run before its stages, which add up to {planned} steps, are over"
    for name, _ in StageLosses() if recipe.stages else ():
        weight = getattr(recipe.loss, name).weight
        if weight != getattr(Loss(), name).weight:
            yield (
                f"loss.{name}.weight {weight:g} does not count, for every stage weighs the losses itself; set"
                f" stages.NAME.losses.{name}"
            )
    for stage in recipe.stages:
        if stage.plateau is not None and not validates:
            yield f"stages.{stage.name}.plateau never ends the stage, for there are no validation trials"
    if recipe.train.precision.below_per is not None and not validates:
        yield "train.precision.below_per never turns mixed precision on, for there are no validation trials"
    for name in ("compile", "cudnn_benchmark", "tf32"):
        if getattr(recipe.runtime, name) and device != "cuda":
            yield f"runtime.{name} acts on CUDA only and does nothing on {device}"
