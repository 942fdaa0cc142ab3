"""Charts shared by pages and notebooks: curves over steps, rates by session, matrices, images, forest and dot plots.

Every function returns an Altair chart. Layers named `hover…` carry tooltips and are left out of static drawings. The
parameters `hidden`, `session` and `phoneme` are set by the pages: hidden series, and what the pointer is over.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from arcuate.charts import theme
from arcuate.charts.formats import percent
from arcuate.charts.images import png
from arcuate.charts.series import Curve, curve_of, rows_by_step
from arcuate.charts.theme import SERIES, colour

if TYPE_CHECKING:
    import altair as alt

    Chart = alt.Chart | alt.LayerChart
else:
    Chart = Any

HEIGHT = 260
SMALLEST = 1e-100  # a logarithmic scale treats smaller values as zero
_LOG_RATIO = 8  # losses that span more than this ratio are drawn on a logarithmic scale
_FAINT = 0.15  # opacity of what is not highlighted
_SIGNIFICANT_DIGITS = 6

Row = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """One line of a chart with its entry in the legend."""

    name: str
    colour: str
    curve: Curve
    dash: bool = False


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

    def encode(self, field: str) -> "alt.Y":
        import altair as alt

        scale: dict[str, Any] = {"type": "log"} if self.log else {"zero": True}
        if self.domain is not None:
            scale |= {"domain": list(self.domain), "nice": False, "clamp": not self.log}
        shown = "~%" if self.percent else ",~r"
        axis = alt.Axis(title=self.title, format=shown, labelOverlap=True, tickCount=5)
        return alt.Y(f"{field}:Q", title=self.title).scale(**scale).axis(axis)


def for_notebook(*charts: Chart, dark: bool = False) -> Any:
    """Charts below one another with the theme, their own legends and fixed colours, to show outside a page."""
    import altair as alt

    specs = []
    for i, chart in enumerate(charts):
        spec = chart.to_dict(validate=False)
        del spec["config"], spec["$schema"]
        spec["width"] = spec["width"] if isinstance(spec.get("width"), int) else 560
        specs.append(_standalone(spec, i))
    whole = specs[0]
    if len(specs) > 1:  # parameters are declared at the top
        whole = {"params": [p for spec in specs for p in spec.pop("params", ())], "vconcat": specs}
    text = json.dumps({**whole, "config": theme.config(legend=True)})
    return alt.Chart.from_dict(json.loads(theme.resolve(text, theme.DARK if dark else theme.LIGHT)))


def _standalone(value: Any, number: int) -> Any:
    """A part of a specification without the parameters that a page sets, and with unique names."""
    if isinstance(value, list):
        return [_standalone(v, number) for v in value]
    if not isinstance(value, dict):
        return value
    kept = {key: _standalone(v, number) for key, v in value.items() if key != "values"}
    if "values" in value:
        kept["values"] = value["values"]
    if "transform" in kept:
        kept["transform"] = [t for t in kept["transform"] if "hidden" not in str(t.get("filter", ""))]
    if "params" in kept:
        kept["params"] = [
            {**p, "name": f"{p['name']}{number}"} if p["name"] == "zoom" else p
            for p in kept["params"]
            if p["name"] != "hidden"
        ]
    return kept


# --- curves over steps ------------------------------------------------------------------------------------


def log_domain(values: Iterable[float]) -> tuple[float, float]:
    """A domain with a margin around positive values, wide enough for two ticks."""
    kept = [v for v in values if v > SMALLEST] or [1.0, 10.0]
    low, high = min(kept), max(kept)
    if high / low < 4:
        middle = math.sqrt(low) * math.sqrt(high)
        low, high = min(low, middle / 2), max(high, middle * 2)
    margin = 10.0 ** (0.05 * (math.log10(high) - math.log10(low)))
    return low / margin, high * margin


def loss_axis(values: Sequence[float]) -> ValueAxis:
    """Logarithmic if the losses span a wide range, else linear from zero."""
    if min(values) > SMALLEST and max(values) / min(values) > _LOG_RATIO:
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
    height: int = HEIGHT,
    dots: bool = False,
) -> "alt.LayerChart":
    """Lines over steps, each over the band between its minimum and maximum; drag pans and Ctrl + wheel zooms."""
    import altair as alt

    rows = [row for line in lines for row in _line_rows(line, y.log)]
    end = last if last is not None else max((row["step"] for row in rows), default=1.0)
    series = alt.Color("series:N").scale(
        domain=[line.name for line in lines], range=[colour(line.colour) for line in lines]
    )
    base = (
        alt.Chart(alt.Data(values=rows))
        .transform_filter("indexof(hidden, datum.series) < 0")
        .encode(x=_x("step", x_title, (0.0, max(float(end), 1.0))), color=series)
    )
    drawn: list[Chart] = []
    if any("low" in row for row in rows):
        band = base.mark_area(opacity=0.22, clip=True).encode(y=y.encode("low"), y2="high:Q")
        drawn.append(band)
    dashes = alt.StrokeDash("series:N", legend=None).scale(
        domain=[line.name for line in lines], range=[[5, 4] if line.dash else [1, 0] for line in lines]
    )
    zoom = alt.selection_interval(
        name="zoom", bind="scales", zoom="wheel![event.ctrlKey || event.metaKey]", clear="dblclick"
    )
    curve = base.mark_line(strokeWidth=2, strokeJoin="round", clip=True).encode(y=y.encode("value"), strokeDash=dashes)
    drawn.append(curve.add_params(zoom))
    if dots or any("lone" in row for row in rows):
        points = base if dots else base.transform_filter("datum.lone")
        drawn.append(points.mark_circle(size=60 if dots else 24, opacity=1, clip=True).encode(y=y.encode("value")))
    tooltip = [
        alt.Tooltip("series:N", title="series"),
        alt.Tooltip("step:Q", title=x_title, format=","),
        alt.Tooltip("value:Q", title="value", format=y.tooltip_format),
        *(
            [alt.Tooltip(f"{side}:Q", format=y.tooltip_format) for side in ("low", "high")]
            if any("low" in row for row in rows)
            else []
        ),
    ]
    hover = base.mark_circle(size=160, opacity=0, clip=True).encode(y=y.encode("value"), tooltip=tooltip)
    drawn += [*layers, hover.properties(name="hover")]
    full_title = title + (", logarithmic" if y.log else "")
    return _finish(alt.layer(*drawn).resolve_scale(color="shared"), full_title, label, height, hidden=[])


def _x(field: str, title: str, domain: tuple[float, float]) -> "alt.X":
    import altair as alt

    axis = alt.Axis(
        title=title,
        format="~s" if domain[1] >= 10_000 or domain[1] < 6 else ",d",
        labelExpr="datum.value === 0 ? '0' : datum.label",  # not 0k
        tickCount=6,
        labelOverlap=True,
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
        if all(v is None for v in (*values[max(i - 1, 0) : i], *values[i + 1 : i + 2])):
            row["lone"] = True
        low = value if low is None or (log and low <= SMALLEST) else low
        high = value if high is None else high
        if low != high:
            row |= {"low": rounded(low), "high": rounded(high)}
        rows.append(row)
    return rows


def _plain_step(step: float) -> float:
    """A step as an integer, if JavaScript can represent it as one."""
    return int(step) if abs(step) < 2**53 and float(step).is_integer() else float(step)


def rounded(value: float) -> float:
    return float(f"{value:.{_SIGNIFICANT_DIGITS}g}")


def best_mark(step: float, rate: float, y: ValueAxis, last: float) -> list[Chart]:
    """A ring at the best error rate with its value."""
    import altair as alt

    low = y.domain[0] if y.domain else 0.0
    row = {"step": _plain_step(step), "value": rounded(max(rate, low)), "text": f"best {percent(rate)}"}
    base = alt.Chart(alt.Data(values=[row])).encode(x="step:Q", y=y.encode("value"))
    right = step > last / 2
    ring = base.mark_point(size=90, strokeWidth=2.5, color=colour("blue"), fill=colour("paper"), opacity=1)
    place: dict[str, Any] = {"align": "right" if right else "left", "dy": -14, "dx": 4 if right else -4}
    text = [
        base.mark_text(**place, **look, fontWeight=600).encode(text="text:N")
        for look in ({"stroke": colour("paper"), "strokeWidth": 4}, {"color": colour("ink")})  # a halo first
    ]
    return [*text, ring]


def limit_rule(value: float, y: ValueAxis, name: str) -> Chart:
    """A dashed horizontal line."""
    import altair as alt

    data = alt.Data(values=[{"value": rounded(value), "name": name}])
    rule = alt.Chart(data).mark_rule(color=colour("ink"), strokeDash=[6, 4], strokeWidth=1.3)
    return rule.encode(y=y.encode("value"), tooltip=[alt.Tooltip("name:N", title="limit")])


def step_marks(marks: Sequence[tuple[int, str]], last: float) -> list[Chart]:
    """A labelled vertical line at each (step, event)."""
    import altair as alt

    layers: list[Chart] = []
    for i, (step, event) in enumerate(marks):
        data = alt.Data(values=[{"step": _plain_step(step), "event": event}])
        base = alt.Chart(data).encode(x="step:Q")
        right = step > last / 2
        text = base.mark_text(
            align="right" if right else "left", dx=-5 if right else 5, color=colour("orange"), fontSize=12
        )
        layers += [
            base.mark_rule(color=colour("orange"), strokeDash=[2, 3], strokeWidth=1.5),
            text.encode(text="event:N", y=alt.value(8 + 17 * i)),
        ]
    return layers


def band_layers(grid: Sequence[float], mean: Sequence[float], half: Sequence[float], y: ValueAxis) -> list[Chart]:
    """A reference: a dashed mean over a band."""
    import altair as alt

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


def overlaid_curves(runs: Sequence[GroupedRun]) -> list["alt.LayerChart"]:
    """Validation error rate and training loss of several runs over steps, runs of one group in one colour."""
    validation = [rows_by_step(r for r in log if r.get("split") != "train" and "per" in r) for _, log in runs]
    training = [rows_by_step(r for r in log if r.get("split") == "train") for _, log in runs]
    found = (
        _overlaid(validation, "per", "Phoneme error rate on validation", runs),
        _overlaid(training, "loss", "Training loss", runs),
    )
    return [chart for chart in found if chart is not None]


def _overlaid(
    logs: Sequence[Sequence[Mapping[str, Any]]], quantity: str, title: str, runs: Sequence[GroupedRun]
) -> "alt.LayerChart | None":
    import altair as alt

    curves = [curve_of(rows, quantity) for rows in logs]
    values = [v for curve in curves for v in curve.median if v is not None]
    if not values:
        return None
    y = loss_axis(values) if quantity == "loss" else ValueAxis(percent=True)
    entries = group_colours([group for group, _ in runs])
    rows = [
        {**row, "run": i}
        for i, (curve, (group, _)) in enumerate(zip(curves, runs, strict=True))
        for row in _line_rows(Line(group, entries[group][0], curve), y.log)
    ]
    names = list(entries)
    series = alt.Color("series:N").scale(domain=names, range=[colour(entries[name][0]) for name in names])
    dashes = alt.StrokeDash("series:N", legend=None).scale(
        domain=names, range=[[5, 4] if entries[name][1] else [1, 0] for name in names]
    )
    last = max(s for curve in curves for s in curve.steps)
    base = (
        alt.Chart(alt.Data(values=rows))
        .transform_filter("indexof(hidden, datum.series) < 0")
        .encode(
            x=_x("step", "optimizer steps", (0.0, max(last, 1.0))), y=y.encode("value"), color=series, detail="run:N"
        )
    )
    zoom = alt.selection_interval(
        name="zoom", bind="scales", zoom="wheel![event.ctrlKey || event.metaKey]", clear="dblclick"
    )
    tooltip = [
        alt.Tooltip("series:N", title="run"),
        alt.Tooltip("step:Q", title="optimizer steps", format=","),
        alt.Tooltip("value:Q", title="PER" if quantity == "per" else "loss", format=y.tooltip_format),
    ]
    layers: list[Chart] = [
        base.mark_line(strokeWidth=1.7, opacity=0.85, clip=True).encode(strokeDash=dashes).add_params(zoom),
        base.mark_circle(size=160, opacity=0, clip=True).encode(tooltip=tooltip).properties(name="hover"),
    ]
    if any("lone" in row for row in rows):
        layers.append(base.transform_filter("datum.lone").mark_circle(size=24, opacity=1))
    label = f"{title} over steps, {len(runs)} runs: {', '.join(names)}"
    return _finish(alt.layer(*layers), title + (", logarithmic" if y.log else ""), label, HEIGHT, hidden=[])


def group_colours(groups: Sequence[str]) -> dict[str, tuple[str, bool]]:
    """The colour of each group, and whether its line is dashed because the colours are used up."""
    names = list(dict.fromkeys(groups))
    return {name: (SERIES[i % len(SERIES)], i >= len(SERIES)) for i, name in enumerate(names)}


# --- rates by session -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rate:
    """The error rate of one session with its interval."""

    session: str
    rate: float | None
    low: float | None = None
    high: float | None = None
    note: str = ""  # in the tooltip
    series: str = ""
    hollow: bool = False


def session_chart(
    rates: Sequence[Rate], names: Mapping[str, str], *, title: str, label: str, overall: float | None = None
) -> "alt.LayerChart":
    """Error rate of each session in order, with its interval; `names` are the labels of the sessions.

    Rates of several series are joined by lines.
    """
    import altair as alt

    sessions = list(dict.fromkeys(rate.session for rate in rates))
    rows = [
        {
            "session": r.session, "name": names[r.session], "rate": None if r.rate is None else rounded(r.rate),
            "low": r.low, "high": r.high, "note": r.note, "series": r.series, "hollow": r.hollow,
            "interval": "" if r.low is None or r.high is None else f"{100 * r.low:.1f} – {100 * r.high:.1f} %",
        }
        for r in rates
    ]  # fmt: skip
    y = ValueAxis(percent=True)
    short = [names[session] for session in sessions]
    rotated = len(short) * max(map(len, short), default=1) > 90
    axis = alt.Axis(
        title=None, labelAngle=-45 if rotated else 0, labelOverlap="greedy" if not rotated else True, labelLimit=110
    )
    series = list(dict.fromkeys(r.series for r in rates))
    scale = alt.Color("series:N").scale(
        domain=series, range=[colour("train"), colour("blue")] if len(series) > 1 else [colour("blue")]
    )
    base = (
        alt.Chart(alt.Data(values=rows))
        .transform_filter("indexof(hidden, datum.series) < 0")
        .encode(x=alt.X("name:N", sort=None).scale(domain=short, padding=0.5).axis(axis), color=scale)
    )
    tooltip = [
        alt.Tooltip("session:N", title="session"),
        alt.Tooltip("rate:Q", title="error rate", format=".2%"),
        *([alt.Tooltip("interval:N", title="95 % interval")] if any(r.low is not None for r in rates) else []),
        *([alt.Tooltip("series:N", title="series")] if len(series) > 1 else []),
        *([alt.Tooltip("note:N", title="trials")] if any(r.note for r in rates) else []),
    ]
    layers: list[Chart] = []
    if overall is not None:
        layers.append(limit_rule(overall, y, f"all trials, {percent(overall)}"))
    if len(series) > 1:
        layers.append(base.mark_line(strokeWidth=2).encode(y=y.encode("rate")))
    if any(r.low is not None for r in rates):
        layers.append(
            base.mark_rule(strokeWidth=2).encode(y=y.encode("low"), y2="high:Q", opacity=_highlight("session", 0.45))
        )
    point = base.mark_point(size=70, strokeWidth=2).encode(
        y=y.encode("rate"),
        tooltip=tooltip,
        opacity=_highlight("session"),
        fill=alt.condition("datum.hollow", alt.value(colour("paper")), scale),
    )
    layers.append(point)
    chart = alt.layer(*layers).resolve_scale(color="shared", fill="independent")
    return _finish(chart, title, label, HEIGHT, hidden=[], session="")


def _highlight(parameter: str, opacity: float = 1.0) -> Any:
    """Opacity that singles out what the pointer is over, in this chart or a linked one."""
    import altair as alt

    test = f"{parameter} === '' || datum.{parameter} === {parameter}"
    return alt.condition(test, alt.value(opacity), alt.value(_FAINT))


# --- matrices ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One cell of a matrix; `opacity` is the strength of its colour."""

    row: str
    column: str
    colour: str
    opacity: float
    text: str  # in the tooltip


