"""Causes found in the recipe of an arcuate run: settings outside the range of runs that work, and changed settings.

A setting is suspected if it lies outside the range of published and packaged recipes. Its score is higher if it differs
from the packaged recipe that the run is derived from, and if it explains what the log shows.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from arcuate.config import to_yaml_line
from arcuate.doctor.measurements import Measurements
from arcuate.doctor.step_size import StepSize
from arcuate.progress import logger as _logger

CERTAIN = 1.6  # score of a cause that the log proves
STRONG = 0.6  # score above which a cause belongs to the remedy even if it is not the first
_RELEVANT = 0.25  # score below which a setting is not mentioned
_PROVISIONAL = 0.4  # the same with too few evaluations for a verdict
_OF_HEALTHY = 0.5  # the same for a run with nothing wrong in its curves
_EXPLAINS, _UNRELATED = 1.0, 0.4  # factor on the score if the setting does or does not explain the verdict
_AS_PACKAGED = 0.3  # factor on the score of a setting that has the value of the packaged recipe
_CHANGED, _PER_DECADE = 0.3, 0.3  # score of a changed setting, and of each factor of ten of the change
_MAX_DECADES = 2.0

UNSTABLE, STUCK, SLOW, OVERFIT = "unstable", "stuck", "slow", "overfit"


@dataclass(frozen=True)
class Cause:
    """A likely cause, the evidence for it, and the change that would test it."""

    cause: str
    because: str
    change: str  # in words, with settings as key=value
    factor: str = ""  # learning_rate, eps, clipping, …
    settings: Mapping[str, Any] = field(default_factory=dict)  # the settings of the change
    score: float = field(default=0.0, repr=False, compare=False)  # strength of the evidence in the recipe


def make_cause(
    factor: str, cause: str, because: str, settings: Mapping[str, Any], words: str = "", score: float = 0.0
) -> Cause:
    """A cause whose change is a set of settings; `words` are appended to their description."""
    assignments = " ".join(f"{key}={to_yaml_line(value)}" for key, value in settings.items())
    return Cause(cause, because, f"{assignments}{words}", factor, settings, score)


@dataclass(frozen=True)
class _Limits:
    """The range of a setting in recipes that work, a default, and the symptoms that a value outside explains."""

    factor: str
    low: float | None
    high: float | None
    default: float
    too_high: str = ""
    too_low: str = ""
    explains: tuple[str, ...] = (STUCK, SLOW)


# Ranges of the official, published and packaged recipes that reach their reported error rates.
_LIMITS: dict[str, _Limits] = {
    "optimizer.weight_decay.weights": _Limits(
        "weight_decay", None, 0.1, 0.001, "weight decay pulls all weights towards zero faster than they are learnt"
    ),
    "optimizer.weight_decay.session_layers": _Limits(
        "weight_decay", None, 0.1, 0.0, "weight decay pulls the session layers towards zero"
    ),
    "optimizer.weight_decay.biases": _Limits(
        "weight_decay", None, 0.1, 0.0, "weight decay pulls the biases towards zero"
    ),
    "encoder.dropout": _Limits("dropout", None, 0.5, 0.3, "dropout removes most of the signal between layers"),
    "encoder.input_dropout": _Limits("dropout", None, 0.5, 0.2, "dropout removes most of the input of the encoder"),
    "encoder.attention_dropout": _Limits("dropout", None, 0.5, 0.2, "dropout removes most of the attention weights"),
    "front_end.session_layer.dropout": _Limits("dropout", None, 0.5, 0.1, "dropout removes most of the input"),
    "augment.white_noise_sd": _Limits("noise", None, 1.2, 0.5, "the noise is larger than the signal, whose SD is 1"),
    "augment.offset_sd": _Limits("noise", None, 0.6, 0.2, "random offsets are as large as the signal"),
    "augment.random_walk_sd": _Limits("noise", None, 0.1, 0.0, "the random walk grows larger than the signal"),
    "augment.random_cut": _Limits("augmentation", None, 20, 3, "the start of the sentence is cut off"),
    "augment.speckle": _Limits("masks", None, 0.3, 0.0, "a large part of all values is set to zero"),
    "front_end.smoothing.sd": _Limits("smoothing", None, 4.0, 2.0, "smoothing blurs neighbouring phonemes"),
    "front_end.patch.stride": _Limits("frame_rate", None, 6, 4, "there are too few frames for the phonemes of a trial"),
    "data.batching.batch_size": _Limits(
        "batch_size", 4, None, 16, too_low="the gradient of a batch this small is mostly noise",
        explains=(UNSTABLE, STUCK, SLOW),
    ),
    "train.clip_norm": _Limits(
        "clipping", 0.1, 100.0, 1.0, "gradients are hardly ever clipped", "nearly every gradient is scaled down",
        (UNSTABLE, STUCK, SLOW),
    ),
    "loss.ctc.weight": _Limits("loss_weight", 0.1, 10.0, 1.0, "the loss is scaled up", "the loss is scaled down"),
}  # fmt: skip

# Settings whose difference from the packaged recipe can explain a failure, and the factor they belong to.
_FACTORS = {
    "optimizer.kind": "optimizer", "optimizer.eps": "eps", "optimizer.betas": "optimizer",
    "optimizer.momentum": "optimizer", "loss.ctc.reduction": "loss_reduction", "loss.ctc.zero_infinity": "precision",
    "train.precision.kind": "precision", "train.accumulate": "batch_size", "front_end.normalise": "normalisation",
    "front_end.log1p": "normalisation", "front_end.session_layer.enabled": "session_layers",
    "front_end.smoothing.taps": "smoothing", "front_end.patch.bins": "frame_rate", "ema.decay": "averaging",
    "data.batching.kind": "batch_size", "output_init": "initialisation",
    **{key: limits.factor for key, limits in _LIMITS.items()},
    **{f"augment.time_masks.{key}": "masks" for key in ("n_masks", "max_fraction", "max_bins", "probability")},
    **{f"augment.feature_masks.{key}": "masks" for key in ("n_masks", "max_channels", "probability")},
    "augment.gain_sd": "noise",
}  # fmt: skip
_SCHEDULE_LENGTHS = ("warmup_steps", "warmup_fraction", "pct_start", "decay_steps", "hold_steps", "cycle_steps")


def check_recipe(m: Measurements, symptoms: frozenset[str], step: StepSize, provisional: bool = False) -> list[Cause]:
    """Suspected settings, highest score first; one cause per factor.

    `provisional`: there are too few evaluations for a verdict, so weak suspicions are left out.
    """
    settings = m.log.settings
    if not settings:
        return []
    found = [
        *_out_of_range(m, symptoms),
        *_masks_and_gain(m, symptoms),
        *_schedule_shape(m, symptoms),
        *_categories(m, symptoms),
        *_changed(m, symptoms, step),
    ]
    limit = _OF_HEALTHY if not symptoms else _PROVISIONAL if provisional else _RELEVANT
    found = [cause for cause in found if cause.score >= limit]
    best: dict[str, Cause] = {}
    for cause in sorted(found, key=lambda c: -c.score):
        best.setdefault(cause.factor, cause)
    _logger.debug("suspected settings: %s", [(c.factor, round(c.score, 2)) for c in best.values()])
    return list(best.values())


def packaged_value(m: Measurements, key: str, default: Any) -> Any:
    """The value of the packaged recipe that the run is derived from, if it is usable; else the given one."""
    value = m.log.parent_settings.get(key, default)
    limits = _LIMITS.get(key)
    if limits is not None and isinstance(value, (int, float)) and _decades_outside(value, limits) > 0:
        return default
    return default if value is None else value


def _out_of_range(m: Measurements, symptoms: frozenset[str]) -> Iterator[Cause]:
    for key, limits in _LIMITS.items():
        value = m.log.settings.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if key == "data.batching.batch_size":
            value *= m.log.settings.get("train.accumulate", 1)
        outside = _decades_outside(value, limits)
        if outside <= 0:
            continue
        high = limits.high is not None and value > limits.high
        score = _score(m, key, outside + 0.2, bool(symptoms & set(limits.explains)))
        bound = f"at most {limits.high:g}" if high else f"at least {limits.low:g}"
        because = f"{key} is {value:g}; recipes that work have {bound}{_compared(m, key)}"
        default = packaged_value(m, key, limits.default)
        if key == "data.batching.batch_size" and m.log.settings.get(key) == default:
            continue
        yield make_cause(
            limits.factor, limits.too_high if high else limits.too_low, because, {key: default}, score=score
        )


def _decades_outside(value: float, limits: _Limits) -> float:
    """How far a value lies outside its range, in factors of ten; dropout as a fraction of the distance to 1."""
    if limits.high is not None and value > limits.high:
        if limits.factor == "dropout":
            return (value - limits.high) / (1 - limits.high)
        return min(_MAX_DECADES, math.log10(value / limits.high))
    if limits.low is not None and value < limits.low:
        return min(_MAX_DECADES, math.log10(limits.low / max(value, 1e-12)))
    return 0.0


def _score(m: Measurements, key: str, severity: float, explains: bool) -> float:
    """Severity, weighted by whether it explains the log and by the comparison with the packaged recipe."""
    score = severity * (_EXPLAINS if explains else _UNRELATED)
    if key in m.log.parent_settings:
        same = m.log.parent_settings[key] == m.log.settings.get(key)
        score = score * _AS_PACKAGED if same else score + _CHANGED
    return score


def _compared(m: Measurements, key: str) -> str:
    """A clause with the value of the packaged recipe, if it differs."""
    packaged = m.log.parent_settings.get(key)
    if not m.log.parent or key not in m.log.parent_settings or packaged == m.log.settings.get(key):
        return ""
    return f" ({to_yaml_line(packaged)} in {m.log.parent})"


_MAX_MASKED, _MAX_MASKED_CHANNELS = 0.55, 0.3  # fraction of a trial, or of its channels, hidden on average
_MAX_GAIN_NOISE = 1.0  # SD of the noise that a random mixing of channels adds


def _masks_and_gain(m: Measurements, symptoms: frozenset[str]) -> Iterator[Cause]:
    settings = m.log.settings
    explains = bool(symptoms & {STUCK, SLOW})
    masked = masked_fraction(settings)
    if masked > _MAX_MASKED:
        score = _score(m, "augment.time_masks.n_masks", 0.3 + 1.5 * (masked - _MAX_MASKED), explains)
        packaged = {k: v for k, v in m.log.parent_settings.items() if k.startswith("augment.time_masks.")}
        fits = packaged.get("augment.time_masks.n_masks") and masked_fraction(packaged) <= _MAX_MASKED
        change = packaged if fits else {"augment.time_masks.n_masks": 0}
        because = f"time masks hide {100 * masked:.0f} % of a trial on average; recipes that work hide at most half"
        yield make_cause("masks", "masks hide most of every trial", because, change, score=score)
    n_channels = m.log.n_channels or 256
    n_masks = settings.get("augment.feature_masks.n_masks") or 0
    width = min(settings.get("augment.feature_masks.max_channels") or 0, n_channels)
    probability = settings.get("augment.feature_masks.probability", 1.0)
    hidden = probability * (1 - math.exp(-(n_masks + 1) / 2 * width / 2 / n_channels)) if n_masks else 0.0
    if hidden > _MAX_MASKED_CHANNELS:
        score = _score(m, "augment.feature_masks.n_masks", 0.3 + hidden - _MAX_MASKED_CHANNELS, explains)
        because = f"channel masks hide {100 * hidden:.0f} % of the channels on average"
        change = {"augment.feature_masks.n_masks": 0}
        yield make_cause("masks", "masks hide most of every trial", because, change, score=score)
    noise = (settings.get("augment.gain_sd") or 0.0) * math.sqrt(n_channels)
    if noise > _MAX_GAIN_NOISE:
        score = _score(m, "augment.gain_sd", 0.3 + math.log10(noise / _MAX_GAIN_NOISE), explains)
        because = f"random mixing of {n_channels} channels adds noise with an SD of {noise:.2g}; the signal has 1"
        yield make_cause("noise", "the noise is larger than the signal", because, {"augment.gain_sd": 0.0}, score=score)


def masked_fraction(settings: Mapping[str, Any]) -> float:
    """Average fraction of a trial that time masks hide; masks may overlap."""
    n_masks = settings.get("augment.time_masks.n_masks") or 0
    if not n_masks:
        return 0.0
    mean_count = n_masks if settings.get("augment.time_masks.fixed_count") else (n_masks + 1) / 2
    width = settings.get("augment.time_masks.max_fraction")
    bins = settings.get("augment.time_masks.max_bins") or 0
    mean_width = (width if width is not None else min(1.0, bins / _TYPICAL_BINS)) / 2
    return float(settings.get("augment.time_masks.probability", 1.0) * (1 - math.exp(-mean_count * mean_width)))


_TYPICAL_BINS = 300  # median length of a trial: 6 s
_LONG_WARMUP, _EARLY_END = 0.3, 0.5  # fractions of the run


def _schedule_shape(m: Measurements, symptoms: frozenset[str]) -> Iterator[Cause]:
    """Warm-ups that take a large part of the run, and schedules that end long before it."""
    settings, packaged = m.log.settings, m.log.parent_settings
    steps = settings.get("train.steps") or 0
    kind = settings.get("schedule.kind")
    explains = bool(symptoms & {STUCK, SLOW})
    same_kind = packaged.get("schedule.kind") == kind
    length = settings.get("schedule.decay_steps") or settings.get("schedule.cycle_steps") or steps
    warmup = {
        "warmup_cosine": (settings.get("schedule.warmup_steps") or 0)
        or (settings.get("schedule.warmup_fraction") or 0.0) * length,
        "one_cycle": (settings.get("schedule.pct_start") or 0.0) * length,
    }.get(str(kind), 0)
    long = _LONG_WARMUP if kind == "warmup_cosine" else 0.6
    if steps and warmup > long * steps:
        change: dict[str, Any]
        if kind == "one_cycle":
            change = {"schedule.pct_start": 0.3}
        else:
            fraction = packaged.get("schedule.warmup_fraction") if same_kind else None
            fraction = fraction if fraction and fraction <= _LONG_WARMUP else 0.06
            change = {"schedule.warmup_steps": 0, "schedule.warmup_fraction": fraction}
        because = f"the learning rate rises for {100 * min(1.0, warmup / steps):.0f} % of the run"
        score = 0.4 + 0.5 * min(1.0, warmup / steps)
        yield make_cause("warmup", "the warm-up takes most of the run", because, change,
                         score=score if explains or symptoms else 0.6 * score)  # fmt: skip
    ends = settings.get("schedule.decay_steps") or settings.get("schedule.cycle_steps")
    if steps and ends and ends < _EARLY_END * steps:
        key = "schedule.decay_steps" if settings.get("schedule.decay_steps") else "schedule.cycle_steps"
        because = f"the schedule ends at step {ends:,} of {steps:,}"
        yield make_cause("schedule", "the learning rate decays long before the end of the run", because, {key: None},
                         score=0.4 + (0.3 if explains else 0.0))  # fmt: skip


_MIN_BETA2 = 0.9


def _categories(m: Measurements, symptoms: frozenset[str]) -> Iterator[Cause]:
    """Categorical settings with a value that rarely works."""
    settings = m.log.settings
    unstable, weak = UNSTABLE in symptoms, bool(symptoms & {STUCK, SLOW})
    if settings.get("front_end.normalise") == "none" and m.log.parent_settings.get("front_end.normalise") != "none":
        compared = _compared(m, "front_end.normalise")
        because = f"the features are used as recorded, with a different scale per channel and block{compared}"
        score = _score(m, "front_end.normalise", 0.35, weak or unstable)
        change = {"front_end.normalise": packaged_value(m, "front_end.normalise", "block")}
        yield make_cause("normalisation", "the features are not normalised", because, change, score=score)
    one_layer = settings.get("front_end.session_layer.enabled") is False and settings.get("encoder.kind") == "gru"
    if one_layer and (m.log.n_sessions or 0) > 1:
        because = f"one input layer is shared by {m.log.n_sessions} recording sessions whose channels differ"
        score = _score(m, "front_end.session_layer.enabled", 0.3, weak)
        change = {"front_end.session_layer.enabled": True}
        yield make_cause("session_layers", "there are no session layers", because, change, score=score)
    if settings.get("optimizer.kind") == "sgd":
        because = "plain gradient descent needs learning rates about a hundred times those of Adam, and a warm-up"
        score = _score(m, "optimizer.kind", 0.7, weak)
        keys = ("eps", "weight_decay.weights", "weight_decay.biases", "weight_decay.session_layers", "absent_sessions")
        source = settings if m.log.parent_settings.get("optimizer.kind", "sgd") == "sgd" else m.log.parent_settings
        kept = {f"optimizer.{key}": source.get(f"optimizer.{key}") for key in keys}
        change = {"optimizer": {"kind": packaged_value(m, "optimizer.kind", "adamw"), **_nested(kept)}}
        yield make_cause("optimizer", "the optimizer is SGD with a learning rate meant for Adam", because, change,
                         score=score)  # fmt: skip
    decay, steps = settings.get("ema.decay") or 0.0, settings.get("train.steps") or 0
    if steps and decay and 1 / (1 - decay) > 0.3 * steps:
        because = f"the average spans {1 / (1 - decay):,.0f} steps of a run of {steps:,}, so it contains early weights"
        change = {"ema.decay": packaged_value(m, "ema.decay", 0.0)}
        score = _score(m, "ema.decay", 0.4, weak)
        yield make_cause("averaging", "the averaged weights lag behind", because, change, score=score)
    if unstable and settings.get("train.precision.kind") in ("bf16", "fp16"):
        kind = settings["train.precision.kind"]
        because = f"{kind} rounds small updates away or overflows"
        change = {"train.precision.kind": "fp32"}
        yield make_cause("precision", "half precision is used", because, change,
                         score=_score(m, "train.precision.kind", 0.3, True))  # fmt: skip
    stages = settings.get("stages") or []
    partial = [stage for stage in stages if stage.get("train") and "encoder" not in stage["train"]]
    if partial and len(partial) == len(stages):
        because = f"no stage trains the encoder; {partial[0]['name']!r} trains {', '.join(partial[0]['train'])}"
        change = {"stages": [{**stage, "train": []} for stage in stages]}
        yield make_cause("frozen", "the encoder is not trained", because, change, score=1.0)
    betas = settings.get("optimizer.betas") or (0.9, 0.999)
    if betas[1] < _MIN_BETA2 and settings.get("optimizer.kind") != "sgd":
        because = (
            f"the second moment is averaged over {1 / (1 - betas[1]):.0f} steps; recipes that work have 50 or more"
        )
        change = {"optimizer.betas": packaged_value(m, "optimizer.betas", [0.9, 0.999])}
        cause = "beta2 is too small, so Adam's estimate of the gradient scale is noisy"
        score = _score(m, "optimizer.betas", 0.6, weak or unstable)
        yield make_cause("optimizer", cause, because, change, score=score)


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the optimizer as a tree."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        _, name, *rest = key.split(".")
        if value is not None:
            tree |= {name: {**tree.get(name, {}), rest[0]: value}} if rest else {name: value}
    return tree


def _changed(m: Measurements, symptoms: frozenset[str], step: StepSize) -> Iterator[Cause]:
    """Settings that differ from the packaged recipe, if something is wrong."""
    if not symptoms or not m.log.parent:
        return
    settings, packaged = m.log.settings, m.log.parent_settings
    for key, factor in _FACTORS.items():
        if key not in settings or key not in packaged or settings[key] == packaged[key]:
            continue
        new, old = settings[key], packaged[key]
        if factor == "eps" and step.direction == "too_small":
            continue  # explained by the size of the updates
        score = _CHANGED * 0.5 + _PER_DECADE * _change_size(new, old)
        if factor == "clipping" and UNSTABLE in symptoms and new is None:
            score += 0.3
        limits = _LIMITS.get(key)
        explains = not limits or bool(symptoms & set(limits.explains))
        because = f"{key} is {to_yaml_line(new)}, {to_yaml_line(old)} in {m.log.parent}"
        cause = f"{key} differs from the packaged recipe"
        yield make_cause(factor, cause, because, {key: old}, score=score if explains else 0.5 * score)
    kinds = settings.get("schedule.kind"), packaged.get("schedule.kind")
    if kinds[0] == kinds[1]:
        for key in _SCHEDULE_LENGTHS:
            name = f"schedule.{key}"
            new, old = settings.get(name), packaged.get(name)
            if new is not None and old is not None and new != old:
                because = f"{name} is {to_yaml_line(new)}, {to_yaml_line(old)} in {m.log.parent}"
                score = _CHANGED * 0.5 + _PER_DECADE * _change_size(new, old)
                factor = "warmup" if key.startswith(("warmup", "pct")) else "schedule"
                yield make_cause(factor, f"{name} differs from the packaged recipe", because, {name: old},
                                 score=score)  # fmt: skip


def _change_size(new: Any, old: Any) -> float:
    """A change in factors of ten; 1 for a change of kind."""
    numbers = [v for v in (new, old) if isinstance(v, (int, float)) and not isinstance(v, bool)]
    if len(numbers) < 2:
        return 1.0
    if min(numbers) <= 0:
        return min(1.0, abs(float(numbers[0] - numbers[1])))
    return min(_MAX_DECADES, abs(math.log10(numbers[0] / numbers[1])))
