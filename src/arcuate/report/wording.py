"""Numbers as a reader wants them: per cent with one decimal, thousands apart, times in words."""

import math
from typing import Any

MISSING = "–"
SPLITS = {"train": "training", "val": "validation", "dev": "development", "test": "test"}


def number(value: Any) -> float | None:
    """A number that can be drawn, or None for everything else that may stand in a file."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        plain = float(value)
    except OverflowError:
        return None
    return plain if math.isfinite(plain) and abs(plain) < 1e100 else None


def whole(value: Any) -> int | None:
    plain = number(value)
    return None if plain is None else int(plain)


def percent(rate: Any, digits: int = 1) -> str:
    plain = number(rate)
    return MISSING if plain is None else f"{100 * plain:.{digits}f}\u202f%"


def count(value: Any) -> str:
    plain = number(value)
    return MISSING if plain is None else f"{round(plain):,}"


def counted(value: int, noun: str) -> str:
    return f"{value:,} {noun}" + ("" if value == 1 else "s")


def millions(value: Any) -> str:
    """A parameter count in three digits."""
    plain = number(value)
    if plain is None:
        return MISSING
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if plain >= size:
            return f"{plain / size:.3g}\u202f{unit}"
    return f"{plain:.0f}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return MISSING
    if seconds < 1:
        return f"{1000 * seconds:.0f}\u202fms"
    if seconds < 90:
        return f"{seconds:.0f}\u202fs"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f}\u202fmin"
    hours, rest = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f"{hours}\u202fh {rest}\u202fmin"
    return f"{hours / 24:.1f} days"


def short(value: float) -> str:
    """A tick label: 0.003, 12, 20k."""
    if value and abs(value) >= 10_000:
        for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= size:
                return f"{value / size:g}{unit}"
    if value and abs(value) < 1e-4:
        mantissa, _, exponent = f"{value:.0e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:,.6g}" if abs(value) < 1000 else f"{value:,.0f}"


def split_name(split: str) -> str:
    return SPLITS.get(split, split)
