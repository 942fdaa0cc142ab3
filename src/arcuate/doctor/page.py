"""The page of a diagnosis: the verdict, what to do, the error rate against its reference band, and the other curves."""

import shlex
from collections.abc import Sequence

import numpy as np

from arcuate.config import override_list
from arcuate.doctor.diagnose import Diagnosis, Reference, matching_reference
from arcuate.doctor.log_table import Series, TrainingLog
from arcuate.errors import UserError
from arcuate.experiments.recipe import load_recipe
from arcuate.files import finite_number
from arcuate.insight.charts import curves
from arcuate.insight.charts.base import Chart
from arcuate.insight.charts.curves import Curve, Line, ValueAxis, thin_curve
from arcuate.insight.charts.formats import count, percent
from arcuate.insight.overlay import any_simulated, line_figure
from arcuate.insight.render import Figure, LegendEntry, make_figure, render
from arcuate.run import Run

_LOWEST, _HIGHEST = 0.01, 1.2  # error rates outside are drawn at the edge; untrained models reach 5
_ERROR_HEIGHT = 340
_BAND_SD = 2.0  # half the width of the reference band
_MIN_BAND = 0.03  # fraction of the mean: the band is at least this wide on either side
_MILD = ("unfinished", "too_short", "restarted")  # verdicts that do not mean a failure
_MAX_RUNS = 24  # maximum number of runs drawn
_MAX_MARKS = 4


def diagnosis_page(diagnosis: Diagnosis) -> str:
    runs = diagnosis.runs or (diagnosis,)
    purpose, commands = _commands(diagnosis)
    return render(
        "doctor.html",
        heading=diagnosis.name,
        kind="doctor",
        simulated=any_simulated(Run(run.log.run_path) for run in runs if run.log and run.log.run_path),
        diagnosis=diagnosis,
        tone="good" if diagnosis.primary == "healthy" else "mild" if diagnosis.primary in _MILD else "bad",
        error_name=diagnosis.error_name,
        lead=diagnosis.evidence[0] if diagnosis.evidence else diagnosis.primary,
        has_reference=diagnosis.log is not None and matching_reference(diagnosis.log, diagnosis.dataset) is not None,
        causes=diagnosis.causes,
        suggestion=diagnosis.suggestion,
        purpose=purpose,
        commands=commands,
        runs=[(run, _error_figure(run), _other_figures(run)) for run in runs[:_MAX_RUNS]],
        n_more=max(len(runs) - _MAX_RUNS, 0),
        runs_table=[
            (run.name, run.primary.replace("_", " "), percent(run.best_per), count(run.best_step),
             percent(run.last_per), count(run.last_step))
            for run in diagnosis.runs
        ],
    )  # fmt: skip


def _commands(diagnosis: Diagnosis) -> tuple[str, str]:
    """What the commands that train the remedy do, and the commands; empty if no setting has to change."""
    remedy = diagnosis.fix()
    if not remedy:
        return "", ""
    store = diagnosis.store or "STORE"
    if remedy.run is not None:
        write = ["arcuate", "doctor", str(remedy.run), "--fix", "remedy.yaml"]
        train = ["arcuate", "train", "remedy.yaml", "--data", store, "--run", f"{remedy.run}-remedy"]
        return "Write the remedy as a recipe and train it beside this run:", f"{shlex.join(write)}\n{shlex.join(train)}"
    recipe, overrides = f"{diagnosis.dataset}-gru", override_list(remedy.overrides)
    try:
        load_recipe(recipe, remedy.overrides)
    except UserError:  # an unknown data set, or settings that the recipe does not have
        return "", ""
    train = ["arcuate", "train", recipe, "--data", store, "--run", "runs/remedy", *overrides]
    return (
        "This is the log of another trainer. The change in arcuate, on the recipe of the official model:",
        shlex.join(train),
    )


def _error_figure(run: Diagnosis) -> Figure | None:
    chart = diagnosis_chart(run)
    if chart is None or run.log is None:
        return None
    per, reference = run.log.per.finite, matching_reference(run.log, run.dataset)
    best = float(per.steps[int(per.values.argmin())])
    legend = [
        LegendEntry(f"this run, {run.log.error_name}", "blue"),
        LegendEntry(f"best, step {count(best)}", "blue", "ring"),
    ]
    if reference:
        band = f"± {_BAND_SD:g} SD, drawn at least {100 * _MIN_BAND:.0f}\u202f% wide"
        legend.append(LegendEntry(f"{reference.n_runs} healthy runs, {band}: {reference.model}", "teal", "band"))
    return make_figure(
        chart, caption=f"Reference: {reference.source}." if reference else None, legend=legend, full=True
    )


