"""Warnings before training: settings without effect, and learning rate, eps and loss reduction that do not match."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from arcuate.losses.config import LossSettings
from arcuate.training.config import TrainingConfig
from arcuate.training.curriculum import StageLosses
from arcuate.training.schedule import AnySchedule, Plateau, WarmupCosine


def find_ineffective_settings(recipe: TrainingConfig, validates: bool, device: str) -> Iterator[str]:
    """Yield a sentence for each valid setting that has no effect in this run, or not the full one."""
    steps = recipe.train.steps
    for name in ("schedule", "session_schedule"):
        schedule = getattr(recipe, name)
        if isinstance(schedule, WarmupCosine) and schedule.warmup_steps > steps:  # it has a `decay_steps`
            yield (
                f"{name}.warmup_steps {schedule.warmup_steps} is longer than this run of {steps} steps, so the"
                f" learning rate never reaches its peak; lower {name}.warmup_steps or raise train.steps"
            )
        if isinstance(schedule, Plateau) and not validates:
            yield f"{name}.kind=plateau never reduces the learning rate, because there are no validation trials"
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
    for stage in recipe.stages:
        if stage.patience is not None and not validates:
            yield f"stages.{stage.name}.patience has no effect, because there are no validation trials"
    if recipe.train.precision.below_per is not None and not validates:
        yield "train.precision.below_per never enables mixed precision, because there are no validation trials"
    for name in ("compile", "cudnn_benchmark", "tf32"):
        if getattr(recipe.runtime, name) and device != "cuda":
            yield f"runtime.{name} needs CUDA and has no effect on {device}"


_ADAM_KINDS = ("adam", "adamw")
_TARGET_LENGTH = (30.0, 40.0)  # tokens in a typical sentence: ratio of a loss per trial to a mean per token
_TOLERANCE = 1.5  # factor by which an eps scaled with the reduction may miss the target length
_NEGLIGIBLE_EPS = 1e-4  # nearly every gradient is larger


class _UpdateScale(NamedTuple):
    """The settings that determine how far a small gradient moves a weight."""

    lr: float
    eps: float
    reduction: str


def coupling_warnings(recipe: TrainingConfig, official: TrainingConfig, official_name: str) -> list[str]:
    """Return a warning per schedule if some, but not all, of learning rate, eps and reduction were changed."""
    if not {recipe.optimizer.kind, official.optimizer.kind} <= set(_ADAM_KINDS):
        return []

    def scale(config: TrainingConfig, schedule: AnySchedule) -> _UpdateScale:
        return _UpdateScale(schedule.peak_lr, config.optimizer.eps, config.loss.ctc.reduction)

    both = (official, recipe)
    weights = [scale(config, config.schedule) for config in both]
    session_layers = [scale(config, config.session_schedule or config.schedule) for config in both]
    warnings = [_coupling_warning("the peak learning rate", official_name, *weights)]
    if session_layers != weights:
        name = "the peak learning rate of the session layers"
        warnings.append(_coupling_warning(name, official_name, *session_layers))
    return [warning for warning in warnings if warning]


def _coupling_warning(lr_name: str, official: str, old: _UpdateScale, new: _UpdateScale) -> str | None:
    parts: dict[str, tuple[float | str, float | str]] = {
        lr_name: (old.lr, new.lr),
        "optimizer.eps": (old.eps, new.eps),
        "loss.ctc.reduction": (old.reduction, new.reduction),
    }
    changed = [f"{part} ({_format(a)} → {_format(b)})" for part, (a, b) in parts.items() if not _same(a, b)]
    kept = [f"{part} ({_format(a)})" for part, (a, b) in parts.items() if _same(a, b)]
    if not changed or not kept or _eps_matches_reduction(old, new):
        return None
    return (
        f"{' and '.join(changed)} changed against {official}, but not {' and '.join(kept)}."
        f" Adam is not invariant to the scale of gradients at the official eps {_format(old.eps)}: gradients far below"
        f" eps move weights by lr/eps, {_format(old.lr / old.eps)} → {_format(new.lr / new.eps)}, and"
        f" {_describe_gradients(old, new)} (reasoned from the update rule, not a measured ablation)."
    )


def _describe_gradients(old: _UpdateScale, new: _UpdateScale) -> str:
    times = f"about {_TARGET_LENGTH[0]:g}–{_TARGET_LENGTH[1]:g} times"
    if old.reduction != new.reduction:
        direction = "larger" if new.reduction == "sum_per_trial" else "smaller"
        return f"{new.reduction} makes the gradients {times}, the target length, {direction}"
    if new.eps < _NEGLIGIBLE_EPS:
        return (
            f"at eps {_format(new.eps)} hardly any gradient is that small, so every weight moves by about the learning"
            f" rate, {_format(new.lr)}, regardless of its gradient"
        )
    return f"gradients of sum_per_trial are {times}, the target length, those of mean_per_token"


def _eps_matches_reduction(old: _UpdateScale, new: _UpdateScale) -> bool:
    """Return whether loss and eps were scaled alike at the same learning rate: Adam's updates are unchanged."""
    if not _same(old.lr, new.lr) or old.reduction == new.reduction:
        return False
    ratio = new.eps / old.eps if new.reduction == "sum_per_trial" else old.eps / new.eps
    return _TARGET_LENGTH[0] / _TOLERANCE <= ratio <= _TARGET_LENGTH[1] * _TOLERANCE


def _same(a: float | str, b: float | str) -> bool:
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-9))


def _format(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
