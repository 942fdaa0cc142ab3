"""Charts as SVG: scales, axes and marks, then quantities over steps, learning curves, forest plots and dot plots."""

import base64
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from arcuate.evaluation.significance import Contrast
from arcuate.insight.formats import finite_int, finite_number, percent, tick_label, whole_percent
from arcuate.insight.pages import Html, figure, join, legend, muted, read_style, tag

Point = tuple[float, float]
WIDTH, HEIGHT = 560, 314  # of a chart in one column of the page
LEFT, RIGHT, TOP, BOTTOM = 62, 540, 14, 268  # of its plot area
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


def linear_scale(
    values: Iterable[float], floor: float | None = None, start: float = BOTTOM, stop: float = TOP
) -> Scale:
    """A scale with a margin around the values; it starts at `floor` if that is given and below all values."""
    low, high = _bounds(values)
    if floor is not None:
        low = min(low, floor)
    margin = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    return Scale(low if floor is not None and low == floor else low - margin, high + margin, start, stop)


def log_scale(values: Iterable[float], start: float = BOTTOM, stop: float = TOP) -> Scale:
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


def text(
    x: float, y: float, words: object, class_: str | None = None, anchor: str | None = None, angle: int = 0
) -> Html:
    place = {"x": coordinate(x), "y": coordinate(y)}
    if angle:
        place = {"transform": f"translate({coordinate(x)} {coordinate(y)}) rotate({angle})"}
    return tag("text", words, **place, class_=class_, text_anchor=anchor)


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
    right, down, anchor, angle = (3, 16, "end", -45) if rotated else (0, 20, "middle", 0)
    return [
        text(x + right, bottom + down, name, anchor=anchor, angle=angle) for x, name in zip(places, names, strict=True)
    ]


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


# Quantities over steps.

MAX_POINTS = 320  # of one line; more cannot be seen on a screen
_LOG_RATIO = 8  # losses that span more than this ratio are drawn on a logarithmic scale
_N_COLOURS = 8


@dataclass(frozen=True)
class Curve:
    """A quantity over steps, thinned: the median, minimum and maximum of each stretch of steps."""

    steps: tuple[float, ...]
    median: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    n_missing: int  # logged values that are not finite

    @property
    def values(self) -> list[float]:
        return [v for v in (*self.low, *self.high) if v is not None]


def curve_of(rows: Sequence[Mapping[str, Any]], key: str, peak: str | None = None) -> Curve:
    """One quantity of the log; `peak` names a second one with the maximum within the same steps."""
    rows = [row for row in rows if key in row]
    values = [finite_number(row[key]) for row in rows]
    peaks = [finite_number(row.get(peak)) for row in rows] if peak else ()
    return thin_curve([int(row["step"]) for row in rows], values, peaks)


