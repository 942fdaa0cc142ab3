"""Learning curves of one run: loss, phoneme error rate, learning rate and gradient norm over steps."""

from collections.abc import Mapping

from arcuate.insight.pages.charts import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Curve,
    curve_of,
    draw_best,
    draw_curve,
    loss_scale,
    steps_chart,
    steps_scale,
)
from arcuate.insight.pages.formatting import count, counted, finite_number, percent, split_name, whole_percent
from arcuate.insight.pages.markup import Html, legend, muted, tag
from arcuate.insight.pages.svg import SMALLEST, Scale, line, linear_scale, log_scale
from arcuate.insight.report.run_data import RunData

_VALIDATION_STYLES = ("validation", "second", "third")


def learning_curves(data: RunData) -> Html:
    """The charts for which the log has values."""
    charts = [_loss_chart(data), _error_chart(data), _learning_rate_chart(data), _gradient_chart(data)]
    drawn = [chart for chart in charts if chart]
    return tag("div", *drawn, class_="pair") if drawn else muted("The log of this run is still empty.")


def _loss_chart(data: RunData) -> Html | None:
    train = curve_of(data.training, "loss")
    validation = {split: curve_of(rows, "loss") for split, rows in data.validation.items()}
    values = [*train.values, *(v for curve in validation.values() for v in curve.values)]
    if not values:
        return None
    x, y = _steps(data), loss_scale(values)
    marks, entries = _validation_marks(validation, x, y)
    if train.values:
        marks.insert(0, draw_curve(train, x, y, "train"))
        entries.insert(0, ("train", "training"))
    last = train.median[-1] if train.median else None
    label = "CTC loss over steps" + (f"; final training loss {last:.3g}" if last is not None else "")
    return steps_chart("Loss", label, x, y, marks, legend(*entries), _gaps(train, *validation.values()))


def _error_chart(data: RunData) -> Html | None:
    validation = {split: curve_of(rows, "per") for split, rows in data.validation.items()}
    values = [v for curve in validation.values() for v in curve.values]
    if not values or data.best is None:
        return None
    x, y = _steps(data), linear_scale(values, BOTTOM, TOP, 0.0)
    marks, entries = _validation_marks(validation, x, y)
    split, step, rate = data.best
    marks += draw_best(x, y, step, rate)
    entries.append(("best", f"best, step {count(step)}"))
    label = f"Phoneme error rate over steps; best {percent(rate)} on {split_name(split)} at step {count(step)}"
    caption = _gaps(*validation.values())
    return steps_chart("Phoneme error rate", label, x, y, marks, legend(*entries), caption, whole_percent)


def _learning_rate_chart(data: RunData) -> Html | None:
    lr, session_lr = curve_of(data.training, "lr"), curve_of(data.training, "lr_session")
    values = [*lr.values, *session_lr.values]
    if not values:
        return None
    x, y = _steps(data), linear_scale(values, BOTTOM, TOP, 0.0)
    marks, entries = [draw_curve(lr, x, y, "validation")], [("validation", "all weights")]
    if session_lr.values and session_lr.median != lr.median:
        marks.append(draw_curve(session_lr, x, y, "second"))
        entries.append(("second", "session layers"))
    elif session_lr.values:
        entries = [("validation", "all weights, including session layers")]
    label = f"Learning rate over steps; maximum {max(values):.3g}"
    return steps_chart("Learning rate", label, x, y, marks, legend(*entries), _gaps(lr, session_lr))


def _gradient_chart(data: RunData) -> Html | None:
    norms = curve_of(data.training, "grad_norm", "grad_norm_max")
    positive = [v for v in norms.values if v > SMALLEST]
    if not positive:
        return None
    limit = finite_number(data.setting("train.clip_norm")) or 0.0
    clipped = limit > SMALLEST
    x, y = _steps(data), log_scale([*positive, *([limit] if clipped else [])], BOTTOM, TOP)
    marks = [draw_curve(norms, x, y, "train")]
    entries = [("train", "before clipping" if clipped else "not clipped"), ("train area", "maximum")]
    if clipped:
        marks.append(line(LEFT, y(limit), RIGHT, y(limit), "line limit"))
        entries.append(("limit", f"clipped to {limit:g}"))
    label = f"Gradient norm over steps, logarithmic; between {min(positive):.3g} and {max(positive):.3g}"
    return steps_chart("Gradient norm", label, x, y, marks, legend(*entries), _gaps(norms))


def _steps(data: RunData) -> Scale:
    return steps_scale(data.last_step or 1)


def _validation_marks(curves: Mapping[str, Curve], x: Scale, y: Scale) -> tuple[list[Html], list[tuple[str, str]]]:
    """The curves of the validation splits with their legend entries."""
    shown = [
        (kind, split, curve)
        for kind, (split, curve) in zip(_VALIDATION_STYLES, curves.items(), strict=False)
        if curve.values
    ]
    marks = [draw_curve(curve, x, y, kind) for kind, _, curve in shown]
    return marks, [(kind, split_name(split)) for kind, split, _ in shown]


def _gaps(*curves: Curve) -> str | None:
    n_missing = sum(curve.n_missing for curve in curves)
    return f"{counted(n_missing, 'logged value')} not finite; shown as gaps." if n_missing else None
