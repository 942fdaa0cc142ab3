"""SVG primitives of the charts: scales, ticks, axes, lines, bands and heat maps."""

import base64
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from arcuate.insight.pages.formatting import tick_label
from arcuate.insight.pages.markup import Html, join, tag

Point = tuple[float, float]
SMALLEST = 1e-100  # a logarithmic scale treats smaller values as zero
_N_SHADES = 16  # of a heat map: four bits per value


def coordinate(value: float) -> str:
    """A coordinate with one decimal, which is as fine as a screen shows."""
    text = f"{value:.1f}"
    return text.removesuffix(".0") if text != "-0.0" else "0"


@dataclass(frozen=True)
class Scale:
    """Maps values [low, high] to coordinates [start, stop]; values outside are clamped."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        fraction = (value - low) / (high - low) if high > low else 0.5
        return self.start + min(max(fraction, 0.0), 1.0) * (self.stop - self.start)

    def ticks(self, n_ticks: int = 5) -> list[float]:
        return log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high, n_ticks)


def linear_ticks(low: float, high: float, n_ticks: int = 5) -> list[float]:
    """About `n_ticks` round numbers within the range."""
    if not high > low:
        return [low]
    rough = (high - low) / max(n_ticks, 1)
    size = 10.0 ** math.floor(math.log10(rough))
    step = size * next((m for m in (1, 2, 2.5, 5, 10) if m * size >= rough * 0.999), 10)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, with intermediate ticks if the range is short."""
    decades = math.log10(high) - math.log10(low)
    factors = (1, 2, 5) if decades < 1.6 else (1, 3) if decades < 3 else (1,)
    every = max(1, math.ceil(decades / 6))
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10.0**e for e in exponents if e % every == 0 for m in factors]
    return [t for t in ticks if low * 0.999 <= t <= high * 1.001]


def linear_scale(values: Iterable[float], start: float, stop: float, floor: float | None = None) -> Scale:
    """A scale with a margin around the values; it starts at `floor` if that is given and below all values."""
    low, high = _bounds(values)
    if floor is not None:
        low = min(low, floor)
    margin = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    return Scale(low if floor is not None and low == floor else low - margin, high + margin, start, stop)


def log_scale(values: Iterable[float], start: float, stop: float) -> Scale:
    low, high = _bounds(v for v in values if v > SMALLEST)
    if high / low < 4:  # room for at least two ticks
        middle = math.sqrt(low * high)
        low, high = min(low, middle / 2), max(high, middle * 2)
    margin = 10.0 ** (0.05 * (math.log10(high) - math.log10(low)))
    return Scale(low / margin, high * margin, start, stop, log=True)


def _bounds(values: Iterable[float]) -> tuple[float, float]:
    kept = list(values)
    return (min(kept), max(kept)) if kept else (1.0, 10.0)


def drawing(width: float, height: float, label: str, *children: object, style: str | None = None) -> Html:
    """A drawing that scales with its column; `label` is the description for screen readers."""
    size = f"0 0 {width:.0f} {height:.0f}"
    return tag("svg", *children, viewBox=size, role="img", aria_label=label, class_="plot", style=style)


def text(x: float, y: float, words: object, class_: str | None = None, anchor: str | None = None) -> Html:
    return tag("text", words, x=coordinate(x), y=coordinate(y), class_=class_, text_anchor=anchor)


