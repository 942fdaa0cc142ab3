"""Number formats of the pages: percentages with one decimal, thousands separators, tick labels."""

from collections.abc import Sequence
from typing import Any

from arcuate.files import finite_number

MISSING = "–"
_SPLIT_NAMES = {"train": "training", "val": "validation", "dev": "development", "test": "test"}


def percent(rate: Any, digits: int = 1) -> str:
    number = finite_number(rate)
    return MISSING if number is None else f"{100 * number:.{digits}f}\u202f%"


def interval(bounds: Sequence[float | None] | None) -> str:
    """The bounds of an interval as percentages, such as `10.7–13.7 %`; empty if they are not known."""
    low, high = bounds or (None, None)
    return "" if low is None or high is None else f"{100 * low:.1f}–{100 * high:.1f}\u202f%"


def confidence_text(bounds: Sequence[float | None] | None) -> str:
    """` (95 % interval 10.7–13.7 %)`, to follow a rate in a sentence; empty if the bounds are not known."""
    return f" (95\u202f% interval {shown})" if (shown := interval(bounds)) else ""


def count(value: Any) -> str:
    number = finite_number(value)
    return MISSING if number is None else f"{round(number):,}"


def parameter_count(value: Any) -> str:
    """A parameter count with three significant digits."""
    number = finite_number(value)
    if number is None:
        return MISSING
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}\u202f{unit}"
    return f"{number:.0f}"


def split_name(split: str) -> str:
    return _SPLIT_NAMES.get(split, split)


def short_session_names(sessions: Sequence[str]) -> dict[str, str]:
    """Labels of sessions: without the participant if it is the same for all; long names are truncated.

    Sessions that would get the same label are numbered.
    """
    names = list(dict.fromkeys(sessions))
    short = names
    if len(names) > 1 and len({name.partition(".")[0] for name in names}) == 1:
        short = [name.partition(".")[2] or name for name in names]
    short = [name if len(name) <= 16 else name[:15] + "…" for name in short]
    if len(set(short)) < len(short):
        short = [f"{name} {i}" for i, name in enumerate(short, start=1)]
    return dict(zip(names, short, strict=True))
