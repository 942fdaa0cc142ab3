"""Commands about many runs and about what happened in them: sweep, ablate, doctor, runs, compare, ledger."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, WithSettings, app, complete_recipe


@app.command(cls=WithSettings)
def sweep(
    recipe: Annotated[
        str, typer.Argument(help="A packaged recipe or a YAML file.", autocompletion=complete_recipe)
    ],
    space: Annotated[Path, typer.Argument(help="YAML: setting paths, each with a range or choices.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value, for every trial")] = None,
    data: Annotated[Path, typer.Option("--data", help="A prepared store.")] = ...,  # type: ignore[assignment]
    out: Annotated[Path, typer.Option("--out", help="Sweep folder; a run folder per trial.")] = ...,  # type: ignore[assignment]
    trials: Annotated[int, typer.Option(min=1, max=100_000, help="In all, over all workers.")] = 20,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Search for better settings; start the same command several times to share the work."""
    from arcuate.cli.sweep import sweep_command

    raise typer.Exit(sweep_command(recipe, space, overrides or [], data, out, trials, seed, as_json))


@app.command()
def ablate(
    recipe: Annotated[str, typer.Argument(help="The baseline: a packaged recipe or a YAML file.")],
    factors: Annotated[
        list[str],
        typer.Argument(help="name:key=value[,key=value] for each factor; key=value holds for every arm."),
    ],
    data: Annotated[Path, typer.Option("--data", help="A prepared store.")] = ...,  # type: ignore[assignment]
    out: Annotated[
        Path, typer.Option("--out", help="Experiment folder; a run folder per arm and seed.")
    ] = ...,  # type: ignore[assignment]
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Runs of each arm.")] = 3,
    split: Annotated[str, typer.Option(help="What the arms are scored on.")] = "val",
    checkpoint: Annotated[
        str, typer.Option(help="last (so that a run which went wrong counts as such) or best.")
    ] = "last",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs; write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Change one factor at a time, in both directions and with seeds: which one caused the difference?"""
    from arcuate.cli.ablate import ablate_command

    raise typer.Exit(ablate_command(recipe, factors, data, out, seeds, split, checkpoint, dry_run, as_json))


@app.command()
def doctor(
    path: Annotated[Path, typer.Argument(help="A run folder, or a log that any trainer or tracker wrote.")],
    dataset: Annotated[str | None, typer.Option(help="b2t24 or b2t25; left out: inferred.")] = None,
    planned_steps: Annotated[
        int | None, typer.Option(min=1, help="How long the run was meant to be; left out: inferred.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a page with the curves.")] = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read a pickle; nothing in it is executed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """What happened in a training run: a verdict, since when, the evidence, causes and what to try."""
    from arcuate.cli.doctor import doctor_command

    doctor_command(path, dataset, planned_steps, allow_pickle, html, as_json)


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(help="A folder that holds runs, at any depth.")] = Path("runs"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list on one line on stdout, all else on stderr.")
    ] = False,
) -> None:
    """List runs: verdict, best PER, steps, and what changed against the parent."""
    from arcuate.cli.ledger import runs_command

    runs_command(folder, as_json)


@app.command()
def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, or folders of runs; the first is the reference.")
    ],
    split: Annotated[
        str, typer.Option(help="val, test, dev or train; evaluated where that is missing.")
    ] = "val",
    label: Annotated[str | None, typer.Option(help="Compare results/<split>.<label>.jsonl.")] = None,
    over: Annotated[
        str, typer.Option(help="trials: further trials of these sessions; sessions: further sessions.")
    ] = "trials",
    html: Annotated[
        Path | None, typer.Option("--html", help="Also draw curves and differences on a page.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Is the difference real? Same trials, paired; runs that differ only in their seed count as one."""
    from arcuate.cli.compare import compare_command

    compare_command(runs, split, label, over, html, as_json)


@app.command()
def ledger(
    folder: Annotated[Path, typer.Argument(help="A folder that holds runs, at any depth.")] = Path("runs"),
    out: Annotated[Path | None, typer.Option("--out", help="File to write; left out: printed.")] = None,
) -> None:
    """Write the run diary from the run folders: purpose, changes, result, finding."""
    from arcuate.cli.ledger import ledger_command

    ledger_command(folder, out)
