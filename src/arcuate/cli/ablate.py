"""`arcuate ablate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from arcuate.cli.app import Json, RecipeName, StorePath, app
from arcuate.cli.console import emit_json, out, percent, print_table, progress, say

if TYPE_CHECKING:
    from arcuate.experiments.ablation import AblationRuns
    from arcuate.insight.ablation import AblationResult


@app.command()
def ablate(
    recipe: RecipeName,
    factors: Annotated[
        list[str],
        typer.Argument(
            help="name:key=value[,key=value] for each factor; key=value without a name applies to every arm."
        ),
    ],
    data: StorePath = ...,  # type: ignore[assignment]
    out: Annotated[Path, typer.Option("--out", help="Experiment folder; one run folder per arm and seed.")] = ...,  # type: ignore[assignment]
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Runs per arm.")] = 3,
    checkpoint: Annotated[
        Literal["last", "best"],
        typer.Option(help="Checkpoint to score: last (shows late divergence) or best."),
    ] = "last",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs; write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Find which change caused a difference: apply each factor alone, and all factors but one, over several seeds."""
    from arcuate.experiments.ablation import ablate as train_arms

    with progress("training") as report:
        runs = train_arms(
            *(recipe, factors, data, out),
            seeds=seeds,
            checkpoint=checkpoint,
            dry_run=dry_run,
            progress=report,
        )
    if dry_run:
        emit_json(runs.to_dict()) if as_json else _print_plan(runs)
        return
    from arcuate.doctor import diagnose
    from arcuate.insight.ablation import report_ablation

    result = report_ablation(runs, diagnose=diagnose)
    emit_json(result.to_dict()) if as_json else _print_result(result)
    if runs.signal is not None:
        say(f"stopped by {runs.signal.name}; run the same command again to continue")
        raise typer.Exit(128 + runs.signal)
    raise typer.Exit(0 if result.runs else 1)


def _print_plan(runs: "AblationRuns") -> None:
    experiment, planned = runs.experiment, runs.to_dict()["runs"]
    rows = []
    for arm in experiment.arms:
        seeds = ", ".join(str(row["seed"]) for row in planned if row["arm"] == arm.name)
        rows.append((arm.name, seeds, "\n".join(arm.overrides(experiment.factors)) or "the baseline"))
    print_table(("arm", "seeds", "settings"), rows, fold=True)
    say(f"{len(planned)} runs, {runs.n_steps:,} steps in total; dry run: nothing was written")


def _print_result(ablation: "AblationResult") -> None:
    experiment = ablation.experiment
    rows = []
    for arm in ablation.arms:
        values = arm.to_dict()
        sd = "–" if values["seed_sd"] is None else f"{100 * values['seed_sd']:.1f}"
        verdicts = ", ".join(f"{name} × {n}" for name, n in arm.verdicts.items())
        rows.append((arm.arm, percent(values["per"]), sd, str(len(values["per_by_run"])), verdicts))
    title = f"{ablation.rate_name} on {experiment.split}, {experiment.checkpoint} checkpoint"
    print_table(("arm", ablation.rate_name, "SD over seeds", "runs", "verdicts"), rows, title=title, fold=True)
    for factor in ablation.factors:
        out.print(factor.sentence, markup=False, soft_wrap=True)
    out.print(f"\n{ablation.verdict}", markup=False, soft_wrap=True)
    if ablation.n_comparisons > 1:
        say(f"p-values are Holm-adjusted for {ablation.n_comparisons} comparisons; the 95 % intervals are not adjusted")
    for run, reason in ablation.failed.items():
        say(f"{run} failed: {reason}")
    if ablation.missing:
        say(f"missing or incomplete, and excluded from all effects: {'; '.join(ablation.missing)}")
    if ablation.runs:
        say(f"wrote {experiment.out / 'ablation.html'}")
