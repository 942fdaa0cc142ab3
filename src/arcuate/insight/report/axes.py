"""The few parts every chart is made of: scales, ticks, axes, lines, bands and pictures of arrays."""

import base64
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from arcuate.insight.report.markup import Html, join, short, tag

Point = tuple[float, float]
SMALLEST = 1e-100  # below it, a logarithmic scale takes a value for zero
LEVELS = 16  # shades in a picture of an array: four bits each


def place(value: float) -> str:
    """A coordinate, no longer than a reader's screen can show."""
    text = f"{value:.1f}"
    return text.removesuffix(".0") if text != "-0.0" else "0"


@dataclass(frozen=True)
class Scale:
    """Values to places in the drawing."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(value)
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + min(max(share, 0.0), 1.0) * (self.stop - self.start)

    def ticks(self, n_ticks: int = 5) -> list[float]:
        return log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high, n_ticks)


def linear_ticks(low: float, high: float, n_ticks: int = 5) -> list[float]:
    """About so many round numbers within the range."""
    if not high > low:
        return [low]
    rough = (high - low) / max(n_ticks, 1)
    size = 10.0 ** math.floor(math.log10(rough))
    step = size * next((m for m in (1, 2, 2.5, 5, 10) if m * size >= rough * 0.999), 10)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten; with 2 and 5 between them where the range is short."""
    decades = math.log10(high) - math.log10(low)
    factors = (1, 2, 5) if decades < 1.6 else (1, 3) if decades < 3 else (1,)
    every = max(1, math.ceil(decades / 6))
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10.0**e for e in exponents if e % every == 0 for m in factors]
    return [t for t in ticks if low * 0.999 <= t <= high * 1.001]


def linear(values: Iterable[float], start: float, stop: float, floor: float | None = None) -> Scale:
    """A scale with a little air around the values; from `floor` where one is given."""
    low, high = bounds(values)
    if floor is not None:
        low = min(low, floor)
    air = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    return Scale(low if floor is not None and low == floor else low - air, high + air, start, stop)


def logarithmic(values: Iterable[float], start: float, stop: float) -> Scale:
    low, high = bounds(v for v in values if v > SMALLEST)
    if high / low < 4:  # room for at least two ticks
        middle = math.sqrt(low * high)
        low, high = min(low, middle / 2), max(high, middle * 2)
    air = 10.0 ** (0.05 * (math.log10(high) - math.log10(low)))
    return Scale(low / air, high * air, start, stop, log=True)


def bounds(values: Iterable[float]) -> tuple[float, float]:
    kept = list(values)
    return (min(kept), max(kept)) if kept else (1.0, 10.0)


def text(x: float, y: float, words: object, class_: str | None = None, anchor: str | None = None) -> Html:
    return tag("text", words, x=place(x), y=place(y), class_=class_, text_anchor=anchor)


def rule(x1: float, y1: float, x2: float, y2: float, class_: str) -> Html:
    return tag("line", x1=place(x1), y1=place(y1), x2=place(x2), y2=place(y2), class_=class_)


def dot(x: float, y: float, radius: float, class_: str, title: str | None = None) -> Html:
    note = tag("title", title) if title else None
    return tag("circle", note, cx=place(x), cy=place(y), r=place(radius), class_=class_)


def rows_axis(scale: Scale, left: float, right: float, name: Callable[[float], str] = short) -> Html:
    """Horizontal guide lines with their values on the left."""
    parts = []
    for tick in scale.ticks():
        y = scale(tick)
        parts += [rule(left, y, right, y, "guide"), text(left - 8, y + 4, name(tick), anchor="end")]
    return join(parts)


def thousands(value: float) -> str:
    """Ticks of one axis look alike: 5k beside 10k, not 5,000."""
    return f"{value / 1000:g}k" if 1000 <= value < 1e6 else short(value)


def columns_axis(scale: Scale, bottom: float, title: str, name: Callable[[float], str] = short) -> Html:
    """The line along the bottom with its ticks and what it counts."""
    parts = [rule(scale.start, bottom, scale.stop, bottom, "axis")]
    ticks = scale.ticks(6)
    if name is short and max(ticks, default=0) >= 10_000:
        name = thousands
    for tick in ticks:
        x = scale(tick)
        parts += [rule(x, bottom, x, bottom + 5, "axis"), text(x, bottom + 20, name(tick), anchor="middle")]
    return join([*parts, text(scale.stop, bottom + 42, title, "quiet", "end")])


def path(points: Sequence[Point | None], class_: str) -> Html:
    """A line with gaps where a point is None; a point on its own becomes a dot."""
    parts: list[Html] = []
    strokes: list[str] = []
    for stroke in runs(points):
        if len(stroke) == 1:
            parts.append(dot(*stroke[0], 2.5, f"{class_} lone"))
        else:
            strokes.append("M" + "L".join(f"{place(x)} {place(y)}" for x, y in stroke))
    if strokes:
        parts.insert(0, tag("path", d="".join(strokes), class_=class_))
    return join(parts)


def runs(points: Sequence[Point | None]) -> list[list[Point]]:
    found: list[list[Point]] = [[]]
    for point in points:
        if point is None:
            found.append([])
        else:
            found[-1].append(point)
    return [stroke for stroke in found if stroke]


def band(upper: Sequence[Point], lower: Sequence[Point], class_: str) -> Html:
    if len(upper) < 2:
        return Html()
    outline = "L".join(f"{place(x)} {place(y)}" for x, y in [*upper, *reversed(lower)])
    return tag("path", d=f"M{outline}Z", class_=class_)


def shade(
    values: np.ndarray, name: str, x: float, y: float, width: float, height: float, class_: str
) -> Html:
    """An array of shares (rows, columns) from 0 to 1, in the colour that the theme gives to `class_`.

    The array is a grey picture used as a mask, so the same bytes serve light and dark pages.
    """
    box = {"x": place(x), "y": place(y), "width": place(width), "height": place(height)}
    image = tag(
        "image",
        **box,
        href=png(values),
        preserveAspectRatio="none",
        class_="pixels" if values.shape[0] <= height else None,
    )
    mask = tag("mask", image, id=name, maskUnits="userSpaceOnUse", **box)
    return join([mask, tag("rect", **box, class_=class_, mask=f"url(#{name})")])


def png(values: np.ndarray) -> str:
    """A grey picture of four bits per value, as a data address."""
    shades = np.clip(np.rint(np.nan_to_num(values) * (LEVELS - 1)), 0, LEVELS - 1).astype(np.uint8)
    n_rows, n_columns = shades.shape
    padded = np.pad(shades, ((0, 0), (0, n_columns % 2)))
    packed = (padded[:, 0::2] << 4) | padded[:, 1::2]
    lines = np.pad(packed, ((0, 0), (1, 0))).tobytes()  # each line starts with its filter, 0 = none
    header = struct.pack(">IIBBBBB", n_columns, n_rows, 4, 0, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + content).decode("ascii")


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
