"""`arcuate doctor`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from arcuate.cli.app import Json, app
from arcuate.cli.console import emit_json, out, percent, print_table, progress, say
from arcuate.errors import UserError

if TYPE_CHECKING:
    from arcuate.doctor import Diagnosis

_COLOURS = {"healthy": "green", "unfinished": "cyan", "too_short": "cyan", "plateaued": "yellow", "overfit": "yellow"}


@app.command()
def doctor(
    path: Annotated[Path, typer.Argument(help="Run folder, or log of any trainer or tracker.")],
    dataset: Annotated[str | None, typer.Option(help="Data set, b2t24 or b2t25; default: inferred.")] = None,
    planned_steps: Annotated[
        int | None, typer.Option(min=1, help="Planned number of steps; default: inferred.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write an HTML page with the curves to this file.")] = None,
    fix: Annotated[
        Path | None, typer.Option(help="Write the remedy to this file, as a recipe that extends the run's.")
    ] = None,
    try_it: Annotated[
        bool, typer.Option("--try", help="Train a new run with the remedy and the same budget, and compare.")
    ] = False,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="With --try: folder of the new run; default: RUN-remedy.")
    ] = None,
    check_labels: Annotated[
        bool, typer.Option("--check-labels", help="Decode the training trials too, to find wrong labels.")
    ] = False,
    data: Annotated[Path | None, typer.Option(help="Store of the run, if moved after training.")] = None,
    as_json: Json = False,
) -> None:
    """Diagnose a training run: verdict, first step affected, evidence, likely causes and remedies."""
    from arcuate.doctor import diagnose, try_remedy, write_remedy
    from arcuate.doctor.remedy import check_remedy_file

    if out_folder is not None and not try_it:
        raise UserError("--out names the folder of the run that --try trains: add --try, or omit --out")
    check_remedy_file(fix)
    with progress(f"reading {path}") as report:
        diagnosis = diagnose(
            path,
            dataset=dataset,
            planned_steps=planned_steps,
            html=html,
            check_store=True,
            check_labels=check_labels,
            data=data,
            progress=report,
        )
        remedy = diagnosis.fix()
        written = write_remedy(remedy, fix) if fix is not None and remedy else None
        tried = try_remedy(remedy, out=out_folder, data=data, progress=report) if try_it and remedy else None
    if html is not None:
        say(f"page: {html}")
    if as_json:
        done = {"remedy": remedy.to_dict(), "fix": written, "tried": tried and tried.to_dict()}
        emit_json({**diagnosis.to_dict(), **done})
        return
    print_diagnosis(diagnosis)
    if (fix is not None or try_it) and not remedy:
        out.print(f"\nno remedy: {remedy.message}", markup=False, soft_wrap=True)
    if written is not None:
        train = remedy.train_command(written, diagnosis.store)
        out.print(f"\nwrote {written}; train it with: {train}", markup=False, soft_wrap=True)
    if tried is not None:
        out.print(f"\n{tried.sentence}", markup=False, soft_wrap=True)
        say(f"the remedy was trained in {tried.run.path}")


def print_diagnosis(diagnosis: "Diagnosis") -> None:
    colour = _COLOURS.get(diagnosis.primary, "red")
    line = Text.assemble((diagnosis.primary.replace("_", " "), f"bold {colour}"), f"  {diagnosis.name}")
    if diagnosis.since:
        line.append(f"  {diagnosis.since}")
    if diagnosis.secondary:
        line.append(f"  (also: {', '.join(diagnosis.secondary).replace('_', ' ')})", "dim")
    if diagnosis.best_per is not None and diagnosis.best_step is not None:
        best, last = percent(diagnosis.best_per), percent(diagnosis.last_per)
        line.append(f"\n{diagnosis.error_name}: best {best} at {diagnosis.best_step:,}, last {last}")
    out.print(line)
    for sentence in diagnosis.evidence:
        out.print(Padding(Text(f"· {sentence}"), (0, 0, 0, 2)))
    if diagnosis.runs:
        _print_runs(diagnosis)
    if diagnosis.causes:
        out.print("\nlikely causes, most likely first")
        for i, cause in enumerate(diagnosis.causes, start=1):
            out.print(Padding(Text(f"{i}. {cause.cause}: {cause.because}"), (0, 0, 0, 2)))
            out.print(Padding(Text(f"try {cause.change}", style="dim"), (0, 0, 0, 5)))
    if diagnosis.suggestion:
        prefix = ("\ntry first ", "bold") if diagnosis.causes else "\n"
        out.print(Text.assemble(prefix, diagnosis.suggestion))
    remarks = [*diagnosis.inferences, *diagnosis.notes, f"read as {diagnosis.source}"]
    out.print(Padding(Text("\n".join(remarks), style="dim"), (1, 0, 0, 0)))


def _print_runs(diagnosis: "Diagnosis") -> None:
    numbers = (f"best {diagnosis.error_name}", "at step", f"last {diagnosis.error_name}", "last step")
    rows = []
    for run in diagnosis.runs:
        steps = [f"{step:,}" if step is not None else "–" for step in (run.best_step, run.last_step)]
        verdict = run.primary.replace("_", " ")
        rows.append((run.name, verdict, percent(run.best_per), steps[0], percent(run.last_per), steps[1]))
    print_table(("run", "verdict", *numbers), rows, right=numbers)