def matrix_chart(
    cells: Sequence[Cell],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str,
    label: str,
    size: int,
    row_title: str,
    column_title: str,
    highlight: str | None = None,
    top: bool = True,
) -> Chart:
    """Cells with tooltips; blank names in `rows` and `columns` are gaps. `highlight` links rows with other charts."""
    import altair as alt

    data = [
        {"row": c.row, "column": c.column, "colour": colour(c.colour), "opacity": round(c.opacity, 3), "text": c.text}
        | ({highlight: c.row} if highlight else {})
        for c in cells
    ]
    every = max(1, round(14 / size))
    axis: dict[str, Any] = {"grid": False, "domain": False, "ticks": False, "labelFontSize": 11, "labelLimit": 110}
    x_values = [name for name in columns if name.strip()][::every]
    y_values = [name for name in rows if name.strip()][::every]
    x_axis = alt.Axis(
        orient="top" if top else "bottom",
        labelAngle=-90 if top else -45,
        values=x_values,
        title=column_title,
        titleAnchor="start",
        **axis,
    )
    y_axis = alt.Axis(values=y_values, title=row_title, **axis)
    rect = (
        alt.Chart(alt.Data(values=data))
        .mark_rect(stroke=colour("paper"), strokeWidth=1 if size > 5 else 0)
        .encode(
            x=alt.X("column:N").scale(domain=list(columns), padding=0).axis(x_axis),
            y=alt.Y("row:N").scale(domain=list(rows), padding=0).axis(y_axis),
            color=alt.Color("colour:N", scale=None, legend=None),
            fillOpacity=alt.FillOpacity("opacity:Q", scale=None, legend=None),
            tooltip=[
                alt.Tooltip("row:N", title=row_title),
                alt.Tooltip("column:N", title=column_title),
                alt.Tooltip("text:N", title=" "),
            ],
        )
    )
    if highlight:
        rect = rect.encode(opacity=_highlight(highlight))
    chart = rect.properties(width=size * len(columns), height=size * len(rows), title=title, description=label)
    return chart.add_params(alt.param(name=highlight, value="")) if highlight else chart


