"""Whether the updates of a run were too small or too large: what the log shows, judged by `training.step_size`."""

import math
from dataclasses import dataclass

import numpy as np

from arcuate.doctor.log_table import Series, running_median
from arcuate.doctor.measurements import Measurements, loss_stays_high, non_finite_gradients, non_finite_losses
from arcuate.training.step_size import STRONGLY_DAMPED, Direction, LoggedUpdates, logged

_DEFAULT_PARAMETERS = 300_000  # if the run folder does not state the number
_HARD = 0.1  # clipping norm / gradient norm
_RISING = 2.0  # ratio of late to early gradient norms
_MOVED = 0.1  # relative rise of the training loss above its lowest level
_SLOW_FALL = 0.25  # fraction of the run that the first fall of the loss takes if updates are too small
_HIGHEST_PUBLISHED = 0.02  # learning rate, of the official '24 recipe with eps 0.1
_NOISY = 0.02  # relative noise of the validation loss between evaluations if updates are too large


@dataclass(frozen=True)
class Updates:
    """Whether updates are too small or too large, and the measurements that show it."""

    direction: Direction = "unclear"
    reason: str = ""
    damping: float = 1.0  # factor on the updates due to eps
    path: float | None = None  # sum of learning rates × damping
    rising: bool = False  # gradients are not finite, or their norm rises
    clipped: bool = False  # eps limits the updates only because gradients are clipped far below their norm


def judge_updates(m: Measurements) -> Updates:
    """By the recipe and the logged size of updates; for the log of another trainer by the shape of its losses."""
    known = _logged_updates(m)
    share = known.damping
    clipped = share < STRONGLY_DAMPED <= _logged_updates(m, clip=False).damping and _is_clipped_hard(m)
    path = None if known.lr_sum is None else known.lr_sum * share
    rising = gradients_rise(m)
    direction, reason = _direction(m, known, rising)
    return Updates(direction, reason, share, path, rising, clipped)


def _direction(m: Measurements, known: LoggedUpdates, rising: bool) -> tuple[Direction, str]:
    adam = bool(m.log.settings) and m.log.settings.get("optimizer.kind", "adam") != "sgd"
    judged = logged(known if adam else LoggedUpdates(known.learnt, known.update_ratio))
    measured_large = judged.direction == "too_large" and known.update_ratio is not None
    if rising and not (measured_large or (judged.direction == "too_small" and not non_finite_gradients(m.log))):
        return "too_large", "gradients are not finite or their norm rises"
    if judged.direction != "unclear":
        return judged.direction, judged.reason
    peak = float(m.log.lr.finite.values.max(initial=0))
    if not m.log.settings and peak > 2 * _HIGHEST_PUBLISHED:
        return "too_large", f"the learning rate reached {peak:.2g}; published recipes have at most {_HIGHEST_PUBLISHED}"
    if not m.log.settings and not m.learnt and (shape := _direction_by_shape(m)) is not None:
        return shape
    movement = _movement(m.log.train_loss)
    if movement is None:
        return "unclear", ""
    if movement > _MOVED:
        return "too_large", f"training loss rose by {100 * movement:.0f} % above its lowest level"
    if judged.eps_limits and known.damping < STRONGLY_DAMPED:
        return "too_small", f"training loss barely changes, {judged.reason}"
    return "unclear", ""


def _direction_by_shape(m: Measurements) -> tuple[Direction, str] | None:
    """The direction for a run that learnt nothing: small updates take long, large ones make the loss jump."""
    if m.loss_noise >= _NOISY and m.noise >= 0.5 * _NOISY:
        return (
            "too_large",
            f"the validation loss of a blank output jumps by {100 * m.loss_noise:.0f} % between evaluations",
        )
    if m.first_fall_share is not None and m.first_fall_share >= _SLOW_FALL:
        return "too_small", f"the first fall of the loss took {100 * m.first_fall_share:.0f} % of the run"
    return None


def gradients_rise(m: Measurements) -> bool:
    """Whether gradients or losses are not finite, or the gradient norm rises together with the loss."""
    log = m.log
    if non_finite_losses(log) or non_finite_gradients(log) or log.skipped_steps:
        return True
    series = log.grad_norm.finite
    if len(series) < 12:
        return False
    third = len(series) // 3
    middle, late = np.median(series.values[third : 2 * third]), np.median(series.values[2 * third :])
    return bool(late > _RISING * middle > 0) or (loss_stays_high(m) and bool(late > 10 * np.min(series.values[:third])))


def _logged_updates(m: Measurements, clip: bool = True) -> LoggedUpdates:
    """What the log states; with `clip` the gradient is clipped first, as in training."""
    settings = m.log.settings
    eps, norms, lr = settings.get("optimizer.eps"), m.log.grad_norm.finite.values, m.log.lr.finite
    gradient = None
    if isinstance(eps, float) and len(norms) and settings.get("optimizer.kind") != "sgd":
        norm, max_norm = float(np.median(norms)), settings.get("train.clip_norm")
        norm = min(norm, max_norm) if clip and isinstance(max_norm, (int, float)) else norm
        gradient = norm / math.sqrt(m.log.n_parameters or _DEFAULT_PARAMETERS)
    ratios = m.log.update_ratio.finite.values
    return LoggedUpdates(
        learnt=m.n > 0 and (m.learnt or m.loss_only),
        update_ratio=float(ratios.max()) if len(ratios) else None,
        n_steps=m.log.last_step,
        peak_lr=float(lr.values.max()) if len(lr) else None,
        lr_sum=_lr_sum(lr),
        eps=eps if isinstance(eps, float) else None,
        gradient=gradient,
    )


def _is_clipped_hard(m: Measurements) -> bool:
    """Whether gradients are clipped to less than a tenth of their norm."""
    max_norm, norms = m.log.settings.get("train.clip_norm"), m.log.grad_norm.finite.values
    return isinstance(max_norm, (int, float)) and len(norms) > 0 and bool(max_norm < _HARD * np.median(norms))


def _lr_sum(lr: Series) -> float | None:
    if len(lr) < 3 or lr.unit not in ("batches", "steps"):
        return None
    return float((lr.values * np.diff(np.concatenate([[0.0], lr.steps]))).sum())


def _movement(loss: Series) -> float | None:
    """Rise of the training loss from its lowest level to its end, relative to the lowest level."""
    loss = loss.finite
    if len(loss) < 6:
        return None
    level = running_median(loss.values, 5)
    lowest = float(level.min())
    end = min(float(level[-1]), float(np.median(loss.values[-3:])))  # for a falling loss, the last value
    return end / lowest - 1 if lowest > 0 else None
