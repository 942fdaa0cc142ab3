"""Differences with their intervals, one row each, and error rates of single runs, one dot each."""

from collections.abc import Sequence
from dataclasses import dataclass

from arcuate.insight.report.axes import Scale, columns_axis, dot, linear, rule, text
from arcuate.insight.report.markup import Html, join, read_style, svg, tag

WIDTH, LEFT, RIGHT, ROW = 760, 250, 600, 30
TOP = 34
TITLE = 18


@dataclass(frozen=True)
class Row:
    """One difference in points of PER; positive is worse."""

    name: str
    estimate: float
    low: float
    high: float
    real: bool
    title: str | None = None  # of a block of rows that begins here


def forest(rows: Sequence[Row], label: str) -> Html:
    """Every difference as a dot on its interval; filled where it is real, on the side of better or worse."""
    places, y = [], float(TOP)
    for row in rows:
        y += TITLE if row.title else 0
        places.append(y)
        y += ROW
    bottom = y + 6
    scale = linear([0.0, *(v for r in rows for v in (r.low, r.high))], LEFT, RIGHT)
    marks = [guides(scale, bottom)]
    for row, at in zip(rows, places, strict=True):
        marks.append(drawn(row, at, scale))
    axis = columns_axis(scale, bottom, "points of PER", lambda v: f"{v:+g}".replace("-", "−") if v else "0")
    heads = [
        text(scale(0) - 8, TOP - 18, "← better", "quiet", "end"),
        text(scale(0) + 8, TOP - 18, "worse →", "quiet", "start"),
    ]
    return svg(WIDTH, bottom + 50, label, axis, *marks, *heads)


def guides(scale: Scale, bottom: float) -> Html:
    return rule(scale(0), TOP - 12, scale(0), bottom, "zero")


def drawn(row: Row, y: float, scale: Scale) -> Html:
    kind = ("better" if row.estimate < 0 else "worse") if row.real else ""
    parts = [text(8, y - 16, row.title, "strong")] if row.title else []
    return join(
        [
            *parts,
            text(24, y + 4, row.name),
            rule(scale(row.low), y, scale(row.high), y, f"reach {kind}".strip()),
            dot(scale(row.estimate), y, 5, f"guess {kind}".strip()),
            text(RIGHT + 12, y + 4, f"{signed(row.estimate)} ({signed(row.low)} to {signed(row.high)})"),
        ]
    )


def signed(value: float) -> str:
    shown = f"{value:.1f}".removesuffix(".0") if abs(value) >= 100 else f"{value:.1f}"
    shown = "0" if float(shown) == 0 else shown
    return (f"+{shown}" if value > 0 and shown != "0" else shown).replace("-", "−")


def rates(arms: Sequence[tuple[str, Sequence[float]]], label: str) -> Html:
    """Error rates in per cent: a dot for each run, a bar at the mean of the arm."""
    scale = linear([v for _, values in arms for v in values], LEFT, RIGHT, 0.0)
    bottom = TOP + ROW * len(arms) - 8
    marks = []
    for i, (name, values) in enumerate(arms):
        y = TOP + ROW * i - 8
        mean = sum(values) / len(values)
        marks += [
            text(24, y + 4, name),
            rule(LEFT, y, RIGHT, y, "guide"),
            *(dot(scale(v), y, 4.5, "dot", f"{v:.1f} %") for v in values),
            rule(scale(mean), y - 9, scale(mean), y + 9, "mean"),
            text(RIGHT + 12, y + 4, f"{mean:.1f} %"),
        ]
    axis = columns_axis(scale, bottom, "PER in per cent")
    return svg(WIDTH, bottom + 50, label, axis, *marks)


def drawing_style() -> str:
    """The colours and the rules for drawings, without those for pages."""
    colours, _, pages = read_style("style.css").partition("* {")
    rules = (pages + read_style("together.css")).splitlines()
    return colours + "\n".join(line for line in rules if line.startswith("svg "))


def standalone(drawing: Html) -> str:
    """A drawing as a file of its own, with the colours of the pages in it."""
    style = tag("style", Html(drawing_style()))
    ground = '<rect width="100%" height="100%" style="fill: var(--paper)"/>'
    head, _, rest = drawing.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg">{style}{ground}{rest}\n'
