"""The pictures of a diagnosis: the error rate in its reference band, the losses, the rate, the gradient norm."""

from importlib.resources import files
from pathlib import Path

import numpy as np

from arcuate.files import write_text
from arcuate.insight.doctor.curve import Log, Series
from arcuate.insight.doctor.diagnosis import Diagnosis
from arcuate.insight.doctor.read import Reading
from arcuate.insight.doctor.reference import Reference, fitting
from arcuate.insight.report import curves
from arcuate.insight.report.axes import (
    SMALLEST,
    Scale,
    band,
    columns_axis,
    dot,
    logarithmic,
    path,
    rows_axis,
    rule,
    text,
)
from arcuate.insight.report.curves import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH
from arcuate.insight.report.markup import (
    Html,
    count,
    escape,
    figure,
    join,
    legend,
    pairs,
    percent,
    svg,
    table,
    tag,
)
from arcuate.insight.report.page import POLICY

LOWEST, HIGHEST = 0.01, 1.2  # error rates beyond are drawn at the edge; untrained models reach 5
WIDE, TALL, FAR_RIGHT, FLOOR = 1120, 430, 1100, 384  # the error rate has a chart as wide as the page
READABLE = "min-width: 44rem"  # narrower, it scrolls
N_SD = 2.0  # half the width of the reference band
THIN = 0.03  # of the mean: the band is at least so wide on either side that it can be seen


def error_chart(run: Diagnosis, log: Log, reference: Reference | None) -> Html | None:
    """The error rate over steps, over the band of healthy runs, with the steps that matter marked."""
    per = log.per.finite
    if not len(per):
        return None
    last = max(float(per.steps[-1]), 1.0)
    x = Scale(0.0, last, LEFT, FAR_RIGHT)
    usual = reference.mean[reference.grid <= last].tolist() if reference else []
    y = logarithmic([*np.clip([*per.values, *usual], LOWEST, HIGHEST).tolist()], FLOOR, TOP)
    best = int(per.values.argmin())
    at, rate = float(per.steps[best]), float(per.values[best])
    marks = [reference_band(reference, x, y, last)] if reference else []
    marks += [*step_marks(run, x, FLOOR), drawn(per, x, y, "held"), *best_mark(x, y, at, rate)]
    axes = [rows_axis(y, LEFT, FAR_RIGHT, lambda v: percent(v, 0)), columns_axis(x, FLOOR, per.unit)]
    drawing = svg(
        WIDE, TALL, f"{log.error_name} over {per.unit}; best {percent(rate)}", *axes, *marks, style=READABLE
    )
    entries = [("held", f"this run, {log.error_name}"), ("best", f"best, step {count(at)}")]
    if reference:
        entries.append(
            (
                "reference",
                f"{reference.n_runs} healthy runs, ± {N_SD:g} SD, drawn at least 3 % wide: {reference.model}",
            )
        )
    source = f"Reference: {reference.source}." if reference else None
    return figure(
        f"{log.error_name} on validation, logarithmic", drawing, source, legend(*entries), wide=True
    )


def best_mark(x: Scale, y: Scale, at: float, rate: float) -> list[Html]:
    side = "end" if x(at) > (x.start + x.stop) / 2 else "start"
    place = y(max(rate, y.low))
    height = place + (22 if place + 22 < FLOOR - 4 else -12)
    return [dot(x(at), place, 5, "best"), text(x(at), height, f"best {percent(rate)}", "strong halo", side)]


def reference_band(reference: Reference, x: Scale, y: Scale, last: float) -> Html:
    grid = [*reference.grid[reference.grid <= last].tolist(), min(last, float(reference.grid[-1]))]
    middle = np.interp(grid, reference.grid, reference.mean)
    half = np.maximum(N_SD * np.interp(grid, reference.grid, reference.sd), THIN * middle)
    upper, lower, line = (
        [(x(step), y(max(float(v), y.low))) for step, v in zip(grid, values, strict=True)]
        for values in (middle + half, middle - half, middle)
    )
    return join([band(upper, lower, "band reference"), path(line, "line reference")])


