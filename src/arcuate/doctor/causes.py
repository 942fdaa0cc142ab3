"""Likely causes of a verdict, the most likely first, each with the settings that would test it.

The order follows the evidence: first what the recipe and this log show, then the most frequent causes in real logs with
the same verdict. Advice that could make things worse is removed: see `contradicts`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from arcuate.config import parse_yaml
from arcuate.doctor.log_checks import check_log
from arcuate.doctor.measurements import CONSTANT_OUTPUT_PER, Measurements
from arcuate.doctor.recipe_checks import (
    OVERFIT,
    SLOW,
    STUCK,
    UNSTABLE,
    Cause,
    check_recipe,
    make_cause,
)
from arcuate.doctor.rules import LOSS_TREND, Finding
from arcuate.doctor.step_size import GOOD_PATH, LARGE_STEP, SHORT_PATH, StepSize, judge_step_size

_ASSIGNMENT = re.compile(r"([a-z_]+(?:\.[a-z_0-9]+)+)=([\w.+-]+?),?")  # a setting within a sentence
_TIME_MASKS: dict[str, Any] = {"augment.time_masks.n_masks": 20, "augment.time_masks.max_fraction": 0.075}
_COUPLED = "learning rate, eps and loss reduction must match"
_LONG_TRAINING_EPOCHS = 100  # published gains from heavy masking are from runs of 250 epochs and more
_EPS_MATTERS = 1e-4  # an eps below this is smaller than nearly every gradient
_OFFICIAL_LR = {"b2t24": ("schedule.lr", 0.02), "b2t25": ("schedule.peak_lr", 0.005)}  # both with eps 0.1
_OFFICIAL_REDUCTION = {"b2t24": "mean_per_token", "b2t25": "sum_per_trial"}
# Scores of causes that the verdict suggests; those of the recipe are computed in `recipe_checks`.
_MIN_ROWS = 10  # training rows that can be judged without evaluations
_SAFE = 0.8  # fraction of the largest learning rate that works
_MEAN_LR = 0.5  # mean learning rate of a decaying schedule / its peak
_HIGH = 0.4  # an error rate that is high on any data
_FIRST, _SECOND, _THIRD, _FOURTH, _LAST = 0.55, 0.45, 0.35, 0.26, 0.24


def find_causes(lead: Finding, m: Measurements, rest: Sequence[Finding] = ()) -> tuple[Cause, ...]:
    """Causes whose change is safe and not already in the recipe; at most one per factor."""
    step = judge_step_size(m)
    symptoms = _symptoms(lead, rest, m, step)
    verdicts = (lead.verdict, *(f.verdict for f in rest if f.verdict))
    provisional = lead.verdict == "too_short" and not m.stuck_train_loss
    candidates = [
        *check_recipe(m, symptoms, step, provisional),
        *check_log(m, step),
        *_CAUSES[lead.verdict](lead, m, step),
    ]
    found: dict[str, Cause] = {}
    for cause in sorted(candidates, key=lambda c: -c.score):
        cause = _without_current(cause, m.log.settings)
        if cause.change and not contradicts(cause, m, verdicts, step):
            found.setdefault(cause.factor if cause.settings else cause.cause, cause)
    return tuple(found.values())


def first_suggestion(lead: Finding, causes: tuple[Cause, ...], m: Measurements) -> str:
    """The change to try first."""
    if causes:
        return causes[0].change
    if lead.verdict != "healthy":
        return "this log suggests no setting change; check the data"
    return "nothing needs to be fixed"


def _symptoms(lead: Finding, rest: Sequence[Finding], m: Measurements, step: StepSize) -> frozenset[str]:
    """Symptoms of the run as defined in `recipe_checks`; with few evaluations, derived from its training rows."""
    found = set()
    if lead.verdict == "too_short" and m.log.is_arcuate and len(m.log.train_loss.finite) >= _MIN_ROWS:
        if step.direction == "too_large":
            found.add(UNSTABLE)
        if m.n and not m.loss_only and m.evaluations.values[-1] >= _HIGH:
            found.add(SLOW)
    verdicts = {lead.verdict, *(f.verdict for f in rest)}
    learnt = m.n > 0 and m.best < CONSTANT_OUTPUT_PER and not m.loss_only
    if "exploded" in verdicts or m.log.n_rewinds or (lead.verdict == "collapsed" and learnt):
        found.add(UNSTABLE)
    if lead.verdict == "degraded":
        found.add(OVERFIT if (m.train_loss_trend or 0.0) < -LOSS_TREND else UNSTABLE)
    if (lead.verdict == "collapsed" and not learnt) or (lead.verdict == "too_short" and m.stuck_train_loss):
        found.add(STUCK)
    if lead.verdict in ("plateaued", "unfinished"):
        found.add(SLOW)
    if lead.verdict == "overfit":
        found.add(OVERFIT)
    return frozenset(found)


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


def _without_current(cause: Cause, settings: Mapping[str, Any]) -> Cause:
    changed = {key: v for key, v in cause.settings.items() if key not in settings or settings[key] != v}
    if cause.settings and not changed:
        return replace(cause, change="", settings={})
    return replace(cause, change=without_current_settings(cause.change, settings), settings=changed)


# Safety: changes that a verdict rules out.

_LR_UP, _CLIP_UP, _REGULARISE, _DEREGULARISE, _LONGER, _SHORTER = (
    "lr_up",
    "clip_up",
    "more",
    "less",
    "longer",
    "shorter",
)
_FORBIDDEN = {
    "exploded": {_LR_UP, _CLIP_UP},
    "degraded": {_LR_UP, _LONGER},
    "collapsed": {_REGULARISE},
    "overfit": {_DEREGULARISE, _LONGER},
    "unfinished": {_SHORTER},
}
_STRENGTHS = (
    *("encoder.dropout", "encoder.input_dropout", "encoder.attention_dropout", "front_end.session_layer.dropout"),
    *("augment.white_noise_sd", "augment.offset_sd", "augment.gain_sd", "augment.random_walk_sd", "augment.speckle"),
    *("augment.time_masks.n_masks", "augment.feature_masks.n_masks", "optimizer.weight_decay.weights"),
)


_OFFICIAL_STRENGTHS = {
    "encoder.dropout": 0.4,
    "augment.white_noise_sd": 0.8,
    "augment.offset_sd": 0.2,
    "train.clip_norm": None,
    "optimizer.eps": 0.1,
}


def contradicts(cause: Cause, m: Measurements, verdicts: Sequence[str], step: StepSize) -> bool:
    """Whether a change is dangerous for this run, or the opposite of what one of its verdicts needs."""
    forbidden = set().union(*(_FORBIDDEN.get(v, set()) for v in verdicts))
    if step.rising:
        forbidden |= {_LR_UP, _CLIP_UP}
    return bool(forbidden & directions(cause, m))


def directions(cause: Cause, m: Measurements) -> set[str]:
    """Directions in which a cause changes a run, derived from its settings, or from its factor if it has none."""
    found = set(_WORD_DIRECTIONS.get(cause.factor, ()))
    for key, value in cause.settings.items():
        if isinstance(value, Mapping) and key in ("schedule", "session_schedule"):
            peak = value.get("peak_lr", value.get("lr"))
            found |= {_LR_UP} if _raises_lr(peak, m) else set()
        elif key.endswith((".lr", ".peak_lr")):
            found |= {_LR_UP} if _raises_lr(value, m) else set()
        old = m.log.settings.get(key) if m.log.settings else _usual_value(key, m)
        found |= _direction(key, value, old)
    return found


def _usual_value(key: str, m: Measurements) -> Any:
    """Most likely value in a log of another trainer: the length of that run, else the value of the official recipes."""
    return m.log.last_step if key == "train.steps" else _OFFICIAL_STRENGTHS.get(key, 0)


_WORD_DIRECTIONS = {"learning_rate_low": (_LR_UP,)}


def _raises_lr(value: Any, m: Measurements) -> bool:
    current = _peak_learning_rate(m)
    return not isinstance(value, (int, float)) or current is None or value > 1.001 * current


def _direction(key: str, new: Any, old: Any) -> set[str]:
    numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (new, old))
    up, down = numbers and new > old, numbers and new < old
    if key == "optimizer.eps":
        return {_LR_UP} if down and old > _EPS_MATTERS else set()
    if key == "loss.ctc.reduction":
        return {_LR_UP} if new == "sum_per_trial" and old != new else set()
    if key == "train.clip_norm":
        return {_CLIP_UP} if up or (new is None and old is not None) else set()
    if key in ("train.steps", "schedule.decay_steps", "schedule.cycle_steps"):
        return {_LONGER} if up else {_SHORTER} if down else set()
    if key in _STRENGTHS:
        return {_DEREGULARISE} if down else {_REGULARISE} if up else set()
    return set()


# Causes by verdict.


def _exploded(lead: Finding, m: Measurements, step: StepSize) -> list[Cause]:
    since = lead.since
    if m.n and (since is None or m.best_step < since):
        since = m.best_step  # the run was already degrading before the explosion
    causes = [*_coupling(m), learning_rate_too_high(m, since, step)]
    if m.log.settings.get("train.clip_norm") is None:
        cause = "gradients were not clipped" if m.log.is_arcuate else "gradients may not have been clipped"
        because = "a single bad batch can undo thousands of updates"
        causes.append(make_cause("clipping", cause, because, {"train.clip_norm": _clip_norm(m)}, score=_SECOND))
    causes.append(
        make_cause(
            "precision",
            "half precision overflowed, or a trial could not be aligned",
            "the loss becomes infinite without rising first",
            {"train.precision.kind": "fp32", "loss.ctc.zero_infinity": True},
            score=_THIRD,
        )
    )
    return causes


def _collapsed(lead: Finding, m: Measurements, step: StepSize) -> list[Cause]:
    causes = [*_coupling(m)]
    if m.n > 0 and m.best < CONSTANT_OUTPUT_PER and not m.loss_only:
        causes.append(learning_rate_too_high(m, m.best_step, step))
    else:
        causes += _stuck(m, step)
    return [
        *causes,
        make_cause(
            "noise",
            "the input carries too little information",
            "noise or masks that hide the signal, or features without normalisation, also cause blank collapse",
            {"augment.white_noise_sd": 0.2, "augment.time_masks.n_masks": 0, "front_end.normalise": "block"},
            score=_FOURTH,
        ),
        Cause(
            "labels or lengths are wrong",
            "with a wrong blank index or padded label lengths, only blanks can be learnt",
            "arcuate prepare DATA STORE --dry-run, then inspect the trials it reports",
            "labels",
            score=0.2,
        ),
    ]


def _stuck(m: Measurements, step: StepSize) -> list[Cause]:
    """Causes for a run that never learnt: updates that are too small or too large, by the measured step size."""
    if step.direction == "too_small":
        return _updates_too_small(m, step)
    if step.direction == "too_large":
        return [learning_rate_too_high(m, None, step)]
    unclear = (
        f"{_COUPLED}: steps that are too large end in a constant output, steps that are too small never leave the"
        " all-blank solution"
    )
    dataset = m.dataset or "b2t24"
    name, lr = _OFFICIAL_LR[dataset]
    name = _peak_setting(m) if m.log.settings else name
    reduction = _OFFICIAL_REDUCTION[dataset]
    official = {"optimizer.eps": 0.1, name: lr, "loss.ctc.reduction": reduction}
    cause = "the learning rate does not match eps and the loss reduction"
    if m.log.is_arcuate:  # the packaged recipe is a better source than another model's settings
        return [Cause(cause, unclear, "take all three from one packaged recipe", "coupling", {}, _FIRST)]
    return [make_cause("learning_rate", cause, unclear, official, f", as in recipe {dataset}-gru", score=_FIRST)]


def _updates_too_small(m: Measurements, step: StepSize) -> list[Cause]:
    """A higher learning rate, or a smaller eps if eps limits the updates and the learning rate is a usual one."""
    settings, packaged = m.log.settings, m.log.parent_settings
    peak = _peak_learning_rate(m)
    if peak is None or step.path is None:
        words = "a learning rate ten times higher, or a smaller eps"
        return [Cause("the updates are too small", step.because, words, "learning_rate_low", {}, _FIRST)]
    if step.clipped:
        cause = "gradients are clipped to almost nothing, so the updates are too small"
        usual = max(_clip_norm(m), _rounded(float(np.median(m.log.grad_norm.finite.values))))
        return [make_cause("clipping", cause, step.because, {"train.clip_norm": usual}, score=_FIRST + 0.3)]
    wanted = GOOD_PATH / max(step.path, 1e-9)
    eps = settings.get("optimizer.eps", 0.0)
    causes = []
    limit = LARGE_STEP / 2 / step.damping  # highest learning rate that is still safe at this eps
    higher = _with_lr(m, min(peak * min(wanted, 300.0), max(limit, peak)))
    score = _FIRST + 0.35 * min(1.0, np.log10(max(1.0, wanted)))
    if step.damping < 0.5 and eps > _EPS_MATTERS:
        small = packaged.get("optimizer.eps", 1e-8)
        small = small if small < eps else 1e-8
        words = f", or at this eps {_assignments(higher)}: the updates have to become larger, not smaller"
        if peak <= LARGE_STEP:
            cause = "eps is too large for the gradients, so the updates are too small"
            causes.append(make_cause("eps", cause, step.because, {"optimizer.eps": small}, words, score + 0.3))
        else:
            cause = "the learning rate is too low for this eps, so the updates are too small"
            causes.append(make_cause("learning_rate", cause, step.because, higher, score=score))
        return causes
    packaged_peak = packaged.get(_peak_setting(m))
    if isinstance(packaged_peak, float) and peak < packaged_peak <= LARGE_STEP:
        higher = _with_lr(m, max(packaged_peak, _sufficient_lr(m, step)))
        score += 0.3
    cause = "the learning rate is too low: the weights barely change"
    return [make_cause("learning_rate", cause, step.because, higher, score=score)]


def _degraded(lead: Finding, m: Measurements, step: StepSize) -> list[Cause]:
    trend = m.train_loss_trend or 0.0
    falling, rising = trend < -LOSS_TREND, trend > LOSS_TREND
    too_high = learning_rate_too_high(m, m.best_step, step)
    regularisation = make_cause(
        "regularisation",
        "too little regularisation for the length of the run",
        "training continued to improve while validation got worse"
        if falling
        else "less likely, because training got worse as well"
        if rising
        else "possible, because the training loss does not rule it out",
        _more_regularisation(m),
        score=_FIRST + 0.3 if falling else _THIRD,
    )
    if falling:
        too_high = replace(too_high, score=min(too_high.score, _SECOND))
    return [*_coupling(m), too_high, regularisation]


def _overfit(lead: Finding, m: Measurements, step: StepSize) -> list[Cause]:
    steps = max(m.best_step, 1) if m.n else 1000
    shorter: dict[str, Any] = {"train.steps": steps}
    for key in ("schedule.decay_steps", "schedule.cycle_steps"):
        if (m.log.settings.get(key) or 0) > steps:
            shorter[key] = steps
    return [
        make_cause(
            "regularisation",
            "the model memorises the training sentences",
            "validation gets worse while training continues to improve",
            _more_regularisation(m),
            score=_FIRST,
        ),
        make_cause(
            "length",
            "the run is longer than the data support",
            f"its best was at step {m.best_step:,}" if m.n else "the best was much earlier",
            shorter,
            ", with a schedule that has decayed by then",
            score=_SECOND,
        ),
        make_cause(
            "averaging", "the weights fluctuate around the best", "late evaluations scatter above it",
            {"ema.decay": 0.999}, score=_FOURTH,
        ),
    ]  # fmt: skip


def _more_regularisation(m: Measurements) -> dict[str, Any]:
    """Heavier masks and dropout, without lowering what the recipe has."""
    settings = m.log.settings
    change: dict[str, Any] = {}
    if (settings.get("augment.time_masks.n_masks") or 0) == 0:
        change |= _TIME_MASKS
        if settings.get("augment.time_masks.max_bins") is not None:
            change["augment.time_masks.max_bins"] = None
    if "encoder.dropout" not in settings or settings["encoder.dropout"] < 0.4:
        change["encoder.dropout"] = 0.4
    return change or {"augment.white_noise_sd": 1.0}


def _plateaued(lead: Finding, m: Measurements, step: StepSize) -> list[Cause]:
    stuck = m.train_loss_trend is None or m.train_loss_trend > -LOSS_TREND
    too_regularised = make_cause(
        "regularisation",
        "too much regularisation",
        "training loss stays high as well" if stuck else "it limits how well the training data can be fitted",
        _less_regularisation(m),
        score=_SECOND if stuck else _FOURTH,
    )
    too_small = make_cause(
        "model_size",
        "the model is too small or lacks session layers",
        "other runs reach lower error rates on these data",
        _larger_model(m),
        score=_THIRD,
    )
    regularisation = make_cause(
        "masks",
        "too little regularisation",
        "training continues to improve, validation does not",
        {k: v for k, v in _more_regularisation(m).items() if k != "encoder.dropout"} or {"encoder.dropout": 0.4},
        score=_FIRST if not stuck else 0.0,
    )
    causes = [*_coupling(m), *_learning_rate_too_low(m, step, stuck), too_regularised, too_small]
    return causes if stuck else [*causes, regularisation]


def _less_regularisation(m: Measurements) -> dict[str, Any]:
    settings = m.log.settings
    lower = {"augment.white_noise_sd": 0.2, "encoder.dropout": 0.2}
    return {k: v for k, v in lower.items() if k not in settings or settings[k] > v}


def _larger_model(m: Measurements) -> dict[str, Any]:
    width, heads = m.log.settings.get("encoder.width"), m.log.settings.get("encoder.n_heads")
    wider = (
        2 * width if isinstance(width, int) and (width >= 768 or heads) else 768 if not width else min(768, 2 * width)
    )
    return {"encoder.width": wider, "front_end.session_layer.enabled": True}


def _learning_rate_too_low(m: Measurements, step: StepSize, stuck: bool) -> list[Cause]:
    """A higher learning rate for a plateau, unless the measured step size rules it out."""
    if step.direction == "too_small":
        return _updates_too_small(m, step)
    if step.direction == "too_large" or step.rising:
        return [learning_rate_too_high(m, None, step)] if step.because else []
    peak = _peak_learning_rate(m)
    because = "training loss is flat as well" if stuck else f"other runs reach a far lower error rate; {_COUPLED}"
    cause = "the learning rate is too low for eps, or decayed too early"
    if peak is None:
        return [Cause(cause, because, "four times the learning rate", "learning_rate_low", {}, _THIRD)]
    limit = LARGE_STEP if m.log.settings and step.damping > 0.5 else 2 * LARGE_STEP / min(1.0, step.damping)
    if 4 * peak > limit:
        return []
    longer = f", or a longer {key}" if (key := _length_setting(m)) else ""
    return [make_cause("learning_rate", cause, because, _with_lr(m, 4 * peak), longer, _SECOND if stuck else _THIRD)]


def _unfinished(lead: Finding, m: Measurements, step: StepSize) -> list[Cause]:
    last, unit = m.log.last_step or 0, m.evaluations.unit
    causes = _updates_too_small(m, step) if step.direction == "too_small" else []
    stopped = m.planned is not None and m.planned > last and not m.finished
    steps = m.planned if m.planned and m.planned > last else 2 * max(last, 1)
    resume = "continue with --resume" if m.log.is_arcuate else "continue from the last checkpoint"
    because = "its best evaluation is the last one"
    cause = "the run was stopped while it was improving"
    if m.log.is_arcuate and stopped:
        causes.append(Cause(cause, because, f"{resume}, train.steps={steps}", "length", {}, _FIRST))
    elif unit == "batches" or m.log.is_arcuate:
        longer: dict[str, Any] = {"train.steps": steps}
        if stages := m.log.settings.get("stages"):
            ratio = steps / max(1, last)
            longer["stages"] = [{**s, "steps": s["steps"] and round(ratio * s["steps"])} for s in stages]
        if (key := _length_setting(m)) and m.log.settings.get(key):
            longer[key] = steps
        words = "" if m.log.is_arcuate else ", from the last checkpoint"
        cause = cause if not m.finished else "the run ended while it was improving"
        causes.append(make_cause("length", cause, because, longer, words, _FIRST))
    else:
        causes.append(Cause(cause, because, f"{resume}, twice as many {unit}", "length", {}, _FIRST))
    return causes


def _too_short(lead: Finding, m: Measurements, step: StepSize) -> list[Cause]:
    every = max(1, min(100, (m.log.settings.get("train.steps") or 2000) // 20))
    few = make_cause(
        "length",
        "too few evaluations for a verdict",
        f"{m.n} in the log",
        {"train.validate_every": every},
        ", or train longer",
        score=_LAST if m.log.is_arcuate and len(m.log.train_loss.finite) >= _MIN_ROWS else _FIRST,
    )
    if m.stuck_train_loss:
        return [*_collapsed(lead, m, step), few]
    if not m.log.is_arcuate or len(m.log.train_loss.finite) < _MIN_ROWS:
        return [few]
    if step.direction == "too_large":
        return [learning_rate_too_high(m, None, step), few]
    return [*(_updates_too_small(m, step) if step.direction == "too_small" else []), few]


def _healthy(lead: Finding, m: Measurements, step: StepSize) -> list[Cause]:
    """Advice for a healthy run, only with evidence from this run: changes by the guard, or many epochs.

    Published results show 18 % fewer word errors from heavy time masking after 250 epochs. It slows down short runs, so
    it is not suggested for them.
    """
    causes = []
    peak, scale = _peak_learning_rate(m), m.log.lr_scale
    if m.log.guard_eps is not None and peak is not None:
        because = f"the guard rewound the run, lowered eps to {m.log.guard_eps:.2g} and multiplied the learning rate by"
        settings = {"optimizer.eps": m.log.guard_eps, **(_with_lr(m, peak * scale) if scale != 1 else {})}
        cause = "eps was too large for the gradients until the guard lowered it"
        causes.append(make_cause("eps", cause, f"{because} {scale:.2g}", settings, score=_FIRST))
    elif m.log.lr_scale < 1 and m.log.n_rewinds and peak is not None:
        because = f"the guard rewound {m.log.n_rewinds} times and reduced it by a factor of {m.log.lr_scale:.2g}"
        cause = "the learning rate was too high until the guard reduced it"
        causes.append(make_cause("learning_rate", cause, because, _with_lr(m, peak * m.log.lr_scale), score=_FIRST))
    elif m.log.settings and step.direction == "too_large" and peak is not None and peak * step.damping > LARGE_STEP:
        causes.append(replace(learning_rate_too_high(m, None, step), score=_FIRST))
    epochs = m.epochs
    if epochs is not None and epochs >= _LONG_TRAINING_EPOCHS and not m.log.settings.get("augment.time_masks.n_masks"):
        because = (
            f"the run has {epochs:,.0f} epochs; published results show 18 % fewer word errors from heavy masking after"
            " 250 epochs"
        )
        causes.append(make_cause("masks", "time masks may improve the result", because, _TIME_MASKS, score=_FOURTH))
    return causes


_CAUSES: dict[str, Callable[[Finding, Measurements, StepSize], list[Cause]]] = {
    "exploded": _exploded,
    "collapsed": _collapsed,
    "degraded": _degraded,
    "overfit": _overfit,
    "plateaued": _plateaued,
    "unfinished": _unfinished,
    "too_short": _too_short,
    "healthy": _healthy,
}


def _coupling(m: Measurements) -> list[Cause]:
    """Learning rate, eps or reduction changed without the others, relative to a known recipe."""
    return [
        Cause(
            "learning rate, eps and reduction no longer match",
            warning,
            "take all three from the official recipe, then change one at a time",
            "coupling",
            score=_SECOND,
        )
        for warning in m.log.coupling_warnings[:1]
    ]


def learning_rate_too_high(m: Measurements, step: int | None, size: StepSize) -> Cause:
    """A lower learning rate: that of the packaged recipe if it is lower, else a fraction of the one at `step`."""
    lr, peak = _learning_rate_at(m, step), _peak_learning_rate(m)
    if lr:
        because = f"the learning rate was {lr:.3g}" + (f" at step {step:,}, the last good one" if step else "")
        early = m.n > 0 and m.best_step <= m.evaluations.steps[min(2, m.n - 1)]
        lower = (0.1 if early else 0.5) * lr  # if early, it may have been too high from the start
    else:
        because = size.because if size.direction == "too_large" else _COUPLED
        lower = peak / 4 if peak else 0.0
    score = _FIRST
    settings: dict[str, Any] = {}
    packaged = _packaged_schedule(m)
    if packaged is not None and peak is not None:
        schedule, packaged_peak = packaged
        if packaged_peak < 0.99 * peak:
            because += f"; recipe {m.log.parent} has at most {packaged_peak:g}, this run {peak:g}"
            score += 0.3 + 0.3 * min(2.0, float(np.log10(peak / packaged_peak)))
            best = min(max(packaged_peak, _sufficient_lr(m, size)), 0.5 * peak)
            best = packaged_peak if best < 1.1 * packaged_peak else _rounded(best)
            same_kind = "schedule" not in schedule
            settings = (
                _with_lr(m, best) if same_kind else {"schedule": {**schedule["schedule"], **_peak_of(schedule, best)}}
            )
        else:
            score -= 0.1
    if not settings and lower:
        if m.log.settings and m.log.settings.get("optimizer.kind") != "sgd":
            lower = min(max(lower, _sufficient_lr(m, size)), _SAFE * LARGE_STEP / size.damping)
        settings = _with_lr(m, min(lower, 0.5 * peak) if peak else lower)
    if peak and m.log.settings and peak * size.damping > LARGE_STEP:
        score += 0.2
    if m.log.settings.get("train.clip_norm") is None and not (m.log.is_arcuate and not settings):
        settings = {**settings, "train.clip_norm": _clip_norm(m)}
    words = ", with eps unchanged" if lower or settings else "a quarter of the learning rate"
    cause = "the learning rate is too high for this eps and reduction"
    if not lower and "schedule" not in settings:
        words = ", and a quarter of the learning rate with eps unchanged"
    return make_cause("learning_rate", cause, because, settings, words, score)


def _peak_of(schedule: Mapping[str, Any], peak: float) -> dict[str, float]:
    return {"lr" if "lr" in schedule["schedule"] else "peak_lr": peak}


def _sufficient_lr(m: Measurements, size: StepSize) -> float:
    """Learning rate at which the weights can move far enough in a run of this length, limited to a safe value."""
    steps, peak = m.log.settings.get("train.steps") or 0, _peak_learning_rate(m)
    if not steps or peak is None:
        return 0.0
    return min(_SAFE * LARGE_STEP, GOOD_PATH / (_MEAN_LR * steps)) / max(size.damping, 1e-3)


def _packaged_schedule(m: Measurements) -> tuple[dict[str, Any], float] | None:
    """The schedule of the packaged recipe as settings, and its peak; None if eps or reduction differ from it."""
    settings, packaged = m.log.settings, m.log.parent_settings
    same = all(settings.get(k) == packaged.get(k) for k in ("optimizer.eps", "loss.ctc.reduction", "optimizer.kind"))
    if not packaged or not same:
        return None
    kind = packaged.get("schedule.kind")
    peak = packaged.get("schedule.lr") if kind == "constant" else packaged.get("schedule.peak_lr")
    if not isinstance(peak, float) or peak <= 0:
        return None
    if settings.get("schedule.kind") == kind:
        return {}, peak
    parts = {k.removeprefix("schedule."): v for k, v in packaged.items() if k.startswith("schedule.")}
    lengths = ("decay_steps", "cycle_steps", "hold_steps", "warmup_steps", "period", "every_steps")
    if kind == "step_decay" or any(parts.get(key) for key in lengths):
        return None  # its lengths in steps only fit the packaged number of steps
    return {"schedule": {k: v for k, v in parts.items() if v is not None}}, peak


def _with_lr(m: Measurements, value: float) -> dict[str, Any]:
    """Settings of a new peak learning rate: all learning rates of the recipe are scaled by the same factor."""
    setting, peak = _peak_setting(m), _peak_learning_rate(m)
    value = _rounded(value)
    change: dict[str, Any] = {setting: value}
    settings = m.log.settings
    if not settings or not peak:
        return change
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
    return change


def _clip_norm(m: Measurements) -> float:
    """The clipping norm of the packaged recipe, else a few times the usual gradient norm, 10 if that is unknown."""
    packaged = m.log.parent_settings.get("train.clip_norm")
    if isinstance(packaged, (int, float)):
        return packaged
    norms = m.log.grad_norm.finite.values
    return 1.0 if len(norms) and m.log.is_arcuate and float(np.median(norms)) < 1.0 else 10


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
    """The setting of the peak learning rate: of the recipe of this run, or of the official one for its data set."""
    if not m.log.settings:
        return _OFFICIAL_LR[m.dataset][0] if m.dataset in _OFFICIAL_LR else "schedule.peak_lr"
    return "schedule.lr" if "schedule.lr" in m.log.settings else "schedule.peak_lr"


def _length_setting(m: Measurements) -> str | None:
    """The setting of the length of the schedule, if its kind has one."""
    names = ("schedule.decay_steps", "schedule.cycle_steps")
    return next((name for name in names if name in m.log.settings), None)


def _assignments(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value:g}" for key, value in settings.items())


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


__all__ = ["SHORT_PATH", "Cause", "contradicts", "directions", "find_causes", "first_suggestion"]