def diagnosis_chart(run: Diagnosis) -> Chart | None:
    """The error rate over the reference band, with the steps of the verdicts marked; None without error rates."""
    log = run.log
    per = log.per.finite if log else None
    if log is None or per is None or not len(per):
        return None
    reference, last = matching_reference(log, run.dataset), max(float(per.steps[-1]), 1.0)
    expected = reference.mean[reference.grid <= last].tolist() if reference else []
    shown = np.clip([*per.values, *expected], _LOWEST, _HIGHEST)
    y = ValueAxis(percent=True, log=True, domain=curves.log_domain(shown[np.isfinite(shown)].tolist()))
    best = int(per.values.argmin())
    step, rate = float(per.steps[best]), float(per.values[best])
    layers = [
        *(_reference_layers(reference, last, y) if reference else []),
        *curves.best_mark(step, rate, y, last, float(shown.max())),
    ]
    return curves.line_chart(
        [Line(f"this run, {log.error_name}", "blue", _clamped(_curve(per), *(y.domain or (_LOWEST, _HIGHEST))))],
        y,
        title=f"{log.error_name} on validation",
        label=f"{log.error_name} over {per.unit}; best {percent(rate)}",
        x_title=per.unit,
        last=last,
        layers=layers,
        marks=_marks(run),
        height=_ERROR_HEIGHT,
    )


def _clamped(curve: Curve, low: float, high: float) -> Curve:
    def clamp(values: Sequence[float | None]) -> tuple[float | None, ...]:
        return tuple(None if v is None else min(max(v, low), high) for v in values)

    return Curve(curve.steps, clamp(curve.median), clamp(curve.low), clamp(curve.high), curve.n_missing)


def _reference_layers(reference: Reference, last: float, y: ValueAxis) -> list[Chart]:
    grid = [*reference.grid[reference.grid <= last].tolist(), min(last, float(reference.grid[-1]))]
    mean = np.interp(grid, reference.grid, reference.mean)
    half = np.maximum(_BAND_SD * np.interp(grid, reference.grid, reference.sd), _MIN_BAND * mean)
    return curves.band_layers(grid, mean.tolist(), half.tolist(), y)


def _marks(run: Diagnosis) -> list[tuple[int, str]]:
    """Steps where a verdict starts."""
    return [(step, verdict.replace("_", " ")) for step, verdict in run.marks[:_MAX_MARKS]]


def _other_figures(run: Diagnosis) -> list[Figure]:
    """Loss, learning rate and gradient norm, as far as the log has them."""
    log = run.log
    if log is None:
        return []
    lr, norms = log.lr.finite, log.grad_norm.finite
    figures = [_loss_figure(run, log)]
    if len(lr) > 1 and lr.values.max() > 0:
        figures.append(_series_figure("Learning rate", lr, ValueAxis(), "blue"))
    if len(positive := _positive(norms)) > 1:
        y = ValueAxis(log=True, domain=curves.log_domain(positive))
        figures.append(_series_figure("Gradient norm", norms, y, "train"))
    return [figure for figure in figures if figure]


def _loss_figure(run: Diagnosis, log: TrainingLog) -> Figure | None:
    losses = (log.train_loss.finite, "train", "training"), (log.val_loss.finite, "blue", "validation")
    shown = [entry for entry in losses if len(entry[0]) > 1]
    if len({series.unit for series, _, _ in shown}) > 1:
        shown = shown[-1:]  # the two axes are not comparable
    values = [v for series, _, _ in shown for v in _positive(series)]
    if not values:
        return None
    last, unit = max(float(series.steps[-1]) for series, _, _ in shown), shown[0][0].unit
    n_missing = len(log.train_loss.non_finite_steps) + len(log.val_loss.non_finite_steps)
    return line_figure(
        [Line(name, colour, _curve(series)) for series, colour, name in shown],
        ValueAxis(log=True, domain=curves.log_domain(values)),
        caption=f"{n_missing:,} non-finite values are not shown." if n_missing else None,
        title="Loss",
        label="Loss, logarithmic",
        x_title=unit,
        last=last,
        marks=_marks(run) if run.unit == unit else (),
    )


def _series_figure(title: str, series: Series, y: ValueAxis, colour: str) -> Figure:
    lines = [Line(title.lower(), colour, _curve(series))]
    label = f"{title}, logarithmic" if y.log else title
    last = float(series.steps[-1])
    return make_figure(curves.line_chart(lines, y, title=title, label=label, x_title=series.unit, last=last))


def _positive(series: Series) -> list[float]:
    return [v for v in series.values.tolist() if curves.SMALLEST < v < 1e100]


def _curve(series: Series) -> Curve:
    return thin_curve(series.steps.tolist(), [finite_number(v) for v in series.values.tolist()])