def step_marks(run: Diagnosis, x: Scale, bottom: float = BOTTOM) -> list[Html]:
    """A line down the chart at each step that a verdict begins at."""
    marks = []
    for i, (step, what) in enumerate(run.marks[:4]):
        place = x(float(step))
        right = place > (x.start + x.stop) / 2
        words = f"{what.replace('_', ' ')} from {count(step)}"
        at = (place - 5 if right else place + 5, TOP + 14 + 17 * i)
        marks += [
            rule(place, TOP, place, bottom, "line event"),
            text(*at, words, "event halo", "end" if right else "start"),
        ]
    return marks


def loss_chart(run: Diagnosis, log: Log) -> Html | None:
    train, held = log.train_loss.finite, log.val_loss.finite
    units = {s.unit for s in (train, held) if len(s)}
    if not units:
        return None
    shown = [(s, k, n) for s, k, n in ((train, "train", "training"), (held, "held", "validation")) if len(s)]
    if len(units) > 1:
        shown = shown[-1:]  # two axes that cannot be laid over each other
    values = [v for s, _, _ in shown for v in s.values.tolist() if SMALLEST < v < 1e100]
    if not values:
        return None
    x = Scale(0.0, max(1.0, *(float(s.steps[-1]) for s, _, _ in shown)), LEFT, RIGHT)
    y = logarithmic(values, BOTTOM, TOP)
    same = run.unit == shown[0][0].unit
    marks = [*(step_marks(run, x) if same else []), *(drawn(s, x, y, kind) for s, kind, _ in shown)]
    broken = len(log.train_loss.broken_steps) + len(log.val_loss.broken_steps)
    note = f"{broken:,} values are not finite and left out." if broken else None
    drawing = frame(x, y, shown[0][0].unit, "Loss, logarithmic", marks)
    return figure("Loss, logarithmic", drawing, note, legend(*((kind, name) for _, kind, name in shown)))


def rate_chart(log: Log) -> Html | None:
    rates = log.lr.finite
    if len(rates) < 2 or rates.values.max() <= 0:
        return None
    x = Scale(0.0, max(float(rates.steps[-1]), 1.0), LEFT, RIGHT)
    y = Scale(0.0, 1.06 * float(rates.values.max()), BOTTOM, TOP)
    return figure("Learning rate", frame(x, y, rates.unit, "Learning rate", [drawn(rates, x, y, "held")]))


def gradient_chart(log: Log) -> Html | None:
    norms = log.grad_norm.finite
    positive = [v for v in norms.values.tolist() if SMALLEST < v < 1e100]
    if len(positive) < 2:
        return None
    x, y = Scale(0.0, max(float(norms.steps[-1]), 1.0), LEFT, RIGHT), logarithmic(positive, BOTTOM, TOP)
    drawing = frame(x, y, norms.unit, "Gradient norm, logarithmic", [drawn(norms, x, y, "train")])
    return figure("Gradient norm, logarithmic", drawing)


def frame(x: Scale, y: Scale, unit: str, label: str, marks: list[Html]) -> Html:
    return svg(WIDTH, HEIGHT, label, rows_axis(y, LEFT, RIGHT), columns_axis(x, BOTTOM, unit), *marks)


def drawn(series: Series, x: Scale, y: Scale, kind: str) -> Html:
    rows = [
        {"step": s, "value": v} for s, v in zip(series.steps.tolist(), series.values.tolist(), strict=True)
    ]
    return curves.drawn(curves.series(rows, "value"), x, y, kind)


# One self-contained HTML page per diagnosis: the verdict, the curve in its reference band, the marked steps.

MOST_RUNS = 24  # drawn, of a file with many


def write_page(path: Path, diagnosis: Diagnosis, reading: Reading) -> None:
    write_text(path, page(diagnosis, reading))


