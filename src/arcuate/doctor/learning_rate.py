"""Causes in the learning rate, eps or clipping, with the values that the evidence of a run supports."""

from typing import Any

import numpy as np

from arcuate.doctor.causes import Cause, Change, describe_changes, settings_to_changes
from arcuate.doctor.measurements import Measurements, first_departure
from arcuate.doctor.updates import Updates
from arcuate.training.step_size import GOOD_PATH, MAX_STEP

_FIRST, _SECOND, _THIRD = 0.55, 0.45, 0.35
_SAFE = 2 / 3  # fraction of the largest learning rate that works
_MOST = 0.8  # fraction of the peak: a lower rate is at most this
_MEAN_LR = 0.5  # mean learning rate of a decaying schedule / its peak
LENGTH_SETTINGS = ("schedule.decay_steps", "schedule.cycle_steps")  # of a schedule
_EPS_MATTERS = 1e-4  # an eps below this is smaller than nearly every gradient


def updates_too_small(m: Measurements, updates: Updates) -> list[Cause]:
    """A higher learning rate, or a smaller eps if eps limits the updates and the learning rate is a usual one."""
    settings, packaged = m.log.settings, m.log.parent_settings
    peak, facts = peak_learning_rate(m), {"reason": updates.reason, "rest": ""}
    if peak is None or updates.path is None or not settings:
        setting = Change(_peak_setting(m), times=10.0)
        facts["rest"] = ", or lower eps if it is above 1e-4: the updates have to become larger"
        return [Cause("lr_too_low", "learning_rate_low", _FIRST + 0.3, facts, (setting,))]
    if updates.clipped:
        usual = max(clip_norm(m), _rounded(float(np.median(m.log.grad_norm.finite.values))))
        return [Cause("clipped_too_hard", "clipping", _FIRST + 0.3, facts, (Change("train.clip_norm", usual),))]
    wanted = GOOD_PATH / max(updates.path, 1e-9)
    eps = settings.get("optimizer.eps", 0.0)
    limit = MAX_STEP / 2 / updates.damping  # highest learning rate that is still safe at this eps
    higher = with_lr(m, min(peak * min(wanted, 300.0), max(limit, peak)))
    score = _FIRST + 0.35 * min(1.0, float(np.log10(max(1.0, wanted))))
    if updates.damping < 0.5 and eps > _EPS_MATTERS:
        if peak > MAX_STEP:
            return [Cause("lr_too_low_for_eps", "learning_rate", score, facts, higher)]
        small = packaged.get("optimizer.eps", 1e-8)
        facts["alternative"] = describe_changes(higher)
        changes = (Change("optimizer.eps", small if small < eps else 1e-8),)
        return [Cause("eps_too_large", "eps", score + 0.3, facts, changes)]
    packaged_peak = packaged.get(_peak_setting(m))
    if isinstance(packaged_peak, float) and peak < packaged_peak <= MAX_STEP:
        higher = with_lr(m, max(packaged_peak, _sufficient_lr(m, updates)))
        score += 0.3
    return [Cause("lr_too_low", "learning_rate", score, facts, higher)]


def higher_learning_rate(m: Measurements, updates: Updates, stuck: bool) -> list[Cause]:
    """A higher learning rate for a plateau, unless the size of the updates rules it out."""
    if updates.direction == "too_small":
        return updates_too_small(m, updates)
    if updates.direction == "too_large" or updates.rising:
        return [learning_rate_too_high(m, None, updates)] if updates.reason else []
    peak = peak_learning_rate(m)
    reason = (
        "training loss is flat as well"
        if stuck and m.train_loss_trend is not None
        else "learning rate, eps and loss reduction must match"
    )
    if not m.log.settings or peak is None:  # nothing shows the direction
        return [Cause("lr_unknown", "learning_rate", _SECOND + 0.02 if stuck else _THIRD, {"reason": reason})]
    facts = {"reason": reason, "longer": ""}
    limit = MAX_STEP if updates.damping > 0.5 else 2 * MAX_STEP / min(1.0, updates.damping)
    if 4 * peak > limit:
        return []
    if keys := [key for key in LENGTH_SETTINGS if key in m.log.settings]:
        facts["longer"] = f", or a longer {keys[0]}"
    score = _SECOND if stuck else _THIRD
    return [Cause("lr_too_low_or_decayed", "learning_rate", score, facts, with_lr(m, 4 * peak))]


