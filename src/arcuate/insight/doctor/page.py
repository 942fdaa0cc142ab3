"""The page of a diagnosis: the verdict, the error rate against its reference band, and the other curves."""

import numpy as np

from arcuate.insight import charts
from arcuate.insight.doctor.diagnose import Diagnosis, Reference, matching_reference
from arcuate.insight.doctor.training_log import Series, TrainingLog
from arcuate.insight.formats import count, finite_number, percent, whole_percent
from arcuate.insight.pages import (
    Html,
    definition_list,
    document,
    figure,
    join,
    legend,
    muted,
    notice,
    scroll_table,
    tag,
    tile,
)

_LOWEST, _HIGHEST = 0.01, 1.2  # error rates outside are drawn at the edge; untrained models reach 5
_WIDTH, _HEIGHT, _RIGHT, _BOTTOM = 1120, 430, 1100, 384  # of the error chart, which is as wide as the page
_BAND_SD = 2.0  # half the width of the reference band
_MIN_BAND = 0.03  # fraction of the mean: the band is at least this wide on either side
_MILD = ("unfinished", "too_short", "restarted")  # verdicts that do not mean a failure
_MAX_RUNS = 24  # maximum number of runs drawn


def diagnosis_page(diagnosis: Diagnosis) -> str:
    runs = diagnosis.runs or (diagnosis,)
    parts: list[Html] = []
    if diagnosis.runs:
        parts.append(tag("section", tag("h2", "Runs in this file"), _runs_table(diagnosis)))
    parts += [_run_section(run, alone=not diagnosis.runs) for run in runs[:_MAX_RUNS]]
    if len(runs) > _MAX_RUNS:
        parts.append(muted(f"{len(runs) - _MAX_RUNS} more runs are listed in the table only."))
    footer = tag("footer", f"Written by arcuate; {diagnosis.name} was read as {diagnosis.source}.")
    body = join(_header(diagnosis), tag("main", *parts), footer)
    return document(f"{diagnosis.name} · arcuate doctor", body, "doctor.css")


def _header(diagnosis: Diagnosis) -> Html:
    """The verdict in large type, then the main evidence."""
    first = diagnosis.evidence[0] if diagnosis.evidence else diagnosis.primary
    tone = "good" if diagnosis.primary == "healthy" else "mild" if diagnosis.primary in _MILD else "bad"
    since = tag("small", f" {diagnosis.since}" if diagnosis.since else "")
    return tag(
        "header",
        tag("p", f"arcuate doctor · {diagnosis.name}", class_="kicker"),
        tag("h1", diagnosis.primary.replace("_", " "), since, class_=f"verdict {tone}"),
        tag("p", f"{first[:1].upper()}{first[1:]}.", class_="lead"),
        muted(f"Also: {', '.join(diagnosis.secondary)}.") if diagnosis.secondary else None,
        _tiles(diagnosis),
    )


def _tiles(diagnosis: Diagnosis) -> Html:
    best_at = "not logged" if diagnosis.best_step is None else f"at step {count(diagnosis.best_step)}"
    planned, dataset = diagnosis.planned_steps, diagnosis.dataset
    return tag(
        "div",
        tile("best PER", percent(diagnosis.best_per), best_at),
        tile("last PER", percent(diagnosis.last_per), f"last step {count(diagnosis.last_step)}"),
        tile("planned", count(planned), diagnosis.unit if planned else "unknown"),
        tile("reference", dataset or "none", "data set" if dataset else "no reference curve"),
        class_="tiles",
    )


def _run_section(run: Diagnosis, alone: bool) -> Html:
    remarks: list[tuple[str, object]] = [("inferred", s) for s in run.inferences]
    remarks += [("note", s) for s in run.notes]
    return tag(
        "section",
        tag("h2", "Curves" if alone else f"{run.name}: {run.primary}"),
        _charts(run, run.log) if run.log else None,
        tag("h3", "Evidence"),
        tag("ul", *(tag("li", sentence) for sentence in run.evidence)),
        _causes(run),
        tag("h3", "Inferences and notes") if remarks else None,
        definition_list(remarks) if remarks else None,
    )


def _causes(run: Diagnosis) -> Html:
    if not run.causes:
        return notice(run.suggestion) if run.suggestion else Html()
    rows = [(f"{i}. {c.cause}", c.because, tag("code", c.change)) for i, c in enumerate(run.causes, start=1)]
    return join(tag("h3", "Likely causes and what to try"), scroll_table(("cause", "because", "try"), rows))


def _runs_table(diagnosis: Diagnosis) -> Html:
    rows = []
    for run in diagnosis.runs:
        best, last = (percent(run.best_per), count(run.best_step)), (percent(run.last_per), count(run.last_step))
        rows.append((run.name, run.primary, *best, *last))
    return scroll_table(("run", "verdict", "best PER", "at step", "last PER", "last step"), rows)


# Charts.


def _charts(run: Diagnosis, log: TrainingLog) -> Html:
    wide = _error_chart(run, log, matching_reference(log, run.dataset))
    small = charts.pair(_loss_chart(run, log), _learning_rate_chart(log), _gradient_chart(log))
    return join(wide or Html(), small)


