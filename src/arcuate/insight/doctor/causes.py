"""Likely causes of a verdict, the likeliest first, each with the settings that would test it.

The order is that of the evidence: what this log shows, then what real logs of this kind most often turned out to be.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import yaml

from arcuate.insight.doctor.diagnosis import Cause
from arcuate.insight.doctor.facts import Facts
from arcuate.insight.doctor.rules import TREND, Finding

_ASSIGNED = re.compile(r"([a-z_]+(?:\.[a-z_0-9]+)+)=([\w.+-]+?),?")  # a setting within a sentence
MASKS = "augment.time_masks.n_masks=20 augment.time_masks.max_fraction=0.075"
TOGETHER = "rate, eps and the reduction of the loss act as one unit"


def causes_of(lead: Finding, facts: Facts) -> tuple[Cause, ...]:
    """Without what the recipe has already; what would leave nothing to try is no cause to name."""
    found = CAUSES[lead.verdict](lead, facts)
    return tuple(
        replace(c, change=left) for c in found if (left := still_to_try(c.change, facts.log.settings))
    )


def suggestion_of(lead: Finding, causes: tuple[Cause, ...], facts: Facts) -> str:
    """The one thing to try first."""
    if causes:
        return causes[0].change
    if lead.verdict != "healthy":
        return "the recipe has every setting that usually helps; look at the data"
    masks = still_to_try(MASKS, facts.log.settings)
    further = f"the largest known single gain is heavy time masking: {masks}" if masks else ""
    return f"nothing needs mending; to go further, {further}" if further else "nothing needs mending"


def still_to_try(change: str, settings: Mapping[str, Any]) -> str:
    """A change without the settings that a recipe has already; empty where nothing is left of it."""
    words = change.split(" ")
    kept = [
        w for w in words if not (named := _ASSIGNED.fullmatch(w)) or not _has(settings, named[1], named[2])
    ]
    return " ".join(kept) if any(_ASSIGNED.fullmatch(w) for w in kept) or kept == words else ""


def _has(settings: Mapping[str, Any], name: str, wanted: str) -> bool:
    if name not in settings:
        return False
    return bool(settings[name] == yaml.safe_load(wanted))


def _exploded(lead: Finding, facts: Facts) -> list[Cause]:
    since = lead.since
    if facts.n and (since is None or facts.best_step < since):
        since = facts.best_step  # it had begun to lose ground before it broke
    causes = [*_coupled(facts), _too_fast(facts, since, _rate_at(facts, since))]
    if _setting(facts, "train.clip_norm") is None:
        known = "gradients were not held back" if facts.log.own else "gradients were perhaps not held back"
        causes.append(Cause(known, "one bad batch can undo thousands of good ones", "train.clip_norm=10"))
    causes.append(
        Cause(
            "half precision overflowed, or a trial could not be aligned",
            "a loss becomes infinite at once, without rising before",
            "train.precision.kind=fp32 loss.ctc.zero_infinity=true",
        )
    )
    return causes


def _collapsed(lead: Finding, facts: Facts) -> list[Cause]:
    learnt = facts.n > 0 and facts.best < 0.8
    causes = [*_coupled(facts)]
    if learnt:
        causes.append(_too_fast(facts, facts.best_step, _rate_at(facts, facts.best_step)))
    else:
        causes.append(
            Cause(
                "the rate does not suit eps and the reduction",
                f"{TOGETHER}: too large a step leaves one constant output, too small a step never leaves the blank",
                f"optimizer.eps=0.1 {_rate(facts)}=0.02 loss.ctc.reduction=mean_per_token, as the recipe b2t24-gru",
            )
        )
    causes += [
        Cause(
            "the input says too little",
            "noise or masks that drown the signal, or features that were not normalised, end in the same silence",
            "augment.white_noise_sd=0.2 augment.time_masks.n_masks=0 front_end.normalise=block",
        ),
        Cause(
            "labels or lengths are wrong",
            "a wrong blank index or padded label lengths let nothing but blanks be learnt",
            "arcuate prepare DATA STORE --dry-run, then look at the trials it names",
        ),
    ]
    return causes


def _degraded(lead: Finding, facts: Facts) -> list[Cause]:
    falling = facts.train_trend is not None and facts.train_trend < -TREND
    rising = facts.train_trend is not None and facts.train_trend > TREND
    fast = _too_fast(facts, facts.best_step, _rate_at(facts, facts.best_step))
    slack = Cause(
        "too little regularisation for so long a run",
        "training went on to improve while validation got worse"
        if falling
        else "less likely, for training got worse as well"
        if rising
        else "possible, for training loss does not speak against it",
        f"{MASKS} encoder.dropout=0.4",
    )
    return [*_coupled(facts), *([slack, fast] if falling else [fast, slack])]


def _overfit(lead: Finding, facts: Facts) -> list[Cause]:
    return [
        Cause(
            "the model learns its training sentences by heart",
            "validation gets worse while training goes on to improve",
            f"{MASKS} encoder.dropout=0.4",
        ),
        Cause(
            "the run is longer than the data carry",
            f"its best was at step {facts.best_step:,}" if facts.n else "the best lies far back",
            f"train.steps={max(facts.best_step, 1) if facts.n else 1000}, with a schedule that has come down by then",
        ),
        Cause("the weights wander around the best", "late evaluations scatter above it", "ema.decay=0.999"),
    ]


def _plateaued(lead: Finding, facts: Facts) -> list[Cause]:
    stuck = facts.train_trend is None or facts.train_trend > -TREND
    peak = _peak(facts)
    higher = f"{_rate(facts)}={_round(4 * peak)}" if peak else "a rate four times as high"
    slow = Cause(
        "the rate is too small for eps, or fell too early",
        "training loss stands still as well"
        if stuck
        else f"the level is far from what others reach; {TOGETHER}",
        f"{higher}, or a longer schedule.decay_steps",
    )
    held = Cause(
        "more regularisation than the model can bear",
        "training loss stays high too" if stuck else "it takes away from what could be learnt",
        "augment.white_noise_sd=0.2 encoder.dropout=0.2",
    )
    small = Cause(
        "the model is too small, or lacks session layers",
        "others reach more on these data",
        "encoder.width=768 front_end.session_layer.enabled=true",
    )
    slack = Cause("too little regularisation", "training goes on to improve, validation does not", MASKS)
    return [*_coupled(facts), *([slow, held, small] if stuck else [slack, slow, small])]


def _unfinished(lead: Finding, facts: Facts) -> list[Cause]:
    last = facts.log.last_step or 0
    longer = facts.planned if facts.planned and facts.planned > last else 2 * max(last, 1)
    on = "go on with --resume" if facts.log.own else "train on from the last checkpoint"
    unit = facts.evaluations.unit
    more = f"train.steps={longer}" if unit == "batches" else f"twice as many {unit}"
    return [Cause("it was stopped while it was still learning", "its best is at the end", f"{on}, {more}")]


def _too_short(lead: Finding, facts: Facts) -> list[Cause]:
    dead = _collapsed(lead, facts) if facts.dead else []
    return [
        *dead,
        Cause(
            "too few evaluations to judge by",
            f"{facts.n} in the whole log",
            "train longer, or evaluate more often: train.validate_every=100",
        ),
    ]


def _healthy(lead: Finding, facts: Facts) -> list[Cause]:
    return []


CAUSES: dict[str, Callable[[Finding, Facts], list[Cause]]] = {
    "exploded": _exploded,
    "collapsed": _collapsed,
    "degraded": _degraded,
    "overfit": _overfit,
    "plateaued": _plateaued,
    "unfinished": _unfinished,
    "too_short": _too_short,
    "healthy": _healthy,
}


def _coupled(facts: Facts) -> list[Cause]:
    """For a run whose recipe is known: a part of the unit changed without the others."""
    return [
        Cause(
            "rate, eps and reduction no longer belong together",
            warning,
            "take all three from the official recipe, then change one thing at a time",
        )
        for warning in facts.log.coupling[:1]
    ]


def _too_fast(facts: Facts, step: int | None, rate: float | None) -> Cause:
    if rate:
        because = (
            f"the rate was {rate:.3g} at step {step:,}, the last at which it still learnt"
            if step
            else f"rate {rate:.3g}"
        )
        early = facts.n > 0 and facts.best_step <= facts.evaluations.steps[min(2, facts.n - 1)]
        lower = f"{_rate(facts)}={_round((0.1 if early else 0.5) * rate)}"  # early: it may have been too high then too
    else:
        peak = _peak(facts)
        because, lower = (
            TOGETHER,
            f"{_rate(facts)}={_round(peak / 4)}" if peak else "a quarter of the rate",
        )
    clip = "" if _setting(facts, "train.clip_norm") is not None else " train.clip_norm=10"
    return Cause(
        "the rate is too high for this eps and reduction", because, f"{lower}{clip}, and eps as it is"
    )


def _rate_at(facts: Facts, step: int | None) -> float | None:
    """The learning rate at a step, where it was logged on the same axis."""
    rates = facts.log.lr.finite
    if step is None or len(rates) < 2 or facts.n == 0 or rates.unit != facts.evaluations.unit:
        return None
    value = float(np.interp(step, rates.steps, rates.values))
    return value if value > 0 else None


def _peak(facts: Facts) -> float | None:
    told = _setting(facts, "schedule.peak_lr") or _setting(facts, "schedule.lr")
    rates = facts.log.lr.finite.values
    peak = told if isinstance(told, float) else float(rates.max()) if len(rates) else 0.0
    return peak if peak > 0 else None


def _setting(facts: Facts, name: str) -> object:
    return facts.log.settings.get(name)


def _round(value: float) -> str:
    return f"{value:.1g}"


def _rate(facts: Facts) -> str:
    """What the rate is called in the recipe of this run."""
    return "schedule.lr" if "schedule.lr" in facts.log.settings else "schedule.peak_lr"
