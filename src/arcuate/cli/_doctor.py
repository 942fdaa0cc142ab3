"""`arcuate doctor`."""

from pathlib import Path

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from arcuate.cli.console import check_output, emit_json, err, out, percent, say
from arcuate.insight.doctor.diagnose import check_dataset, judge_all
from arcuate.insight.doctor.diagnosis import Diagnosis
from arcuate.insight.doctor.page import write_page
from arcuate.insight.doctor.read import read

COLOURS = {
    "healthy": "green",
    "unfinished": "cyan",
    "too_short": "cyan",
    "plateaued": "yellow",
    "overfit": "yellow",
}


def doctor_command(
    path: Path,
    dataset: str | None,
    planned_steps: int | None,
    allow_pickle: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    check_dataset(dataset)
    check_output(html, "<!doctype html", "page.html")
    with err.status(f"reading {path}"):
        reading = read(path, allow_pickle)
        diagnosis = judge_all(reading, dataset, planned_steps)
        if html is not None:
            write_page(html, diagnosis, reading)
    if html is not None:
        say(f"page: {html}")
    if as_json:
        emit_json(diagnosis.as_json())
    else:
        show(diagnosis)


def show(diagnosis: Diagnosis) -> None:
    out.print(headline(diagnosis))
    for sentence in diagnosis.evidence:
        out.print(Padding(Text(f"· {sentence}"), (0, 0, 0, 2)))
    if diagnosis.runs:
        out.print(runs_table(diagnosis))
    if diagnosis.causes:
        out.print("\nlikely causes, the likeliest first")
        for i, cause in enumerate(diagnosis.causes, start=1):
            out.print(Padding(Text(f"{i}. {cause.cause}: {cause.because}"), (0, 0, 0, 2)))
            out.print(Padding(Text(f"try {cause.change}", style="dim"), (0, 0, 0, 5)))
    if diagnosis.suggestion:
        first = ("\ntry first ", "bold") if diagnosis.causes else "\n"
        out.print(Text.assemble(first, diagnosis.suggestion))
    told = [*diagnosis.inferences, *diagnosis.notes, f"read as {diagnosis.source}"]
    out.print(Padding(Text("\n".join(told), style="dim"), (1, 0, 0, 0)))


def headline(diagnosis: Diagnosis) -> Text:
    colour = COLOURS.get(diagnosis.primary, "red")
    line = Text.assemble((f"{diagnosis.primary}", f"bold {colour}"), f"  {diagnosis.name}")
    if diagnosis.since:
        line.append(f"  {diagnosis.since}")
    if diagnosis.secondary:
        line.append(f"  (also: {', '.join(diagnosis.secondary)})", "dim")
    if diagnosis.best_per is not None and diagnosis.best_step is not None:
        line.append(
            f"\nbest {percent(diagnosis.best_per)} at {diagnosis.best_step:,}, last {percent(diagnosis.last_per)}"
        )
    return line


def runs_table(diagnosis: Diagnosis) -> Table:
    table = Table(box=None, header_style="bold")
    for heading in ("run", "verdict", "best PER", "at step", "last PER", "last step"):
        table.add_column(heading, justify="left" if heading in ("run", "verdict") else "right")
    for run in diagnosis.runs:
        steps = [f"{step:,}" if step is not None else "–" for step in (run.best_step, run.last_step)]
        cells = (run.name, run.primary, percent(run.best_per), steps[0], percent(run.last_per), steps[1])
        table.add_row(*map(Text, cells))
    return table