def page(diagnosis: Diagnosis, reading: Reading) -> str:
    judged = list(zip(diagnosis.runs or (diagnosis,), reading.logs, strict=True))
    parts: list[Html] = []
    if diagnosis.runs:
        parts.append(tag("section", tag("h2", "Runs in this file"), runs_table(diagnosis)))
    for run, log in judged[:MOST_RUNS]:
        parts.append(section(run, log, alone=not diagnosis.runs))
    if len(judged) > MOST_RUNS:
        parts.append(tag("p", f"{len(judged) - MOST_RUNS} more runs are in the table only.", class_="absent"))
    footer = tag("footer", f"Written by arcuate from {reading.name}, read as {reading.source}.")
    body = join([head(diagnosis), tag("main", *parts), footer])
    style = (files("arcuate") / "insight" / "report" / "style.css").read_text("utf-8")
    own = (files("arcuate") / "insight" / "doctor" / "style.css").read_text("utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(diagnosis.name)} · arcuate doctor</title>\n"
        f"<style>\n{style}{own}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def head(diagnosis: Diagnosis) -> Html:
    """The verdict in large letters, then why."""
    also = (
        tag("p", "Also: ", ", ".join(diagnosis.secondary), ".", class_="absent")
        if diagnosis.secondary
        else None
    )
    since = f" {diagnosis.since}" if diagnosis.since else ""
    return tag(
        "header",
        tag("p", f"arcuate doctor · {diagnosis.name}", class_="kicker"),
        tag(
            "h1",
            diagnosis.primary.replace("_", " "),
            tag("small", since),
            class_=f"verdict {tone(diagnosis)}",
        ),
        tag("p", sentence(diagnosis), class_="lead"),
        also,
        tiles(diagnosis),
    )


def sentence(diagnosis: Diagnosis) -> str:
    first = diagnosis.evidence[0] if diagnosis.evidence else diagnosis.primary
    return f"{first[:1].upper()}{first[1:]}."


def tone(diagnosis: Diagnosis) -> str:
    if diagnosis.primary == "healthy":
        return "good"
    return "mild" if diagnosis.primary in ("unfinished", "too_short", "restarted") else "bad"


def tiles(diagnosis: Diagnosis) -> Html:
    shown = [
        ("best PER", percent(diagnosis.best_per), _at(diagnosis.best_step) or "none was logged"),
        ("last PER", percent(diagnosis.last_per), f"last step {count(diagnosis.last_step)}"),
        (
            "planned",
            count(diagnosis.planned_steps),
            diagnosis.unit if diagnosis.planned_steps else "not known",
        ),
        (
            "compared with",
            diagnosis.dataset or "itself",
            "data set" if diagnosis.dataset else "there is no reference",
        ),
    ]
    made = [
        tag(
            "div",
            tag("p", name, class_="name"),
            tag("p", value, class_="value"),
            tag("p", note, class_="below"),
            class_="tile",
        )
        for name, value, note in shown
    ]
    return tag("div", *made, class_="tiles")


def _at(step: int | None) -> str:
    return "" if step is None else f"at step {count(step)}"


def section(run: Diagnosis, log: Log, alone: bool) -> Html:
    main = error_chart(run, log, fitting(log, run.dataset))
    rest = [chart for chart in (loss_chart(run, log), rate_chart(log), gradient_chart(log)) if chart]
    charts = join([main or Html(), tag("div", *rest, class_="pair")])
    title = "Curves" if alone else f"{run.name}: {run.primary}"
    evidence = tag("ul", *(tag("li", sentence) for sentence in run.evidence))
    told = [("concluded", s) for s in run.inferences] + [("note", s) for s in run.notes]
    return tag(
        "section",
        tag("h2", title),
        charts,
        tag("h3", "Evidence"),
        evidence,
        causes(run),
        tag("h3", "What was not told") if told else None,
        pairs(list(told)) if told else None,
    )


def causes(run: Diagnosis) -> Html:
    if not run.causes:
        return tag("p", run.suggestion, class_="notice") if run.suggestion else Html()
    rows: list[tuple[object, ...]] = [
        (f"{i}. {c.cause}", c.because, tag("code", c.change)) for i, c in enumerate(run.causes, start=1)
    ]
    return join(
        [
            tag("h3", "Likely causes, and what to try"),
            tag("div", table(("cause", "because", "try"), rows), class_="scroll"),
        ]
    )


def runs_table(diagnosis: Diagnosis) -> Html:
    rows: list[tuple[object, ...]] = [
        (
            run.name,
            run.primary,
            percent(run.best_per),
            count(run.best_step),
            percent(run.last_per),
            count(run.last_step),
        )
        for run in diagnosis.runs
    ]
    heads = ("run", "verdict", "best PER", "at step", "last PER", "last step")
    return tag("div", table(heads, rows), class_="scroll")