def bar_chart(rows: Sequence[Row], *, title: str, label: str, key: str, kinds: Mapping[str, str]) -> Chart:
    """Stacked rates by `key`; rows have the key, `kind`, `rate` and `text`, and `kinds` gives the colours."""
    import altair as alt

    names = list(dict.fromkeys(row[key] for row in rows))
    axis = alt.Axis(title=None, labelAngle=-90, labelFontSize=11, labelOverlap=True)
    chart = (
        alt.Chart(alt.Data(values=list(rows)))
        .transform_filter("indexof(hidden, datum.kind) < 0")
        .mark_bar()
        .encode(
            x=alt.X(f"{key}:N").scale(domain=names, padding=0.25).axis(axis),
            y=ValueAxis(percent=True).encode("rate"),
            color=alt.Color("kind:N").scale(domain=list(kinds), range=[colour(c) for c in kinds.values()]),
            opacity=_highlight(key),
            tooltip=[
                alt.Tooltip(f"{key}:N"),
                alt.Tooltip("kind:N"),
                alt.Tooltip("rate:Q", format=".2%"),
                alt.Tooltip("text:N", title="count"),
            ],
        )
    )
    return _finish(chart, title, label, 200, **{"hidden": [], key: ""})


def scatter_chart(rows: Sequence[Row], *, title: str, x_title: str, colours: Mapping[str, str]) -> Chart:
    """Points with `value`, `per`, `state`, `number` and `text`; text values are categories, wide ranges logarithmic."""
    import altair as alt

    values = [row["value"] for row in rows]
    numeric = all(isinstance(v, (int, float)) and math.isfinite(v) for v in values)
    wide = numeric and min(values) > 0 and max(values) / min(values) > 30
    x = alt.X(f"value:{'Q' if numeric else 'N'}").axis(alt.Axis(title=x_title, labelOverlap=True, tickCount=6))
    if numeric:
        x = x.scale(type="log") if wide else x.scale(zero=False)
    chart = (
        alt.Chart(alt.Data(values=[row if numeric else {**row, "value": str(row["value"])} for row in rows]))
        .transform_filter("indexof(hidden, datum.state) < 0")
        .mark_circle(size=70, opacity=0.8)
        .encode(
            x=x,
            y=ValueAxis(percent=True).encode("per"),
            color=alt.Color("state:N").scale(domain=list(colours), range=[colour(c) for c in colours.values()]),
            tooltip=[
                alt.Tooltip("number:Q", title="trial"),
                alt.Tooltip("per:Q", title="PER", format=".2%"),
                alt.Tooltip("state:N"),
                alt.Tooltip("text:N", title="settings"),
            ],
        )
    )
    return _finish(chart, title, title, HEIGHT, hidden=[])


