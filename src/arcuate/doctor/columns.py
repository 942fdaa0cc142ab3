"""What a log calls its numbers: the quantity of a column by its name, and facts stated beside the numbers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

METRICS = frozenset({"per", "wer", "loss", "grad", "lr"})
TRAIN = frozenset("train training tr".split())
HELD_OUT = frozenset("val valid validation eval evaluation evaluate test dev heldout held vloss".split())
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

_COUNTER = "steps?|batch(?:es)?|iterations?|iters?|it|updates?"
_OF_COUNTER = "global|trainer|train|training|num|n|idx|index|number|current|total|optimizer"
# Words that mark a derived number, not the value of one evaluation.
_DERIVED = (
    "ma|ema|moving|smooth|smoothed|best|min|max|std|sd|sample|target|delta|improvement|patience|threshold|count|weight"
    "|scale|prev|previous|lowest|bias|day|session|sessions|low|high|ci|var|variance|timestamp|scaler"
)
_RESOURCE = "time|secs?|seconds?|s|ms|hour|memory|mem|gb|mb"
_SPLIT = "train|training|tr|val|valid|validation|eval|evaluation|evaluate|test|dev|heldout|held"

# The quantity of a name, by its words in lower case: the first pattern that is found decides, "" if it is irrelevant.
QUANTITIES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (quantity, re.compile(pattern))
    for quantity, pattern in (
        ("epoch", r"^(?=.*\bepoch\b)(?:(?:epoch|current|num|idx|trainer)(?: |$))+$"),
        ("step", rf"^(?=.*\b(?:{_COUNTER})\b)(?:(?:{_COUNTER}|{_OF_COUNTER})(?: |$))+$"),
        ("group", r"^(?:seed|run|run id|run name|runid|experiment|fold|trial id|run uuid|exp)$"),
        ("split", r"^(?:split|phase|mode|set|stage|subset|partition|kind|type|event)$"),
        ("tag", r"^(?:tag|metric|metric name|key|name|variable)$"),
        ("value", r"^value$"),
        ("skipped", r"\bskipped\b"),
        ("grad", r"\b(?:gradnorm|gnorm)\b|(?=.*\bgrad(?:ients?)?\b).*\bnorms?\b|^(?:total norm|norm total)$"),
        ("", r"\bgrad(?:ients?)?\b"),
        ("", r"(?=.*\b(?:lr|learning rate)\b).*\b(?:bias|day|session|min|max|start|end)\b"),
        ("lr", r"\b(?:lr|learning rate)\b"),
        ("", rf"\b(?:{_DERIVED})\b"),
        ("loss", rf"\b(?:loss|losses|nll|vloss)\b|^(?=.*\bctc\b)(?:(?:{_SPLIT}|ctc)(?: |$))+$"),
        ("per", r"(?=.*\berror\b)(?=.*\brate\b).*\b(?:phonemes?|phones?|character|char|token|label|unit)\b"),
        # "for each", as in time per batch or samples per second
        ("", rf"\bper\b.*\b(?:{_RESOURCE}|{_COUNTER}|epoch|sample|token|word|gpu|device|trial|sentence)\b"),
        ("", rf"\b(?:{_RESOURCE}|samples|steps|tokens|batches|examples|trials)\b.*\bper\b"),
        ("per", r"\b(?:per|cer|ter|ler|uer)\b"),
        ("wer", r"\bwer\b"),
    )
)
# Names that are further from the plainest name of a quantity, by how much.
_FURTHER = tuple(
    (quantity, re.compile(pattern), distance)
    for quantity, pattern, distance in (
        ("step", r"\bbatch\b", 2),
        ("step", r"\bglobal\b", -3),
        ("grad", r"\b(?:max|clipped)\b", 5),
        ("loss", rf"\b(?!(?:loss|losses|nll|vloss|ctc|avg|mean|total|{_SPLIT})\b)\w", 3),
        ("per", r"\b(?:cer|ter|ler|uer)\b", 6),
        ("per", r"\bbeam\b", 4),
        ("wer", r"\bbeam\b", 4),
    )
)


class Meaning(NamedTuple):
    """The quantity of a column, its split, and the distance of its name from the plainest name of that quantity."""

    quantity: str  # one of QUANTITIES
    split: str = ""  # train, val, or "" if the name does not show it
    rank: int = 0
    percent: bool = False  # the name states that values are per cent


@lru_cache(maxsize=4096)
def parse_name(name: str) -> Meaning:
    words = split_words(name.replace("%", " percent "))
    if not words or len(words) > 12:
        return Meaning("")
    text = " ".join(words)
    quantity = next((q for q, pattern in QUANTITIES if pattern.search(text)), "")
    rank = len(words) + sum(d for q, pattern, d in _FURTHER if q == quantity and pattern.search(text))
    rank += 10 * (quantity == "step" and name.startswith("_"))
    percent = not {"percent", "pct", "percentage"}.isdisjoint(words)
    return Meaning(quantity, split_of(name) if quantity in METRICS else "", rank, percent)


def split_words(text: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in _WORDS.findall(text))


@lru_cache(maxsize=4096)
def split_of(text: str) -> str:
    """The split that a name or label states: train, val, or ""."""
    words = set(split_words(text))
    return "train" if words & TRAIN else "val" if words & HELD_OUT else ""


# Numbers.

_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_MISSING = frozenset({"", "none", "null", "-", "n/a", "na", "--", "missing"})


def parse_number(value: Any) -> float | None:
    """A number, or a string such as `0.31`, `31 %`, `NaN` or `-Infinity`; None for anything else."""
    if isinstance(value, str):
        value = value.strip()
        if value.lower() in _MISSING or len(value) > 60:
            return None
        if value.endswith("%"):
            inner = parse_number(value[:-1])
            return None if inner is None else inner / 100
        if _THOUSANDS.fullmatch(value):
            value = value.replace(",", "")
    elif isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


# Facts beside the numbers: data set, planned length, end of training, names of runs.

_B2T25 = re.compile(r"t15[._]?20\d\d|t15[._ ]copytask|hdf5_data_final|b2t[_-]?25|brain-to-text-25|\bt15\b", re.I)
_B2T24 = re.compile(r"t12[._]20\d\d|ptdecoder_ctc|competitiondata|b2t[_-]?24|brain-to-text-24|\bt12\b|willett", re.I)
_SESSION = re.compile(r"\bt1[25]\.20\d\d\.\d\d\.\d\d")
_PLANNED = re.compile(
    r"(?:total[ _](?:batches|steps|iterations)|num[ _]training[ _](?:batches|steps)|n_?batch(?:es)?|max[ _]steps"
    r"|num[ _]train[ _]steps|training[ _]steps|planned[ _]steps)\W{1,4}(\d[\d,_]{1,11})\b",
    re.I,
)
_FINISHED = re.compile(
    r"training (?:is )?(?:complete|finished|done)|finished training|best avg val per achieved|total training time"
    r"|training completed|={3,} *(?:fin|end|done) *={3,}",
    re.I,
)
_RUN_NAME = re.compile(r"={2,} *(?:RUN|EXPERIMENT) +([^=\s][^=]{0,80}?) *={2,}", re.I)
_CRASHED = re.compile(r"\b(?:total norm|gradients?|loss|parameters?)\b.{0,200}\bnon-?finite|\bnan loss\b", re.I)
_KEYWORDS = re.compile(r"train|best avg|=== *|finished|total|max.steps|num.train|n_?batch|finite|nan loss", re.I)
_PLANNED_KEYS = frozenset(
    "nbatch nbatches n_batches num_training_batches max_steps total_batches total_steps num_train_steps"
    " planned_steps steps max_iters n_steps".split()
)
_MAX_TEXT = 10_000
_MAX_DEPTH = 3  # levels of mappings within a row or a configuration


@dataclass
class Facts:
    """Facts found so far, with their evidence."""

    dataset: tuple[str, str] | None = None  # name, evidence
    planned: tuple[int, str] | None = None  # steps, evidence
    sessions: set[str] = field(default_factory=set)  # sessions of a published release that the file names
    n_finished: int = 0  # messages that training is complete
    crashed_non_finite: bool = False  # an error message says that a gradient or loss was not finite
    has_epochs: bool = False  # lines count epochs, so that the counter of batches may start again
    run_names: list[str] = field(default_factory=list)

    def scan_line(self, line: str, thorough: bool) -> None:
        """Extract facts from a line of text."""
        if not _KEYWORDS.search(line) and not thorough:
            return
        self.n_finished += _FINISHED.search(line) is not None
        self.crashed_non_finite = self.crashed_non_finite or _CRASHED.search(line) is not None
        if named := _RUN_NAME.search(line):
            self.run_names.append(named[1].strip())
        if planned := _PLANNED.search(line):
            self.set_planned(planned[1].replace(",", "").replace("_", ""), "stated in the log")
        if thorough:
            self.scan_text(line, "file names in the log")

    def scan_text(self, text: str, because: str) -> None:
        newer, older = _B2T25.search(text), _B2T24.search(text)
        match = newer or older
        if match and not (newer and older) and self.dataset is None:
            self.dataset = "b2t25" if newer else "b2t24", f"{because} ({match[0]})"

    def scan_sessions(self, text: str) -> None:
        self.sessions.update(_SESSION.findall(text))

    def scan_config(self, config: Mapping[str, Any], because: str) -> None:
        """Extract planned length and data set from a configuration stored with a log."""
        flat = flatten(config)
        for name, value in flat.items():
            if name.rsplit("/", 1)[-1].lower() in _PLANNED_KEYS:
                self.set_planned(value, because)
        self.scan_text(" ".join(v for v in flat.values() if isinstance(v, str))[:_MAX_TEXT], because)

    def set_planned(self, value: Any, because: str) -> None:
        try:
            steps = int(value)
        except (TypeError, ValueError, OverflowError):
            return
        if self.planned is None and 10 <= steps <= 100_000_000:
            self.planned = steps, because


def flatten(row: Mapping[Any, Any], depth: int = _MAX_DEPTH, prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by slashes, to a limited depth; lists are omitted."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            if depth > 0:
                flat |= flatten(value, depth - 1, f"{prefix}{name}/")
        elif not isinstance(value, (list, tuple)):
            flat[f"{prefix}{name}"] = value
    return flat
