"""Curves of one run: loss, error rate, learning rate and gradient norm over steps, and the calibration curve."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arcuate.evaluation.floor import read_floor
from arcuate.files import finite_int, finite_number, read_json
from arcuate.insight.charts import curves
from arcuate.insight.charts.curves import Curve, Line, ValueAxis, curve_of
from arcuate.insight.charts.formats import MISSING, count, percent, split_name
from arcuate.insight.overlay import line_figure
from arcuate.insight.render import Figure, LegendEntry, Measured, make_figure
from arcuate.insight.report.run_data import RunData
from arcuate.progress import counted
from arcuate.run import Run

_VALIDATION_COLOURS = ("blue", "orange", "purple")


def learning_curves(data: RunData) -> list[Figure]:
    """The charts for which the log has values."""
    figures = (
        *(_loss_figure(data), _error_figure(data), _word_error_figure(data)),
        *(_learning_rate_figure(data), _gradient_figure(data)),
    )
    return [figure for figure in figures if figure]


def _loss_figure(data: RunData) -> Figure | None:
    train = curve_of(data.training, "loss")
    lines = [Line("training", "train", train), *_validation_lines(data, "loss")]
    if not (values := _values(lines)):
        return None
    last = train.median[-1] if train.median else None
    label = "CTC loss over steps" + (f"; final training loss {last:.3g}" if last is not None else "")
    return _figure(data, "Loss", label, lines, curves.loss_axis(values))


def _error_figure(data: RunData) -> Figure | None:
    lines = _validation_lines(data, "per")
    if not (values := _values(lines)) or data.best is None:
        return None
    split, step, rate = data.best
    label = f"{data.rate_name} over steps; best {percent(rate)} on {split_name(split)} at step {count(step)}"
    y = ValueAxis(percent=True)
    entries = [LegendEntry(f"best, step {count(step)}", "blue", "ring")]
    layers = curves.best_mark(step, rate, y, _last(data), max(values))
    measured = read_floor(data.run, data.results.split if data.results else "val")
    if measured is not None and (floor := measured.per) is not None:
        name = f"floor without neural information, {percent(floor)}"
        entries.append(LegendEntry(name, "ink", "limit"))
        layers = [*layers, curves.limit_rule(floor, y, name)]
    return _figure(data, data.rate_name, label, lines, y, layers, entries)


def _word_error_figure(data: RunData) -> Figure | None:
    lines = _validation_lines(data, "wer")
    if not (values := _values(lines)):
        return None
    label = f"Word error rate over steps; lowest {percent(min(values))}"
    return _figure(data, "Word error rate", label, lines, ValueAxis(percent=True))


def _learning_rate_figure(data: RunData) -> Figure | None:
    lr, session_lr = curve_of(data.training, "lr"), curve_of(data.training, "lr_session")
    if session_lr.median == lr.median:
        lines = [Line("all weights, including session layers", "blue", lr)]
    else:
        lines = [Line("all weights", "blue", lr), Line("session layers", "orange", session_lr)]
    if not (values := _values(lines)):
        return None
    return _figure(data, "Learning rate", f"Learning rate over steps; maximum {max(values):.3g}", lines, ValueAxis())


def _gradient_figure(data: RunData) -> Figure | None:
    norms = curve_of(data.training, "grad_norm", "grad_norm_max")
    positive = [v for v in norms.values if v > curves.SMALLEST]
    if not positive:
        return None
    limit = finite_number(data.setting("train.clip_norm")) or 0.0
    clipped = limit > curves.SMALLEST
    y = ValueAxis(log=True, domain=curves.log_domain([*positive, *([limit] if clipped else [])]))
    lines = [Line("before clipping" if clipped else "not clipped", "train", norms)]
    entries = [LegendEntry("maximum", "train", "band")]
    entries += [LegendEntry(f"clipped to {limit:g}", "ink", "limit")] if clipped else []
    layers = [curves.limit_rule(limit, y, f"clipped to {limit:g}")] if clipped else []
    label = f"Gradient norm over steps, logarithmic; between {min(positive):.3g} and {max(positive):.3g}"
    return _figure(data, "Gradient norm", label, lines, y, layers, entries)


def _last(data: RunData) -> float:
    return float(data.last_step or 1)


def _validation_lines(data: RunData, quantity: str) -> list[Line]:
    splits = zip(_VALIDATION_COLOURS, data.validation.items(), strict=False)
    return [Line(split_name(split), colour, curve_of(rows, quantity)) for colour, (split, rows) in splits]


def _values(lines: Sequence[Line]) -> list[float]:
    return [v for line in lines for v in line.curve.values]


def _figure(
    data: RunData,
    title: str,
    label: str,
    lines: Sequence[Line],
    y: ValueAxis,
    layers: Sequence[Any] = (),
    entries: Sequence[LegendEntry] = (),
) -> Figure:
    """The lines that have values with their legend; `layers` and `entries` are added after them."""
    shown = [line for line in lines if line.curve.values]
    n_missing = sum(line.curve.n_missing for line in lines)
    caption = f"{counted(n_missing, 'logged value')} not finite; shown as gaps." if n_missing else None
    options: dict[str, Any] = {"title": title, "label": label, "last": _last(data), "layers": layers}
    return line_figure(shown, y, entries=entries, caption=caption, **options)


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


def calibration_section(calibration: Mapping[str, Any]) -> Measured:
    points = calibration_points(calibration)
    initial = calibration.get("initialised_from", calibration.get("began_as", MISSING))
    lead = (
        f"Calibrated to session {calibration.get('session', MISSING)} from {calibration.get('parent', MISSING)} with"
        f" {counted(finite_int(calibration.get('sentences')) or 0, 'sentence')}; the session layer was initialised"
        f" from {initial}."
    )
    if not points:
        return Measured(lead)
    n_trials = counted(points[-1].n_trials, "sentence")
    caption = f"Measured on the {n_trials} after the calibration block; the band is the 95 % interval."
    rows = tuple(
        (p.sentences, percent(p.per), MISSING if p.low is None else f"{percent(p.low)} – {percent(p.high)}")
        for p in points
    )
    figure = make_figure(calibration_chart(points), caption=caption)
    return Measured(lead, (figure,), ("sentences", "error rate", "95 % interval"), rows)


def calibration_chart(points: Sequence[CalibrationPoint]) -> Any:
    """Error rate against the number of calibration sentences, with its interval."""
    first, last = points[0], points[-1]
    label = f"From {percent(first.per)} with {first.sentences} sentences to {percent(last.per)} with {last.sentences}."
    curve = Curve(
        tuple(float(p.sentences) for p in points),
        tuple(p.per for p in points),
        tuple(p.low for p in points),
        tuple(p.high for p in points),
        0,
    )
    lines = [Line("error rate", "blue", curve, dots=True)]
    title = "Error rate on the rest of the session"
    y = ValueAxis(percent=True)
    return curves.line_chart(lines, y, title=title, label=label, x_title="calibration sentences")
