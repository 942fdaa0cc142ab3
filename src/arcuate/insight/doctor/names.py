"""What a column, key or tag of a log means, judged by the words in its name."""

import re
from dataclasses import dataclass
from functools import lru_cache

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
TRAIN = frozenset({"train", "training", "tr"})
HELD_OUT = frozenset(
    {"val", "valid", "validation", "eval", "evaluation", "evaluate", "test", "dev", "heldout", "held"}
)
# Words that make a number something else than the value of one evaluation.
_DERIVED = frozenset(
    {
        "ma",
        "ema",
        "moving",
        "smooth",
        "smoothed",
        "best",
        "min",
        "max",
        "std",
        "sd",
        "sample",
        "target",
        "delta",
    }
    | {
        "improvement",
        "patience",
        "threshold",
        "count",
        "weight",
        "scale",
        "prev",
        "previous",
        "lowest",
        "bias",
    }
    | {"day", "session", "sessions", "low", "high", "ci", "var", "variance", "timestamp", "scaler"}
)
_OF_TIME = frozenset(
    {"time", "sec", "secs", "second", "seconds", "s", "ms", "hour", "memory", "mem", "gb", "mb"}
)
_COUNTER = frozenset(
    {
        "step",
        "steps",
        "batch",
        "batches",
        "iteration",
        "iterations",
        "iter",
        "iters",
        "it",
        "update",
        "updates",
    }
)
_BESIDE_COUNTER = frozenset(
    {
        "global",
        "trainer",
        "train",
        "training",
        "num",
        "n",
        "idx",
        "index",
        "number",
        "current",
        "total",
        "optimizer",
    }
)
_GROUP = frozenset(
    {"seed", "run", "run id", "run name", "runid", "experiment", "fold", "trial id", "run uuid", "exp"}
)
_SPLIT = frozenset({"split", "phase", "mode", "set", "stage", "subset", "partition", "kind", "type", "event"})
_TAG = frozenset({"tag", "metric", "metric name", "key", "name", "variable"})
_LOSSES = frozenset({"loss", "losses", "nll"})
_UNITS = frozenset({"phoneme", "phone", "phonemes", "character", "char", "token", "label", "unit"})


@dataclass(frozen=True)
class Name:
    """The role of a name, the split it speaks of, and how far it is from the plainest name for that role."""

    role: str  # per, wer, loss, grad, lr, step, epoch, group, split, tag, value, skipped, or "" for nothing of interest
    split: str = ""  # train, val, or "" where the name does not say
    rank: int = 0
    percent: bool = False  # whether the name says that the numbers are per cent


def words(text: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in _WORDS.findall(text))


@lru_cache(maxsize=4096)
def read_name(text: str) -> Name:
    parts = words(text.replace("%", " percent "))
    found = frozenset(parts)
    if not found or len(parts) > 12:
        return Name("")
    if name := _axis_or_label(text, parts, found):
        return name
    split = "train" if found & TRAIN else "val" if found & HELD_OUT else ""
    rank = len(parts)
    if "skipped" in found:
        return Name("skipped")
    if found & {"grad", "gradient", "gradients", "gradnorm", "gnorm"} or found == {"total", "norm"}:
        normed = found & {"norm", "gradnorm", "norms", "gnorm"}
        return Name("grad", split, rank + 5 * bool(found & {"max", "clipped"})) if normed else Name("")
    if "lr" in found or {"learning", "rate"} <= found:
        return (
            Name("lr", split, rank)
            if not found & {"bias", "day", "session", "min", "max", "start", "end"}
            else Name("")
        )
    if found & _DERIVED:
        return Name("")
    if found == {"vloss"}:
        return Name("loss", "val", rank)
    if found & _LOSSES or found - TRAIN - HELD_OUT == {"ctc"}:
        return Name(
            "loss",
            split,
            rank + 3 * bool(found - _LOSSES - TRAIN - HELD_OUT - {"ctc", "avg", "mean", "total"}),
        )
    return _error_rate(parts, found, split)


def _axis_or_label(text: str, parts: tuple[str, ...], found: frozenset[str]) -> Name | None:
    plain = " ".join(parts)
    if "epoch" in found and found <= {"epoch", "current", "num", "idx", "trainer"}:
        return Name("epoch", "", len(parts))
    if found & _COUNTER and found <= _COUNTER | _BESIDE_COUNTER:
        own = 10 * text.startswith("_") + 2 * ("batch" in found) - 3 * ("global" in found)
        return Name("step", "", len(parts) + own)
    if plain in _GROUP:
        return Name("group")
    if plain in _SPLIT:
        return Name("split")
    if plain in _TAG:
        return Name("tag")
    return Name("value") if plain == "value" else None


def _error_rate(parts: tuple[str, ...], found: frozenset[str], split: str) -> Name:
    rank = len(parts) + 4 * ("beam" in found)
    hundredths = bool(found & {"percent", "pct", "percentage"})
    if {"error", "rate"} <= found and found & _UNITS:
        return Name("per", split, rank + 1, hundredths)
    if "per" in found and not _preposition(parts):
        return Name("per", split, rank, hundredths)
    if found & {"cer", "ter", "ler", "uer"}:
        return Name("per", split, rank + 6, hundredths)
    return Name("wer", split, rank, hundredths) if "wer" in found else Name("")


def _preposition(parts: tuple[str, ...]) -> bool:
    """Whether `per` means `for each`, as in time_per_batch or samples_per_second."""
    i = parts.index("per")
    after = set(parts[i + 1 :])
    measured = after & (
        _OF_TIME | _COUNTER | {"epoch", "sample", "token", "word", "gpu", "device", "trial", "sentence"}
    )
    return bool(
        measured
        or set(parts[:i]) & (_OF_TIME | {"samples", "steps", "tokens", "batches", "examples", "trials"})
    )
