"""Curves of one run: loss, error rate, learning rate and gradient norm over steps, and the calibration curve."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arcuate.files import read_json
from arcuate.insight.pages import charts, svg
from arcuate.insight.pages.formatting import (
    MISSING,
    count,
    counted,
    finite_int,
    finite_number,
    percent,
    split_name,
    whole_percent,
)
from arcuate.insight.pages.markup import Html, figure, join, legend, muted, table, tag
from arcuate.insight.report.run_data import RunData
from arcuate.run import Run

_VALIDATION_STYLES = ("validation", "second", "third")


def learning_curves(data: RunData) -> Html:
    """The charts for which the log has values."""
    candidates = (_loss_chart(data), _error_chart(data), _learning_rate_chart(data), _gradient_chart(data))
    drawn = [chart for chart in candidates if chart]
    return tag("div", *drawn, class_="pair") if drawn else muted("The log of this run is still empty.")


def _loss_chart(data: RunData) -> Html | None:
    train = charts.curve_of(data.training, "loss")
    validation = {split: charts.curve_of(rows, "loss") for split, rows in data.validation.items()}
    values = [*train.values, *(v for curve in validation.values() for v in curve.values)]
    if not values:
        return None
    x, y = _steps(data), charts.loss_scale(values)
    marks, entries = _validation_marks(validation, x, y)
    if train.values:
        marks.insert(0, charts.draw_curve(train, x, y, "train"))
        entries.insert(0, ("train", "training"))
    last = train.median[-1] if train.median else None
    label = "CTC loss over steps" + (f"; final training loss {last:.3g}" if last is not None else "")
    return charts.steps_chart("Loss", label, x, y, marks, legend(*entries), _gaps(train, *validation.values()))


def _error_chart(data: RunData) -> Html | None:
    validation = {split: charts.curve_of(rows, "per") for split, rows in data.validation.items()}
    values = [v for curve in validation.values() for v in curve.values]
    if not values or data.best is None:
        return None
    x, y = _steps(data), svg.linear_scale(values, charts.BOTTOM, charts.TOP, 0.0)
    marks, entries = _validation_marks(validation, x, y)
    split, step, rate = data.best
    marks += charts.draw_best(x, y, step, rate)
    entries.append(("best", f"best, step {count(step)}"))
    label = f"Phoneme error rate over steps; best {percent(rate)} on {split_name(split)} at step {count(step)}"
    caption = _gaps(*validation.values())
    return charts.steps_chart("Phoneme error rate", label, x, y, marks, legend(*entries), caption, whole_percent)


def _learning_rate_chart(data: RunData) -> Html | None:
    lr, session_lr = charts.curve_of(data.training, "lr"), charts.curve_of(data.training, "lr_session")
    values = [*lr.values, *session_lr.values]
    if not values:
        return None
    x, y = _steps(data), svg.linear_scale(values, charts.BOTTOM, charts.TOP, 0.0)
    marks, entries = [charts.draw_curve(lr, x, y, "validation")], [("validation", "all weights")]
    if session_lr.values and session_lr.median != lr.median:
        marks.append(charts.draw_curve(session_lr, x, y, "second"))
        entries.append(("second", "session layers"))
    elif session_lr.values:
        entries = [("validation", "all weights, including session layers")]
    label = f"Learning rate over steps; maximum {max(values):.3g}"
    return charts.steps_chart("Learning rate", label, x, y, marks, legend(*entries), _gaps(lr, session_lr))


def _gradient_chart(data: RunData) -> Html | None:
    norms = charts.curve_of(data.training, "grad_norm", "grad_norm_max")
    positive = [v for v in norms.values if v > svg.SMALLEST]
    if not positive:
        return None
    limit = finite_number(data.setting("train.clip_norm")) or 0.0
    clipped = limit > svg.SMALLEST
    x, y = _steps(data), svg.log_scale([*positive, *([limit] if clipped else [])], charts.BOTTOM, charts.TOP)
    marks = [charts.draw_curve(norms, x, y, "train")]
    entries = [("train", "before clipping" if clipped else "not clipped"), ("train area", "maximum")]
    if clipped:
        marks.append(svg.line(charts.LEFT, y(limit), charts.RIGHT, y(limit), "line limit"))
        entries.append(("limit", f"clipped to {limit:g}"))
    label = f"Gradient norm over steps, logarithmic; between {min(positive):.3g} and {max(positive):.3g}"
    return charts.steps_chart("Gradient norm", label, x, y, marks, legend(*entries), _gaps(norms))


def _steps(data: RunData) -> svg.Scale:
    return charts.steps_scale(data.last_step or 1)


def _validation_marks(
    curves: Mapping[str, charts.Curve], x: svg.Scale, y: svg.Scale
) -> tuple[list[Html], list[tuple[str, str]]]:
    """The curves of the validation splits with their legend entries."""
    shown = [
        (kind, split, curve)
        for kind, (split, curve) in zip(_VALIDATION_STYLES, curves.items(), strict=False)
        if curve.values
    ]
    marks = [charts.draw_curve(curve, x, y, kind) for kind, _, curve in shown]
    return marks, [(kind, split_name(split)) for kind, split, _ in shown]


def _gaps(*curves: charts.Curve) -> str | None:
    n_missing = sum(curve.n_missing for curve in curves)
    return f"{counted(n_missing, 'logged value')} not finite; shown as gaps." if n_missing else None


# Calibration curve: error rate against the number of calibration sentences.


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
    x = svg.Scale(0.0, float(max(points[-1].sentences, 1)), charts.LEFT, charts.RIGHT)
    y = svg.linear_scale([v for p in points for v in (p.per, p.high) if v is not None], charts.BOTTOM, charts.TOP, 0.0)
    spread = [(x(p.sentences), p.low, p.high) for p in points if p.low is not None and p.high is not None]
    upper, lower = [(at, y(high)) for at, _, high in spread], [(at, y(low)) for at, low, _ in spread]
    first, last = points[0], points[-1]
    label = f"From {percent(first.per)} with {first.sentences} sentences to {percent(last.per)} with {last.sentences}."
    return svg.drawing(
        *(charts.WIDTH, charts.HEIGHT, label),
        svg.y_axis(y, charts.LEFT, charts.RIGHT, whole_percent),
        svg.x_axis(x, charts.BOTTOM, "calibration sentences"),
        svg.band(upper, lower, "band validation"),
        svg.path([(x(p.sentences), y(p.per)) for p in points], "line validation"),
        *(svg.dot(x(p.sentences), y(p.per), 4.5, "point", f"{p.sentences}: {percent(p.per)}") for p in points),
    )
