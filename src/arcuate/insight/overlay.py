"""Parts that several pages share: lines with their legend, overlaid learning curves, the mark of simulated data."""

from collections.abc import Iterable, Sequence
from typing import Any

from arcuate.errors import UserError
from arcuate.insight.charts import curves
from arcuate.insight.charts.curves import Line, ValueAxis
from arcuate.insight.render import Figure, LegendEntry, make_figure
from arcuate.run import Run

FOREST_LEGEND = (
    LegendEntry("better", "teal", "dot"),
    LegendEntry("worse", "orange", "dot"),
    LegendEntry("not significant", "quiet", "ring"),
)


def line_figure(
    lines: Sequence[Line],
    y: ValueAxis,
    *,
    entries: Iterable[LegendEntry] = (),
    caption: str | None = None,
    full: bool = False,
    **options: Any,
) -> Figure:
    """Lines with their legend; `entries` are added to it, `options` are those of `curves.line_chart`."""
    legend = [*(_entry(line.name, line.colour, line.dash) for line in lines), *entries]
    return make_figure(curves.line_chart(lines, y, **options), caption=caption, legend=legend, full=full)


def _entry(name: str, colour: str, dashed: bool) -> LegendEntry:
    """A line in a legend; a click hides it."""
    return LegendEntry(name, colour, "dash" if dashed else "line", name)


def overlaid_figures(runs: Sequence[curves.GroupedRun], rate_name: str) -> list[Figure]:
    """Learning curves of several runs, runs of one group in one colour; a click on the legend hides a group."""
    legend = [_entry(name, *style) for name, style in curves.group_colours([group for group, _ in runs]).items()]
    return [make_figure(chart, legend=legend) for chart in curves.overlaid_curves(runs, rate_name)]


def any_simulated(runs: Iterable[Run]) -> bool:
    """Whether one of the runs was trained on simulated data."""
    return any(is_simulated(run) for run in runs)


def is_simulated(run: Run) -> bool:
    try:
        return run.data().get("simulated") is True
    except UserError:  # no environment.json, or a damaged one
        return False
