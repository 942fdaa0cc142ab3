"""Robustness in the report: error rate by severity of corrupted input, and by kind."""

from collections.abc import Mapping
from typing import Any

from arcuate.evaluation.charts.curves import Curve, Line, ValueAxis
from arcuate.evaluation.charts.formats import finite_int, finite_number, percent
from arcuate.files import read_json
from arcuate.insight.overlay import line_figure
from arcuate.insight.render import Measured
from arcuate.insight.report.run_data import RunData

_SHOWN = (("undefended", "orange"), ("renormalised", "blue"))


def robustness_section(data: RunData) -> Measured | None:
    """The latest `bench robustness` on the split of the results; None if there is none."""
    file = data.run.measurement_file("robustness", data.results.split if data.results else "val")
    found = read_json(file) if file.is_file() else None
    if not isinstance(found, Mapping):
        return None
    kinds = [k for k in found.get("corruptions") or () if isinstance(k, Mapping) and isinstance(k.get("per"), Mapping)]
    clean, mce = finite_number(found.get("clean_per")), found.get("mce")
    sets = [(name, colour, rates) for name, colour in _SHOWN if (rates := _by_severity(kinds, name, clean))]
    if not sets or not isinstance(mce, Mapping):
        return None
    means = ", ".join(f"{percent(mce.get(name))} {name}" for name, _, _ in sets)
    lead = (
        f"Mean corruption error over {len(kinds)} kinds of corrupted input: {means}; {percent(clean)} on clean input."
    )
    lines = [Line(name, colour, Curve.through(rates), dots=True) for name, colour, rates in sets]
    label = "; ".join(f"{name} from {rates[0][1]:.1%} to {rates[-1][1]:.1%}" for name, _, rates in sets)
    n_trials = finite_int(found.get("n_trials"))
    caption = None if n_trials is None else f"Mean over the kinds, on {n_trials:,} trials."
    rows = tuple(
        (str(kind.get("name")), *(percent(_mean(kind["per"].get(name))) for name, _, _ in sets)) for kind in kinds
    )
    head = f"mean {data.short_rate_name} by kind"
    figure = line_figure(
        lines,
        ValueAxis(percent=True),
        caption=caption,
        title=f"{data.short_rate_name} by severity",
        label=label,
        x_title="severity, 0 = clean",
    )
    return Measured(lead, (figure,), (head, *(name for name, _, _ in sets)), rows)


def _numbers(values: Any) -> list[float]:
    return [v for v in map(finite_number, values) if v is not None] if isinstance(values, list) else []


def _mean(values: Any) -> float | None:
    known = _numbers(values)
    return sum(known) / len(known) if known else None


def _by_severity(kinds: list[Any], name: str, clean: float | None) -> list[tuple[float, float]]:
    """(severity, mean PER over the kinds), with the clean error rate at 0; [] if a kind lacks a value."""
    table = [_numbers(kind["per"].get(name)) for kind in kinds]
    n = len(table[0]) if table else 0
    if not n or clean is None or any(len(row) != n for row in table):
        return []
    return [(0.0, clean), *((float(s + 1), sum(row[s] for row in table) / len(table)) for s in range(n))]