def image_chart(
    values: np.ndarray, columns: Sequence[str], *, title: str, label: str, y_title: str, height: int
) -> "alt.LayerChart":
    """An array (rows, columns) of values from 0 to 1 as one image over named columns."""
    import altair as alt

    n_rows = values.shape[0]
    rotated = len(columns) * max(map(len, columns), default=1) > 90
    axis = alt.Axis(title=None, labelAngle=-45 if rotated else 0, labelOverlap=True, labelLimit=110)
    names = alt.Chart(alt.Data(values=[{"name": name} for name in columns])).mark_rect(opacity=0)
    frame = names.encode(
        x=alt.X("name:N", sort=None).scale(domain=list(columns), padding=0).axis(axis), tooltip=["name:N"]
    )
    y_axis = alt.Axis(title=y_title, grid=False, tickCount=6, format="d")
    y = alt.Y("row:Q").scale(domain=[0, n_rows], nice=False, reverse=True).axis(y_axis)
    size: dict[str, Any] = {"width": alt.ExprRef("width"), "height": alt.ExprRef("height")}
    data = alt.Data(values=[{"url": png(values), "row": 0}])
    picture = alt.Chart(data).mark_image(aspect=False, align="left", baseline="top", smooth=False, **size)
    picture = picture.encode(url="url:N", x=alt.value(0), y=y)
    return _finish(alt.layer(frame, picture), title, label, height)


