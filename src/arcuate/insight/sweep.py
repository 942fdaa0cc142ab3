"""The page of a sweep: the error rate of every trial, against each setting that was varied."""

from pathlib import Path

from arcuate.evaluation.charts import base, plots
from arcuate.evaluation.charts.formats import MISSING, count, duration, percent
from arcuate.experiments.sweep import SweepResult, SweepTrial, sweep_status
from arcuate.insight.overlay import any_simulated
from arcuate.insight.render import Figure, LegendEntry, make_figure, render
from arcuate.run import Run

_STATES = {"complete": "blue", "pruned": "train", "fail": "orange", "running": "teal"}
_MAX_SETTINGS = 12


def sweep_page(out: str | Path) -> str:
    """The trials of a sweep so far, best first, and how the error rate depends on each setting."""
    result = sweep_status(out)
    return render(
        "sweep.html",
        heading=result.out.name,
        kind="sweep",
        simulated=any_simulated(Run(Path(trial.run)) for trial in result.trials[:1]),
        result=result,
        best=percent(result.best.per) if result.best else None,
        best_settings=_settings(result.best) if result.best else "",
        command=" ".join(result.command) if result.command else "",
        figures=_figures(result),
        rows=[_row(trial) for trial in sorted(result.trials, key=lambda t: (t.per is None, t.per or 0.0, t.number))],
    )


def _row(trial: SweepTrial) -> tuple[object, ...]:
    seconds = MISSING if trial.seconds is None else duration(trial.seconds)
    step = count(trial.step)
    return (trial.number, percent(trial.per), trial.state, _settings(trial), step, seconds, trial.reason or "")


def _settings(trial: SweepTrial) -> str:
    """The settings of a trial with four digits; the command has all of them."""
    parts = []
    for override in trial.overrides:
        path, _, value = override.partition("=")
        number = _number(value)
        parts.append(f"{path}={number:.4g}" if isinstance(number, float) and not value.isdigit() else override)
    return ", ".join(parts)


def _figures(result: SweepResult) -> list[Figure]:
    """The error rate over trials, and against each setting."""
    scored = [trial for trial in result.trials if trial.per is not None]
    if not scored:
        return []
    points: dict[str, list[base.Row]] = {"trial": []}
    for trial in scored:
        shown = {"per": trial.per, "state": trial.state, "text": _settings(trial), "number": trial.number}
        points["trial"].append({**shown, "value": trial.number})
        for override in trial.overrides:
            path, _, value = override.partition("=")
            points.setdefault(path, []).append({**shown, "value": _number(value)})
    legend = [LegendEntry(s, c, "dot", s) for s, c in _STATES.items() if any(t.state == s for t in scored)]
    rate = result.rate_name
    charts = [
        plots.scatter_chart(rows, title=f"{rate} against {name}", x_title=name, colours=_STATES, rate_name=rate)
        for name, rows in list(points.items())[: _MAX_SETTINGS + 1]
    ]
    return [make_figure(chart, legend=legend) for chart in charts]


def _number(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value