def learning_rate_too_high(m: Measurements, step: int | None, updates: Updates) -> Cause:
    """A lower learning rate: that of the packaged recipe if it is lower, else a fraction of the one at `step`."""
    lr, peak = _learning_rate_at(m, step), peak_learning_rate(m)
    facts: dict[str, Any] = {"packaged": "", "rest": ", with eps unchanged"}
    if lr:
        facts["reason"] = f"the learning rate was {lr:.3g} at step {step:,}, the last good one"
        lower = _reduction(m, updates) * lr
    else:
        facts["reason"] = (
            updates.reason
            if updates.direction == "too_large"
            else "the run did not recover by itself; learning rate, eps and loss reduction must match"
        )
        lower = peak / 4 if peak else 0.0
    score = _FIRST
    changes: tuple[Change, ...] = ()
    packaged = _packaged_schedule(m)
    if packaged is not None and peak is not None:
        schedule, packaged_peak = packaged
        if packaged_peak < 0.99 * peak:
            facts["packaged"] = f"; recipe {m.log.parent} has at most {packaged_peak:g}, this run {peak:g}"
            score += 0.3 + 0.3 * min(2.0, float(np.log10(peak / packaged_peak)))
            best = min(max(packaged_peak, _sufficient_lr(m, updates)), 0.5 * peak)
            best = packaged_peak if best < 1.1 * packaged_peak else _rounded(best)
            name = "lr" if "lr" in schedule else "peak_lr"
            changes = (Change("schedule", {**schedule, name: best}),) if schedule else with_lr(m, best)
        else:
            score -= 0.1
    if not changes and lower:
        if m.log.settings and m.log.settings.get("optimizer.kind") != "sgd":
            lower = min(max(lower, _sufficient_lr(m, updates)), _SAFE * MAX_STEP / updates.damping)
        changes = with_lr(m, min(lower, _MOST * peak) if peak else lower)
    if not changes:
        changes = (Change(_peak_setting(m), times=0.25),)
    if peak and m.log.settings and peak * updates.damping > MAX_STEP:
        score += 0.2
    if not m.log.is_arcuate:
        facts["norm"] = usual_norm(m)
        return Cause("lr_too_high_and_clip", "learning_rate", score, facts, changes)
    if m.log.settings.get("train.clip_norm") is None and m.log.settings:
        changes = (*changes, Change("train.clip_norm", clip_norm(m)))
    return Cause("lr_too_high", "learning_rate", score, facts, changes)


def _reduction(m: Measurements, updates: Updates) -> float:
    """By how much to lower a learning rate that was too high: as much as the evidence requires.

    A rate that trained a third of the run without trouble is only a little too high; one that never worked may be far
    too high.
    """
    if m.n == 0 or m.best_step <= m.evaluations.steps[min(2, m.n - 1)]:
        return 0.1
    worked = (m.best_step - m.first_step) / max(m.last_step - m.first_step, 1.0)
    few = 0 < len(m.log.grad_norm.non_finite_steps) <= 0.1 * len(m.log.grad_norm)
    return 0.8 if worked >= 1 / 3 and few and m.regression < 0.15 else 0.5


def _sufficient_lr(m: Measurements, updates: Updates) -> float:
    """Learning rate at which the weights can move far enough in a run of this length, limited to a safe value."""
    steps, peak = m.log.settings.get("train.steps") or 0, peak_learning_rate(m)
    if not steps or peak is None:
        return 0.0
    return min(_SAFE * MAX_STEP, GOOD_PATH / (_MEAN_LR * steps)) / max(updates.damping, 1e-3)