# --- differences ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForestRow:
    """One difference in PER with its confidence interval; positive is worse."""

    name: str
    estimate: float
    low: float
    high: float
    significant: bool


def forest_chart(rows: Sequence[ForestRow], *, title: str, label: str) -> "alt.LayerChart":
    """Each difference as a dot on its interval; filled if significant, coloured by its direction."""
    import altair as alt

    data: list[Row] = []
    for row in rows:
        shown: Row = {"name": row.name, "estimate": 100 * row.estimate, "low": 100 * row.low, "high": 100 * row.high}
        direction = "better" if row.estimate < 0 else "worse"
        verdict = direction if row.significant else "not significant"
        text = f"{_signed(shown['estimate'])} ({_signed(shown['low'])} to {_signed(shown['high'])})"
        data.append({**shown, "verdict": verdict, "text": text, "fill": row.significant})
    kinds = {"better": "teal", "worse": "orange", "not significant": "quiet"}
    scale = alt.Color("verdict:N").scale(domain=list(kinds), range=[colour(c) for c in kinds.values()])
    bounds = [0.0, *(v for row in data for v in (row["low"], row["high"]))]
    margin = 0.06 * (max(bounds) - min(bounds)) or 1.0
    domain = [min(bounds) - margin, max(bounds) + margin]
    names = [row.name for row in rows]
    x = (
        alt.X("estimate:Q")
        .scale(domain=domain, nice=False)
        .axis(alt.Axis(title="← better   points of PER   worse →", format="+~g", tickCount=6, titleAnchor="middle"))
    )
    y = alt.Y("name:N", sort=None).scale(domain=names).axis(
        alt.Axis(title=None, grid=True, labelFontSize=13, labelLimit=150, orient="left")
    )  # fmt: skip
    base = alt.Chart(alt.Data(values=data)).encode(y=y, color=scale)
    tooltip = [alt.Tooltip("name:N", title=" "), alt.Tooltip("text:N", title="points of PER"), alt.Tooltip("verdict:N")]
    layers: list[Chart] = [
        alt.Chart(alt.Data(values=[{"x": 0}])).mark_rule(color=colour("ink"), strokeWidth=1.2).encode(x="x:Q"),
        base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q"), x2="high:Q"),
        base.mark_point(size=80, strokeWidth=2).encode(
            x=x, fill=alt.condition("datum.fill", scale, alt.value(colour("paper"))), tooltip=tooltip
        ),
        base.mark_text(dy=-13, fontSize=11.5, color=colour("ink")).encode(
            x=x, text="text:N", color=alt.value(colour("ink"))
        ),
    ]
    return _finish(alt.layer(*layers), title, label, 44 * len(rows) + 10)