def thin_curve(steps: Sequence[float], values: Sequence[float | None], peaks: Sequence[float | None] = ()) -> Curve:
    size = max(1, -(-len(steps) // MAX_POINTS))
    at, median, low, high = [], [], [], []
    for i in range(0, len(steps), size):
        kept = [v for v in values[i : i + size] if v is not None]
        tops = kept + [v for v in peaks[i : i + size] if v is not None]
        at.append(float(np.median(steps[i : i + size])))
        median.append(float(np.median(kept)) if kept else None)
        low.append(min(kept) if kept else None)
        high.append(max(tops) if tops else None)
    return Curve(tuple(at), tuple(median), tuple(low), tuple(high), sum(v is None for v in values))


def rows_by_step(rows: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Rows in the order of their step; of a step that was run twice the later row is kept."""
    kept = {step: {**row, "step": step} for row in rows if (step := finite_int(row.get("step"))) is not None}
    return tuple(kept[step] for step in sorted(kept))


def steps_scale(last: float, right: float = RIGHT) -> Scale:
    return Scale(0.0, max(float(last), 1.0), LEFT, right)


def loss_scale(values: Sequence[float]) -> Scale:
    """Logarithmic if the losses span a wide range, else linear from zero."""
    if min(values) > SMALLEST and max(values) / min(values) > _LOG_RATIO:
        return log_scale(values)
    return linear_scale(values, 0.0 if min(values) >= 0 else None)


def draw_curve(curve: Curve, x: Scale, y: Scale, kind: str) -> Html:
    """The median line, over the band between minimum and maximum."""
    edges = zip(points(curve.steps, curve.low, x, y), points(curve.steps, curve.high, x, y), strict=True)
    both = [(low, high) for low, high in edges if low and high]
    spread = any(low != high for low, high in both)
    shadow = band([high for _, high in both], [low for low, _ in both], f"band {kind}") if spread else Html()
    return join(shadow, path(points(curve.steps, curve.median, x, y), f"line {kind}"))


def points(steps: Sequence[float], values: Sequence[float | None], x: Scale, y: Scale) -> list[Point | None]:
    return [
        None if v is None or (y.log and v <= SMALLEST) else (x(s), y(v)) for s, v in zip(steps, values, strict=True)
    ]


def draw_best(x: Scale, y: Scale, step: float, rate: float) -> list[Html]:
    """A ring at the best error rate, labelled below it if there is room."""
    side = "end" if x(step) > (x.start + x.stop) / 2 else "start"
    place = y(max(rate, y.low))
    height = place + (24 if place + 24 < y.start - 4 else -14)
    label = f"best {percent(rate)}"
    return [
        dot(x(step), place, 5, "best", f"{label} at step {step:,.0f}"),
        text(x(step), height, label, "strong halo", side),
    ]


def pair(*figures: Html | None) -> Html:
    """The figures that exist, two to a row; empty if there are none."""
    drawn = [drawing for drawing in figures if drawing]
    return tag("div", *drawn, class_="pair") if drawn else Html()


def steps_chart(
    title: str,
    label: str,
    x: Scale,
    y: Scale,
    marks: Iterable[Html],
    key: Html | None = None,
    caption: str | None = None,
    tick: Callable[[float], str] = tick_label,
    unit: str = "optimizer steps",
) -> Html:
    """A figure with a quantity over steps; `label` describes it to screen readers."""
    title += ", logarithmic" if y.log else ""
    return figure(title, plot(label, x, y, unit, marks, tick), caption, key)


def plot(
    label: str, x: Scale, y: Scale, x_title: str, marks: Iterable[Html], tick: Callable[[float], str] = tick_label
) -> Html:
    """Marks between two axes, as wide as one column of the page."""
    axes = y_axis(y, x.start, x.stop, tick), x_axis(x, y.start, x_title)
    return drawing(WIDTH, HEIGHT, label, *axes, *marks)


# Learning curves of several runs in one chart, runs of one group in one colour.


GroupedRun = tuple[str, Sequence[Mapping[str, Any]]]  # group, rows of the log


def overlaid_curves(runs: Sequence[GroupedRun]) -> Html:
    """Validation error rate and training loss over steps."""
    validation = [rows_by_step(r for r in log if r.get("split") != "train" and "per" in r) for _, log in runs]
    training = [rows_by_step(r for r in log if r.get("split") == "train") for _, log in runs]
    return pair(
        _overlaid_chart("Phoneme error rate on validation", validation, "per", runs),
        _overlaid_chart("Training loss", training, "loss", runs),
    ) or muted("The logs are still empty.")


def _overlaid_chart(
    title: str, logs: Sequence[Sequence[Mapping[str, Any]]], quantity: str, runs: Sequence[GroupedRun]
) -> Html | None:
    curves = [curve_of(rows, quantity) for rows in logs]
    values = [v for curve in curves for v in curve.median if v is not None]
    if not values:
        return None
    groups = list(dict.fromkeys(group for group, _ in runs))
    x = steps_scale(max(s for curve in curves for s in curve.steps))
    y = loss_scale(values) if quantity == "loss" else linear_scale(values, 0.0)
    marks = [
        path(points(c.steps, c.median, x, y), f"line own {_colour(groups.index(group))}")
        for c, (group, _) in zip(curves, runs, strict=True)
    ]
    key = legend(*((_colour(i), name) for i, name in enumerate(groups)))
    label = f"{title} over steps, {len(runs)} runs: {', '.join(groups)}"
    return steps_chart(title, label, x, y, marks, key, tick=whole_percent if quantity == "per" else tick_label)


def _colour(i: int) -> str:
    return f"c{i % _N_COLOURS}" + (" dash" if i >= _N_COLOURS else "")


# Forest plot of differences, and dot plot of error rates by arm.

_ROW_WIDTH, _ROW_LEFT, _ROW_RIGHT, _ROW_TOP, _ROW, _ROW_TITLE = 760, 250, 600, 34, 30, 18


@dataclass(frozen=True)
class ForestRow:
    """One difference in PER with its confidence interval; positive is worse."""

    name: str
    contrast: Contrast
    significant: bool
    title: str | None = None  # heading above this row


def forest_plot(rows: Sequence[ForestRow], label: str) -> Html:
    """Each difference as a dot on its interval; filled if significant, coloured by its direction."""
    places, y = [], float(_ROW_TOP)
    for row in rows:
        y += _ROW_TITLE if row.title else 0
        places.append(y)
        y += _ROW
    bottom = y + 6
    bounds = [100 * v for r in rows for v in (r.contrast.low, r.contrast.high)]
    scale = linear_scale([0.0, *bounds], None, _ROW_LEFT, _ROW_RIGHT)
    zero, above = scale(0), _ROW_TOP - 18
    parts = [
        line(zero, _ROW_TOP - 12, zero, bottom, "zero"),
        x_axis(scale, bottom, "percentage points of PER", _signed_tick),
        text(zero - 8, above, "← better", "quiet", "end"),
        text(zero + 8, above, "worse →", "quiet", "start"),
        *(_forest_row(row, at, scale) for row, at in zip(rows, places, strict=True)),
    ]
    return drawing(_ROW_WIDTH, bottom + 50, label, *parts)


def _forest_row(row: ForestRow, y: float, scale: Scale) -> Html:
    estimate, low, high = (100 * v for v in (row.contrast.estimate, row.contrast.low, row.contrast.high))
    kind = ("better" if estimate < 0 else "worse") if row.significant else ""
    return join(
        text(8, y - 16, row.title, "strong") if row.title else Html(),
        text(24, y + 4, row.name),
        line(scale(low), y, scale(high), y, f"interval {kind}".strip()),
        dot(scale(estimate), y, 5, f"estimate {kind}".strip()),
        text(_ROW_RIGHT + 12, y + 4, f"{_signed(estimate)} ({_signed(low)} to {_signed(high)})"),
    )


def _signed_tick(value: float) -> str:
    return f"{value:+g}".replace("-", "−") if value else "0"


def _signed(value: float) -> str:
    shown = f"{value:.1f}".removesuffix(".0") if abs(value) >= 100 else f"{value:.1f}"
    shown = "0" if float(shown) == 0 else shown
    return (f"+{shown}" if value > 0 and shown != "0" else shown).replace("-", "−")


def dot_plot(arms: Sequence[tuple[str, Sequence[float]]], label: str) -> Html:
    """Error rates in per cent: a dot for each run, a bar at the mean of the arm."""
    scale = linear_scale([v for _, values in arms for v in values], 0.0, _ROW_LEFT, _ROW_RIGHT)
    bottom = _ROW_TOP + _ROW * len(arms) - 8
    marks = []
    for i, (name, values) in enumerate(arms):
        y = _ROW_TOP + _ROW * i - 8
        mean = sum(values) / len(values)
        marks += [
            text(24, y + 4, name),
            line(_ROW_LEFT, y, _ROW_RIGHT, y, "guide"),
            *(dot(scale(v), y, 4.5, "dot", f"{v:.1f} %") for v in values),
            line(scale(mean), y - 9, scale(mean), y + 9, "mean"),
            text(_ROW_RIGHT + 12, y + 4, f"{mean:.1f} %"),
        ]
    return drawing(_ROW_WIDTH, bottom + 50, label, x_axis(scale, bottom, "PER in per cent"), *marks)


def standalone_svg(drawing: Html) -> str:
    """A drawing as a separate file, with the colours and drawing rules of the pages."""
    colours, _, rules = read_style("style.css").partition("* {")
    lines = (rules + read_style("groups.css")).splitlines()
    style = tag("style", Html(colours + "\n".join(rule for rule in lines if rule.startswith("svg "))))
    background = '<rect width="100%" height="100%" style="fill: var(--paper)"/>'
    head, _, rest = drawing.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg">{style}{background}{rest}\n'
