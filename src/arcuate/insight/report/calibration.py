"""The calibration curve of a calibrated run: error rate against the number of calibration sentences."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arcuate.files import read_json
from arcuate.insight.pages.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH
from arcuate.insight.pages.formatting import (
    MISSING,
    counted,
    finite_int,
    finite_number,
    percent,
    whole_percent,
)
from arcuate.insight.pages.markup import Html, figure, join, muted, svg, table, tag
from arcuate.insight.pages.svg import Scale, band, dot, linear_scale, path, x_axis, y_axis
from arcuate.run import Run


@dataclass(frozen=True)
class CalibrationPoint:
    sentences: int
    per: float
    low: float | None
    high: float | None
    n_trials: int


def read_calibration(run: Run) -> Mapping[str, Any] | None:
    """The summary that `arcuate calibrate` writes into a run folder; None for other runs."""
    return read_json(run.calibration_file) if run.calibration_file.is_file() else None


def calibration_points(calibration: Mapping[str, Any]) -> list[CalibrationPoint]:
    """The valid points of the curve; damaged ones are skipped."""
    rows = calibration.get("curve")
    points = []
    for row in rows if isinstance(rows, list) else ():
        if not isinstance(row, Mapping):
            continue
        sentences, rate = finite_int(row.get("sentences")), finite_number(row.get("per"))
        if sentences is not None and rate is not None:
            interval = finite_number(row.get("low")), finite_number(row.get("high"))
            points.append(CalibrationPoint(sentences, rate, *interval, finite_int(row.get("n_trials")) or 0))
    return sorted(points, key=lambda p: p.sentences)


def calibration_section(calibration: Mapping[str, Any]) -> Html:
    points = calibration_points(calibration)
    initial = calibration.get("initialised_from", calibration.get("began_as", MISSING))
    lead = (
        f"Calibrated to session {calibration.get('session', MISSING)} from {calibration.get('parent', MISSING)} with"
        f" {counted(finite_int(calibration.get('sentences')) or 0, 'sentence')}; the session layer was initialised"
        f" from {initial}."
    )
    if not points:
        return join([tag("p", lead), muted("No labelled sentences were left for an evaluation.")])
    n_trials = counted(points[-1].n_trials, "sentence")
    caption = f"Measured on the {n_trials} after the calibration block; the band is the 95 % interval."
    rows = [
        (p.sentences, percent(p.per), MISSING if p.low is None else f"{percent(p.low)} – {percent(p.high)}")
        for p in points
    ]
    return join(
        [
            tag("p", lead),
            tag(
                "div",
                figure("Error rate on the rest of the session", _curve(points), caption),
                tag("div", table(("sentences", "error rate", "95 % interval"), rows, "numbers")),
                class_="pair",
            ),
        ]
    )


def _curve(points: list[CalibrationPoint]) -> Html:
    x = Scale(0.0, float(max(points[-1].sentences, 1)), LEFT, RIGHT)
    y = linear_scale([v for p in points for v in (p.per, p.high) if v is not None], BOTTOM, TOP, 0.0)
    spread = [(x(p.sentences), p.low, p.high) for p in points if p.low is not None and p.high is not None]
    upper, lower = [(at, y(high)) for at, _, high in spread], [(at, y(low)) for at, low, _ in spread]
    first, last = points[0], points[-1]
    label = f"From {percent(first.per)} with {first.sentences} sentences to {percent(last.per)} with {last.sentences}."
    return svg(
        *(WIDTH, HEIGHT, label),
        y_axis(y, LEFT, RIGHT, whole_percent),
        x_axis(x, BOTTOM, "calibration sentences"),
        band(upper, lower, "band validation"),
        path([(x(p.sentences), y(p.per)) for p in points], "line validation"),
        *(dot(x(p.sentences), y(p.per), 4.5, "point", f"{p.sentences}: {percent(p.per)}") for p in points),
    )
