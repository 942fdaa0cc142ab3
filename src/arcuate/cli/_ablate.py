"""`arcuate ablate`: train the arms, then say which factor caused the difference."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from arcuate.cli.console import emit_json, out, percent, progress, say
from arcuate.data.selection import select
from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.experiments.ablation import (
    Experiment,
    cells,
    check_factors,
    open_experiment,
    overview,
    read_factors,
    work,
)
from arcuate.insight.ablation import AblationResult, judge_ablation, write_ablation
from arcuate.run import Run
from arcuate.training.interrupts import handle_signals

CHECKPOINTS = ("last", "best")
SPLITS = ("val", "dev")


def ablate_command(
    recipe: str,
    arguments: Sequence[str],
    data: Path,
    folder: Path,
    n_seeds: int,
    split: str,
    checkpoint: str,
    dry_run: bool,
    as_json: bool,
) -> int:
    factors, overrides = read_factors(arguments)
    experiment = Experiment(recipe, overrides, factors, data, folder, n_seeds, split, checkpoint)
    check(experiment)
    if dry_run:
        return plan(experiment, as_json)
    open_experiment(experiment)
    with handle_signals() as stop, progress("training") as report:
        failed = work(experiment, scorer(experiment), stop, say, report)
    ablation = judge_ablation(experiment, failed)
    if ablation.runs:
        write_ablation(ablation)
    if as_json:
        emit_json(ablation.to_dict())
    else:
        show(ablation)
    if stop.signal is not None:
        say(f"stopped by {stop.signal.name}; the same command goes on from here")
        return stop.exit_code
    return 0 if ablation.runs else 1


def check(experiment: Experiment) -> None:
    """Refuse what could only fail after hours: unknown settings, factors that change nothing, data that do not fit."""
    if experiment.checkpoint not in CHECKPOINTS:
        raise UserError(
            f"--checkpoint {experiment.checkpoint} is not known; choose {' or '.join(CHECKPOINTS)}"
        )
    if experiment.split not in SPLITS:
        raise UserError(f"--split {experiment.split} cannot judge an ablation; choose {' or '.join(SPLITS)}")
    base = check_factors(experiment.recipe, experiment.overrides, experiment.factors)
    selection = select(Store.open(experiment.data), base.data, base.front_end.patch.count_frames)
    if not selection.validation:
        raise UserError(f"{experiment.data} has no validation trials to judge by; set data.dev_fraction=0.1")
    if experiment.split == "dev" and selection.selected_on != "dev":
        raise UserError("there is no dev split (data.dev_fraction is 0); use --split val")


def scorer(experiment: Experiment) -> Any:
    def score(run: Run) -> None:
        from arcuate.evaluation.evaluate import evaluate

        evaluate(
            run,
            split=experiment.split,
            data=experiment.data,
            checkpoint=experiment.checkpoint,
            label=experiment.label,
        )

    return score


def plan(experiment: Experiment, as_json: bool) -> int:
    planned = cells(experiment)
    n_steps = sum(cell.n_steps for cell in planned)
    if as_json:
        emit_json(
            {"dry_run": True, "out": str(experiment.out), "n_steps": n_steps, "runs": overview(experiment)}
        )
        return 0
    table = Table(box=None, header_style="bold")
    for heading in ("arm", "seeds", "settings"):
        table.add_column(heading, overflow="fold")
    for arm in experiment.arms:
        seeds = ", ".join(str(cell.seed) for cell in planned if cell.arm == arm)
        table.add_row(
            *map(Text, (arm.name, seeds, "\n".join(arm.overrides(experiment.factors)) or "the baseline"))
        )
    out.print(table)
    say(f"{len(planned)} runs, {n_steps:,} steps in all; dry run: nothing was written")
    return 0


def show(ablation: AblationResult) -> None:
    experiment = ablation.experiment
    table = Table(box=None, header_style="bold", title_justify="left")
    table.title = f"PER on {experiment.split}, {experiment.checkpoint} checkpoint"
    for heading in ("arm", "PER", "SD over seeds", "runs", "verdicts"):
        table.add_column(heading, overflow="fold")
    for arm in ablation.arms:
        values = arm.to_dict()
        sd = "–" if values["seed_sd"] is None else f"{100 * values['seed_sd']:.1f}"
        verdicts = ", ".join(f"{name} × {n}" for name, n in arm.verdicts.items())
        table.add_row(
            *map(Text, (arm.arm, percent(values["per"]), sd, str(len(values["per_by_run"])), verdicts))
        )
    out.print(table)
    for factor in ablation.factors:
        out.print(factor.sentence, markup=False, soft_wrap=True)
    out.print(f"\n{ablation.verdict}", markup=False, soft_wrap=True)
    if ablation.n_comparisons > 1:
        say(f"p-values are Holm-adjusted for {ablation.n_comparisons} comparisons; intervals are 95 % each")
    if ablation.failed:
        say(f"{len(ablation.failed)} runs did not finish; they are scored at their last checkpoint")
    if ablation.missing:
        say(f"not measured yet: {'; '.join(ablation.missing)}")
    if ablation.runs:
        say(f"wrote {experiment.out / 'ablation.html'}")