def _error_chart(run: Diagnosis, log: TrainingLog, reference: Reference | None) -> Html | None:
    """The error rate over the reference band, with the steps of the verdicts marked."""
    per = log.per.finite
    if not len(per):
        return None
    last = max(float(per.steps[-1]), 1.0)
    expected = reference.mean[reference.grid <= last].tolist() if reference else []
    x = charts.steps_scale(last, _RIGHT)
    y = charts.log_scale(np.clip([*per.values, *expected], _LOWEST, _HIGHEST).tolist(), _BOTTOM)
    best = int(per.values.argmin())
    step, rate = float(per.steps[best]), float(per.values[best])
    parts = [charts.y_axis(y, charts.LEFT, _RIGHT, whole_percent), charts.x_axis(x, _BOTTOM, per.unit)]
    entries = [("validation", f"this run, {log.error_name}"), ("best", f"best, step {count(step)}")]
    if reference:
        parts.append(_reference_band(reference, x, y, last))
        minimum = f"drawn at least {100 * _MIN_BAND:.0f} % wide"
        entries.append(
            ("reference", f"{reference.n_runs} healthy runs, ± {_BAND_SD:g} SD, {minimum}: {reference.model}")
        )
    parts += [*_verdict_marks(run, x, y), _draw(per, x, y, "validation")]
    parts += charts.draw_best(x, y, step, rate)
    label = f"{log.error_name} over {per.unit}; best {percent(rate)}"
    drawing = charts.drawing(_WIDTH, _HEIGHT, label, *parts, style="min-width: 44rem")
    caption = f"Reference: {reference.source}." if reference else None
    title = f"{log.error_name} on validation, logarithmic"
    return figure(title, drawing, caption, legend(*entries), wide=True)


def _reference_band(reference: Reference, x: charts.Scale, y: charts.Scale, last: float) -> Html:
    grid = [*reference.grid[reference.grid <= last].tolist(), min(last, float(reference.grid[-1]))]
    mean = np.interp(grid, reference.grid, reference.mean)
    half = np.maximum(_BAND_SD * np.interp(grid, reference.grid, reference.sd), _MIN_BAND * mean)
    upper, lower, middle = (
        [(x(step), y(max(float(v), y.low))) for step, v in zip(grid, values, strict=True)]
        for values in (mean + half, mean - half, mean)
    )
    return join(charts.band(upper, lower, "band reference"), charts.path(middle, "line reference"))


def _verdict_marks(run: Diagnosis, x: charts.Scale, y: charts.Scale) -> list[Html]:
    """A vertical line at each step where a verdict starts."""
    marks = []
    for i, (step, verdict) in enumerate(run.marks[:4]):
        at, height = x(float(step)), charts.TOP + 14 + 17 * i
        label = f"{verdict.replace('_', ' ')} from {count(step)}"
        right_half = at > (x.start + x.stop) / 2
        place, anchor = (at - 5, "end") if right_half else (at + 5, "start")
        marks += [
            charts.line(at, y.stop, at, y.start, "line event"),
            charts.text(place, height, label, "event halo", anchor),
        ]
    return marks


def _loss_chart(run: Diagnosis, log: TrainingLog) -> Html | None:
    losses = (log.train_loss.finite, "train", "training"), (log.val_loss.finite, "validation", "validation")
    shown = [entry for entry in losses if len(entry[0])]
    if len({series.unit for series, _, _ in shown}) > 1:
        shown = shown[-1:]  # the two axes are not comparable
    values = [v for series, _, _ in shown for v in _positive(series)]
    if not values:
        return None
    x = charts.steps_scale(max(float(series.steps[-1]) for series, _, _ in shown))
    y = charts.log_scale(values)
    unit = shown[0][0].unit
    marks = _verdict_marks(run, x, y) if run.unit == unit else []
    marks += [_draw(series, x, y, kind) for series, kind, _ in shown]
    n_missing = len(log.train_loss.non_finite_steps) + len(log.val_loss.non_finite_steps)
    caption = f"{n_missing:,} non-finite values are not shown." if n_missing else None
    key = legend(*((kind, name) for _, kind, name in shown))
    return charts.steps_chart("Loss", "Loss, logarithmic", x, y, marks, key, caption, unit=unit)


def _learning_rate_chart(log: TrainingLog) -> Html | None:
    lr = log.lr.finite
    if len(lr) < 2 or lr.values.max() <= 0:
        return None
    return _series_chart("Learning rate", lr, charts.linear_scale(lr.values.tolist(), 0.0), "validation")


def _gradient_chart(log: TrainingLog) -> Html | None:
    norms = log.grad_norm.finite
    positive = _positive(norms)
    return _series_chart("Gradient norm", norms, charts.log_scale(positive), "train") if len(positive) > 1 else None


def _series_chart(title: str, series: Series, y: charts.Scale, kind: str) -> Html:
    x = charts.steps_scale(float(series.steps[-1]))
    label = f"{title}, logarithmic" if y.log else title
    return charts.steps_chart(title, label, x, y, [_draw(series, x, y, kind)], unit=series.unit)


def _positive(series: Series) -> list[float]:
    return [v for v in series.values.tolist() if charts.SMALLEST < v < 1e100]


def _draw(series: Series, x: charts.Scale, y: charts.Scale, kind: str) -> Html:
    values = [finite_number(v) for v in series.values.tolist()]
    return charts.draw_curve(charts.thin_curve(series.steps.tolist(), values), x, y, kind)
