"""Parts that the pages of several runs share: overlaid learning curves and legends."""

from collections.abc import Iterable, Sequence

from arcuate.errors import UserError
from arcuate.evaluation.charts import curves
from arcuate.insight.render import Figure, LegendEntry, make_figure
from arcuate.run import Run

FOREST_LEGEND = (
    LegendEntry("better", "teal", "dot"),
    LegendEntry("worse", "orange", "dot"),
    LegendEntry("not significant", "quiet", "ring"),
)
DOT_LEGEND = (LegendEntry("one run", "blue", "dot"), LegendEntry("mean", "ink", "box"))


def overlaid_figures(runs: Sequence[curves.GroupedRun]) -> list[Figure]:
    """Learning curves of several runs, runs of one group in one colour; a click on the legend hides a group."""
    legend = [
        LegendEntry(name, colour, "dash" if dashed else "line", name)
        for name, (colour, dashed) in curves.group_colours([group for group, _ in runs]).items()
    ]
    return [make_figure(chart, legend=legend) for chart in curves.overlaid_curves(runs)]


def any_simulated(runs: Iterable[Run]) -> bool:
    """Whether one of the runs was trained on simulated data."""
    return any(is_simulated(run) for run in runs)


def is_simulated(run: Run) -> bool:
    try:
        return run.data().get("simulated") is True
    except UserError:  # no environment.json, or a damaged one
        return False
