"""The meaning of a column, key or tag of a log, inferred from the words in its name."""

import re
from dataclasses import dataclass
from functools import lru_cache

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def _word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


TRAIN = _word_set("train training tr")
HELD_OUT = _word_set("val valid validation eval evaluation evaluate test dev heldout held")
# Words that mark a derived number, not the value of one evaluation.
_DERIVED = _word_set(
    "ma ema moving smooth smoothed best min max std sd sample target delta improvement patience threshold count"
    " weight scale prev previous lowest bias day session sessions low high ci var variance timestamp scaler"
)
_RESOURCE = _word_set("time sec secs second seconds s ms hour memory mem gb mb")
_COUNTER = _word_set("step steps batch batches iteration iterations iter iters it update updates")
_COUNTER_PREFIX = _word_set("global trainer train training num n idx index number current total optimizer")
_GROUP = frozenset({"seed", "run", "run id", "run name", "runid", "experiment", "fold", "trial id", "run uuid", "exp"})
_SPLIT = _word_set("split phase mode set stage subset partition kind type event")
_TAG = frozenset({"tag", "metric", "metric name", "key", "name", "variable"})
_LOSSES = _word_set("loss losses nll")
_UNITS = _word_set("phoneme phone phonemes character char token label unit")


@dataclass(frozen=True)
class ColumnMeaning:
    """The role of a column, its split, and the distance of its name from the plainest name for that role."""

    role: str  # per, wer, loss, grad, lr, step, epoch, group, split, tag, value, skipped, or "" if irrelevant
    split: str = ""  # train, val, or "" if the name does not tell
    rank: int = 0
    percent: bool = False  # the name states that values are per cent


def split_words(text: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in _WORDS.findall(text))


def split_from_words(words: "frozenset[str] | set[str]") -> str:
    return "train" if words & TRAIN else "val" if words & HELD_OUT else ""


@lru_cache(maxsize=4096)
def parse_column_name(text: str) -> ColumnMeaning:
    parts = split_words(text.replace("%", " percent "))
    words = frozenset(parts)
    if not words or len(parts) > 12:
        return ColumnMeaning("")
    if meaning := _axis_or_label(text, parts, words):
        return meaning
    split = split_from_words(words)
    rank = len(parts)
    if "skipped" in words:
        return ColumnMeaning("skipped")
    if words & {"grad", "gradient", "gradients", "gradnorm", "gnorm"} or words == {"total", "norm"}:
        is_norm = words & {"norm", "gradnorm", "norms", "gnorm"}
        rank += 5 * bool(words & {"max", "clipped"})
        return ColumnMeaning("grad", split, rank) if is_norm else ColumnMeaning("")
    if "lr" in words or {"learning", "rate"} <= words:
        partial = words & {"bias", "day", "session", "min", "max", "start", "end"}
        return ColumnMeaning("") if partial else ColumnMeaning("lr", split, rank)
    if words & _DERIVED:
        return ColumnMeaning("")
    if words == {"vloss"}:
        return ColumnMeaning("loss", "val", rank)
    if words & _LOSSES or words - TRAIN - HELD_OUT == {"ctc"}:
        special = words - _LOSSES - TRAIN - HELD_OUT - {"ctc", "avg", "mean", "total"}
        return ColumnMeaning("loss", split, rank + 3 * bool(special))
    return _error_rate(parts, words, split)


def _axis_or_label(text: str, parts: tuple[str, ...], words: frozenset[str]) -> ColumnMeaning | None:
    plain = " ".join(parts)
    if "epoch" in words and words <= {"epoch", "current", "num", "idx", "trainer"}:
        return ColumnMeaning("epoch", "", len(parts))
    if words & _COUNTER and words <= _COUNTER | _COUNTER_PREFIX:
        rank = len(parts) + 10 * text.startswith("_") + 2 * ("batch" in words) - 3 * ("global" in words)
        return ColumnMeaning("step", "", rank)
    if plain in _GROUP:
        return ColumnMeaning("group")
    if plain in _SPLIT:
        return ColumnMeaning("split")
    if plain in _TAG:
        return ColumnMeaning("tag")
    return ColumnMeaning("value") if plain == "value" else None


def _error_rate(parts: tuple[str, ...], words: frozenset[str], split: str) -> ColumnMeaning:
    rank = len(parts) + 4 * ("beam" in words)
    percent = bool(words & {"percent", "pct", "percentage"})
    if {"error", "rate"} <= words and words & _UNITS:
        return ColumnMeaning("per", split, rank + 1, percent)
    if "per" in words and not _is_preposition(parts):
        return ColumnMeaning("per", split, rank, percent)
    if words & {"cer", "ter", "ler", "uer"}:
        return ColumnMeaning("per", split, rank + 6, percent)
    return ColumnMeaning("wer", split, rank, percent) if "wer" in words else ColumnMeaning("")


def _is_preposition(parts: tuple[str, ...]) -> bool:
    """Whether `per` means "for each", as in time_per_batch or samples_per_second."""
    i = parts.index("per")
    before, after = set(parts[:i]), set(parts[i + 1 :])
    per_what = _RESOURCE | _COUNTER | _word_set("epoch sample token word gpu device trial sentence")
    return bool(after & per_what or before & (_RESOURCE | _word_set("samples steps tokens batches examples trials")))
