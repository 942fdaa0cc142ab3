"""Charts shared by pages and notebooks: rates by session, matrices and forest plots.

Every function returns an Altair chart. The parameters `hidden`, `session` and `phoneme` are set by the pages: hidden
series, and the item under the pointer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arcuate.data.trial import session_order
from arcuate.errors import UserError
from arcuate.evaluation.metrics import Score, total
from arcuate.evaluation.significance import Contrast, bootstrap_interval
from arcuate.insight.charts.base import HEIGHT, Chart, Row, alt, colours_by, finish, for_notebook, rounded, tooltips
from arcuate.insight.charts.curves import ValueAxis, haloed, limit_rule
from arcuate.insight.charts.formats import interval, percent, short_session_names
from arcuate.insight.charts.theme import colour

if TYPE_CHECKING:
    from arcuate.evaluation.evaluate import Evaluation  # imports torch

_CELL = 14  # pixels of a cell of a matrix
_FAINT = 0.15  # opacity of items that are not highlighted


# --- rates by session -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rate:
    """The error rate of one session with its interval."""

    session: str
    rate: float
    low: float | None = None
    high: float | None = None
    note: str = ""  # number of trials, shown in the tooltip


def session_chart(
    rates: Sequence[Rate], names: Mapping[str, str], *, title: str, label: str, overall: float | None = None
) -> "alt.LayerChart":
    """Error rate of each session in order, with its interval; `names` are the labels of the sessions."""
    rows = [
        {**vars(r), "name": names[r.session], "rate": rounded(r.rate), "interval": interval((r.low, r.high))}
        for r in rates
    ]
    y = ValueAxis(percent=True)
    base = alt.Chart(alt.Data(values=rows)).encode(x=_names_axis([names[r.session] for r in rates], padding=0.5))
    tooltip = tooltips(
        ("session:N", "session"), ("rate:Q", "error rate", ".2%"), ("interval:N", "95 % interval"), ("note:N", "trials")
    )
    layers: list[Chart] = []
    if overall is not None:
        layers.append(limit_rule(overall, y, f"all trials, {percent(overall)}"))
    if any(r.low is not None for r in rates):
        bars = base.mark_rule(strokeWidth=2, color=colour("blue"))
        layers.append(bars.encode(y=y.encode("low"), y2="high:Q", opacity=_highlight("session", 0.45)))
    point = base.mark_point(size=70, strokeWidth=2, color=colour("blue"), fill=colour("blue"))
    layers.append(point.encode(y=y.encode("rate"), tooltip=tooltip, opacity=_highlight("session")))
    return finish(alt.layer(*layers), title, label, HEIGHT, session="")


def plot_sessions(evaluation: "Evaluation") -> Any:
    """Error rate by session of the result of `evaluate`, with 95 % intervals, as an Altair chart."""
    scores: dict[str, list[Score]] = {}
    for result in evaluation.trials:
        if result.score is not None:
            scores.setdefault(result.trial.session, []).append(result.score)
    if not scores:
        split = evaluation.provenance.split
        raise UserError(f"the {split} trials have no labels, so there are no error rates to plot")
    rates = [
        Rate(session, total(own).rate or 0.0, *bootstrap_interval(own, n_resamples=500), note=f"{len(own):,}")
        for session, own in sorted(scores.items(), key=lambda item: session_order(item[0]))
    ]
    title, names = f"{evaluation.run.name}: error rate by session", short_session_names(list(scores))
    overall = evaluation.metrics.per
    return for_notebook(session_chart(rates, names, title=title, label=evaluation.summary(), overall=overall))


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
    cells: Sequence[Cell], rows: Sequence[str], columns: Sequence[str], *, title: str, label: str
) -> Chart:
    """Reference and decoded phonemes with tooltips; blank names are gaps. The phoneme of a row links other charts."""
    data = [{**vars(c), "colour": colour(c.colour), "opacity": round(c.opacity, 3), "phoneme": c.row} for c in cells]
    look: dict[str, Any] = {"grid": False, "domain": False, "ticks": False, "labelFontSize": 11, "labelLimit": 110}
    x_names, y_names = ([name for name in names if name.strip()] for names in (columns, rows))
    x_axis = alt.Axis(orient="top", labelAngle=-90, values=x_names, title="decoded", titleAnchor="start", **look)
    y_axis = alt.Axis(values=y_names, title="reference", **look)
    rect = (
        alt.Chart(alt.Data(values=data))
        .mark_rect(stroke=colour("paper"), strokeWidth=1)
        .encode(
            x=alt.X("column:N").scale(domain=list(columns), padding=0).axis(x_axis),
            y=alt.Y("row:N").scale(domain=list(rows), padding=0).axis(y_axis),
            color=alt.Color("colour:N", scale=None, legend=None),
            fillOpacity=alt.FillOpacity("opacity:Q", scale=None, legend=None),
            opacity=_highlight("phoneme"),
            tooltip=tooltips(("row:N", "reference"), ("column:N", "decoded"), ("text:N", " ")),
        )
    )
    chart = rect.properties(width=_CELL * len(columns), height=_CELL * len(rows), title=title, description=label)
    return chart.add_params(alt.param(name="phoneme", value=""))


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