def _packaged_schedule(m: Measurements) -> tuple[dict[str, Any], float] | None:
    """The schedule of the packaged recipe if it is of another kind, and its peak; None if eps or reduction differ."""
    settings, packaged = m.log.settings, m.log.parent_settings
    same = all(settings.get(k) == packaged.get(k) for k in ("optimizer.eps", "loss.ctc.reduction", "optimizer.kind"))
    if not packaged or not same:
        return None
    kind = packaged.get("schedule.kind")
    peak = packaged.get("schedule.peak_lr")
    if not isinstance(peak, float) or peak <= 0:
        return None
    if settings.get("schedule.kind") == kind:
        return {}, peak
    parts = {k.removeprefix("schedule."): v for k, v in packaged.items() if k.startswith("schedule.")}
    lengths = ("decay_steps", "cycle_steps", "hold_steps", "warmup_steps", "period", "every_steps")
    if kind == "step_decay" or any(parts.get(key) for key in lengths):
        return None  # its lengths in steps only fit the packaged number of steps
    return {k: v for k, v in parts.items() if v is not None}, peak


def with_lr(m: Measurements, value: float) -> tuple[Change, ...]:
    """A new peak learning rate: all learning rates of the recipe are scaled by the same factor."""
    setting, peak = _peak_setting(m), peak_learning_rate(m)
    value = _rounded(value)
    change: dict[str, Any] = {setting: value}
    settings = m.log.settings
    if not settings or not peak:
        return settings_to_changes(change)
    ratio = value / peak
    minimum = settings.get("schedule.min_lr")
    if isinstance(minimum, float) and minimum > value:
        change["schedule.min_lr"] = _rounded(minimum * ratio)
    for name in ("session_schedule.lr", "session_schedule.peak_lr", "session_schedule.min_lr"):
        if isinstance(old := settings.get(name), float) and old > 0:
            change[name] = _rounded(old * ratio)
    floor = settings.get("guard.adaptive.min_lr")
    if settings.get("guard.adaptive.threshold") is not None and isinstance(floor, float) and floor > value:
        change["guard.adaptive.min_lr"] = _rounded(floor * ratio)
    return settings_to_changes(change)


def clip_norm(m: Measurements) -> float:
    """The clipping norm of the packaged recipe, else a few times the usual gradient norm, 10 if that is unknown."""
    packaged = m.log.parent_settings.get("train.clip_norm")
    if isinstance(packaged, (int, float)):
        return packaged
    norms = m.log.grad_norm.finite.values
    return 1.0 if len(norms) and float(np.median(norms)) < 1.0 else 10


def usual_norm(m: Measurements) -> float:
    """The gradient norm before gradients exploded, of the first half of the run at most; 1 if it was not logged."""
    norms, sign = m.log.grad_norm.finite, first_departure(m)
    before = norms.between(-np.inf, sign.step - 1 if sign else np.inf).values[: max(1, len(norms) // 2)]
    return float(f"{np.median(before):.1g}") if len(before) else 1.0


def clipping(m: Measurements, score: float) -> Cause:
    """Gradients that were not clipped, as far as the log states it."""
    if m.log.is_arcuate:
        change = Change("train.clip_norm", clip_norm(m))
        return Cause("not_clipped", "clipping", score, {"were": "were", "rest": ""}, (change,))
    rest = f"clip gradients to about {usual_norm(m):g}, or keep a lower limit"
    return Cause("not_clipped", "clipping", score, {"were": "were perhaps", "rest": rest})


def _learning_rate_at(m: Measurements, step: int | None) -> float | None:
    """The learning rate at a step, if it was logged on the same axis."""
    lr = m.log.lr.finite
    if step is None or len(lr) < 2 or m.n == 0 or lr.unit != m.evaluations.unit:
        return None
    value = float(np.interp(step, lr.steps, lr.values))
    return value if value > 0 else None


def peak_learning_rate(m: Measurements) -> float | None:
    setting = m.log.settings.get(_peak_setting(m))
    logged = m.log.lr.finite.values
    peak = setting if isinstance(setting, float) else float(logged.max()) if len(logged) else 0.0
    return peak if peak > 0 else None


def _peak_setting(m: Measurements) -> str:
    """The setting of the peak learning rate: of the recipe of this run, or of the official one for its data set."""
    if not m.log.settings:
        return "schedule.peak_lr"
    return "schedule.lr" if "schedule.lr" in m.log.settings else "schedule.peak_lr"


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")
