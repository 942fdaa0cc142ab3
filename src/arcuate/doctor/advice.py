"""What each verdict suggests: causes in order of probability, without changes that could make things worse.

Where a log cannot tell causes apart (labels, lengths, days, decoding), each is listed with the cheapest test that can.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from arcuate.doctor.causes import Cause, Change, leading_causes, settings_to_changes
from arcuate.doctor.learning_rate import (
    LENGTH_SETTINGS,
    clipping,
    higher_learning_rate,
    learning_rate_too_high,
    peak_learning_rate,
    updates_too_small,
    with_lr,
)
from arcuate.doctor.log_checks import check_log
from arcuate.doctor.log_table import running_median
from arcuate.doctor.measurements import BLANK_PER, Measurements
from arcuate.doctor.recipe_checks import OVERFIT, SLOW, STUCK, UNSTABLE, check_recipe
from arcuate.doctor.rules import LIMITS, LOSS_TREND, Finding
from arcuate.doctor.updates import Updates, judge_updates
from arcuate.progress import percent
from arcuate.training.step_size import MAX_STEP

# Scores of causes that the verdict suggests; those of the recipe are computed in `recipe_checks`.
_FIRST, _SECOND, _THIRD, _FOURTH, _LAST = 0.55, 0.45, 0.35, 0.26, 0.24
_OWN_CODE = (
    0.4  # weight of causes in data and program for an arcuate run, whose data and decoding are checked elsewhere
)
_MIN_ROWS = 10  # training rows that can be judged without evaluations
_LONG_TRAINING_EPOCHS = 100  # published gains from heavy masking are from runs of 250 epochs and more
_TIME_MASKS: dict[str, Any] = {"augment.time_masks.n_masks": 20, "augment.time_masks.max_fraction": 0.075}
_LATE_START = 1 / 3  # fraction of the run until it left the level of a blank output
_UNDERFIT = 0.95  # validation / training loss below which regularisation, active in training only, dominates
_GAP = 1.3  # validation / training loss above which the two splits differ
_MEMORISED = 0.3  # training loss / that of uninformative output below which sentences may have been memorised
_LEARNT_LITTLE = 0.85  # loss / that of uninformative output above which hardly anything was learnt
_STOPPED = -0.01  # change of the validation loss over the last third above which it no longer falls
_MIN_NATS = 0.69  # ln 2: a token that greedy decoding gets wrong has a probability below one half
_PER_TOKEN = 3.3  # usual loss per token, in nats, of an output that does not depend on the input
_DECODED_BADLY = 0.3  # error rate from which a low loss is suspicious
_HIGH = 0.4  # an error rate that is high on any data


def find_causes(lead: Finding, m: Measurements, rest: Sequence[Finding] = ()) -> tuple[Cause, ...]:
    """Causes whose change is safe and not already in the recipe; at most one per factor."""
    updates = judge_updates(m)
    symptoms = _symptoms(lead, rest, m, updates)
    verdicts = (lead.verdict, *(f.verdict for f in rest if f.verdict))
    provisional = lead.verdict == "too_short" and not m.stuck_train_loss
    candidates = [
        *check_recipe(m, symptoms, provisional),
        *check_log(m, updates),
        *_CAUSES[lead.verdict](lead, m, updates),
        *_decoding(lead, m),
    ]
    found: dict[str, Cause] = {}
    for cause in sorted(candidates, key=lambda c: -c.score):
        current = _without_current(cause, m.log.settings)
        if current is not None and not contradicts(current, m, verdicts, updates):
            found.setdefault(current.factor if current.changes else current.cause, current)
    return tuple(found.values())


def first_suggestion(lead: Finding, causes: tuple[Cause, ...]) -> str:
    """The change to try first, or the first test if the log cannot tell the causes apart."""
    if len(alike := leading_causes(causes)) > 1:
        return f"the log cannot tell {len(alike)} causes apart, so test before changing a setting: {alike[0].change}"
    if causes:
        return causes[0].change
    if lead.verdict != "healthy":
        return "this log suggests no setting change; check the data"
    return "nothing needs to be fixed"


def _symptoms(lead: Finding, rest: Sequence[Finding], m: Measurements, updates: Updates) -> frozenset[str]:
    """Symptoms of the run as defined in `recipe_checks`; with few evaluations, derived from its training rows."""
    found = set()
    if lead.verdict == "too_short" and m.log.is_arcuate and len(m.log.train_loss.finite) >= _MIN_ROWS:
        if updates.direction == "too_large":
            found.add(UNSTABLE)
        if m.n and not m.loss_only and m.evaluations.values[-1] >= _HIGH:
            found.add(SLOW)
    verdicts = {lead.verdict, *(f.verdict for f in rest)}
    if "exploded" in verdicts or m.log.n_rewinds or (lead.verdict == "collapsed" and m.learnt):
        found.add(UNSTABLE)
    if lead.verdict == "degraded":
        found.add(OVERFIT if (m.train_loss_trend or 0.0) < -LOSS_TREND else UNSTABLE)
    if (lead.verdict == "collapsed" and not m.learnt) or (lead.verdict == "too_short" and m.stuck_train_loss):
        found.add(STUCK)
    if lead.verdict in ("plateaued", "unfinished"):
        found.add(SLOW)
    if lead.verdict == "overfit":
        found.add(OVERFIT)
    return frozenset(found)


def _without_current(cause: Cause, settings: Mapping[str, Any]) -> Cause | None:
    """The cause without changes that the recipe already has; None if no change is left."""
    changed = tuple(c for c in cause.changes if c.times or c.setting not in settings or settings[c.setting] != c.value)
    return None if cause.changes and not changed else replace(cause, changes=changed)


# Safety: changes that a verdict rules out.

Factor = str  # lr, clip, regularisation or length
FORBIDDEN: Mapping[str, frozenset[tuple[Factor, int]]] = {
    "exploded": frozenset({("lr", 1), ("clip", 1)}),
    "degraded": frozenset({("lr", 1), ("clip", 1), ("length", 1)}),
    "collapsed": frozenset({("regularisation", 1)}),
    "overfit": frozenset({("regularisation", -1), ("length", 1)}),
    "unfinished": frozenset({("length", -1), ("regularisation", 1)}),
}
_STRENGTHS = (
    *("encoder.dropout", "encoder.input_dropout", "encoder.attention_dropout", "front_end.session_layer.dropout"),
    *("augment.white_noise_sd", "augment.offset_sd"),
    *("augment.time_masks.n_masks", "augment.feature_masks.n_masks", "optimizer.weight_decay.weights"),
)
_EPS_MATTERS = 1e-4  # an eps below this is smaller than nearly every gradient


def contradicts(cause: Cause, m: Measurements, verdicts: Sequence[str], updates: Updates) -> bool:
    """Whether a change is dangerous for this run, or the opposite of what one of its verdicts needs."""
    forbidden = frozenset[tuple[Factor, int]]().union(*(FORBIDDEN.get(v, frozenset()) for v in verdicts))
    if updates.rising:
        forbidden |= {("lr", 1), ("clip", 1)}
    if m.loss_gap is not None and m.loss_gap <= _UNDERFIT:
        forbidden |= {("regularisation", 1)}
    return any(direction(change, m) in forbidden for change in cause.changes)


def direction(change: Change, m: Measurements) -> tuple[Factor, int]:
    """The factor that a change affects, and whether it raises (1) or lowers (-1) it; 0 if neither."""
    key, new = change.setting, change.value
    old = m.log.last_step if key == "train.steps" and not m.log.settings else m.log.settings.get(key)
    numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (new, old))
    sign = (new > old) - (new < old) if numbers else 0
    if change.times is not None:
        sign = 1 if change.times > 1 else -1
    if key in ("schedule", "session_schedule") or key.endswith((".lr", ".peak_lr")):
        rate = new.get("peak_lr", new.get("lr")) if isinstance(new, Mapping) else new
        peak = peak_learning_rate(m)
        if change.times is None:
            sign = 1 if not isinstance(rate, (int, float)) or peak is None or rate > 1.001 * peak else -1
        return "lr", sign
    if key == "optimizer.eps":
        return "lr", 1 if sign < 0 and isinstance(old, float) and old > _EPS_MATTERS else 0
    if key == "loss.ctc.reduction":
        return "lr", int(new == "sum_per_trial" and old != new)
    if key == "train.clip_norm":
        return "clip", 1 if not m.log.settings or (new is None and old is not None) else sign
    if key in ("train.steps", *LENGTH_SETTINGS):
        return "length", sign
    return "regularisation", sign if key in _STRENGTHS else 0


# What a verdict suggests.


def _weight(m: Measurements) -> float:
    return _OWN_CODE if m.log.is_arcuate else 1.0


def _decoding(lead: Finding, m: Measurements) -> list[Cause]:
    """A loss too low for the error rate: every error means a probability below one half, a loss of ln 2 or more."""
    loss = m.log.val_loss.finite.values
    if m.loss_only or m.n < 5 or len(loss) < 4 or lead.verdict in ("exploded", "too_short"):
        return []
    last = float(np.median(loss[-3:]))
    per_token: float | None = None
    if m.chance_loss is not None and m.learnt:
        per_token = last / m.chance_loss * _PER_TOKEN
    if loss[0] < 15:  # a mean per token: an untrained model has less than four times the level of a blank output
        per_token = last
    if per_token is None or m.end < _DECODED_BADLY or per_token >= _MIN_NATS * m.end:
        return []
    facts = {
        "loss": last,
        "allowed": percent(per_token / _MIN_NATS),
        "n_nats": f"{per_token:.2g} nats",
        "name": m.log.error_name,
        "rate": m.shown(m.end),
    }
    return [Cause("decoding", "decoding", 0.9 * _weight(m), facts)]


def _exploded(lead: Finding, m: Measurements, updates: Updates) -> list[Cause]:
    causes = [learning_rate_too_high(m, _last_good_step(m, lead.since), updates)]
    if not m.log.is_arcuate and (what := _stopped_without_warning(m, lead.since)):
        causes.append(Cause("bad_trial", "data", causes[0].score + 0.1, {"what": what}))
    if m.log.settings.get("train.clip_norm") is None:
        causes.append(clipping(m, _SECOND))
    precision = {"train.precision.kind": "fp32", "loss.ctc.zero_infinity": True}
    return [*causes, Cause("overflow", "precision", _THIRD, changes=settings_to_changes(precision))]


def _stopped_without_warning(m: Measurements, since: int | None) -> str | None:
    """The loss that became non-finite for good without having risen before; None if there is no such loss."""
    norms = m.log.grad_norm.finite.between(-np.inf, np.inf if since is None else since).values
    if len(norms) >= 4 and norms[-1] >= 3 * np.median(norms):
        return None
    for name, series in (("training loss", m.log.train_loss), ("validation loss", m.log.val_loss)):
        broken = ~np.isfinite(series.values)
        if len(series) < 2 or not broken[-1]:
            continue
        before = running_median(series.values[: int(broken.argmax())])
        if len(before) < 2 or before[-1] < 1.5 * before.min():
            return name
    return None


def _last_good_step(m: Measurements, since: int | None) -> int | None:
    """The last evaluation before a step, or the best one if the run was degrading before it."""
    if since is None or not m.n or not (m.learnt or m.loss_only):
        return None
    before = m.evaluations.steps[m.evaluations.steps < since]
    last = int(before[-1]) if len(before) else None
    return m.best_step if m.learnt and last is not None and m.best_step < last else last


def _collapsed(lead: Finding, m: Measurements, updates: Updates) -> list[Cause]:
    reason = "with a wrong blank index, or wrong label lengths, only blanks can be learnt"
    labels = Cause("labels_unrelated", "labels", 0.2 if m.log.is_arcuate else _SECOND, {"reason": reason})
    if updates.direction == "too_small":
        return [*updates_too_small(m, updates), *_input(m), labels]
    if m.learnt or updates.direction == "too_large":
        too_high = learning_rate_too_high(m, m.best_step if m.learnt else None, updates)
        return [too_high, *_input(m), *([] if m.learnt else [labels])]
    if m.first_fall_share is not None and not m.log.is_arcuate:
        reason = (
            f"the loss fell to the level of a blank output within {100 * m.first_fall_share:.0f} % of the run, without"
            " noise, and stayed there: its updates are neither much too small nor much too large"
        )
        labels = replace(labels, score=_FIRST + 0.1, facts={"reason": reason})
    reason = "too large updates end in a constant output, and too small ones never leave the blank output"
    return [Cause("lr_unknown", "learning_rate", _FIRST, {"reason": reason}), labels, *_input(m)]


def _input(m: Measurements) -> list[Cause]:
    """Noise, masks or features without normalisation."""
    if not m.log.is_arcuate:
        return [Cause("input_information", "input", _FOURTH)]
    change = {"augment.white_noise_sd": 0.2, "augment.time_masks.n_masks": 0, "front_end.normalise": "block"}
    return [Cause("noise_hides_signal", "noise", _FOURTH, changes=settings_to_changes(change))]


def _degraded(lead: Finding, m: Measurements, updates: Updates) -> list[Cause]:
    trend = m.train_loss_trend or 0.0
    too_high = learning_rate_too_high(m, m.best_step, updates)
    score, reason = _THIRD, "possible, because the training loss does not rule it out"
    if trend > LOSS_TREND:
        reason = "less likely, because training got worse as well"
    if trend < -LOSS_TREND:
        too_high = replace(too_high, score=min(too_high.score, _SECOND))
        score, reason = _FIRST + 0.3, "training continued to improve while validation got worse"
    return [too_high, _more_regularisation(m, "too_little_regularisation", reason, score), *_different_splits(m)]


def _overfit(lead: Finding, m: Measurements, updates: Updates) -> list[Cause]:
    steps = max(m.best_step, 1) if m.n else 1000
    too_long = [key for key in LENGTH_SETTINGS if (m.log.settings.get(key) or 0) > steps]
    shorter = tuple(Change(key, steps) for key in ("train.steps", *too_long))
    return [
        _more_regularisation(m, "memorised", "validation gets worse while training continues to improve", _FIRST),
        Cause("run_too_long", "length", _SECOND, {"step": steps}, shorter),
        *_different_splits(m),
    ]


def _different_splits(m: Measurements) -> list[Cause]:
    """Validation loss far above a training loss that is itself high: the sentences were not memorised."""
    gap, train, val = m.loss_gap, m.train_of_chance, m.val_of_chance
    if gap is None or train is None or val is None or gap < _GAP or train < _MEMORISED:
        return []
    weight = _weight(m)
    if val >= _UNDERFIT:
        return [Cause("lengths", "labels", 0.9 * weight, {"gap": gap}),
                Cause("validation_data", "validation_data", 0.6 * weight, {"reason": _gap_text(m)})]  # fmt: skip
    scale = Cause("input_scale", "input", 0.5 * weight, {"reason": f"{_gap_text(m)}, as with a scale that dominates"})
    if _gradients_grow_while_learning(m):
        reason = f"{_gap_text(m)}, and gradient norms grew while the training loss fell"
        scale = replace(scale, score=0.8 * weight, facts={"reason": reason})
    return [scale, Cause("validation_data", "validation_data", 0.6 * weight, {"reason": _gap_text(m)})]


def _gap_text(m: Measurements) -> str:
    return (
        f"validation loss is {m.loss_gap:.2g} times the training loss, which is still"
        f" {percent(m.train_of_chance)} of that of an output without information, so nothing was memorised"
    )


def _gradients_grow_while_learning(m: Measurements) -> bool:
    norms, fell = m.log.grad_norm.finite.values, (m.train_of_chance or 1.0) < _LEARNT_LITTLE
    third = len(norms) // 3
    start = max(2, len(norms) // 10)
    return fell and third > 3 and bool(np.median(norms[-third:]) > 1.5 * np.median(norms[start : start + third]))


def _plateaued(lead: Finding, m: Measurements, updates: Updates) -> list[Cause]:
    stuck = m.train_loss_trend is None or m.train_loss_trend > -LOSS_TREND
    stopped = m.late_val_loss is None or m.late_val_loss > _STOPPED
    gap, labels = m.loss_gap, _labels(m)
    underfit = gap is not None and gap <= _UNDERFIT
    causes = [*higher_learning_rate(m, updates, stuck), *_different_splits(m)]
    causes.append(Cause("too_small_model", "model_size", _THIRD, changes=_larger_model(m)))
    if labels:
        causes += [*labels, *_input(m)]
    else:
        causes += _stalled_loss(m)
    if not _has_gap(m):
        reason = (
            _underfit_text(m)
            if underfit
            else "training loss stays high as well"
            if stuck
            else "it limits how well the training data can be fitted"
        )
        still_falls = m.late_val_loss is None or not stopped
        score = 0.6 if underfit else _SECOND if stuck and still_falls else _FOURTH
        causes.append(_less_regularisation(m, reason, score))
    if not stuck and not underfit and (stopped or (m.split_ratio or 1.0) > _GAP):
        reason = "training continues to improve, validation does not"
        causes.append(_more_regularisation(m, "too_little_regularisation", reason, _FIRST, masks_first=True))
    return [*causes, *_run_too_short(m)]


def _stalled_loss(m: Measurements) -> list[Cause]:
    """A validation loss that no longer falls at a high level, in a log without a training loss to compare it with."""
    val = m.val_of_chance
    if m.loss_gap is not None or val is None or not 0.4 <= val < _LEARNT_LITTLE or m.best < _HIGH or m.log.is_arcuate:
        return []
    if m.late_val_loss is None or m.late_val_loss <= _STOPPED:
        return []
    reason = (
        f"the validation loss stopped falling at {percent(val)} of that of an output without information; the log has"
        " no training loss, which would show whether training went on"
    )
    return [Cause("validation_data", "validation_data", 0.6, {"reason": reason})]


def _underfit_text(m: Measurements) -> str:
    excess = percent(1 / (m.loss_gap or 1.0) - 1)
    return f"training loss, with dropout and noise, is {excess} above the validation loss, without them"


def _labels(m: Measurements) -> list[Cause]:
    """A model that left the blank output, but has learnt hardly more than the frequencies of the classes."""
    train, val = m.train_of_chance, m.val_of_chance
    if val is None or not _LEARNT_LITTLE <= val <= 1.0 or (train is not None and train < _LEARNT_LITTLE):
        return []
    reason = f"the loss is still {percent(val)} of that of an output that does not depend on the input"
    return [Cause("labels_unrelated", "labels", 0.8 * _weight(m), {"reason": reason})]


def _has_gap(m: Measurements) -> bool:
    return m.loss_gap is not None and m.loss_gap >= _GAP


def _run_too_short(m: Measurements) -> list[Cause]:
    """A run that left the blank output late: what follows takes several times as long."""
    left = np.flatnonzero(m.trained & (m.smoothed < BLANK_PER))
    blank = len(left) > 0 and bool((m.smoothed[: left[0]][m.trained[: left[0]]] >= BLANK_PER).any())
    if not blank or m.loss_only or m.best < 0.3:
        return []
    step = int(m.evaluations.steps[left[0]])
    if step - m.first_step < _LATE_START * (m.last_step - m.first_step):
        return []
    more = f" and improved by {100 * m.gain:.0f} % in the last third" if m.gain > 0 else ""
    facts = {"step": step, "last": int(m.last_step), "more": more, "rest": ""}
    score = _FIRST + 0.15 if m.gain >= 0.06 else _THIRD
    return [Cause("run_too_short", "length", score, facts, (Change("train.steps", 3 * (m.log.last_step or 1)),))]


def _more_regularisation(m: Measurements, kind: str, reason: str, score: float, masks_first: bool = False) -> Cause:
    """Heavier masks and dropout, without lowering what the run has."""
    facts = {"reason": reason, "rest": ""}
    settings = m.log.settings
    if not m.log.is_arcuate:
        facts["rest"] = ", or add dropout, noise or time masks where the run had none"
        changes = (Change("encoder.dropout", times=1.5), Change("augment.white_noise_sd", times=1.5))
        return Cause(kind, "regularisation", score, facts, changes)
    change: dict[str, Any] = {}
    if (settings.get("augment.time_masks.n_masks") or 0) == 0:
        change |= _TIME_MASKS
        if settings.get("augment.time_masks.max_bins") is not None:
            change["augment.time_masks.max_bins"] = None
    if ("encoder.dropout" not in settings or settings["encoder.dropout"] < 0.4) and not (change and masks_first):
        change["encoder.dropout"] = 0.4
    factor = "masks" if masks_first else "regularisation"
    return Cause(kind, factor, score, facts, settings_to_changes(change or {"augment.white_noise_sd": 1.0}))


def _less_regularisation(m: Measurements, reason: str, score: float) -> Cause:
    facts = {"reason": reason, "rest": ""}
    if not m.log.is_arcuate:
        changes = (Change("encoder.dropout", times=0.5), Change("augment.white_noise_sd", times=0.5))
        return Cause("too_much_regularisation", "regularisation", score, facts, changes)
    lower = {"augment.white_noise_sd": 0.2, "encoder.dropout": 0.2}
    kept = {k: v for k, v in lower.items() if k not in m.log.settings or m.log.settings[k] > v}
    return Cause("too_much_regularisation", "regularisation", score, facts, settings_to_changes(kept))


def _larger_model(m: Measurements) -> tuple[Change, ...]:
    width, heads = m.log.settings.get("encoder.width"), m.log.settings.get("encoder.n_heads")
    if not isinstance(width, int):
        return (Change("encoder.width", times=2.0), Change("front_end.session_layer.enabled", True))
    wider = 2 * width if width >= 768 or heads else min(768, 2 * width)
    return (Change("encoder.width", wider), Change("front_end.session_layer.enabled", True))


def _unfinished(lead: Finding, m: Measurements, updates: Updates) -> list[Cause]:
    last, unit = m.log.last_step or 0, m.evaluations.unit
    causes = updates_too_small(m, updates) if updates.direction == "too_small" else []
    if m.late_val_loss is not None and m.late_val_loss > 3 * _STOPPED:
        causes += [*_labels(m), *_different_splits(m), *_stalled_loss(m)]  # only the error rate still falls
    if m.loss_gap is not None and m.loss_gap <= _UNDERFIT:
        score = 0.6 if m.gain < LIMITS.falling else _SECOND
        causes.append(_less_regularisation(m, _underfit_text(m), score))
    kind, resume = "run_ended" if m.finished else "run_stopped", "from the last checkpoint"
    steps = m.planned if m.planned and m.planned > last else 2 * max(last, 1)
    if m.log.is_arcuate and steps == m.planned and not m.finished:
        causes.append(Cause(kind, "length", _FIRST, {"rest": f"continue with --resume, train.steps={steps}"}))
    elif unit == "batches" or m.log.is_arcuate:
        longer: dict[str, Any] = {"train.steps": steps}
        if stages := m.log.settings.get("stages"):
            ratio = steps / max(1, last)
            longer["stages"] = [{**s, "steps": s["steps"] and round(ratio * s["steps"])} for s in stages]
        longer |= {key: steps for key in LENGTH_SETTINGS if m.log.settings.get(key)}
        rest = "" if m.log.is_arcuate else f", {resume}"
        causes.append(Cause(kind, "length", _FIRST, {"rest": rest}, settings_to_changes(longer)))
    else:
        causes.append(Cause(kind, "length", _FIRST, {"rest": f"continue {resume}, for twice as many {unit}"}))
    return causes


def _too_short(lead: Finding, m: Measurements, updates: Updates) -> list[Cause]:
    every = max(1, min(100, (m.log.settings.get("train.steps") or 2000) // 20))
    has_rows = m.log.is_arcuate and len(m.log.train_loss.finite) >= _MIN_ROWS
    change = (Change("train.validate_every", every),)
    few = Cause("few_evaluations", "length", _LAST if has_rows else _FIRST, {"n": m.n}, change)
    if m.stuck_train_loss:
        return [*_collapsed(lead, m, updates), few]
    if has_rows and updates.direction == "too_large":
        return [learning_rate_too_high(m, None, updates), few]
    if has_rows and updates.direction == "too_small":
        return [*updates_too_small(m, updates), few]
    return [few]


def _healthy(lead: Finding, m: Measurements, updates: Updates) -> list[Cause]:
    """Advice for a healthy run, only with evidence from this run: changes by the guard, or many epochs.

    Published results show 18 % fewer word errors from heavy time masking after 250 epochs. It slows down short runs, so
    it is not suggested for them.
    """
    causes = []
    peak, scale = peak_learning_rate(m), m.log.lr_scale
    if m.log.guard_eps is not None and peak is not None:
        lr = with_lr(m, peak * scale) if scale != 1 else ()
        changes = (Change("optimizer.eps", m.log.guard_eps), *lr)
        causes.append(Cause("eps_of_guard", "eps", _FIRST, {"eps": m.log.guard_eps, "scale": scale}, changes))
    elif scale < 1 and m.log.n_rewinds and peak is not None:
        facts = {"n_rewinds": m.log.n_rewinds, "scale": scale}
        causes.append(Cause("lr_of_guard", "learning_rate", _FIRST, facts, with_lr(m, peak * scale)))
    elif m.log.settings and updates.direction == "too_large" and peak and peak * updates.damping > MAX_STEP:
        causes.append(replace(learning_rate_too_high(m, None, updates), score=_FIRST))
    epochs = m.epochs
    if epochs is not None and epochs >= _LONG_TRAINING_EPOCHS and not m.log.settings.get("augment.time_masks.n_masks"):
        masks = settings_to_changes(_TIME_MASKS)
        causes.append(Cause("masks_may_help", "masks", _FOURTH, {"epochs": epochs}, masks))
    return causes


_CAUSES: dict[str, Callable[[Finding, Measurements, Updates], list[Cause]]] = {
    "exploded": _exploded,
    "collapsed": _collapsed,
    "degraded": _degraded,
    "overfit": _overfit,
    "plateaued": _plateaued,
    "unfinished": _unfinished,
    "too_short": _too_short,
    "healthy": _healthy,
}
