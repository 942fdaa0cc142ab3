"""Causes as data: a kind with facts, and the changes that would test it.

The texts of a cause are a row of `SENTENCES`, so the advice in words, the command and the JSON object state the same
changes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from arcuate.config import to_yaml_line
from arcuate.files import to_json_value

CERTAIN = 1.6  # score of a cause that the log proves
STRONG = 0.6  # score above which a cause belongs to the remedy even if it is not the first


@dataclass(frozen=True)
class Change:
    """A setting to change: to a value, or by a factor if its value is unknown because the log has no recipe."""

    setting: str
    value: Any = None
    times: float | None = None

    @property
    def text(self) -> str:
        if self.times is None:
            return f"{self.setting}={to_yaml_line(self.value)}"
        name = _NAMES.get(self.setting, "")
        verb = "raise" if self.times > 1 else "lower"
        amount = f"{self.times:g} times" if self.times > 1 else f"{self.times:g} of"
        return f"{verb} {name + ' ' if name else ''}({self.setting}) to {amount} its value"

    def to_dict(self) -> dict[str, Any]:
        relative = {"times": self.times} if self.times is not None else {"value": to_json_value(self.value)}
        return {"setting": self.setting, **relative}


_NAMES = {
    "schedule.peak_lr": "the learning rate",
    "schedule.lr": "the learning rate",
    "encoder.dropout": "dropout",
    "encoder.width": "the width",
    "augment.white_noise_sd": "white noise",
    "train.steps": "the number of steps",
    "train.clip_norm": "the clipping norm",
}


def settings_to_changes(settings: Mapping[str, Any]) -> tuple[Change, ...]:
    return tuple(Change(key, value) for key, value in settings.items())


class Sentence(NamedTuple):
    """The cause, its evidence and what to do, as templates of the facts; what to do follows the changes."""

    cause: str
    because: str
    remedy: str = ""


@dataclass(frozen=True)
class Cause:
    """A likely cause, the evidence for it, and the changes that would test it."""

    kind: str  # row of SENTENCES
    factor: str  # learning_rate, eps, clipping, …
    score: float = field(default=0.0, compare=False)  # strength of the evidence
    facts: Mapping[str, Any] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()

    @property
    def cause(self) -> str:
        return SENTENCES[self.kind].cause.format_map(self.facts)

    @property
    def because(self) -> str:
        return SENTENCES[self.kind].because.format_map(self.facts)

    @property
    def change(self) -> str:
        """What to do in words: the changes, with settings as key=value, and the rest of the advice."""
        return describe_changes(self.changes) + SENTENCES[self.kind].remedy.format_map(self.facts)

    @property
    def settings(self) -> dict[str, Any]:
        """The changes to a value."""
        return {change.setting: change.value for change in self.changes if change.times is None}

    def to_dict(self) -> dict[str, Any]:
        texts = {"cause": self.cause, "because": self.because, "change": self.change, "factor": self.factor}
        return {**texts, "settings": to_json_value(self.settings), "changes": [c.to_dict() for c in self.changes]}


def describe_changes(changes: Iterable[Change]) -> str:
    changes = list(changes)
    absolute = " ".join(change.text for change in changes if change.times is None)
    relative = " and ".join(change.text for change in changes if change.times is not None)
    return ", and ".join(filter(None, (absolute, relative)))


def leading_causes(causes: Sequence[Cause]) -> tuple[Cause, ...]:
    """The causes that the log cannot tell apart from the first one, if only a test can."""
    untold = [c for c in causes if c.factor in UNSEPARATED or c.kind == "lr_unknown"]
    return tuple(untold) if untold and untold[0] is causes[0] else ()


# Causes that leave the same trace in a log; each has the cheapest test that tells it from the others.
UNSEPARATED = frozenset({"labels", "validation_data", "decoding", "input"})

_HIGH_LR = "the learning rate is too high for this eps and reduction"
_LENGTHS = "wrong labels, or wrong lengths of trials or labels"
SENTENCES: Mapping[str, Sentence] = {
    # Size of the updates.
    "lr_too_high": Sentence(_HIGH_LR, "{reason}{packaged}", "{rest}"),
    "lr_too_high_and_clip": Sentence(
        _HIGH_LR, "{reason}{packaged}", "{rest}, and clip gradients to about {norm:g}, or keep a lower limit"
    ),
    "lr_too_low": Sentence("the learning rate is too low: the weights barely change", "{reason}", "{rest}"),
    "lr_too_low_for_eps": Sentence(
        "the learning rate is too low for this eps, so the updates are too small", "{reason}"
    ),
    "lr_too_low_or_decayed": Sentence(
        "the learning rate is too low for eps, or decayed too early", "{reason}", "{longer}"
    ),
    "lr_unknown": Sentence(
        "the learning rate does not match eps and the loss reduction",
        "{reason}",
        "train a few hundred steps at three times and at a third of the learning rate, and follow the better one",
    ),
    "lr_of_guard": Sentence(
        "the learning rate was too high until the guard reduced it",
        "the guard rewound {n_rewinds} times and reduced it by a factor of {scale:.2g}",
    ),
    "eps_of_guard": Sentence(
        "eps was too large for the gradients until the guard lowered it",
        "the guard rewound the run, lowered eps to {eps:.2g} and multiplied the learning rate by {scale:.2g}",
    ),
    "eps_too_large": Sentence(
        "eps is too large for the gradients, so the updates are too small",
        "{reason}",
        ", or at this eps {alternative}: the updates have to become larger, not smaller",
    ),
    "clipped_too_hard": Sentence("gradients are clipped to almost nothing, so the updates are too small", "{reason}"),
    "not_clipped": Sentence(
        "gradients {were} not clipped", "a single bad batch can undo thousands of updates", "{rest}"
    ),
    "off_schedule": Sentence(
        "the learning rate did not follow its schedule",
        "from step {step:,} it was {ratio:.3g} times that of the recipe, up to {highest:.3g}",
        "find the code that changes the learning rate; the recipe itself needs no change",
    ),
    # Precision and batches.
    "overflow": Sentence(
        "half precision overflowed, or a trial could not be aligned",
        "the loss becomes infinite without rising first",
    ),
    "bad_trial": Sentence(
        "a training trial or batch with non-finite values, or a label longer than its frames",
        "{what} stopped being finite without rising first",
        "check the training trials for NaN and for labels longer than their frames, and train in fp32",
    ),
    "damaged_batches": Sentence(
        "damaged batches",
        "training loss rose from {before:.3g} to {peak:.3g} at steps {first:,} to {last:,} and fell again, at a normal"
        " learning rate",
        "inspect the trials of these steps, which incidents.jsonl lists, and correct or exclude them",
    ),
    "damaged_batch": Sentence(
        "a damaged batch",
        "the gradient norm reached {ratio:.0f} times its usual maximum once, before step {step:,}, and was normal"
        " otherwise",
        "inspect the trials of these steps, which incidents.jsonl lists, and correct or exclude them",
    ),
    "repeated_data": Sentence(
        "the same few trials are used repeatedly",
        "training loss is {train:.2g} and validation loss {val:.2g} after {epochs:.1f} passes through the data, too few"
        " to memorise them",
        "check the order of the batches: every trial should occur once per pass",
    ),
    # Labels, data and decoding, which a log can only suggest.
    "data": Sentence("a fault in the data: {fault}", "{sentence}", "{remedy}"),
    "decoding": Sentence(
        "training and decoding disagree on the blank index, the order of the classes or the labels",
        "the validation loss of {loss:.3g} allows at most {allowed} errors ({n_nats} per token), and {name} is {rate}",
        "decode one training trial by hand with the blank index and the class names that the loss used",
    ),
    "labels_unrelated": Sentence(
        f"labels and recordings do not belong together: {_LENGTHS}",
        "{reason}",
        "train on eight trials without dropout and noise: if their loss does not approach 0, compare their labels,"
        " lengths and sentences",
    ),
    "lengths": Sentence(
        f"lengths or labels differ between training and validation: {_LENGTHS}",
        "validation loss is {gap:.2g} times the training loss and never fell below that of an output without"
        " information, although the training sentences are not memorised",
        "evaluate on training trials with the validation code: the loss has to match that of training",
    ),
    "validation_data": Sentence(
        "training and validation data are treated differently: wrong day layer, normalisation, labels or lengths",
        "{reason}",
        "evaluate on training trials with the validation code: if their error rate is low, compare day index,"
        " normalisation, lengths and labels of both splits",
    ),
    "input_scale": Sentence(
        "the features are not normalised, so that a few channels or the noise dominate",
        "{reason}",
        "print mean and SD of the features per channel and session, as the model receives them: they should be near 0"
        " and 1",
    ),
    "input_information": Sentence(
        "the input carries too little information: missing normalisation, or noise or masks that hide the signal",
        "both also cause blank collapse and a plateau at a high error rate",
        "train a few hundred steps without noise and masks, and print mean and SD of the features",
    ),
    "noise_hides_signal": Sentence(
        "the input carries too little information",
        "noise or masks that hide the signal, or features without normalisation, also cause blank collapse",
    ),
    # Regularisation, capacity and length.
    "too_little_regularisation": Sentence("too little regularisation for the length of the run", "{reason}", "{rest}"),
    "too_much_regularisation": Sentence("too much regularisation", "{reason}", "{rest}"),
    "memorised": Sentence(
        "the model memorises the training sentences",
        "{reason}",
        "{rest}",
    ),
    "masks_may_help": Sentence(
        "time masks may improve the result",
        "the run has {epochs:,.0f} epochs; published results show 18 % fewer word errors from heavy masking after 250"
        " epochs",
    ),
    "too_small_model": Sentence(
        "the model is too small or lacks session layers",
        "other runs reach lower error rates on these data",
    ),
    "run_too_long": Sentence(
        "the run is longer than the data support", "its best was at step {step:,}", ", with a schedule decayed by then"
    ),
    "run_stopped": Sentence(
        "the run was stopped while it was improving", "its best evaluation is the last one", "{rest}"
    ),
    "run_ended": Sentence("the run ended while it was improving", "its best evaluation is the last one", "{rest}"),
    "run_too_short": Sentence(
        "the run is too short: it ended, or its learning rate decayed too early, before the error rate had come down",
        "it left the level of a blank output only at step {step:,} of {last:,}{more}",
        "{rest}",
    ),
    "few_evaluations": Sentence("too few evaluations for a verdict", "{n} in the log", ", or train longer"),
    # Settings outside the range of recipes that work: `recipe_checks`.
    "too_high": Sentence("{problem}", "{setting} is {shown}; recipes that work have at most {bound:g}{packaged}"),
    "too_low": Sentence("{problem}", "{setting} is {shown}; recipes that work have at least {bound:g}{packaged}"),
    "wrong_setting": Sentence("{problem}", "{reason}{packaged}"),
}
