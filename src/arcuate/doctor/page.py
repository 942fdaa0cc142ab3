"""The page of a diagnosis: the verdict, what to do, the error rate against its reference band, and the other curves."""

import shlex
from collections.abc import Mapping

import numpy as np

from arcuate.doctor.diagnose import Diagnosis, Reference, matching_reference
from arcuate.doctor.log_table import Series
from arcuate.files import finite_number
from arcuate.insight.charts import curves
from arcuate.insight.charts.base import Chart
from arcuate.insight.charts.curves import Curve, Line, ValueAxis, thin_curve
from arcuate.insight.charts.formats import count, percent
from arcuate.insight.render import Figure, LegendEntry, line_figure, make_figure, render
from arcuate.insight.run_data import is_simulated
from arcuate.run import Run

_LOWEST, _HIGHEST = 0.01, 1.2  # error rates outside are drawn at the edge; untrained models reach 5
_ERROR_HEIGHT = 340
_BAND_SD = 2.0  # half the width of the reference band
_MIN_BAND = 0.03  # fraction of the mean: the band is at least this wide on either side
_MILD = ("unfinished", "too_short", "restarted")  # verdicts that do not mean a failure
_MAX_RUNS = 24  # maximum number of runs drawn
_MAX_MARKS = 4
_COLOURS = {"training": "train", "validation": "blue", "learning rate": "blue", "gradient norm": "train"}


def diagnosis_page(diagnosis: Diagnosis) -> str:
    runs = diagnosis.runs or (diagnosis,)
    purpose, commands = _commands(diagnosis)
    return render(
        "doctor.html",
        heading=diagnosis.name,
        kind="doctor",
        simulated=any(is_simulated(Run(run.log.run_path)) for run in runs if run.log and run.log.run_path),
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
    if remedy and remedy.run is not None:
        write = shlex.join(["arcuate", "doctor", str(remedy.run), "--fix", "remedy.yaml"])
        train = remedy.train_command("remedy.yaml", diagnosis.store)
        return "Write the remedy as a recipe and train it beside this run:", f"{write}\n{train}"
    if remedy and (command := remedy.packaged_command(diagnosis.store)):
        return "The log of another trainer. The change in arcuate, on the recipe of the official model:", command
    return "", ""


def _error_figure(run: Diagnosis) -> Figure | None:
    chart = diagnosis_chart(run)
    if chart is None or run.log is None:
        return None
    reference = matching_reference(run.log, run.dataset)
    legend = [
        LegendEntry(f"this run, {run.log.error_name}", "blue"),
        LegendEntry(f"best, step {count(run.best_step)}", "blue", "ring"),
    ]
    if reference:
        band = f"± {_BAND_SD:g} SD, drawn at least {100 * _MIN_BAND:.0f}\u202f% wide"
        legend.append(LegendEntry(f"{reference.n_runs} healthy runs, {band}: {reference.model}", "teal", "band"))
    caption = f"Reference: {reference.source}." if reference else None
    return make_figure(chart, caption=caption, legend=legend)


def diagnosis_chart(run: Diagnosis) -> Chart | None:
    """The error rate over the reference band, with the steps of the verdicts marked; None without error rates."""
    log = run.log
    if log is None or run.best_per is None or run.best_step is None:
        return None
    per = log.per.finite
    reference, last = matching_reference(log, run.dataset), max(float(per.steps[-1]), 1.0)
    expected = reference.mean[reference.grid <= last].tolist() if reference else []
    shown = np.clip([*per.values, *expected], _LOWEST, _HIGHEST)
    low, high = curves.log_domain(shown[np.isfinite(shown)].tolist())
    y = ValueAxis(percent=True, log=True, domain=(low, high))
    band = _reference_layers(reference, last, y) if reference else []
    chart = curves.line_chart(
        [Line(f"this run, {log.error_name}", "blue", _curve(per, low, high))],
        y,
        title=f"{log.error_name} on validation",
        label=f"{log.error_name} over {per.unit}; best {percent(run.best_per)}",
        x_title=per.unit,
        last=last,
        layers=[*band, *curves.best_mark(float(run.best_step), run.best_per, y, last, float(shown.max()))],
        marks=_marks(run),
    )
    return chart.properties(height=_ERROR_HEIGHT)


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
    losses = {"training": log.train_loss, "validation": log.val_loss}
    if len({series.unit for series in losses.values() if len(series.finite) > 1}) > 1:
        del losses["training"]  # the two axes are not comparable
    rates = {"learning rate": log.lr} if log.lr.finite.values.max(initial=0) > 0 else {}
    figures = (
        _figure(run, "Loss", losses, log=True),
        _figure(run, "Learning rate", rates),
        _figure(run, "Gradient norm", {"gradient norm": log.grad_norm}, log=True),
    )
    return [figure for figure in figures if figure]


def _figure(run: Diagnosis, title: str, series: Mapping[str, Series], log: bool = False) -> Figure | None:
    """The finite values of series with a common axis; None if there are no two of them."""
    shown = {name: s.finite for name, s in series.items() if len(s.finite) > 1}
    values = [v for s in shown.values() for v in s.values.tolist() if not log or curves.SMALLEST < v < 1e100]
    if not values:
        return None
    n_missing = sum(len(s.non_finite_steps) for s in series.values())
    unit = next(iter(shown.values())).unit
    return line_figure(
        [Line(name, _COLOURS[name], _curve(s)) for name, s in shown.items()],
        ValueAxis(log=True, domain=curves.log_domain(values)) if log else ValueAxis(),
        caption=f"{n_missing:,} non-finite values are not shown." if n_missing else None,
        title=title,
        label=f"{title}, logarithmic" if log else title,
        x_title=unit,
        last=max(float(s.steps[-1]) for s in shown.values()),
        marks=_marks(run) if run.unit == unit else (),
    )


def _curve(series: Series, low: float = -np.inf, high: float = np.inf) -> Curve:
    values = np.clip(series.values, low, high)
    return thin_curve(series.steps.tolist(), [finite_number(v) for v in values.tolist()])