def _signed(value: float) -> str:
    shown = f"{value:.1f}".removesuffix(".0") if abs(value) >= 100 else f"{value:.1f}"
    shown = "0" if float(shown) == 0 else shown
    return (f"+{shown}" if value > 0 and shown != "0" else shown).replace("-", "−")


def dot_chart(groups: Sequence[tuple[str, Sequence[float]]], *, title: str, label: str) -> "alt.LayerChart":
    """Error rates: a dot for each run, a bar at the mean of its group."""
    import altair as alt

    rows = [{"name": name, "rate": rounded(v)} for name, values in groups for v in values]
    means = [{"name": name, "mean": sum(values) / len(values)} for name, values in groups]
    y = alt.Y("name:N", sort=None).scale(domain=[name for name, _ in groups]).axis(
        alt.Axis(title=None, grid=True, labelFontSize=13, labelLimit=150)
    )  # fmt: skip
    x = alt.X("rate:Q").scale(zero=True).axis(alt.Axis(title="PER", format="~%", tickCount=6))
    dots = alt.Chart(alt.Data(values=rows)).mark_circle(size=75, opacity=0.75, color=colour("blue"))
    bars = alt.Chart(alt.Data(values=means)).mark_tick(thickness=2.4, size=20, color=colour("ink"))
    text = alt.Chart(alt.Data(values=means)).mark_text(dy=-15, fontSize=11.5, color=colour("ink"))
    mean = alt.X("mean:Q")
    layers: list[Chart] = [
        dots.encode(x=x, y=y, tooltip=["name:N", alt.Tooltip("rate:Q", title="PER", format=".2%")]),
        bars.encode(x=mean, y=y, tooltip=["name:N", alt.Tooltip("mean:Q", title="mean PER", format=".2%")]),
        text.encode(x=mean, y=y, text=alt.Text("mean:Q", format=".1%")),
    ]
    return _finish(alt.layer(*layers), title, label, 40 * len(groups) + 10)


def _finish(chart: Any, title: str, label: str, height: int, **parameters: Any) -> Any:
    """Title, description for screen readers, size, and the parameters that the page sets."""
    import altair as alt

    params = [alt.param(name=name, value=value) for name, value in parameters.items()]
    sized = chart.properties(width="container", height=height, title=title, description=label)
    return sized.add_params(*params) if params else sized
