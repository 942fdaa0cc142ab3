"""Charts used by several pages: quantities over steps, overlaid learning curves, forest plots, dot plots."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arcuate.evaluation.significance import Contrast
from arcuate.insight.pages import svg
from arcuate.insight.pages.formatting import finite_int, finite_number, percent, tick_label, whole_percent
from arcuate.insight.pages.markup import Html, figure, join, legend, muted, read_style, tag

WIDTH, HEIGHT = 560, 314
LEFT, RIGHT, TOP, BOTTOM = 62, 540, 14, 268
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
    peaks = [finite_number(row.get(peak)) for row in rows] if peak else values
    return thin_curve([int(row["step"]) for row in rows], values, peaks)


def thin_curve(steps: Sequence[float], values: Sequence[float | None], peaks: Sequence[float | None]) -> Curve:
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


def steps_scale(last: float, right: float = RIGHT) -> svg.Scale:
    return svg.Scale(0.0, max(float(last), 1.0), LEFT, right)


def loss_scale(values: Sequence[float]) -> svg.Scale:
    """Logarithmic if the losses span a wide range, else linear from zero."""
    if min(values) > svg.SMALLEST and max(values) / min(values) > _LOG_RATIO:
        return svg.log_scale(values, BOTTOM, TOP)
    return svg.linear_scale(values, BOTTOM, TOP, 0.0 if min(values) >= 0 else None)


def draw_curve(curve: Curve, x: svg.Scale, y: svg.Scale, kind: str) -> Html:
    """The median line, over the band between minimum and maximum."""
    edges = zip(_points(curve.steps, curve.low, x, y), _points(curve.steps, curve.high, x, y), strict=True)
    both = [(low, high) for low, high in edges if low and high]
    spread = any(low != high for low, high in both)
    shadow = svg.band([high for _, high in both], [low for low, _ in both], f"band {kind}") if spread else Html()
    return join(shadow, svg.path(_points(curve.steps, curve.median, x, y), f"line {kind}"))


def _points(
    steps: Sequence[float], values: Sequence[float | None], x: svg.Scale, y: svg.Scale
) -> list[svg.Point | None]:
    return [
        None if v is None or (y.log and v <= svg.SMALLEST) else (x(s), y(v)) for s, v in zip(steps, values, strict=True)
    ]


def draw_best(x: svg.Scale, y: svg.Scale, step: float, rate: float, bottom: float = BOTTOM) -> list[Html]:
    """A ring at the best error rate, labelled below it if there is room."""
    side = "end" if x(step) > (x.start + x.stop) / 2 else "start"
    place = y(max(rate, y.low))
    height = place + (24 if place + 24 < bottom - 4 else -14)
    label = f"best {percent(rate)}"
    return [
        svg.dot(x(step), place, 5, "best", f"{label} at step {step:,.0f}"),
        svg.text(x(step), height, label, "strong halo", side),
    ]


def pair(*figures: Html | None) -> Html:
    """The figures that exist, two to a row; empty if there are none."""
    drawn = [drawing for drawing in figures if drawing]
    return tag("div", *drawn, class_="pair") if drawn else Html()


def steps_chart(
    title: str,
    label: str,
    x: svg.Scale,
    y: svg.Scale,
    marks: Iterable[Html],
    key: Html | None = None,
    caption: str | None = None,
    tick: Callable[[float], str] = tick_label,
    unit: str = "optimizer steps",
) -> Html:
    """A figure with a quantity over steps; `label` describes it to screen readers."""
    axes = svg.y_axis(y, LEFT, RIGHT, tick), svg.x_axis(x, BOTTOM, unit)
    title += ", logarithmic" if y.log else ""
    return figure(title, svg.drawing(WIDTH, HEIGHT, label, *axes, *marks), caption, key)


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
    y = loss_scale(values) if quantity == "loss" else svg.linear_scale(values, BOTTOM, TOP, 0.0)
    marks = [
        svg.path(_points(c.steps, c.median, x, y), f"line own {_colour(groups.index(group))}")
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
    scale = svg.linear_scale(
        [0.0, *(100 * v for r in rows for v in (r.contrast.low, r.contrast.high))], _ROW_LEFT, _ROW_RIGHT
    )
    zero, above = scale(0), _ROW_TOP - 18
    parts = [
        svg.line(zero, _ROW_TOP - 12, zero, bottom, "zero"),
        svg.x_axis(scale, bottom, "percentage points of PER", _signed_tick),
        svg.text(zero - 8, above, "← better", "quiet", "end"),
        svg.text(zero + 8, above, "worse →", "quiet", "start"),
        *(_forest_row(row, at, scale) for row, at in zip(rows, places, strict=True)),
    ]
    return svg.drawing(_ROW_WIDTH, bottom + 50, label, *parts)


def _forest_row(row: ForestRow, y: float, scale: svg.Scale) -> Html:
    estimate, low, high = (100 * v for v in (row.contrast.estimate, row.contrast.low, row.contrast.high))
    kind = ("better" if estimate < 0 else "worse") if row.significant else ""
    return join(
        svg.text(8, y - 16, row.title, "strong") if row.title else Html(),
        svg.text(24, y + 4, row.name),
        svg.line(scale(low), y, scale(high), y, f"interval {kind}".strip()),
        svg.dot(scale(estimate), y, 5, f"estimate {kind}".strip()),
        svg.text(_ROW_RIGHT + 12, y + 4, f"{_signed(estimate)} ({_signed(low)} to {_signed(high)})"),
    )


def _signed_tick(value: float) -> str:
    return f"{value:+g}".replace("-", "−") if value else "0"


def _signed(value: float) -> str:
    shown = f"{value:.1f}".removesuffix(".0") if abs(value) >= 100 else f"{value:.1f}"
    shown = "0" if float(shown) == 0 else shown
    return (f"+{shown}" if value > 0 and shown != "0" else shown).replace("-", "−")


def dot_plot(arms: Sequence[tuple[str, Sequence[float]]], label: str) -> Html:
    """Error rates in per cent: a dot for each run, a bar at the mean of the arm."""
    scale = svg.linear_scale([v for _, values in arms for v in values], _ROW_LEFT, _ROW_RIGHT, 0.0)
    bottom = _ROW_TOP + _ROW * len(arms) - 8
    marks = []
    for i, (name, values) in enumerate(arms):
        y = _ROW_TOP + _ROW * i - 8
        mean = sum(values) / len(values)
        marks += [
            svg.text(24, y + 4, name),
            svg.line(_ROW_LEFT, y, _ROW_RIGHT, y, "guide"),
            *(svg.dot(scale(v), y, 4.5, "dot", f"{v:.1f} %") for v in values),
            svg.line(scale(mean), y - 9, scale(mean), y + 9, "mean"),
            svg.text(_ROW_RIGHT + 12, y + 4, f"{mean:.1f} %"),
        ]
    return svg.drawing(_ROW_WIDTH, bottom + 50, label, svg.x_axis(scale, bottom, "PER in per cent"), *marks)


def standalone_svg(drawing: Html) -> str:
    """A drawing as a separate file, with the colours and drawing rules of the pages."""
    colours, _, rules = read_style("style.css").partition("* {")
    lines = (rules + read_style("groups.css")).splitlines()
    style = tag("style", Html(colours + "\n".join(rule for rule in lines if rule.startswith("svg "))))
    background = '<rect width="100%" height="100%" style="fill: var(--paper)"/>'
    head, _, rest = drawing.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg">{style}{background}{rest}\n'
