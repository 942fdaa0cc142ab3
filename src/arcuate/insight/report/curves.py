"""Learning curves: loss, phoneme error rate, learning rate and gradient norm over steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arcuate.insight.report.axes import (
    SMALLEST,
    Scale,
    band,
    columns_axis,
    dot,
    linear,
    logarithmic,
    path,
    rows_axis,
    rule,
    text,
)
from arcuate.insight.report.evidence import Evidence, by_step
from arcuate.insight.report.markup import (
    Html,
    count,
    counted,
    figure,
    join,
    legend,
    number,
    percent,
    short,
    split_name,
    svg,
    tag,
)

WIDTH, HEIGHT = 560, 314
LEFT, RIGHT, TOP, BOTTOM = 62, 540, 14, 268
MAX_POINTS = 320  # a line holds no more than a screen can show


@dataclass(frozen=True)
class Series:
    """Values over steps, thinned: the middle of each stretch of steps with its lowest and highest value."""

    steps: tuple[float, ...]
    middle: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    n_missing: int  # logged, but no finite number

    @property
    def values(self) -> list[float]:
        return [v for v in (*self.low, *self.high) if v is not None]


def series(rows: Sequence[Mapping[str, Any]], key: str, peak: str | None = None) -> Series:
    """One quantity of the log; `peak` names another whose values may reach higher within the same steps."""
    steps = [int(row["step"]) for row in rows if key in row]
    values = [number(row[key]) for row in rows if key in row]
    peaks = [number(row.get(peak)) for row in rows if key in row] if peak else values
    size = max(1, -(-len(steps) // MAX_POINTS))
    at, middle, low, high = [], [], [], []
    for i in range(0, len(steps), size):
        kept = [v for v in values[i : i + size] if v is not None]
        tops = kept + [v for v in peaks[i : i + size] if v is not None]
        at.append(float(np.median(steps[i : i + size])))
        middle.append(float(np.median(kept)) if kept else None)
        low.append(min(kept) if kept else None)
        high.append(max(tops) if tops else None)
    return Series(tuple(at), tuple(middle), tuple(low), tuple(high), sum(v is None for v in values))


def curves(evidence: Evidence) -> Html:
    """The four charts, those that the log has numbers for."""
    drawn = [loss_chart(evidence), error_chart(evidence), rate_chart(evidence), gradient_chart(evidence)]
    kept = [chart for chart in drawn if chart]
    if not kept:
        return tag("p", "The log of this run holds no numbers yet.", class_="absent")
    return tag("div", *kept, class_="pair")


def steps_scale(evidence: Evidence) -> Scale:
    last = float(evidence.last_step or 1)
    return Scale(0.0, max(last, 1.0), LEFT, RIGHT)


def drawn(values: Series, x: Scale, y: Scale, kind: str) -> Html:
    """The line, over the band between the lowest and the highest of each stretch."""

    def point(step: float, value: float | None) -> tuple[float, float] | None:
        return None if value is None or (y.log and value <= SMALLEST) else (x(step), y(value))

    edges = [
        (point(s, lo), point(s, hi)) for s, lo, hi in zip(values.steps, values.low, values.high, strict=True)
    ]
    both = [(lo, hi) for lo, hi in edges if lo and hi]
    spread = any(hi != lo for lo, hi in both)
    line = [point(s, v) for s, v in zip(values.steps, values.middle, strict=True)]
    shadow = band([hi for _, hi in both], [lo for lo, _ in both], f"band {kind}") if spread else Html()
    return join([shadow, path(line, f"line {kind}")])


def chart(
    title: str, label: str, x: Scale, y: Scale, marks: Sequence[Html], key: Html, note: str, name: Any = short
) -> Html:
    drawing = svg(
        WIDTH,
        HEIGHT,
        label,
        rows_axis(y, LEFT, RIGHT, name),
        columns_axis(x, BOTTOM, "optimizer steps"),
        *marks,
    )
    return figure(title, drawing, note, key)


def missing(*lines: Series) -> str:
    n_missing = sum(line.n_missing for line in lines)
    return f" {counted(n_missing, 'logged value')} not finite, left as gaps." if n_missing else ""


def loss_chart(evidence: Evidence) -> Html | None:
    train = series(evidence.training, "loss")
    held = {split: series(rows, "loss") for split, rows in evidence.validation.items()}
    values = [*train.values, *(v for line in held.values() for v in line.values)]
    if not values:
        return None
    x = steps_scale(evidence)
    wide = min(values) > SMALLEST and max(values) / min(values) > 8
    y = (
        logarithmic(values, BOTTOM, TOP)
        if wide
        else linear(values, BOTTOM, TOP, 0.0 if min(values) >= 0 else None)
    )
    marks, entries = [], []
    if train.values:
        marks.append(drawn(train, x, y, "train"))
        entries.append(("train", "training"))
    for kind, (split, line) in zip(("held", "second", "third"), held.items(), strict=False):
        if line.values:
            marks.append(drawn(line, x, y, kind))
            entries.append((kind, split_name(split)))
    note = missing(train, *held.values())
    last = train.middle[-1] if train.middle and train.middle[-1] is not None else None
    label = "CTC loss over steps" + (f"; training loss at the end {last:.3g}" if last is not None else "")
    return chart("Loss, logarithmic" if wide else "Loss", label, x, y, marks, legend(*entries), note.strip())


def error_chart(evidence: Evidence) -> Html | None:
    held = {split: series(rows, "per") for split, rows in evidence.validation.items()}
    values = [v for line in held.values() for v in line.values]
    best = evidence.best
    if not values or best is None:
        return None
    x, y = steps_scale(evidence), linear(values, BOTTOM, TOP, 0.0)
    marks, entries = [], []
    for kind, (split, line) in zip(("held", "second", "third"), held.items(), strict=False):
        if line.values:
            marks.append(drawn(line, x, y, kind))
            entries.append((kind, split_name(split)))
    split, step, rate = best
    side = "end" if x(step) > (LEFT + RIGHT) / 2 else "start"
    beneath = y(rate) + 24 < BOTTOM - 4  # nothing lies under the best
    height = y(rate) + (24 if beneath else -14)
    words = f"best {percent(rate)}"
    marks += [
        dot(x(step), y(rate), 5, "best", f"{words} at step {count(step)}"),
        text(x(step), height, words, "strong halo", side),
    ]
    entries.append(("best", f"best, step {count(step)}"))
    label = (
        f"Phoneme error rate over steps; best {percent(rate)} on {split_name(split)} at step {count(step)}"
    )
    note = missing(*held.values()).strip()
    return chart("Phoneme error rate", label, x, y, marks, legend(*entries), note, lambda v: percent(v, 0))


def rate_chart(evidence: Evidence) -> Html | None:
    rates, session = series(evidence.training, "lr"), series(evidence.training, "lr_session")
    values = [*rates.values, *session.values]
    if not values:
        return None
    x, y = steps_scale(evidence), linear(values, BOTTOM, TOP, 0.0)
    marks, entries = [drawn(rates, x, y, "held")], [("held", "all weights")]
    if session.values and session.middle != rates.middle:
        marks.append(drawn(session, x, y, "second"))
        entries.append(("second", "session layers"))
    elif session.values:
        entries = [("held", "all weights, session layers included")]
    label = f"Learning rate over steps; highest {max(values):.3g}"
    return chart("Learning rate", label, x, y, marks, legend(*entries), missing(rates, session).strip())


def gradient_chart(evidence: Evidence) -> Html | None:
    norms = series(evidence.training, "grad_norm", "grad_norm_max")
    positive = [v for v in norms.values if v > SMALLEST]
    if not positive:
        return None
    limit = number(evidence.setting("train.clip_norm")) or 0.0
    x, y = (
        steps_scale(evidence),
        logarithmic([*positive, *([limit] if limit > SMALLEST else [])], BOTTOM, TOP),
    )
    marks, entries = [drawn(norms, x, y, "train")], [("train", "before clipping"), ("train area", "highest")]
    if limit > SMALLEST:
        marks.append(rule(LEFT, y(limit), RIGHT, y(limit), "line limit"))
        entries.append(("limit", f"clipped to {limit:g}"))
    else:
        entries[0] = ("train", "not clipped")
    label = f"Gradient norm over steps, logarithmic; between {min(positive):.3g} and {max(positive):.3g}"
    return chart("Gradient norm, logarithmic", label, x, y, marks, legend(*entries), missing(norms).strip())


# The learning curves of several runs in one picture, runs of one group in one colour.

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
        overlay_chart(
            "Phoneme error rate on validation", [held_out(r) for r in runs], "per", runs, names, key
        ),
        overlay_chart("Training loss", [training(r) for r in runs], "loss", runs, names, key),
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


def overlay_chart(
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
