"""Likely causes of a verdict, the most likely first, each with the settings that would test it.

The order follows the evidence: first what this log shows, then what real logs of this kind most often turned out to be.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from arcuate.config import parse_yaml
from arcuate.insight.doctor.measurements import CONSTANT_OUTPUT_PER, Measurements
from arcuate.insight.doctor.rules import LOSS_TREND, Finding

_ASSIGNMENT = re.compile(r"([a-z_]+(?:\.[a-z_0-9]+)+)=([\w.+-]+?),?")  # a setting within a sentence
_TIME_MASKS = "augment.time_masks.n_masks=20 augment.time_masks.max_fraction=0.075"
_COUPLED = "learning rate, eps and loss reduction must match"


@dataclass(frozen=True)
class Cause:
    """A likely cause, the evidence for it, and the change of settings that would test it."""

    cause: str
    because: str
    change: str


def find_causes(lead: Finding, m: Measurements) -> tuple[Cause, ...]:
    """The causes whose change is not yet part of the recipe."""
    causes = _CAUSES[lead.verdict](lead, m)
    return tuple(
        replace(cause, change=change)
        for cause in causes
        if (change := without_current_settings(cause.change, m.log.settings))
    )


def first_suggestion(lead: Finding, causes: tuple[Cause, ...], m: Measurements) -> str:
    """The change to try first."""
    if causes:
        return causes[0].change
    if lead.verdict != "healthy":
        return "the recipe already has all settings that usually help; check the data"
    masks = without_current_settings(_TIME_MASKS, m.log.settings)
    further = f"; the largest known gain from one change is heavy time masking: {masks}" if masks else ""
    return f"nothing needs to be fixed{further}"


def without_current_settings(change: str, settings: Mapping[str, Any]) -> str:
    """Remove the assignments that a recipe already has; empty if no assignment is left."""
    words = change.split(" ")
    kept = [
        word
        for word in words
        if not (match := _ASSIGNMENT.fullmatch(word))
        or match[1] not in settings
        or settings[match[1]] != parse_yaml(match[2])
    ]
    return " ".join(kept) if kept == words or any(map(_ASSIGNMENT.fullmatch, kept)) else ""


def _exploded(lead: Finding, m: Measurements) -> list[Cause]:
    since = lead.since
    if m.n and (since is None or m.best_step < since):
        since = m.best_step  # it was already degrading before the explosion
    causes = [*_coupling(m), _learning_rate_too_high(m, since)]
    if m.log.settings.get("train.clip_norm") is None:
        cause = "gradients were not clipped" if m.log.is_arcuate else "gradients may not have been clipped"
        causes.append(Cause(cause, "a single bad batch can undo thousands of updates", "train.clip_norm=10"))
    causes.append(
        Cause(
            "half precision overflowed, or a trial could not be aligned",
            "the loss becomes infinite without rising first",
            "train.precision.kind=fp32 loss.ctc.zero_infinity=true",
        )
    )
    return causes


def _collapsed(lead: Finding, m: Measurements) -> list[Cause]:
    causes = [*_coupling(m)]
    if m.n > 0 and m.best < CONSTANT_OUTPUT_PER:
        causes.append(_learning_rate_too_high(m, m.best_step))
    else:
        causes.append(
            Cause(
                "the learning rate does not match eps and the loss reduction",
                f"{_COUPLED}: steps that are too large end in a constant output, steps that are too small never leave"
                " the all-blank solution",
                f"optimizer.eps=0.1 {_peak_setting(m)}=0.02 loss.ctc.reduction=mean_per_token, as in recipe b2t24-gru",
            )
        )
    return [
        *causes,
        Cause(
            "the input carries too little information",
            "noise or masks that drown the signal, or features without normalisation, end in the same blank collapse",
            "augment.white_noise_sd=0.2 augment.time_masks.n_masks=0 front_end.normalise=block",
        ),
        Cause(
            "labels or lengths are wrong",
            "with a wrong blank index or padded label lengths only blanks can be learnt",
            "arcuate prepare DATA STORE --dry-run, then inspect the trials it reports",
        ),
    ]


def _degraded(lead: Finding, m: Measurements) -> list[Cause]:
    trend = m.train_loss_trend or 0.0
    falling, rising = trend < -LOSS_TREND, trend > LOSS_TREND
    too_high = _learning_rate_too_high(m, m.best_step)
    regularisation = Cause(
        "too little regularisation for the length of the run",
        "training continued to improve while validation got worse"
        if falling
        else "less likely, because training got worse as well"
        if rising
        else "possible, because the training loss does not rule it out",
        f"{_TIME_MASKS} encoder.dropout=0.4",
    )
    return [*_coupling(m), *([regularisation, too_high] if falling else [too_high, regularisation])]


def _overfit(lead: Finding, m: Measurements) -> list[Cause]:
    steps = max(m.best_step, 1) if m.n else 1000
    return [
        Cause(
            "the model memorises the training sentences",
            "validation gets worse while training continues to improve",
            f"{_TIME_MASKS} encoder.dropout=0.4",
        ),
        Cause(
            "the run is longer than the data support",
            f"its best was at step {m.best_step:,}" if m.n else "the best was much earlier",
            f"train.steps={steps}, with a schedule that has decayed by then",
        ),
        Cause("the weights fluctuate around the best", "late evaluations scatter above it", "ema.decay=0.999"),
    ]


def _plateaued(lead: Finding, m: Measurements) -> list[Cause]:
    stuck = m.train_loss_trend is None or m.train_loss_trend > -LOSS_TREND
    peak = _peak_learning_rate(m)
    higher = f"{_peak_setting(m)}={_round(4 * peak)}" if peak else "four times the learning rate"
    too_low = Cause(
        "the learning rate is too low for eps, or decayed too early",
        "training loss is flat as well" if stuck else f"the level is far from that of other runs; {_COUPLED}",
        f"{higher}, or a longer schedule.decay_steps",
    )
    too_regularised = Cause(
        "more regularisation than the model tolerates",
        "training loss stays high as well" if stuck else "it limits what can be learnt",
        "augment.white_noise_sd=0.2 encoder.dropout=0.2",
    )
    too_small = Cause(
        "the model is too small or lacks session layers",
        "other runs reach lower error rates on these data",
        "encoder.width=768 front_end.session_layer.enabled=true",
    )
    regularisation = Cause(
        "too little regularisation", "training continues to improve, validation does not", _TIME_MASKS
    )
    causes = [too_low, too_regularised, too_small] if stuck else [regularisation, too_low, too_small]
    return [*_coupling(m), *causes]


def _unfinished(lead: Finding, m: Measurements) -> list[Cause]:
    last, unit = m.log.last_step or 0, m.evaluations.unit
    steps = m.planned if m.planned and m.planned > last else 2 * max(last, 1)
    resume = "continue with --resume" if m.log.is_arcuate else "continue from the last checkpoint"
    longer = f"train.steps={steps}" if unit == "batches" else f"twice as many {unit}"
    return [
        Cause(
            "the run was stopped while it was improving", "its best evaluation is the last one", f"{resume}, {longer}"
        )
    ]


def _too_short(lead: Finding, m: Measurements) -> list[Cause]:
    few = Cause(
        "too few evaluations for a verdict",
        f"{m.n} in the log",
        "train longer, or evaluate more often: train.validate_every=100",
    )
    return [*(_collapsed(lead, m) if m.stuck_train_loss else []), few]


_CAUSES: dict[str, Callable[[Finding, Measurements], list[Cause]]] = {
    "exploded": _exploded,
    "collapsed": _collapsed,
    "degraded": _degraded,
    "overfit": _overfit,
    "plateaued": _plateaued,
    "unfinished": _unfinished,
    "too_short": _too_short,
    "healthy": lambda lead, m: [],
}


def _coupling(m: Measurements) -> list[Cause]:
    """For a known recipe: learning rate, eps or reduction changed without the others."""
    return [
        Cause(
            "learning rate, eps and reduction no longer match",
            warning,
            "take all three from the official recipe, then change one at a time",
        )
        for warning in m.log.coupling_warnings[:1]
    ]


def _learning_rate_too_high(m: Measurements, step: int | None) -> Cause:
    lr, setting = _learning_rate_at(m, step), _peak_setting(m)
    if lr:
        because = f"the learning rate was {lr:.3g}" + (f" at step {step:,}, the last good one" if step else "")
        early = m.n > 0 and m.best_step <= m.evaluations.steps[min(2, m.n - 1)]
        lower = f"{setting}={_round((0.1 if early else 0.5) * lr)}"  # early: it may have been too high before
    else:
        peak = _peak_learning_rate(m)
        because = _COUPLED
        lower = f"{setting}={_round(peak / 4)}" if peak else "a quarter of the learning rate"
    clip = "" if m.log.settings.get("train.clip_norm") is not None else " train.clip_norm=10"
    cause = "the learning rate is too high for this eps and reduction"
    return Cause(cause, because, f"{lower}{clip}, with eps unchanged")


def _learning_rate_at(m: Measurements, step: int | None) -> float | None:
    """The learning rate at a step, if it was logged on the same axis."""
    lr = m.log.lr.finite
    if step is None or len(lr) < 2 or m.n == 0 or lr.unit != m.evaluations.unit:
        return None
    value = float(np.interp(step, lr.steps, lr.values))
    return value if value > 0 else None


def _peak_learning_rate(m: Measurements) -> float | None:
    setting = m.log.settings.get(_peak_setting(m))
    logged = m.log.lr.finite.values
    peak = setting if isinstance(setting, float) else float(logged.max()) if len(logged) else 0.0
    return peak if peak > 0 else None


def _peak_setting(m: Measurements) -> str:
    """The setting of the peak learning rate in the recipe of this run."""
    return "schedule.lr" if "schedule.lr" in m.log.settings else "schedule.peak_lr"


def _round(value: float) -> str:
    return f"{value:.1g}"
