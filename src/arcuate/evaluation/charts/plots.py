"""Charts shared by pages and notebooks: rates by session, matrices, bars, images, forest and dot plots.

Every function returns an Altair chart. The parameters `hidden`, `session` and `phoneme` are set by the pages: hidden
series, and the item under the pointer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arcuate.evaluation.charts.base import HEIGHT, Chart, Row, alt, colours_by, finish, rounded, tooltips
from arcuate.evaluation.charts.curves import ValueAxis, haloed, limit_rule
from arcuate.evaluation.charts.formats import interval, percent
from arcuate.evaluation.charts.images import png
from arcuate.evaluation.charts.theme import colour
from arcuate.evaluation.significance import Contrast

_FAINT = 0.15  # opacity of items that are not highlighted


# --- rates by session -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rate:
    """The error rate of one session with its interval."""

    session: str
    rate: float | None
    low: float | None = None
    high: float | None = None
    note: str = ""  # shown in the tooltip
    series: str = ""
    hollow: bool = False


def session_chart(
    rates: Sequence[Rate], names: Mapping[str, str], *, title: str, label: str, overall: float | None = None
) -> "alt.LayerChart":
    """Error rate of each session in order, with its interval; `names` are the labels of the sessions.

    Rates of several series are joined by lines.
    """
    sessions = list(dict.fromkeys(rate.session for rate in rates))
    rows = [
        {
            "session": r.session, "name": names[r.session], "rate": None if r.rate is None else rounded(r.rate),
            "low": r.low, "high": r.high, "note": r.note, "series": r.series, "hollow": r.hollow,
            "interval": interval((r.low, r.high)),
        }
        for r in rates
    ]  # fmt: skip
    y = ValueAxis(percent=True)
    series = list(dict.fromkeys(r.series for r in rates))
    scale = colours_by("series", dict(zip(series, ("train", "blue") if len(series) > 1 else ("blue",), strict=False)))
    base = (
        alt.Chart(alt.Data(values=rows))
        .transform_filter("indexof(hidden, datum.series) < 0")
        .encode(x=_names_axis([names[session] for session in sessions], padding=0.5), color=scale)
    )
    with_interval = any(r.low is not None for r in rates)
    tooltip = tooltips(
        ("session:N", "session"),
        ("rate:Q", "error rate", ".2%"),
        *([("interval:N", "95 % interval")] if with_interval else []),
        *([("series:N", "series")] if len(series) > 1 else []),
        *([("note:N", "trials")] if any(r.note for r in rates) else []),
    )
    layers: list[Chart] = []
    if overall is not None:
        layers.append(limit_rule(overall, y, f"all trials, {percent(overall)}"))
    if len(series) > 1:
        layers.append(base.mark_line(strokeWidth=2).encode(y=y.encode("rate")))
    if with_interval:
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
    return finish(chart, title, label, HEIGHT, hidden=[], session="")


def _names_axis(names: Sequence[str], padding: float) -> "alt.X":
    """Names side by side; long ones are rotated."""
    rotated = len(names) * max(map(len, names), default=1) > 90
    axis = alt.Axis(title=None, labelAngle=-45 if rotated else 0, labelOverlap=True, labelLimit=110)
    return alt.X("name:N", sort=None).scale(domain=list(names), padding=padding).axis(axis)


def _highlight(parameter: str, opacity: float = 1.0) -> Any:
    """Opacity that highlights the item under the pointer, in this chart and linked ones."""
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
    text: str  # shown in the tooltip


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
            tooltip=tooltips(("row:N", row_title), ("column:N", column_title), ("text:N", " ")),
        )
    )
    if highlight:
        rect = rect.encode(opacity=_highlight(highlight))
    chart = rect.properties(width=size * len(columns), height=size * len(rows), title=title, description=label)
    return chart.add_params(alt.param(name=highlight, value="")) if highlight else chart


def bar_chart(rows: Sequence[Row], *, title: str, label: str, key: str, kinds: Mapping[str, str]) -> Chart:
    """Stacked rates by `key`; rows have the key, `kind`, `rate` and `text`, and `kinds` gives the colours."""
    names = list(dict.fromkeys(row[key] for row in rows))
    axis = alt.Axis(title=None, labelAngle=-90, labelFontSize=11, labelOverlap=True)
    chart = (
        alt.Chart(alt.Data(values=list(rows)))
        .transform_filter("indexof(hidden, datum.kind) < 0")
        .mark_bar()
        .encode(
            x=alt.X(f"{key}:N").scale(domain=names, padding=0.25).axis(axis),
            y=ValueAxis(percent=True).encode("rate"),
            color=colours_by("kind", kinds),
            opacity=_highlight(key),
            tooltip=tooltips((f"{key}:N", key), ("kind:N", "kind"), ("rate:Q", "rate", ".2%"), ("text:N", "count")),
        )
    )
    return finish(chart, title, label, 200, **{"hidden": [], key: ""})


def scatter_chart(
    rows: Sequence[Row], *, title: str, x_title: str, colours: Mapping[str, str], rate_name: str
) -> Chart:
    """Points with `value`, `per`, `state`, `number` and `text`; text values are categories, wide ranges logarithmic."""
    values = [row["value"] for row in rows]
    numeric = all(isinstance(v, (int, float)) and math.isfinite(v) for v in values)
    wide = numeric and min(values) > 0 and max(values) / min(values) > 30
    axis = alt.Axis(title=x_title, labelOverlap=True, tickCount=6)
    if all(isinstance(v, int) for v in values):
        axis.tickMinStep = 1
    if wide and min(values) < 1e-3:
        axis.format = "~e"
    x = alt.X(f"value:{'Q' if numeric else 'N'}").axis(axis)
    if numeric:
        x = x.scale(type="log", padding=8) if wide else x.scale(zero=False, padding=8)
    chart = (
        alt.Chart(alt.Data(values=[row if numeric else {**row, "value": str(row["value"])} for row in rows]))
        .transform_filter("indexof(hidden, datum.state) < 0")
        .mark_circle(size=70, opacity=0.8)
        .encode(
            x=x,
            y=ValueAxis(percent=True).encode("per"),
            color=colours_by("state", colours),
            tooltip=tooltips(
                ("number:Q", "trial"), ("per:Q", rate_name, ".2%"), ("state:N", "state"), ("text:N", "settings")
            ),
        )
    )
    return finish(chart, title, title, HEIGHT, hidden=[])


def image_chart(
    values: np.ndarray, columns: Sequence[str], *, title: str, label: str, y_title: str, height: int
) -> "alt.LayerChart":
    """An array (rows, columns) of values from 0 to 1 as one image over named columns."""
    n_rows = values.shape[0]
    names = alt.Chart(alt.Data(values=[{"name": name} for name in columns])).mark_rect(opacity=0)
    frame = names.encode(x=_names_axis(columns, padding=0), tooltip=tooltips(("name:N", "session")))
    y_axis = alt.Axis(title=y_title, grid=False, tickCount=6, format="d")
    y = alt.Y("row:Q").scale(domain=[0, n_rows], nice=False, reverse=True).axis(y_axis)
    size: dict[str, Any] = {"width": alt.ExprRef("width"), "height": alt.ExprRef("height")}
    data = alt.Data(values=[{"url": png(values), "row": 0}])
    picture = alt.Chart(data).mark_image(aspect=False, align="left", baseline="top", smooth=False, **size)
    picture = picture.encode(url="url:N", x=alt.value(0), y=y)
    return finish(alt.layer(frame, picture), title, label, height)


# --- differences ------------------------------------------------------------------------------------------


def forest_chart(
    differences: Sequence[tuple[str, Contrast, bool]], *, title: str, label: str, rate_name: str
) -> "alt.LayerChart":
    """Differences in error rate, positive is worse: each a dot on its interval, filled if it is significant."""
    data: list[Row] = []
    for name, c, significant in differences:
        shown: Row = {"name": name, "estimate": 100 * c.estimate, "low": 100 * c.low, "high": 100 * c.high}
        direction = "better" if c.estimate < 0 else "worse"
        verdict = direction if significant else "not significant"
        text = f"{_signed(shown['estimate'])} ({_signed(shown['low'])} to {_signed(shown['high'])})"
        data.append({**shown, "verdict": verdict, "text": text, "fill": significant})
    scale = colours_by("verdict", {"better": "teal", "worse": "orange", "not significant": "quiet"})
    bounds = [0.0, *(v for row in data for v in (row["low"], row["high"]))]
    margin = 0.06 * (max(bounds) - min(bounds)) or 1.0
    domain = [min(bounds) - margin, max(bounds) + margin]
    names, points = [name for name, _, _ in differences], f"points of {rate_name}"
    axis = alt.Axis(
        title=f"← better\u2003{points}\u2003worse →",
        titleAnchor="middle",
        format="+~r",
        labelExpr="datum.value === 0 ? '0' : datum.label",  # not +0
        tickCount=6,
    )
    x = alt.X("estimate:Q").scale(domain=domain, nice=False).axis(axis)
    y = alt.Y("name:N", sort=None).scale(domain=names).axis(
        alt.Axis(title=None, grid=True, labelFontSize=13, labelLimit=150, orient="left")
    )  # fmt: skip
    base = alt.Chart(alt.Data(values=data)).encode(y=y, color=scale)
    tooltip = tooltips(("name:N", " "), ("text:N", points), ("verdict:N", "verdict"))
    layers: list[Chart] = [
        alt.Chart(alt.Data(values=[{"x": 0}])).mark_rule(color=colour("ink"), strokeWidth=1.2).encode(x="x:Q"),
        base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q"), x2="high:Q"),
        base.mark_point(size=80, strokeWidth=2).encode(
            x=x, fill=alt.condition("datum.fill", scale, alt.value(colour("paper"))), tooltip=tooltip
        ),
    ]
    for side, first, last in (
        ("left", 0.0, 0.25),
        ("center", 0.25, 0.75),
        ("right", 0.75, 1.01),
    ):  # keep labels inside the chart
        placed = [r for r in data if first <= (r["estimate"] - domain[0]) / (domain[1] - domain[0]) < last]
        if placed:
            texts = alt.Chart(alt.Data(values=placed)).encode(x=x, y=y, text="text:N")
            layers += haloed(texts, align=side, dy=-13, fontSize=11.5)
    return finish(alt.layer(*layers), title, label, 44 * len(names) + 10)


def _signed(value: float) -> str:
    shown = f"{value:.1f}".removesuffix(".0") if abs(value) >= 100 else f"{value:.1f}"
    shown = "0" if float(shown) == 0 else shown
    return (f"+{shown}" if value > 0 and shown != "0" else shown).replace("-", "−")


def dot_chart(
    groups: Sequence[tuple[str, Sequence[float]]], *, title: str, label: str, rate_name: str
) -> "alt.LayerChart":
    """Error rates: a dot for each run, a bar at the mean of its group."""
    rows = [{"name": name, "rate": rounded(v)} for name, values in groups for v in values]
    means = [{"name": name, "mean": sum(values) / len(values)} for name, values in groups]
    y = alt.Y("name:N", sort=None).scale(domain=[name for name, _ in groups]).axis(
        alt.Axis(title=None, grid=True, labelFontSize=13, labelLimit=150)
    )  # fmt: skip
    x = alt.X("rate:Q").scale(zero=True).axis(alt.Axis(title=rate_name, format="~%", tickCount=6))
    dots = alt.Chart(alt.Data(values=rows)).mark_circle(size=75, opacity=0.75, color=colour("blue"))
    bars = alt.Chart(alt.Data(values=means)).mark_tick(thickness=2.4, size=20, color=colour("ink"))
    text = alt.Chart(alt.Data(values=means)).mark_text(dy=-15, fontSize=11.5, color=colour("ink"))
    mean = alt.X("mean:Q")
    layers: list[Chart] = [
        dots.encode(x=x, y=y, tooltip=tooltips(("name:N", "run"), ("rate:Q", rate_name, ".2%"))),
        bars.encode(x=mean, y=y, tooltip=tooltips(("name:N", "run"), ("mean:Q", f"mean {rate_name}", ".2%"))),
        text.encode(x=mean, y=y, text=alt.Text("mean:Q", format=".1%")),
    ]
    return finish(alt.layer(*layers), title, label, 40 * len(groups) + 10)