def rotated_text(
    x: float, y: float, words: object, angle: int, class_: str | None = None, anchor: str | None = None
) -> Html:
    place = f"translate({coordinate(x)} {coordinate(y)}) rotate({angle})"
    return tag("text", words, transform=place, class_=class_, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Html:
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    return tag("line", **{k: coordinate(v) for k, v in ends.items()}, class_=class_)


def dot(x: float, y: float, radius: float, class_: str, title: str | None = None) -> Html:
    tooltip = tag("title", title) if title else None
    return tag("circle", tooltip, cx=coordinate(x), cy=coordinate(y), r=coordinate(radius), class_=class_)


def rectangle(
    x: float, y: float, width: float, height: float, class_: str, *children: Html, **attributes: object
) -> Html:
    return tag("rect", *children, **_box(x, y, width, height), class_=class_, **attributes)


def _box(x: float, y: float, width: float, height: float) -> dict[str, str]:
    box = {"x": x, "y": y, "width": width, "height": height}
    return {name: coordinate(value) for name, value in box.items()}


def y_axis(scale: Scale, left: float, right: float, label: Callable[[float], str] = tick_label) -> Html:
    """Horizontal guide lines with their values on the left."""
    parts = []
    for tick in scale.ticks():
        y = scale(tick)
        parts += [line(left, y, right, y, "guide"), text(left - 8, y + 4, label(tick), anchor="end")]
    return join(*parts)


def x_axis(scale: Scale, bottom: float, title: str, label: Callable[[float], str] = tick_label) -> Html:
    """The line along the bottom with its ticks and its title."""
    parts = [line(scale.start, bottom, scale.stop, bottom, "axis")]
    ticks = scale.ticks(6)
    if label is tick_label and max(ticks, default=0) >= 10_000:
        label = _thousands
    for tick in ticks:
        x = scale(tick)
        parts += [line(x, bottom, x, bottom + 5, "axis"), text(x, bottom + 20, label(tick), anchor="middle")]
    return join(*parts, text(scale.stop, bottom + 42, title, "quiet", "end"))


def _thousands(value: float) -> str:
    """Keep the ticks of one axis uniform: 5k next to 10k, not 5,000."""
    return f"{value / 1000:g}k" if 1000 <= value < 1e6 else tick_label(value)


def column_labels(places: Sequence[float], bottom: float, names: Sequence[str], rotated: bool) -> list[Html]:
    """Names below the columns of a chart, at 45 degrees if columns are narrow."""
    if rotated:
        return [
            rotated_text(x + 3, bottom + 16, name, -45, anchor="end") for x, name in zip(places, names, strict=True)
        ]
    return [text(x, bottom + 20, name, anchor="middle") for x, name in zip(places, names, strict=True)]


def path(points: Sequence[Point | None], class_: str) -> Html:
    """A line with gaps where a point is None; an isolated point becomes a dot."""
    parts: list[Html] = []
    outline = ""
    for _, group in groupby(points, key=lambda point: point is None):
        stroke = [point for point in group if point]
        if len(stroke) == 1:
            parts.append(dot(*stroke[0], 2.5, f"{class_} lone"))
        elif stroke:
            outline += "M" + "L".join(f"{coordinate(x)} {coordinate(y)}" for x, y in stroke)
    return join(tag("path", d=outline, class_=class_) if outline else None, *parts)


def band(upper: Sequence[Point], lower: Sequence[Point], class_: str) -> Html:
    if len(upper) < 2:
        return Html()
    outline = "L".join(f"{coordinate(x)} {coordinate(y)}" for x, y in [*upper, *reversed(lower)])
    return tag("path", d=f"M{outline}Z", class_=class_)


def heat_map(values: np.ndarray, name: str, x: float, y: float, width: float, height: float, class_: str) -> Html:
    """An array (rows, columns) of values in [0, 1], in the colour that the theme assigns to `class_`.

    The array is embedded as a greyscale image used as a mask, so the same bytes serve light and dark pages.
    """
    box = _box(x, y, width, height)
    image = tag(
        "image",
        **box,
        href=png(values),
        preserveAspectRatio="none",
        class_="pixels" if values.shape[0] <= height else None,
    )
    mask = tag("mask", image, id=name, maskUnits="userSpaceOnUse", **box)
    return join(mask, tag("rect", **box, class_=class_, mask=f"url(#{name})"))


def png(values: np.ndarray) -> str:
    """A greyscale PNG with four bits per value, as a data URL."""
    shades = np.clip(np.rint(np.nan_to_num(values) * (_N_SHADES - 1)), 0, _N_SHADES - 1).astype(np.uint8)
    n_rows, n_columns = shades.shape
    padded = np.pad(shades, ((0, 0), (0, n_columns % 2)))
    packed = (padded[:, 0::2] << 4) | padded[:, 1::2]
    lines = np.pad(packed, ((0, 0), (1, 0))).tobytes()  # each line starts with its filter type, 0 = none
    header = struct.pack(">IIBBBBB", n_columns, n_rows, 4, 0, 0, 0, 0)
    content = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(lines, 9)) + _chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + content).decode("ascii")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
