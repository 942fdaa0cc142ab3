"""Causes found in the recipe of an arcuate run: settings outside the range of runs that work.

A setting is suspected if it lies outside the range of published and packaged recipes. Its score is higher if it differs
from the packaged recipe that the run is derived from, and if it explains what the log shows.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from arcuate.config import to_yaml_line
from arcuate.doctor.causes import Cause, settings_to_changes
from arcuate.doctor.measurements import Measurements
from arcuate.progress import logger as _logger
from arcuate.progress import percent

_RELEVANT = 0.25  # score below which a setting is not mentioned
_PROVISIONAL = 0.4  # the same with too few evaluations for a verdict
_OF_HEALTHY = 0.5  # the same for a run with nothing wrong in its curves
_UNRELATED = 0.4  # factor on the score of a setting that does not explain the verdict
_AS_PACKAGED = 0.3  # factor on the score of a setting that has the value of the packaged recipe
_CHANGED = 0.3  # score added for a setting that differs from the packaged recipe
_MAX_DECADES = 2.0
_TYPICAL_BINS = 300  # median length of a trial: 6 s

UNSTABLE, STUCK, SLOW, OVERFIT = "unstable", "stuck", "slow", "overfit"
Settings = Mapping[str, Any]


class Check(NamedTuple):
    """One quantity of a recipe and its range in official, published and packaged recipes that reach their results."""

    setting: str
    factor: str
    problem: str
    low: float | None = None
    high: float | None = None
    wrong: frozenset[str] = frozenset()  # values that rarely work
    default: Any = None  # used if the packaged recipe has no usable value
    symptoms: frozenset[str] = frozenset({STUCK, SLOW})
    base: float = 0.2  # score of a value just outside the range
    quantity: Callable[[Settings], float | str | None] | None = None  # by default the value of the setting
    reason: str = ""  # the evidence if it is not the value of the setting: {value}, {percent} or other settings
    changes: Callable[[Settings, Settings], Settings] | None = None  # by default the packaged value or `default`


def masked_fraction(settings: Settings) -> float:
    """Average fraction of a trial that time masks hide; masks may overlap."""
    n_masks = settings.get("augment.time_masks.n_masks") or 0
    if not n_masks:
        return 0.0
    mean_count = n_masks if settings.get("augment.time_masks.fixed_count") else (n_masks + 1) / 2
    width = settings.get("augment.time_masks.max_fraction")
    bins = settings.get("augment.time_masks.max_bins") or 0
    mean_width = (width if width is not None else min(1.0, bins / _TYPICAL_BINS)) / 2
    return float(settings.get("augment.time_masks.probability", 1.0) * (1 - math.exp(-mean_count * mean_width)))


def _masked_channels(settings: Settings) -> float:
    n_masks, n_channels = settings.get("augment.feature_masks.n_masks") or 0, settings["n_channels"]
    if not n_masks:
        return 0.0
    width = min(settings.get("augment.feature_masks.max_channels") or 0, n_channels)
    hidden = 1 - math.exp(-(n_masks + 1) / 2 * width / 2 / n_channels)
    return float(settings.get("augment.feature_masks.probability", 1.0) * hidden)


def _warmup_share(settings: Settings) -> float | None:
    """Fraction of the run in which the learning rate rises; half of it for the one-cycle schedule."""
    steps, kind = settings.get("train.steps") or 0, settings.get("schedule.kind")
    if not steps:
        return None
    length = settings.get("schedule.decay_steps") or settings.get("schedule.cycle_steps") or steps
    if kind == "one_cycle":
        return float(min(1.0, (settings.get("schedule.pct_start") or 0.0) * length / steps) / 2)
    if kind != "warmup_cosine":
        return None
    warmup = settings.get("schedule.warmup_steps") or (settings.get("schedule.warmup_fraction") or 0.0) * length
    return float(min(1.0, warmup / steps))


def _shorter_warmup(settings: Settings, packaged: Settings) -> Settings:
    if settings.get("schedule.kind") == "one_cycle":
        return {"schedule.pct_start": 0.3}
    same_kind = packaged.get("schedule.kind") == settings.get("schedule.kind")
    fraction = packaged.get("schedule.warmup_fraction") if same_kind else None
    usable = fraction and fraction <= 0.3
    return {"schedule.warmup_steps": 0, "schedule.warmup_fraction": fraction if usable else 0.06}


def _schedule_end(settings: Settings) -> float | None:
    """Where the schedule ends, as a fraction of the run."""
    steps = settings.get("train.steps")
    end = settings.get("schedule.decay_steps") or settings.get("schedule.cycle_steps")
    return end / steps if steps and end else None


def _whole_schedule(settings: Settings, packaged: Settings) -> Settings:
    return {f"schedule.{'decay' if settings.get('schedule.decay_steps') else 'cycle'}_steps": None}


def _packaged_masks(settings: Settings, packaged: Settings) -> Settings:
    masks = {k: v for k, v in packaged.items() if k.startswith("augment.time_masks.")}
    fits = masks.get("augment.time_masks.n_masks") and masked_fraction(masks) <= 0.55
    return masks if fits else {"augment.time_masks.n_masks": 0}


def _batch_size(settings: Settings) -> float | None:
    size = settings.get("data.batching.batch_size")
    return size * settings.get("train.accumulate", 1) if isinstance(size, int) else None


def _normalisation(settings: Settings) -> str | None:
    return None if settings.get("packaged.normalise") == "none" else settings.get("front_end.normalise")


def _session_layers(settings: Settings) -> str | None:
    shared = settings.get("front_end.session_layer.enabled") is False and settings.get("encoder.kind") == "gru"
    return "shared" if shared and settings["n_sessions"] > 1 else None


def _frozen_encoder(settings: Settings) -> str | None:
    stages = settings.get("stages") or []
    frozen = [stage for stage in stages if stage.get("train") and "encoder" not in stage["train"]]
    return "frozen" if frozen and len(frozen) == len(stages) else None


def _beta2(settings: Settings) -> float | None:
    return None if settings.get("optimizer.kind") == "sgd" else (settings.get("optimizer.betas") or (0.9, 0.999))[1]


def _ema_span(settings: Settings) -> float | None:
    """Steps in the average of the weights, as a fraction of the run."""
    decay, steps = settings.get("ema.decay") or 0.0, settings.get("train.steps") or 0
    return 1 / (1 - decay) / steps if steps and decay else None


def _adam(settings: Settings, packaged: Settings) -> Settings:
    """AdamW with the values of the packaged recipe, or of this one if that uses SGD as well."""
    keys = ("eps", "weight_decay.weights", "weight_decay.biases", "weight_decay.session_layers", "absent_sessions")
    source = settings if packaged.get("optimizer.kind", "sgd") == "sgd" else packaged
    tree: dict[str, Any] = {"kind": "adamw"}
    for key in keys:
        name, _, part = key.partition(".")
        if (value := source.get(f"optimizer.{key}")) is not None:
            tree |= {name: {**tree.get(name, {}), part: value} if part else value}
    return {"optimizer": tree}


def _trained_stages(settings: Settings, packaged: Settings) -> Settings:
    return {"stages": [{**stage, "train": []} for stage in settings["stages"]]}


_ANY = frozenset({UNSTABLE, STUCK, SLOW})
_DECAY = "weight decay pulls {} towards zero faster than they are learnt"
_HIDDEN = "masks hide most of every trial"
CHECKS = (
    Check("optimizer.weight_decay.weights", "weight_decay", _DECAY.format("all weights"), high=0.1, default=0.001),
    Check("optimizer.weight_decay.session_layers", "weight_decay", _DECAY.format("session layers"), high=0.1,
          default=0.0),
    Check("optimizer.weight_decay.biases", "weight_decay", _DECAY.format("biases"), high=0.1, default=0.0),
    Check("encoder.dropout", "dropout", "dropout removes most of the signal between layers", high=0.5, default=0.3),
    Check("encoder.input_dropout", "dropout", "dropout removes most of the input of the encoder", high=0.5,
          default=0.2),
    Check("encoder.attention_dropout", "dropout", "dropout removes most of the attention weights", high=0.5,
          default=0.2),
    Check("front_end.session_layer.dropout", "dropout", "dropout removes most of the input", high=0.5, default=0.1),
    Check("augment.white_noise_sd", "noise", "the noise is larger than the signal, whose SD is 1", high=1.2,
          default=0.5),
    Check("augment.offset_sd", "noise", "random offsets are as large as the signal", high=0.6, default=0.2),
    Check("augment.random_cut", "augmentation", "the start of the sentence is cut off", high=20, default=3),
    Check("augment.time_masks.n_masks", "masks", _HIDDEN, high=0.55, quantity=masked_fraction, base=0.3,
          reason="time masks hide {percent} of a trial on average; recipes that work hide at most half",
          changes=_packaged_masks),
    Check("augment.feature_masks.n_masks", "masks", _HIDDEN, high=0.3, default=0, quantity=_masked_channels, base=0.3,
          reason="channel masks hide {percent} of the channels on average"),
    Check("front_end.smoothing.sd", "smoothing", "smoothing blurs neighbouring phonemes", high=4.0, default=2.0),
    Check("front_end.patch.stride", "frame_rate", "there are too few frames for the phonemes of a trial", high=6,
          default=4),
    Check("data.batching.batch_size", "batch_size", "the gradient of a batch this small is mostly noise", low=4,
          default=16, symptoms=_ANY, quantity=_batch_size),
    Check("train.clip_norm", "clipping", "gradients are hardly ever clipped", high=100.0, default=1.0, symptoms=_ANY),
    Check("train.clip_norm", "clipping", "nearly every gradient is scaled down", low=0.1, default=1.0, symptoms=_ANY),
    Check("loss.ctc.weight", "loss_weight", "the loss is scaled up", high=10.0, default=1.0),
    Check("loss.ctc.weight", "loss_weight", "the loss is scaled down", low=0.1, default=1.0),
    Check("schedule.warmup_fraction", "warmup", "the warm-up takes most of the run", high=0.3, quantity=_warmup_share,
          base=0.4, symptoms=_ANY, reason="the learning rate rises during most of the run", changes=_shorter_warmup),
    Check("schedule.decay_steps", "schedule", "the learning rate decays long before the end of the run", low=0.5,
          quantity=_schedule_end, base=0.5, reason="the schedule ends after {percent} of the run",
          changes=_whole_schedule),
    Check("optimizer.betas", "optimizer", "beta2 is too small, so Adam's estimate of the gradient scale is noisy",
          low=0.9, default=[0.9, 0.999], symptoms=_ANY, quantity=_beta2, base=0.5,
          reason="beta2 is {value:g}: the second moment is averaged over few steps; recipes that work have 0.98"),
    Check("front_end.normalise", "normalisation", "the features are not normalised", wrong=frozenset({"none"}),
          default="block", symptoms=_ANY, base=0.35, quantity=_normalisation,
          reason="the features are used as recorded, with a different scale per channel and block"),
    Check("front_end.session_layer.enabled", "session_layers", "there are no session layers",
          wrong=frozenset({"shared"}), default=True, base=0.3, quantity=_session_layers,
          reason="one input layer is shared by {n_sessions} recording sessions whose channels differ"),
    Check("optimizer.kind", "optimizer", "plain gradient descent instead of Adam", wrong=frozenset({"sgd"}), base=0.7,
          changes=_adam,
          reason="plain gradient descent needs learning rates about a hundred times those of Adam, and a warm-up"),
    Check("train.precision.kind", "precision", "half precision is used", wrong=frozenset({"bf16", "fp16"}),
          default="fp32", symptoms=frozenset({UNSTABLE}), base=0.3,
          reason="half precision keeps two to three digits of each value"),
    Check("ema.decay", "averaging", "the averaged weights lag behind", high=0.3, default=0.0, quantity=_ema_span,
          base=0.4, reason="the average spans {percent} of the run, so it contains early weights"),
    Check("stages", "frozen", "the encoder is not trained", wrong=frozenset({"frozen"}), base=1.0,
          quantity=_frozen_encoder, reason="no stage trains the encoder", changes=_trained_stages),
)  # fmt: skip


def check_recipe(m: Measurements, symptoms: frozenset[str], provisional: bool = False) -> list[Cause]:
    """Suspected settings, highest score first; one cause per factor.

    `provisional`: there are too few evaluations for a verdict, so weak suspicions are left out.
    """
    if not m.log.settings:
        return []
    settings = {
        **m.log.settings,
        "n_channels": m.log.n_channels or 256,
        "n_sessions": m.log.n_sessions or 0,
        "packaged.normalise": m.log.parent_settings.get("front_end.normalise"),
    }
    found = [cause for check in CHECKS if (cause := _judge(check, settings, m, symptoms)) is not None]
    limit = _OF_HEALTHY if not symptoms else _PROVISIONAL if provisional else _RELEVANT
    best: dict[str, Cause] = {}
    for cause in sorted(found, key=lambda c: -c.score):
        if cause.score >= limit:
            best.setdefault(cause.factor, cause)
    _logger.debug("suspected settings: %s", [(c.factor, round(c.score, 2)) for c in best.values()])
    return list(best.values())


def _judge(check: Check, settings: Settings, m: Measurements, symptoms: frozenset[str]) -> Cause | None:
    value = check.quantity(settings) if check.quantity else settings.get(check.setting)
    outside = _distance_outside(value, check)
    if outside is None:
        return None
    packaged = m.log.parent_settings
    change = check.changes(settings, packaged) if check.changes else {check.setting: _usable_value(check, packaged)}
    if all(settings.get(key, _MISSING) == v for key, v in change.items()):
        return None
    score = (check.base + outside) * (1.0 if symptoms & check.symptoms else _UNRELATED)
    same = packaged.get(check.setting, _MISSING) == m.log.settings.get(check.setting)
    if check.setting in packaged:
        score = score * _AS_PACKAGED if same else score + _CHANGED
    changed = check.setting in packaged and not same and not check.changes
    compared = f" ({to_yaml_line(packaged[check.setting])} in {m.log.parent})" if changed else ""
    facts: dict[str, Any] = {"setting": check.setting, "problem": check.problem, "packaged": compared}
    kind = "wrong_setting" if check.reason else "too_high" if check.high is not None else "too_low"
    if check.reason:
        number = value if isinstance(value, float) else 0.0
        facts["reason"] = check.reason.format_map({**settings, "value": value, "percent": percent(number)})
    else:
        facts |= {"shown": to_yaml_line(value), "bound": check.high if check.high is not None else check.low}
    return Cause(kind, check.factor, score, facts, settings_to_changes(change))


_MISSING = object()


def _usable_value(check: Check, packaged: Settings) -> Any:
    """The value of the packaged recipe that the run is derived from, if it is in the range; else the default."""
    value = packaged.get(check.setting)
    if value is None or (check.quantity is None and _distance_outside(value, check) is not None):
        return check.default
    return value


def _distance_outside(value: Any, check: Check) -> float | None:
    """How far a value lies outside its range: in factors of ten, or for a share of the distance to 1; None inside."""
    if isinstance(value, str):
        return 0.0 if value in check.wrong else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if check.high is not None and value > check.high:
        if check.high < 1 and (check.quantity or check.factor == "dropout") and value <= 1:
            return float((value - check.high) / (1 - check.high))
        return min(_MAX_DECADES, math.log10(value / check.high))
    if check.low is not None and value < check.low:
        return min(_MAX_DECADES, math.log10(check.low / max(value, 1e-12)))
    return None
