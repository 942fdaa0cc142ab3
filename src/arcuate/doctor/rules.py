"""The rules: each verdict is one function from measurements to a finding with its evidence."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arcuate.doctor.measurements import (
    CONSTANT_OUTPUT_PER,
    RANDOM_PER,
    Measurements,
    first_departure,
    gradient_spikes,
    loss_stays_high,
    non_finite_gradients,
    non_finite_losses,
)
from arcuate.progress import percent


@dataclass(frozen=True)
class Limits:
    """The limits of the rules. Changes are relative unless stated otherwise; levels are multiples of the reference."""

    degraded: float = 0.15  # rise of the error rate above its best
    degraded_by: float = 0.03  # the same, absolute
    loss_rose: float = 0.15  # rise of the validation loss above its minimum
    rate_rose: float = 0.03  # rise of the error rate above its best; more than the noise between evaluations
    recovered: float = 0.05  # a run that ends within this of its best has recovered
    flat: float = 0.03  # gain over the last third of a run that is no longer improving
    falling: float = 0.06  # gain over the last third of a run that is still improving
    falling_late: float = 0.03  # the same over the last fifth
    high_flat: float = 1.3  # level of a plateau
    high_done: float = 1.5  # level of a plateau at the end of the schedule
    high_falling: float = 1.4  # level of a run that should continue
    high_anywhere: float = 0.4  # error rate that is high on any data
    loss_flat: float = 0.07  # fraction of the total loss decrease in the last third: a fifth of the average pace


LIMITS = Limits()
LOSS_TREND = 0.05  # smaller relative changes of the training loss count as flat
_FEW, _FEW_IN_WARMUP = 5, 6  # too few evaluations: n < 5, or n <= 6 in warm-up
_FROZEN_HIGH = 0.5  # identical evaluations at this error rate or above mean a constant output
_ON_TRACK = 1.15  # multiple of the official run's error rate at the same step
_LOSS_LEARNT = 0.5  # if the loss fell by this fraction, the model has learnt something and may be flat at the end
_ABOVE_NOISE = 3.0  # multiple of the noise between evaluations that a trend has to exceed
_FAILED = frozenset({"exploded", "collapsed", "degraded"})
_NOT_HEALTHY = _FAILED | {"too_short"}


@dataclass(frozen=True)
class Finding:
    """Result of a rule that applies. A minor finding is never primary; one with an empty verdict is evidence only."""

    verdict: str
    evidence: tuple[str, ...]
    since: int | None = None
    minor: bool = False


def apply_rules(m: Measurements, limits: Limits = LIMITS) -> list[Finding]:
    """All verdicts that apply, the primary one first."""
    found = [finding for rule in _RULES if (finding := rule(m, limits)) is not None]
    if any(f.verdict in ("collapsed", "degraded", "overfit") and not f.minor for f in found):
        found = [f for f in found if f.verdict != "plateaued" or f.minor]  # flat after a failure is not a plateau
    leading = [f for f in found if not f.minor]
    minor = [f for f in found if f.minor]
    return [*(leading or [_fallback(m, limits)]), *minor]


def secondary_verdicts(lead: Finding, rest: Sequence[Finding]) -> tuple[str, ...]:
    """The other verdicts.

    Healthy means that nothing is broken, so it is dropped next to a failure, and a failure that a healthy run recovered
    from is kept as evidence only.
    """
    others = dict.fromkeys(f.verdict for f in rest if f.verdict not in ("", lead.verdict))
    if lead.verdict == "healthy":
        return tuple(v for v in others if v not in _NOT_HEALTHY)
    if lead.verdict in _FAILED:
        others.pop("unfinished", None)  # training longer would not repair a failure
    failed = _NOT_HEALTHY & {lead.verdict, *others}
    return tuple(v for v in others if v != "healthy" or not failed)


def _exploded(m: Measurements, limits: Limits) -> Finding | None:
    """A non-finite loss, or a quantity that left its level for good; minor if the run recovered from it."""
    if losses := non_finite_losses(m.log):
        return Finding("exploded", losses.evidence, losses.step)
    if (skipped := m.log.skipped_steps) and not m.log.grad_norm.non_finite_steps.size:
        text = f"the guard skipped {len(skipped):,} non-finite steps, the first at step {skipped[0]:,}"
        return Finding("exploded", (text,), skipped[0], minor=True)
    sign = non_finite_gradients(m.log) or first_departure(m)
    if sign is None:
        return None
    recovered = m.n > 0 and m.regression <= limits.recovered and not _is_constant_output(m)
    if recovered and not m.loss_only:
        stalled = m.n >= _FEW and _has_stalled(m, sign.step, limits)
        recovered = m.best < RANDOM_PER and not stalled and not (loss_stays_high(m) and m.best > limits.high_anywhere)
    return Finding("exploded", sign.evidence, sign.step, minor=recovered and not m.log.crashed_non_finite)


def _has_stalled(m: Measurements, step: float, limits: Limits) -> bool:
    """Whether a run with a high error rate stopped improving when its gradients stopped being finite."""
    before = m.smoothed[(m.evaluations.steps <= step) & m.trained]
    improved = len(before) > 0 and m.end <= (1 - limits.flat) * float(before.min())
    return m.best >= limits.high_anywhere and not improved


def _spikes(m: Measurements, limits: Limits) -> Finding | None:
    """Single high gradient norms, which are evidence only."""
    spikes = gradient_spikes(m)
    return Finding("", spikes, None, minor=True) if spikes else None


def _too_short(m: Measurements, limits: Limits) -> Finding | None:
    """Fewer than five evaluations, or up to six during warm-up, show no trend."""
    if m.n == 0:
        return Finding("too_short", ("the log contains no evaluation, so it cannot be judged",))
    if m.n >= _FEW and not (m.n <= _FEW_IN_WARMUP and m.in_warmup):
        return None
    warmup = ", all during warm-up" if m.n >= _FEW else ""
    evidence = [f"only {m.n} evaluation{'s' * (m.n > 1)}{warmup}"]
    if m.stuck_train_loss is not None:
        before, after = m.stuck_train_loss
        evidence.append(
            f"nothing has changed so far: {m.log.error_name} is still {m.shown(m.evaluations.values[-1])} and training"
            f" loss went from {before:.3g} to {after:.3g}; continuing unchanged is unlikely to help"
        )
    return Finding("too_short", tuple(evidence))


def _collapsed(m: Measurements, limits: Limits) -> Finding | None:
    """The error rate stays at 0.8 to 1, the level of a blank or constant output."""
    if m.n < _FEW and m.stuck_train_loss:
        return Finding("collapsed", (), int(m.first_step), minor=True)
    if m.loss_only or m.n < _FEW or not _is_constant_output(m):
        return None
    name = m.log.error_name
    if m.learnt:
        text = f"{name} had reached {m.shown(m.best_raw)} at step {m.best_step:,} and returned to {m.shown_end}"
    else:
        left = "never left" if m.best_raw >= CONSTANT_OUTPUT_PER else "left only for a moment"
        text = (
            f"{name} {left} the level of a constant output (all-blank solution): best {m.shown(m.best_raw)},"
            f" last {m.shown_end}"
        )
    falling = not m.learnt and _falls(m, limits) and m.regression <= limits.recovered
    slow = (f"it is still falling, by {_relative(m.gain)} over the last third",) if falling else ()
    since = _constant_output_since(m) if m.learnt or m.log.blank_since is not None else int(m.first_step)
    return Finding("collapsed", (text, *slow, *_frozen_text(m)), since, minor=falling)


def _degraded(m: Measurements, limits: Limits) -> Finding | None:
    """The error rate rose by 15 % and 0.03 above its best without recovering.

    With losses only, training loss must have risen too.
    """
    if m.n < _FEW or m.regression < limits.degraded:
        return None
    if not m.loss_only and not m.learnt:
        return None  # from random output to all blanks: nothing had been learnt
    if not _train_loss_rose(m) if m.loss_only else m.end - m.best < limits.degraded_by:
        return None
    text = (
        f"best {_judged_name(m)} {m.shown(m.best_raw)} at step {m.best_step:,}, then {m.shown_end} at the end"
        f", {_relative(m.regression)} higher"
    )
    return Finding("degraded", (text, *_train_loss_text(m)), m.best_step)


def _overfit(m: Measurements, limits: Limits) -> Finding | None:
    """A rising validation loss is over-confidence while the error rate still falls, and over-fitting afterwards."""
    if m.n < _FEW or m.val_loss_rise is None:
        return None
    rise, step = m.val_loss_rise
    if rise < limits.loss_rose or _train_loss_rose(m):
        return None
    text = f"validation loss ended {_percent(rise)} above its minimum at step {step:,}"
    if m.loss_only:
        return Finding("overfit", (text, *_train_loss_text(m)), step)
    name = m.log.error_name
    if m.val_of_chance is not None and m.val_of_chance > 1.0 and not _is_constant_output(m):
        text += f", above the loss of an output without information, with {name} at {m.shown_end}"
        return Finding("overfit", (text, *_train_loss_text(m)), step)
    gain_since = 1 - m.end / m.value_at(step) if m.value_at(step) > 0 else 0.0
    if m.regression >= max(limits.rate_rose, 2 * m.noise):
        text += f", and {name} ended {_relative(m.regression)} above its best at step {m.best_step:,}"
        return Finding("overfit", (text, *_train_loss_text(m)), step)
    is_flat = gain_since < limits.rate_rose or (m.best >= limits.high_anywhere and m.gain < limits.flat)
    if step <= m.step_at(2 / 3) and is_flat:
        return Finding("overfit", (f"{text}, and {name} has hardly improved since", *_train_loss_text(m)), step)
    text += f" while {name} improved by another {_relative(gain_since)}: harmless over-confidence"
    return Finding("overfit", (text,), step, minor=True)


def _plateaued(m: Measurements, limits: Limits) -> Finding | None:
    """Flat, or at the end of its schedule, with a higher error rate than other runs reach on the same data."""
    if m.n < _FEW:
        return None
    if m.loss_only:
        return _flat_loss(m, limits)
    flat = m.gain < limits.flat or m.frozen_since is not None
    if flat and m.regression > max(limits.recovered, _ABOVE_NOISE * m.noise):
        return None  # it got worse
    if m.level is None:
        high, done = m.best >= limits.high_anywhere, False
    else:
        high = m.level >= limits.high_flat
        on_track = m.expected is not None and m.end <= _ON_TRACK * m.expected
        done = m.level >= limits.high_done and not _still_falling(m, limits) and not on_track
    if not (flat and high) and not done:
        return None
    return Finding("plateaued", (_gain_text(m), *_frozen_text(m), *_train_loss_text(m)), _flat_since(m))


def _flat_since(m: Measurements) -> int:
    return m.frozen_since if m.frozen_since is not None else m.flat_since


def _flat_loss(m: Measurements, limits: Limits) -> Finding | None:
    """A flat loss: its level cannot be judged, but whether anything was learnt can."""
    if _loss_falls(m, limits) or m.regression > limits.recovered:
        return None
    drop = 1 - m.best / float(m.smoothed.max()) if m.smoothed.max() > 0 else 0.0
    text = (
        f"without an error rate only the shape of the validation loss can be judged: it fell by {_percent(drop)},"
        f" {_percent(max(m.late_progress, 0))} of that in the last third"
    )
    return Finding("plateaued", (text, *_train_loss_text(m)), m.flat_since, minor=drop >= _LOSS_LEARNT)


def _unfinished(m: Measurements, limits: Limits) -> Finding | None:
    """Still clearly improving with its best at the end: training longer helps more than any change."""
    if m.n < _FEW:
        return None
    falling = _loss_falls(m, limits) if m.loss_only else _falls(m, limits)
    at_best = m.regression <= (0.01 if m.loss_only else limits.recovered)
    stopped_early = m.finished is False
    if not at_best or not (falling or (stopped_early and m.gain >= limits.flat)):
        return None
    limit = limits.high_done if m.finished else limits.high_falling
    high = m.level is not None and m.level >= limit and _still_falling(m, limits)
    no_reference = m.level is None and (m.loss_only or m.best >= limits.high_anywhere)
    leads = falling and (stopped_early or high or no_reference)
    text = f"{_judged_name(m)} was still falling, by {_relative(m.gain)} over the last third, with its best at the end"
    if m.finished and not leads:
        return Finding("", (f"{text}: a longer schedule may gain more",), None, minor=True)
    evidence = [text + _level_text(m)]
    if stopped_early and m.planned:
        evidence.append(f"the log ends at step {m.log.last_step:,} of {m.planned:,}")
    return Finding("unfinished", tuple(evidence), None, minor=not leads)


def _healthy_curve(m: Measurements, limits: Limits) -> Finding | None:
    """Healthy as a secondary verdict: the curve is fine apart from the primary verdict."""
    if m.loss_only or m.n < _FEW or m.regression > limits.recovered or m.level is None:
        return None
    fine = m.level < limits.high_done and not _is_constant_output(m)
    return Finding("healthy", (), None, minor=True) if fine else None


_RULES = (_exploded, _too_short, _collapsed, _degraded, _overfit, _plateaued, _unfinished, _spikes, _healthy_curve)


def _fallback(m: Measurements, limits: Limits) -> Finding:
    """If no rule applies: healthy, unless the run ended above its best or at a high level."""
    high = m.best >= limits.high_anywhere if m.level is None else m.level >= limits.high_done
    if m.regression > limits.recovered and (m.loss_only or not high or m.regression > _ABOVE_NOISE * m.noise):
        return _slightly_worse(m, limits)
    if m.loss_only or not high:
        return _healthy(m)
    if m.gain >= limits.flat and m.finished is not True and m.regression <= limits.recovered:
        return Finding("unfinished", (_gain_text(m),))
    return Finding("plateaued", (_gain_text(m), *_train_loss_text(m)), _flat_since(m))


def _slightly_worse(m: Measurements, limits: Limits) -> Finding:
    """Slightly above its best at the end: overfit if training continued to improve, else degraded."""
    text = f"{_judged_name(m)} ended at {m.shown_end}, {_relative(m.regression)} above its best at step {m.best_step:,}"
    loss_rose = m.val_loss_rise is None or m.val_loss_rise[0] > limits.recovered
    verdict = "overfit" if loss_rose and not _train_loss_rose(m) else "degraded"
    return Finding(verdict, (text, *_train_loss_text(m)), m.best_step)


def _healthy(m: Measurements) -> Finding:
    """Within 5 % of its best at the end, at a normal level for the data."""
    above = f", {_relative(m.regression)} above its best" if m.regression > 0.001 else ", its best"
    return Finding("healthy", (f"{_judged_name(m)} ended at {m.shown_end}{above}{_level_text(m)}",))


def _is_constant_output(m: Measurements) -> bool:
    """Whether the last third is at the level of a blank or constant output."""
    if m.log.blank_since is not None:
        return True
    if m.frozen_since is not None and m.end >= _FROZEN_HIGH:
        return True
    late = m.evaluations.between(m.step_at(2 / 3), m.last_step).values
    return not m.loss_only and m.end >= CONSTANT_OUTPUT_PER and float(np.median(late)) >= CONSTANT_OUTPUT_PER


def _constant_output_since(m: Measurements) -> int:
    """The first evaluation after which the error rate never fell below the level of a constant output."""
    if m.log.blank_since is not None:
        return m.log.blank_since
    if m.frozen_since is not None:
        return m.frozen_since
    below = np.flatnonzero(m.trained & (m.evaluations.values < CONSTANT_OUTPUT_PER))
    return int(m.evaluations.steps[min(int(below[-1]) + 1, m.n - 1)] if len(below) else m.first_step)


def _falls(m: Measurements, limits: Limits) -> bool:
    """Whether the error rate still fell in the last third, by more than its noise.

    Near the level of a constant output, where a rate wanders, by more than that of a difference of two evaluations.
    """
    noise = m.noise if m.learnt else 2**0.5 * m.noise
    return m.gain >= max(limits.falling, _ABOVE_NOISE * noise)


def _loss_falls(m: Measurements, limits: Limits) -> bool:
    """Whether the loss falls at a fifth of its average pace or faster, or by the gain required of an error rate."""
    return m.late_progress >= limits.loss_flat or m.gain >= limits.falling


def _still_falling(m: Measurements, limits: Limits) -> bool:
    """Whether the run was still improving at the end; a finished run must also improve in its last fifth."""
    late = max(limits.falling_late, 2 * m.noise)
    return m.gain >= limits.falling and (m.finished is False or m.late_gain >= late)


def _train_loss_rose(m: Measurements) -> bool:
    return m.train_loss_trend is not None and m.train_loss_trend > LOSS_TREND


def _judged_name(m: Measurements) -> str:
    return "validation loss" if m.loss_only else m.log.error_name


def _frozen_text(m: Measurements) -> tuple[str, ...]:
    if m.frozen_since is None:
        return ()
    return (f"all evaluations since step {m.frozen_since:,} are identical: the model is not learning",)


def _gain_text(m: Measurements) -> str:
    gain = f"improved by {_relative(m.gain)}" if m.gain > 0 else "did not improve"
    return f"{m.log.error_name} {gain} over the last third; best {m.shown(m.best_raw)}{_level_text(m)}"


def _level_text(m: Measurements) -> str:
    return "" if m.level is None else f" ({m.level:.2f} times the reference level {percent(m.reference)})"


def _train_loss_text(m: Measurements) -> tuple[str, ...]:
    """How the training loss changed since the best evaluation."""
    trend = m.train_loss_trend
    if trend is None:
        return ()
    if m.memorised:
        return ("training loss is close to zero: the training sentences are memorised",)
    if trend > LOSS_TREND:
        return (
            f"training loss rose as well (by {_percent(trend)}), which points to the learning rate rather than the"
            " regularisation",
        )
    if trend < -LOSS_TREND:
        return (
            f"training loss kept falling (by {_percent(-trend)}), which points to the regularisation or the data rather"
            " than the learning rate",
        )
    return ("training loss was flat as well",)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %" if abs(fraction) >= 0.1 else f"{100 * fraction:.1f} %"


def _relative(fraction: float) -> str:
    """A relative change, which must not be taken for a difference of error rates."""
    return f"{_percent(fraction)} (relative)"
