"""Quantities over steps: thinned to what a screen can show, and drawn as lines; learning curves of several runs.

Transparent circles carry tooltips and are left out of static drawings. The parameter `hidden` is set by the pages: the
series that a click on the legend hides.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from arcuate.errors import UserError
from arcuate.evaluation.metrics import run_rate_name
from arcuate.files import finite_int, finite_number
from arcuate.insight.charts.base import HEIGHT, Chart, Row, alt, colours_by, finish, for_notebook, rounded, tooltips
from arcuate.insight.charts.formats import percent
from arcuate.insight.charts.theme import SERIES, colour
from arcuate.run import RunLike, open_run

SMALLEST = 1e-100  # a logarithmic scale treats smaller values as zero
_LOG_RATIO = 8  # losses that span more than this ratio are drawn on a logarithmic scale
_MARGIN = 0.02  # fraction of the axis after the last step, before the first too for dots: marks are clipped there
_LABEL_HEIGHT = 16
MAX_POINTS = 320  # points per line; more cannot be distinguished on a screen


@dataclass(frozen=True)
class Curve:
    """A quantity over steps, thinned: the median, minimum and maximum of each interval of steps."""

    steps: tuple[float, ...]
    median: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    n_missing: int  # logged values that are not finite

    @classmethod
    def through(cls, points: Iterable[tuple[float, float | None]]) -> "Curve":
        """A curve through points that are shown as they are."""
        steps, values = zip(*points, strict=True)
        return cls(steps, values, values, values, 0)

    @property
    def values(self) -> list[float]:
        return [v for v in (*self.low, *self.high) if v is not None]


def curve_of(rows: Sequence[Mapping[str, Any]], key: str, peak: str | None = None) -> Curve:
    """One quantity of the log; `peak` is the name of another one that holds the maximum over the same steps."""
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
    """Rows in the order of their step; if a step was run twice, the later row is kept."""
    kept = {step: {**row, "step": step} for row in rows if (step := finite_int(row.get("step"))) is not None}
    return tuple(kept[step] for step in sorted(kept))


@dataclass(frozen=True)
class Line:
    """One line of a chart with its entry in the legend."""

    name: str
    colour: str
    curve: Curve
    dash: bool = False
    dots: bool = False  # a dot at every point; a point without neighbours always has one


@dataclass(frozen=True)
class ValueAxis:
    """The vertical axis: a percentage or a number, linear from zero or logarithmic."""

    percent: bool = False
    log: bool = False
    domain: tuple[float, float] | None = None
    title: str | None = None

    @property
    def tooltip_format(self) -> str:
        return ".2%" if self.percent else ".4g"

    @property
    def _n_ticks(self) -> int:
        """Few enough for powers of ten only over several decades, enough for a label on every line within one."""
        if not self.log or self.domain is None:
            return 5
        decades = math.log10(self.domain[1] / self.domain[0])
        return 10 if decades < 1.2 else 5 if decades < 2.5 else int(decades)

    def encode(self, field: str) -> "alt.Y":
        scale: dict[str, Any] = {"type": "log"} if self.log else {"zero": True}
        if self.domain is not None:
            scale |= {"domain": list(self.domain), "nice": False, "clamp": not self.log}
        shown = "~%" if self.percent else ",~r"
        axis = alt.Axis(title=self.title, format=shown, labelOverlap=True, tickCount=self._n_ticks)
        return alt.Y(f"{field}:Q", title=self.title).scale(**scale).axis(axis)


def log_domain(values: Iterable[float]) -> tuple[float, float]:
    """A domain with a margin around positive values, wide enough for two ticks."""
    kept = [v for v in values if v > SMALLEST] or [1.0, 10.0]
    low, high = min(kept), max(kept)
    if high / low < 3:
        middle, half = math.sqrt(low) * math.sqrt(high), math.sqrt(3)
        low, high = min(low, middle / half), max(high, middle * half)
    margin = 10.0 ** (0.05 * (math.log10(high) - math.log10(low)))
    return low / margin, high * margin


def loss_axis(values: Sequence[float]) -> ValueAxis:
    """Logarithmic if the losses span a wide range, else linear from zero."""
    if values and min(values) > SMALLEST and max(values) / min(values) > _LOG_RATIO:
        return ValueAxis(log=True, domain=log_domain(values))
    return ValueAxis()


def line_chart(
    lines: Sequence[Line],
    y: ValueAxis,
    *,
    title: str,
    label: str,
    x_title: str = "optimizer steps",
    last: float | None = None,
    layers: Sequence[Chart] = (),
    marks: Sequence[tuple[int, str]] = (),
) -> "alt.LayerChart":
    """Lines over steps, each over the band between its minimum and maximum; drag pans and Ctrl + wheel zooms.

    Lines of one name share its entry in the legend. `marks` are steps where something starts, with its name.
    """
    rows = [{**row, "line": i} for i, line in enumerate(lines) for row in _line_rows(line, y.log)]
    end = max(float(last if last is not None else max((row["step"] for row in rows), default=1.0)), 1.0)
    with_dots = any("dot" in row for row in rows)
    if with_dots and not layers and not y.log and y.domain is None:  # room for dots at the top
        y = replace(y, domain=(0.0, 1.04 * max(v for line in lines for v in line.curve.values)))
    x = _x("step", x_title, (-_MARGIN * end if with_dots else 0.0, (1 + _MARGIN) * end))
    drawn, hover = _line_layers(lines, rows, x, x_title, y)
    zoom = alt.selection_interval(
        name="zoom" + re.sub("[^A-Za-z]", "", title),  # stacked charts zoom separately
        bind="scales",
        zoom="wheel![event.ctrlKey || event.metaKey]",
        clear="dblclick",
    )
    chart = alt.layer(drawn[0].add_params(zoom), *drawn[1:], *_step_marks(marks, end), *layers, hover)
    full_title = title + (", logarithmic" if y.log else "")
    return finish(chart.resolve_scale(color="shared"), full_title, label, HEIGHT, hidden=[])


def _line_layers(
    lines: Sequence[Line], rows: Sequence[Row], x: "alt.X", x_title: str, y: ValueAxis
) -> tuple[list[Chart], Chart]:
    """The lines over their bands with their dots, and transparent circles with the tooltips, to be drawn last."""
    with_band, styles = any("low" in row for row in rows), {line.name: line for line in lines}
    colours = colours_by("series", {name: line.colour for name, line in styles.items()})
    dashes = alt.StrokeDash("series:N").scale(
        domain=list(styles), range=[[5, 4] if line.dash else [1, 0] for line in styles.values()]
    )
    base = (
        alt.Chart(alt.Data(values=list(rows)))
        .transform_filter("indexof(hidden, datum.series) < 0")
        .encode(x=x, color=colours, detail="line:N")
    )
    curve = base.mark_line(strokeWidth=2, strokeJoin="round", clip=True)
    drawn = [curve.encode(y=y.encode("value"), strokeDash=dashes)]
    if with_band:
        drawn.insert(0, base.mark_area(opacity=0.22, clip=True).encode(y=y.encode("low"), y2="high:Q"))
    if any("dot" in row for row in rows):
        points = base.transform_filter("datum.dot").mark_circle(size=60, opacity=1, clip=True)
        drawn.append(points.encode(y=y.encode("value")))
    tooltip = tooltips(
        ("series:N", "series"),
        ("step:Q", x_title, ","),
        ("value:Q", "value", y.tooltip_format),
        *((f"{side}:Q", side, y.tooltip_format) for side in ("low", "high") if with_band),
    )
    hover = base.mark_circle(size=160, opacity=0, clip=True).encode(y=y.encode("value"), tooltip=tooltip)
    return drawn, hover


def _x(field: str, title: str, domain: tuple[float, float]) -> "alt.X":
    axis = alt.Axis(
        title=title,
        format="~s" if domain[1] >= 10_000 or domain[1] < 6 else ",d",
        labelExpr="datum.value === 0 ? '0' : datum.label",  # not 0k
        tickCount=6,
        labelOverlap=True,
        labelSeparation=8,
    )
    return alt.X(f"{field}:Q").scale(domain=list(domain), nice=False).axis(axis)


def _line_rows(line: Line, log: bool) -> list[Row]:
    curve = line.curve
    rows: list[Row] = []
    values = [None if v is None or (log and v <= SMALLEST) else v for v in curve.median]
    steps = [_plain_step(step) for step in curve.steps]
    for i, (step, value, low, high) in enumerate(zip(steps, values, curve.low, curve.high, strict=True)):
        if value is None:
            rows.append({"series": line.name, "step": step, "value": None})
            continue
        row = {"series": line.name, "step": step, "value": rounded(value)}
        if line.dots or all(v is None for v in (*values[max(i - 1, 0) : i], *values[i + 1 : i + 2])):
            row["dot"] = True
        low = value if low is None or (log and low <= SMALLEST) else low
        high = value if high is None else high
        if low != high:
            row |= {"low": rounded(low), "high": rounded(high)}
        rows.append(row)
    return rows


def _plain_step(step: float) -> float:
    """A step as an integer, if JavaScript can represent it as one."""
    return int(step) if abs(step) < 2**53 and float(step).is_integer() else float(step)


def best_mark(step: float, rate: float, y: ValueAxis, last: float, top: float) -> list[Chart]:
    """A ring at the best error rate with its value, below it where the axis to `top` leaves room: curves are above."""
    low = y.domain[0] if y.domain else 0.0
    shown = max(rate, low)
    position = math.log(shown / low) / math.log(top / low) if y.log else shown / max(top, SMALLEST)
    row = {"step": _plain_step(step), "value": rounded(shown), "text": f"best {percent(rate)}"}
    base = alt.Chart(alt.Data(values=[row])).encode(x="step:Q", y=y.encode("value"))
    right = step > last / 2
    ring = base.mark_point(size=90, strokeWidth=2.5, color=colour("blue"), fill=colour("paper"), opacity=1)
    place: dict[str, Any] = {"align": "right" if right else "left", "dy": 16 if position > 0.15 else -14, "clip": True}
    return [*haloed(base.encode(text="text:N"), **place, dx=0 if right else -4, fontWeight=600), ring]


def haloed(base: Chart, **place: Any) -> list[Chart]:
    """Text over a halo in the colour of the page, readable on lines."""
    ink = place.pop("color", colour("ink"))
    looks: list[dict[str, Any]] = [{"stroke": colour("paper"), "strokeWidth": 4}, {"color": ink}]
    return [base.mark_text(**place, **look) for look in looks]


def limit_rule(value: float, y: ValueAxis, name: str) -> Chart:
    """A dashed horizontal line."""
    data = alt.Data(values=[{"value": rounded(value), "name": name}])
    rule = alt.Chart(data).mark_rule(color=colour("ink"), strokeDash=[6, 4], strokeWidth=1.3)
    return rule.encode(y=y.encode("value"), tooltip=tooltips(("name:N", "limit")))


def _step_marks(marks: Sequence[tuple[int, str]], last: float) -> list[Chart]:
    """A vertical line at each step, with its label above the chart, where it hides no curve."""
    events: dict[int, list[str]] = {}
    for step, event in marks:
        events.setdefault(step, []).append(event)
    layers: list[Chart] = []
    for i, (step, names) in enumerate(events.items()):
        data = alt.Data(values=[{"step": _plain_step(step), "event": f"{', '.join(names)} from {step:,}"}])
        inside = alt.condition("inrange(datum.step, domain('x'))", alt.value(1), alt.value(0))  # not after zooming
        base = alt.Chart(data).encode(x="step:Q", opacity=inside)
        style: dict[str, Any] = {"color": colour("orange"), "clip": False}
        place: dict[str, Any] = {"align": "right", "dx": -4} if step > last / 2 else {"align": "left", "dx": 4}
        top = -2 - _LABEL_HEIGHT * (i + 1)
        rule = base.mark_rule(strokeDash=[2, 3], strokeWidth=1.5, **style)
        label = base.mark_text(baseline="top", **style, **place)
        layers += [
            rule.encode(y=alt.value(top), y2=alt.value("height")),
            label.encode(text="event:N", y=alt.value(top)),
        ]
    return layers


def band_layers(grid: Sequence[float], mean: Sequence[float], half: Sequence[float], y: ValueAxis) -> list[Chart]:
    """A reference: a dashed mean over a band."""
    floor = y.domain[0] if y.domain else 0.0
    ceiling = y.domain[1] if y.domain else math.inf
    clip = lambda value: rounded(min(max(float(value), floor), ceiling))
    rows = [
        {"step": rounded(s), "value": clip(m), "low": clip(m - h), "high": clip(m + h)}
        for s, m, h in zip(grid, mean, half, strict=True)
        if math.isfinite(m)
    ]
    base = alt.Chart(alt.Data(values=rows)).encode(x="step:Q")
    area = base.mark_area(opacity=0.18, color=colour("teal"), clip=True).encode(y=y.encode("low"), y2="high:Q")
    line = base.mark_line(color=colour("teal"), strokeDash=[5, 4], strokeWidth=1.5, clip=True)
    return [area, line.encode(y=y.encode("value"))]


GroupedRun = tuple[str, Sequence[Mapping[str, Any]]]  # group, rows of the log


def overlaid_curves(runs: Sequence[GroupedRun], rate_name: str) -> list["alt.LayerChart"]:
    """Validation error rate and training loss of several runs over steps, runs of one group in one colour."""
    validation = [rows_by_step(r for r in log if r.get("split") != "train" and "per" in r) for _, log in runs]
    training = [rows_by_step(r for r in log if r.get("split") == "train") for _, log in runs]
    found = (
        _overlaid(validation, "per", f"{rate_name} on validation", runs),
        _overlaid(training, "loss", "Training loss", runs),
    )
    return [chart for chart in found if chart is not None]


def _overlaid(
    logs: Sequence[Sequence[Mapping[str, Any]]], quantity: str, title: str, runs: Sequence[GroupedRun]
) -> "alt.LayerChart | None":
    curves = [curve_of(rows, quantity) for rows in logs]
    values = [v for curve in curves for v in curve.median if v is not None]
    if not values:
        return None
    styles = group_colours([group for group, _ in runs])
    lines = [
        Line(group, styles[group][0], replace(curve, low=curve.median, high=curve.median), styles[group][1])
        for curve, (group, _) in zip(curves, runs, strict=True)
    ]
    return line_chart(
        lines,
        loss_axis(values) if quantity == "loss" else ValueAxis(percent=True),
        title=title,
        label=f"{title} over steps, {len(runs)} runs: {', '.join(styles)}",
    )


def group_colours(groups: Sequence[str]) -> dict[str, tuple[str, bool]]:
    """The colour of each group, and whether its line is dashed because all colours are in use."""
    names = list(dict.fromkeys(groups))
    return {name: (SERIES[i % len(SERIES)], i >= len(SERIES)) for i, name in enumerate(names)}


def plot_curves(*runs: RunLike) -> Any:
    """Validation error rate and training loss of one or more runs over steps as an Altair chart."""
    opened = [open_run(run) for run in runs]
    charts = overlaid_curves([(run.name, run.metrics()) for run in opened], run_rate_name(*opened))
    if not charts:
        paths = ", ".join(str(run.path) for run in opened) or "an empty list of runs"
        raise UserError(f"{paths}: nothing to plot, the log has neither losses nor error rates yet")
    return for_notebook(*charts)
