"""One self-contained HTML page per diagnosis: the verdict, the curve in its reference band, the marked steps."""

from importlib.resources import files
from pathlib import Path

from arcuate.doctor.charts import error_chart, gradient_chart, loss_chart, rate_chart
from arcuate.doctor.curve import Log
from arcuate.doctor.diagnosis import Diagnosis
from arcuate.doctor.reading import Reading
from arcuate.doctor.reference import fitting
from arcuate.report.markup import Html, escape, join, pairs, table, tag
from arcuate.report.page import POLICY
from arcuate.report.wording import count, percent
from arcuate.run import write_aside

MOST_RUNS = 24  # drawn, of a file with many


def write_page(path: Path, diagnosis: Diagnosis, reading: Reading) -> None:
    write_aside(path, page(diagnosis, reading))


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
    style = (files("arcuate") / "report" / "style.css").read_text("utf-8")
    own = (files("arcuate") / "doctor" / "style.css").read_text("utf-8")
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
