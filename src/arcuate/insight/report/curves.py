"""Curves of one run: loss, error rate, learning rate and gradient norm over steps, and the calibration curve."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arcuate.files import read_json
from arcuate.insight import charts
from arcuate.insight.formats import (
    MISSING,
    count,
    finite_int,
    finite_number,
    percent,
    split_name,
    tick_label,
    whole_percent,
)
from arcuate.insight.pages import Html, figure, join, legend, muted, table, tag
from arcuate.insight.report.run_data import RunData
from arcuate.progress import counted
from arcuate.run import Run

_VALIDATION_STYLES = ("validation", "second", "third")
_NamedCurve = tuple[str, str, charts.Curve]  # line style, entry of the legend, curve


def learning_curves(data: RunData) -> Html:
    """The charts for which the log has values."""
    figures = (
        *(_loss_chart(data), _error_chart(data), _word_error_chart(data)),
        *(_learning_rate_chart(data), _gradient_chart(data)),
    )
    return charts.pair(*figures) or muted("The log of this run is still empty.")


def _loss_chart(data: RunData) -> Html | None:
    train = charts.curve_of(data.training, "loss")
    curves = [("train", "training", train), *_validation_curves(data, "loss")]
    if not (values := _values(curves)):
        return None
    last = train.median[-1] if train.median else None
    label = "CTC loss over steps" + (f"; final training loss {last:.3g}" if last is not None else "")
    return _chart(data, "Loss", label, curves, charts.loss_scale(values))


def _error_chart(data: RunData) -> Html | None:
    curves = _validation_curves(data, "per")
    values = _values(curves)
    if not values or data.best is None:
        return None
    y = charts.linear_scale(values, 0.0)
    split, step, rate = data.best
    label = f"{data.rate_name} over steps; best {percent(rate)} on {split_name(split)} at step {count(step)}"
    best = charts.draw_best(_steps(data), y, step, rate)
    entry = ("best", f"best, step {count(step)}")
    return _chart(data, data.rate_name, label, curves, y, best, [entry], whole_percent)


def _word_error_chart(data: RunData) -> Html | None:
    curves = _validation_curves(data, "wer")
    values = _values(curves)
    if not values:
        return None
    label = f"Word error rate over steps; lowest {percent(min(values))}"
    y = charts.linear_scale(values, 0.0)
    return _chart(data, "Word error rate", label, curves, y, tick=whole_percent)


def _learning_rate_chart(data: RunData) -> Html | None:
    lr, session_lr = charts.curve_of(data.training, "lr"), charts.curve_of(data.training, "lr_session")
    if session_lr.median == lr.median:
        curves = [("validation", "all weights, including session layers", lr)]
    else:
        curves = [("validation", "all weights", lr), ("second", "session layers", session_lr)]
    if not (values := _values(curves)):
        return None
    label = f"Learning rate over steps; maximum {max(values):.3g}"
    return _chart(data, "Learning rate", label, curves, charts.linear_scale(values, 0.0))


def _gradient_chart(data: RunData) -> Html | None:
    norms = charts.curve_of(data.training, "grad_norm", "grad_norm_max")
    positive = [v for v in norms.values if v > charts.SMALLEST]
    if not positive:
        return None
    limit = finite_number(data.setting("train.clip_norm")) or 0.0
    clipped = limit > charts.SMALLEST
    y = charts.log_scale([*positive, *([limit] if clipped else [])])
    curves = [("train", "before clipping" if clipped else "not clipped", norms)]
    marks, entries = [], [("train area", "maximum")]
    if clipped:
        marks.append(charts.line(charts.LEFT, y(limit), charts.RIGHT, y(limit), "line limit"))
        entries.append(("limit", f"clipped to {limit:g}"))
    label = f"Gradient norm over steps, logarithmic; between {min(positive):.3g} and {max(positive):.3g}"
    return _chart(data, "Gradient norm", label, curves, y, marks, entries)


def _steps(data: RunData) -> charts.Scale:
    return charts.steps_scale(data.last_step or 1)


def _validation_curves(data: RunData, quantity: str) -> list[_NamedCurve]:
    splits = zip(_VALIDATION_STYLES, data.validation.items(), strict=False)
    return [(style, split_name(split), charts.curve_of(rows, quantity)) for style, (split, rows) in splits]


def _values(curves: Sequence[_NamedCurve]) -> list[float]:
    return [v for _, _, curve in curves for v in curve.values]


def _chart(
    data: RunData,
    title: str,
    label: str,
    curves: Sequence[_NamedCurve],
    y: charts.Scale,
    marks: Sequence[Html] = (),
    entries: Sequence[tuple[str, str]] = (),
    tick: Callable[[float], str] = tick_label,
) -> Html:
    """The curves that have values with their legend; `marks` and `entries` are added after them."""
    shown, x = [entry for entry in curves if entry[2].values], _steps(data)
    lines = [charts.draw_curve(curve, x, y, style) for style, _, curve in shown]
    n_missing = sum(curve.n_missing for _, _, curve in curves)
    caption = f"{counted(n_missing, 'logged value')} not finite; shown as gaps." if n_missing else None
    key = legend(*((style, name) for style, name, _ in shown), *entries)
    return charts.steps_chart(title, label, x, y, [*lines, *marks], key, caption, tick)


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
        return join(tag("p", lead), muted("No labelled sentences were left for an evaluation."))
    n_trials = counted(points[-1].n_trials, "sentence")
    caption = f"Measured on the {n_trials} after the calibration block; the band is the 95 % interval."
    rows = [
        (p.sentences, percent(p.per), MISSING if p.low is None else f"{percent(p.low)} – {percent(p.high)}")
        for p in points
    ]
    return join(
        tag("p", lead),
        tag(
            "div",
            figure("Error rate on the rest of the session", _curve(points), caption),
            tag("div", table(("sentences", "error rate", "95 % interval"), rows, "numbers")),
            class_="pair",
        ),
    )


def _curve(points: list[CalibrationPoint]) -> Html:
    x = charts.steps_scale(points[-1].sentences)
    y = charts.linear_scale([v for p in points for v in (p.per, p.high) if v is not None], 0.0)
    spread = [(x(p.sentences), p.low, p.high) for p in points if p.low is not None and p.high is not None]
    upper, lower = [(at, y(high)) for at, _, high in spread], [(at, y(low)) for at, low, _ in spread]
    first, last = points[0], points[-1]
    label = f"From {percent(first.per)} with {first.sentences} sentences to {percent(last.per)} with {last.sentences}."
    marks = [
        charts.band(upper, lower, "band validation"),
        charts.path([(x(p.sentences), y(p.per)) for p in points], "line validation"),
        *(charts.dot(x(p.sentences), y(p.per), 4.5, "point", f"{p.sentences}: {percent(p.per)}") for p in points),
    ]
    return charts.plot(label, x, y, "calibration sentences", marks, whole_percent)
