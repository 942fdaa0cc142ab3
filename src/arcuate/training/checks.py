"""Settings that are allowed and yet will not do here what they say; told before training begins."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from arcuate.losses.config import LossSettings
from arcuate.training.config import TrainingConfig
from arcuate.training.curriculum import StageLosses
from arcuate.training.schedule import AnySchedule, Plateau, WarmupCosine


def cautions(recipe: TrainingConfig, validates: bool, device: str) -> Iterator[str]:
    steps = recipe.train.steps
    for name in ("schedule", "session_schedule"):
        schedule = getattr(recipe, name)
        if (
            isinstance(schedule, WarmupCosine) and schedule.warmup_steps > steps
        ):  # of a schedule for a longer run
            yield (
                f"{name}.warmup_steps {schedule.warmup_steps} is longer than this run of {steps} steps, so the"
                f" learning rate never reaches its peak; lower {name}.warmup_steps or raise train.steps"
            )
        if isinstance(schedule, Plateau) and not validates:
            yield f"{name}.kind=plateau never lowers the rate, for there are no validation trials"
    planned = sum(stage.steps or 0 for stage in recipe.stages)
    if planned > steps:
        yield f"train.steps {steps} ends this run before its stages, which add up to {planned} steps, are over"
    for name, _ in StageLosses() if recipe.stages else ():
        weight = getattr(recipe.loss, name).weight
        if weight != getattr(LossSettings(), name).weight:
            yield (
                f"loss.{name}.weight {weight:g} does not count, for every stage weighs the losses itself; set"
                f" stages.NAME.losses.{name}"
            )
    for stage in recipe.stages:
        if stage.patience is not None and not validates:
            yield f"stages.{stage.name}.patience never ends the stage, for there are no validation trials"
    if recipe.train.precision.below_per is not None and not validates:
        yield "train.precision.below_per never turns mixed precision on, for there are no validation trials"
    for name in ("compile", "cudnn_benchmark", "tf32"):
        if getattr(recipe.runtime, name) and device != "cuda":
            yield f"runtime.{name} acts on CUDA only and does nothing on {device}"


# Learning rate, eps and the CTC reduction are one unit; a warning where a recipe changes a part of it.

ADAM_FAMILY = ("adam", "adamw")
TARGET_LENGTH = (30.0, 40.0)  # tokens of a usual sentence: how much larger a sum is than a mean per token
ROOM = 1.5  # an eps that follows the reduction by the target length, give or take this factor, follows it
NEGLIGIBLE_EPS = 1e-4  # below this nearly every gradient is larger than eps


@dataclass(frozen=True)
class Unit:
    """What together decides how far a small gradient moves a weight."""

    rate: float
    eps: float
    reduction: str

    @property
    def step(self) -> float:
        """How far a weight moves per unit of gradient, for gradients well below eps."""
        return self.rate / self.eps


def coupling_warnings(recipe: TrainingConfig, official: TrainingConfig, official_name: str) -> list[str]:
    """A warning for each schedule whose rate, eps and reduction no longer belong together as the official do."""
    if not {recipe.optimizer.kind, official.optimizer.kind} <= set(ADAM_FAMILY):
        return []
    weights = (_unit(official, official.schedule), _unit(recipe, recipe.schedule))
    session_layers = (
        _unit(official, official.session_schedule or official.schedule),
        _unit(recipe, recipe.session_schedule or recipe.schedule),
    )
    found = [_warning("the peak rate", *weights, official_name)]
    if session_layers != weights:
        found.append(_warning("the peak rate of the session layers", *session_layers, official_name))
    return [text for text in found if text]


def _unit(recipe: TrainingConfig, schedule: AnySchedule) -> Unit:
    return Unit(schedule.peak_lr, recipe.optimizer.eps, recipe.loss.ctc.reduction)


def _warning(rate: str, old: Unit, new: Unit, official: str) -> str | None:
    parts: dict[str, tuple[float | str, float | str]] = {
        rate: (old.rate, new.rate),
        "optimizer.eps": (old.eps, new.eps),
        "loss.ctc.reduction": (old.reduction, new.reduction),
    }
    changed = [f"{part} ({_show(a)} → {_show(b)})" for part, (a, b) in parts.items() if not _same(a, b)]
    kept = [f"{part} ({_show(a)})" for part, (a, b) in parts.items() if _same(a, b)]
    if not changed or not kept or _eps_follows_reduction(old, new):
        return None
    return (
        f"{' and '.join(changed)} changed against {official}, but not {' and '.join(kept)}."
        f" Adam is not invariant to the scale of gradients at the official eps {_show(old.eps)}: those well below eps"
        f" move weights by rate/eps, {_show(old.step)} → {_show(new.step)}, and {_scale(old, new)}"
        " (reasoned from the update rule, not a measured ablation)."
    )


def _scale(old: Unit, new: Unit) -> str:
    times = f"some {TARGET_LENGTH[0]:g}–{TARGET_LENGTH[1]:g} times"
    if old.reduction != new.reduction:
        direction = "larger" if new.reduction == "sum_per_trial" else "smaller"
        return f"{new.reduction} makes the gradients {times}, the target length, {direction}"
    if new.eps < NEGLIGIBLE_EPS:
        return (
            f"at eps {_show(new.eps)} hardly any gradient is that small, so that every weight moves by about"
            f" the rate, {_show(new.rate)}, whatever its gradient"
        )
    return f"gradients of sum_per_trial are {times}, the target length, those of mean_per_token"


def _eps_follows_reduction(old: Unit, new: Unit) -> bool:
    """LossSettings and eps scaled alike at the same rate leave Adam's updates as they were."""
    if not _same(old.rate, new.rate) or old.reduction == new.reduction:
        return False
    ratio = new.eps / old.eps if new.reduction == "sum_per_trial" else old.eps / new.eps
    return TARGET_LENGTH[0] / ROOM <= ratio <= TARGET_LENGTH[1] * ROOM


def _same(a: float | str, b: float | str) -> bool:
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-9))


def _show(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
