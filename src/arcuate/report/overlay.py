"""The learning curves of several runs in one picture, runs of one group in one colour."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arcuate.report.axes import Scale, columns_axis, linear, logarithmic, path, rows_axis
from arcuate.report.curves import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Series, series
from arcuate.report.evidence import by_step
from arcuate.report.markup import Html, figure, legend, svg, tag
from arcuate.report.wording import percent, short

N_COLOURS = 8
MAX_RATIO = 8  # beyond it, losses are drawn on a logarithmic scale


@dataclass(frozen=True)
class Traced:
    """One run of a group: the rows of its log."""

    group: str
    rows: Sequence[Mapping[str, Any]]


def overlay(runs: Sequence[Traced]) -> Html:
    """Validation error rate and training loss over steps."""
    names = list(dict.fromkeys(run.group for run in runs))
    key = legend(*((colour(i), name) for i, name in enumerate(names)))
    charts = [
        chart("Phoneme error rate on validation", [held_out(r) for r in runs], "per", runs, names, key),
        chart("Training loss", [training(r) for r in runs], "loss", runs, names, key),
    ]
    kept = [c for c in charts if c is not None]
    return (
        tag("div", *kept, class_="pair")
        if kept
        else tag("p", "The logs hold no numbers yet.", class_="absent")
    )


def colour(i: int) -> str:
    return f"c{i % N_COLOURS}" + (" dash" if i >= N_COLOURS else "")


def held_out(run: Traced) -> tuple[Mapping[str, Any], ...]:
    return by_step(row for row in run.rows if row.get("split") != "train" and "per" in row)


def training(run: Traced) -> tuple[Mapping[str, Any], ...]:
    return by_step(row for row in run.rows if row.get("split") == "train")


def chart(
    title: str,
    logs: Sequence[Sequence[Mapping[str, Any]]],
    quantity: str,
    runs: Sequence[Traced],
    names: Sequence[str],
    key: Html,
) -> Html | None:
    lines = [series(rows, quantity) for rows in logs]
    values = [v for line in lines for v in line.middle if v is not None]
    if not values:
        return None
    last = max(s for line in lines for s in line.steps)
    x = Scale(0.0, max(last, 1.0), LEFT, RIGHT)
    wide = quantity == "loss" and min(values) > 0 and max(values) / min(values) > MAX_RATIO
    y = logarithmic(values, BOTTOM, TOP) if wide else linear(values, BOTTOM, TOP, 0.0)
    marks = [
        path(points(line, x, y), f"line own {colour(names.index(run.group))}")
        for line, run in zip(lines, runs, strict=True)
    ]
    name = (lambda v: percent(v, 0)) if quantity == "per" else short
    label = f"{title} over steps, {len(runs)} runs: {', '.join(names)}"
    drawing = svg(
        WIDTH,
        HEIGHT,
        label,
        rows_axis(y, LEFT, RIGHT, name),
        columns_axis(x, BOTTOM, "optimizer steps"),
        *marks,
    )
    return figure(title + (", logarithmic" if wide else ""), drawing, None, key)


def points(line: Series, x: Scale, y: Scale) -> list[tuple[float, float] | None]:
    return [
        None if v is None or (y.log and v <= 0) else (x(s), y(v))
        for s, v in zip(line.steps, line.middle, strict=True)
    ]
