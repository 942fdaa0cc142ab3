"""Updates too small or too large: the one set of limits for the dry run, the guard and the doctor. Needs no torch.

With Adam a weight moves by lr × g / (|g| + eps) per step. Where its gradient g is far below eps, updates are
proportional to the gradient, and learning rate, eps and the reduction of the loss have to match. A run that hardly
learns can have updates of either kind, and the remedies are opposite.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from arcuate.training.config import TrainingConfig

Direction = Literal["too_small", "too_large", "unclear"]

# Limits on the update ratio (norm of an update / norm of the weights) of a run at chance level.
SMALL_UPDATE = 0.003  # below it, updates are too small to leave chance level
LARGE_UPDATE = 0.02  # below it, a higher learning rate may help as well as a lower one
EXCESSIVE_UPDATE = 0.08  # above it, updates are too large to learn anything
HIGHEST_UPDATE = 0.1  # higher learning rates that would exceed it are not tried

MIN_DISTANCE = 2.0  # sum of all updates of a run / size of the weights below which it hardly learns
MAX_STEP = 0.012  # change of a weight in one update above which gradients explode (`what explodes` in the findings)
SHORT_PATH = 0.15  # sum of all learning rates, damped by eps, below which a weight, about 0.1 at first, hardly moves
GOOD_PATH = 1.0  # the same in the packaged and official recipes: 0.9 (tiny) to several hundred
STRONGLY_DAMPED = 0.3  # gradient / (gradient + eps) below which eps is named as the reason for small updates
DAMPED = 0.5  # gradient / (gradient + eps) below which eps limits the updates

_SAFE_EPS, _LOWEST_EPS = 1e-8, 1e-12  # an eps of Adam below nearly all gradients, and the lowest eps to set
_TARGET_LENGTH = (30.0, 40.0)  # tokens in a typical sentence: ratio of a loss per trial to a mean per token
_TOLERANCE = 1.5  # a ratio of two eps within this factor of the target length matches a change of reduction
_NEGLIGIBLE_EPS = 1e-4  # nearly every gradient is larger


@dataclass(frozen=True)
class StepSize:
    """Whether updates are too small or too large, and why."""

    direction: Direction = "unclear"
    reason: str = ""
    eps_limits: bool = False  # they are small because eps exceeds the typical gradient


def damping(gradient: float, eps: float) -> float:
    """Return the factor by which eps scales the update of a weight with this gradient."""
    return gradient / (gradient + eps)


def expected(recipe: TrainingConfig, n_parameters: int) -> StepSize:
    """Judge the updates of a recipe before training.

    An estimate from the update rule: gradients of norm 1 (mean_per_token) or 35 (others), clipped and spread evenly
    over the weights. If all updates had the same direction, they should move the weights by several times their initial
    size, about 1 / sqrt(3 × width).
    """
    eps, lr, reduction = recipe.optimizer.eps, recipe.schedule.peak_lr, recipe.loss.ctc.reduction
    if recipe.loss.ctc.weight == 0:
        return StepSize()
    norm = min(1.0 if reduction == "mean_per_token" else sum(_TARGET_LENGTH) / 2, recipe.train.clip_norm or math.inf)
    gradient = norm / math.sqrt(n_parameters)
    share = damping(gradient, eps)
    if (step := lr * share) > MAX_STEP:
        return StepSize(
            "too_large",
            f"the learning rate {lr:g} with optimizer.eps {eps:g} moves every weight by about {step:.2g} per step"
            f" (loss.ctc.reduction {reduction}); above {MAX_STEP:g} gradients exploded in a model of 64 units, and"
            " wider ones failed at lower rates; lower the learning rate",
        )
    distance = recipe.train.steps * 0.5 * lr * share * math.sqrt(3 * recipe.encoder.width)
    if share < DAMPED and distance < MIN_DISTANCE:
        return StepSize(
            "too_small",
            f"optimizer.eps {eps:g} is {eps / gradient:.0f} times a typical gradient of this recipe (loss.ctc.reduction"
            f" {reduction}), so updates are about {100 * share:.2g} % of the learning rate and the {recipe.train.steps}"
            f" steps of this run can move the weights by {distance:.2g} of their size; lower optimizer.eps, or multiply"
            f" the learning rate by about {10 / distance:.0f} (an estimate)",
            eps_limits=True,
        )
    return StepSize()


def measured(
    update_ratio: float | None, n_steps: int | None = None, eps: float | None = None, gradient: float | None = None
) -> StepSize:
    """Judge the updates of a run at chance level.

    `update_ratio` is the largest norm of an update / norm of the weights, `n_steps` the length of the run and
    `gradient` the typical gradient of a weight; None if unknown. The mean learning rate of a decaying schedule is about
    half of its peak, so a run has to be long enough for `MIN_DISTANCE`, 2 instead of 1, at this size.
    """
    if update_ratio is None:
        return StepSize()
    size = f"update norm at most {update_ratio:.2g} of the weight norm"
    if update_ratio > EXCESSIVE_UPDATE:
        return StepSize("too_large", f"{size}, too large")
    eps_limits = eps is not None and gradient is not None and 0 < gradient < eps
    is_short = eps_limits and distance_is_short(update_ratio, n_steps)
    if update_ratio < SMALL_UPDATE or is_short:
        length = f" in {n_steps:,} steps" if is_short else ""
        return StepSize("too_small", f"{size}, too small to learn{length}", eps_limits)
    return StepSize("unclear", size)


@dataclass(frozen=True)
class LoggedUpdates:
    """What a log and its recipe state about the updates of a run; None if unknown."""

    learnt: bool  # whether the run left chance level
    update_ratio: float | None = None  # largest norm of an update / norm of the weights
    n_steps: int | None = None
    peak_lr: float | None = None
    lr_sum: float | None = None  # sum of the learning rates of all steps
    eps: float | None = None
    gradient: float | None = None  # typical gradient of a weight, after clipping

    @property
    def damping(self) -> float:
        """The factor by which eps scales the update of a typical weight."""
        return 1.0 if self.eps is None or not self.gradient else damping(self.gradient, self.eps)


def logged(updates: LoggedUpdates) -> StepSize:
    """Judge the updates of a finished run with Adam: by their measured size, else by the learning rates and eps."""
    ratio, share = updates.update_ratio, updates.damping
    eps_text = ""
    if share < STRONGLY_DAMPED:
        eps_text = (
            f", because eps {updates.eps:g} exceeds the typical gradient per weight, {updates.gradient:.1g}, and scales"
            f" updates by {share:.2g}"
        )
    if ratio is not None and (ratio > EXCESSIVE_UPDATE or not updates.learnt):
        judged = measured(ratio, updates.n_steps, updates.eps, updates.gradient)
        if judged.direction != "unclear":
            return StepSize(judged.direction, judged.reason + eps_text, judged.eps_limits)
    if updates.lr_sum is not None and updates.lr_sum * share < SHORT_PATH:
        path = updates.lr_sum * share
        return StepSize("too_small", f"a weight can move by only {path:.2g} in the complete run{eps_text}", share < 1)
    if updates.peak_lr is not None and updates.peak_lr * share > MAX_STEP:
        reason = f"the learning rate reached {updates.peak_lr:.3g}{eps_text or ' with a small eps'}"
        return StepSize("too_large", reason)
    return StepSize("unclear", eps_text.removeprefix(", "), share < STRONGLY_DAMPED)


def distance_is_short(update_ratio: float | None, n_steps: int | None) -> bool:
    """Whether updates of this size cannot change the weights by their own norm within the run."""
    return update_ratio is not None and n_steps is not None and update_ratio * n_steps < MIN_DISTANCE


def lower_eps(eps: float, gradient: float) -> float:
    """Return an eps that no longer limits updates of weights with this typical gradient."""
    return max(min(_SAFE_EPS, gradient / 100), _LOWEST_EPS)


class _UpdateScale(NamedTuple):
    """The settings that determine how far a small gradient moves a weight."""

    lr: float
    eps: float
    reduction: str


def coupling_warnings(recipe: TrainingConfig, official: TrainingConfig, official_name: str) -> list[str]:
    """Return a warning for the weights and one for the session layers if some, but not all, of learning rate, eps and
    reduction were changed.
    """

    def scale(config: TrainingConfig, factor: float = 1.0) -> _UpdateScale:
        return _UpdateScale(factor * config.schedule.peak_lr, config.optimizer.eps, config.loss.ctc.reduction)

    both = (official, recipe)
    weights = [scale(config) for config in both]
    session_layers = [scale(config, config.optimizer.session_lr_factor) for config in both]
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
        f"{' and '.join(changed)} changed relative to {official}, but not {' and '.join(kept)}."
        f" Adam is not invariant to the scale of gradients at the official eps {_format(old.eps)}: gradients far below"
        f" eps move weights by lr/eps, {_format(old.lr / old.eps)} → {_format(new.lr / new.eps)}, and"
        f" {_describe_gradients(old, new)}."
    )


def _describe_gradients(old: _UpdateScale, new: _UpdateScale) -> str:
    times = f"about {_TARGET_LENGTH[0]:g}–{_TARGET_LENGTH[1]:g} times"
    if old.reduction != new.reduction:
        direction = "larger" if new.reduction == "sum_per_trial" else "smaller"
        return f"{new.reduction} makes the gradients {times} (the target length) {direction}"
    if new.eps < _NEGLIGIBLE_EPS:
        return (
            f"at eps {_format(new.eps)} hardly any gradient is that small, so every weight moves by about the learning"
            f" rate, {_format(new.lr)}, regardless of its gradient"
        )
    return f"gradients of sum_per_trial are {times} (the target length) those of mean_per_token"


def _eps_matches_reduction(old: _UpdateScale, new: _UpdateScale) -> bool:
    """Return whether loss and eps were scaled by the same factor, so that Adam's updates are unchanged."""
    if not _same(old.lr, new.lr) or old.reduction == new.reduction:
        return False
    ratio = new.eps / old.eps if new.reduction == "sum_per_trial" else old.eps / new.eps
    return _TARGET_LENGTH[0] / _TOLERANCE <= ratio <= _TARGET_LENGTH[1] * _TOLERANCE


def _same(a: float | str, b: float | str) -> bool:
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-9))


def _format(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
