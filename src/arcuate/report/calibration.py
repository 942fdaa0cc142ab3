"""What sentences of calibration were worth: the error rate of the rest of the day over their number."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arcuate.report.axes import Scale, band, columns_axis, dot, linear, path, rows_axis
from arcuate.report.markup import Html, figure, join, svg, table, tag
from arcuate.report.wording import MISSING, counted, number, percent, whole
from arcuate.run import Run, read_json

FILE = "calibration.json"
WIDTH, HEIGHT = 560, 314
LEFT, RIGHT, TOP, BOTTOM = 62, 540, 14, 258


@dataclass(frozen=True)
class Point:
    sentences: int
    per: float
    low: float | None
    high: float | None
    n_trials: int


def calibration_of(run: Run) -> Mapping[str, Any] | None:
    """What `arcuate calibrate` left in a run folder; None for an ordinary run."""
    file = run.path / FILE
    return read_json(file) if file.is_file() else None


def read_points(told: Mapping[str, Any]) -> list[Point]:
    """The points that can be drawn; a damaged file gives fewer, never an error."""
    given = told.get("curve")
    points = []
    for row in given if isinstance(given, list) else ():
        if not isinstance(row, Mapping):
            continue
        sentences, rate = whole(row.get("sentences")), number(row.get("per"))
        if sentences is not None and rate is not None:
            n_trials = whole(row.get("n_trials")) or 0
            points.append(Point(sentences, rate, number(row.get("low")), number(row.get("high")), n_trials))
    return sorted(points, key=lambda p: p.sentences)


def calibration(told: Mapping[str, Any]) -> Html:
    points = read_points(told)
    lead = (
        f"Calibrated to {told.get('session', MISSING)} from {told.get('parent', MISSING)}, with"
        f" {counted(whole(told.get('sentences')) or 0, 'sentence')}; the layer began as that of"
        f" {told.get('began_as', MISSING)}."
    )
    if not points:
        absent = "No labelled sentence was left to measure on."
        return join([tag("p", lead), tag("p", absent, class_="absent")])
    note = f"Measured on the {counted(points[-1].n_trials, 'sentence')} that came after; the band is the 95 % interval."
    head = ("sentences", "error rate", "95 % interval")
    rows: list[tuple[object, ...]] = [
        (p.sentences, percent(p.per), MISSING if p.low is None else f"{percent(p.low)} – {percent(p.high)}")
        for p in points
    ]
    return join(
        [
            tag("p", lead),
            tag(
                "div",
                figure("Error rate of the rest of the day", curve(points), note),
                tag("div", table(head, rows, "numbers")),
                class_="pair",
            ),
        ]
    )


def curve(points: list[Point]) -> Html:
    x = Scale(0.0, float(max(points[-1].sentences, 1)), LEFT, RIGHT)
    y = linear([v for p in points for v in (p.per, p.high) if v is not None], BOTTOM, TOP, 0.0)
    spread = [(x(p.sentences), p.low, p.high) for p in points if p.low is not None and p.high is not None]
    parts = [
        rows_axis(y, LEFT, RIGHT, lambda v: percent(v, 0)),
        columns_axis(x, BOTTOM, "sentences of calibration"),
        band([(at, y(high)) for at, _, high in spread], [(at, y(low)) for at, low, _ in spread], "band held"),
        path([(x(p.sentences), y(p.per)) for p in points], "line held"),
        *(dot(x(p.sentences), y(p.per), 4.5, "point", f"{p.sentences}: {percent(p.per)}") for p in points),
    ]
    first, last = points[0], points[-1]
    label = f"From {percent(first.per)} with {first.sentences} sentences to {percent(last.per)} with {last.sentences}."
    return svg(WIDTH, HEIGHT, label, *parts)
