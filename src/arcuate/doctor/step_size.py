"""Whether the updates of a run were too small or too large, from the logged values and the recipe.

A stuck run has two possible causes with opposite remedies. With Adam a weight moves by lr × g / (|g| + eps) per step,
so its total path over a run is about the sum of the learning rates, damped where the gradient g is small relative to
eps. Initial weights are of the order of 0.1: with a path much shorter than that nothing can be learnt, and a single
step of that size destroys what was learnt.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from arcuate.doctor.measurements import Measurements, non_finite_gradients, non_finite_losses
from arcuate.doctor.training_log import Series, running_median

SHORT_PATH = 0.15  # total path of a weight below which hardly anything can be learnt
GOOD_PATH = 1.0  # path of the packaged and official recipes: 0.9 (tiny) to several hundred
LARGE_STEP = 0.01  # learning rate of Adam, damping included, above which the recipes of this field diverge
_TINY_RATIO, _HUGE_RATIO = 2e-5, 0.05  # norm of an update / norm of the weights
_DAMPED = 0.3  # factor of eps on an update below which eps limits it
_DEFAULT_PARAMETERS = 300_000  # if the run folder does not state the number
_HARD = 0.1  # clipping norm / gradient norm
_RISING = 2.0  # ratio of late to early gradient norms
_MOVED = 0.1  # relative rise of the training loss above its lowest level

Direction = Literal["too_small", "too_large", "unclear"]


@dataclass(frozen=True)
class StepSize:
    """Whether the step size is too small or too large, and the measurements that show it."""

    direction: Direction
    because: str = ""
    damping: float = 1.0  # factor on the updates due to eps
    path: float | None = None  # sum of learning rates × damping
    rising: bool = False  # gradients are not finite, or their norm rises
    clipped: bool = False  # eps limits the updates only because gradients are clipped far below their norm


def judge_step_size(m: Measurements) -> StepSize:
    damping, eps_text = _damping(m)
    clipped = damping < _DAMPED <= _damping(m, clip=False)[0] and _is_clipped_hard(m)
    path = _path(m.log.lr, damping) if m.log.lr.unit in ("batches", "steps") else None
    rising = gradients_rise(m)
    peak = float(m.log.lr.finite.values.max()) if len(m.log.lr.finite) else None
    movement = _movement(m.log.train_loss)
    ratio = float(np.median(m.log.update_ratio.finite.values)) if len(m.log.update_ratio.finite) else None

    def judged(direction: Direction, because: str) -> StepSize:
        return StepSize(direction, because, damping, path, rising, clipped)

    if rising:
        return judged("too_large", "gradients are not finite or their norm rises")
    if ratio is not None and ratio > _HUGE_RATIO:
        return judged("too_large", f"an update changes the weights by {100 * ratio:.2g} % of their norm")
    if ratio is not None and ratio < _TINY_RATIO:
        return judged("too_small", f"an update changes the weights by only {100 * ratio:.2g} % of their norm{eps_text}")
    adam = m.log.settings.get("optimizer.kind", "adam") != "sgd"
    known = bool(m.log.settings) and adam
    if known and path is not None and path < SHORT_PATH:
        return judged("too_small", f"a weight can move by only {path:.2g} in the complete run{eps_text}")
    if known and peak is not None and peak * damping > LARGE_STEP:
        return judged("too_large", f"the learning rate reached {peak:.3g}{eps_text or ' with a small eps'}")
    if movement is None:
        return judged("unclear", "")
    if movement > _MOVED:
        return judged("too_large", f"training loss rose by {100 * movement:.0f} % above its lowest level")
    if damping < _DAMPED:
        return judged("too_small", f"training loss barely changes{eps_text}")
    return judged("unclear", "")


def gradients_rise(m: Measurements) -> bool:
    """Whether gradients or losses are not finite, or the gradient norm of the last third exceeds twice the middle."""
    log = m.log
    if non_finite_losses(log) or non_finite_gradients(log) or log.skipped_steps:
        return True
    series = log.grad_norm.finite
    if len(series) < 12:
        return False
    third = len(series) // 3
    middle, late = np.median(series.values[third : 2 * third]), np.median(series.values[2 * third :])
    return bool(late > _RISING * middle > 0)


def _damping(m: Measurements, clip: bool = True) -> tuple[float, str]:
    """Factor by which eps scales the update of a typical weight, and a clause that states it.

    With `clip` the gradient is clipped first, as in training.
    """
    settings = m.log.settings
    eps, norms = settings.get("optimizer.eps"), m.log.grad_norm.finite.values
    if not isinstance(eps, float) or not len(norms) or settings.get("optimizer.kind") == "sgd":
        return 1.0, ""
    norm = float(np.median(norms))
    max_norm = settings.get("train.clip_norm")
    norm = min(norm, max_norm) if clip and isinstance(max_norm, (int, float)) else norm
    gradient = norm / math.sqrt(m.log.n_parameters or _DEFAULT_PARAMETERS)
    damping = gradient / (gradient + eps)
    if damping >= _DAMPED:
        return damping, ""
    return damping, (
        f", because eps {eps:g} exceeds the typical gradient per weight, {gradient:.1g}, and scales updates by"
        f" {damping:.2g}"
    )


def _is_clipped_hard(m: Measurements) -> bool:
    """Whether gradients are clipped to less than a tenth of their norm."""
    max_norm, norms = m.log.settings.get("train.clip_norm"), m.log.grad_norm.finite.values
    return isinstance(max_norm, (int, float)) and len(norms) > 0 and bool(max_norm < _HARD * np.median(norms))


def _path(lr: Series, damping: float) -> float | None:
    lr = lr.finite
    if len(lr) < 3:
        return None
    spans = np.diff(np.concatenate([[0.0], lr.steps]))
    return float((lr.values * spans).sum()) * damping


def _movement(loss: Series) -> float | None:
    """Rise of the training loss from its lowest level to its end, relative to the lowest level."""
    loss = loss.finite
    if len(loss) < 6:
        return None
    level = running_median(loss.values, 5)
    lowest = float(level.min())
    end = min(float(level[-1]), float(np.median(loss.values[-3:])))  # for a falling loss, the last value
    return end / lowest - 1 if lowest > 0 else None
