"""`arcuate sweep`."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arcuate.cli.app import Json, OverrideList, RecipeName, StorePath, WithSettings, app
from arcuate.cli.console import emit_json, out, percent, print_table, say

if TYPE_CHECKING:
    from arcuate.experiments.sweep import SweepResult, SweepTrial


StorageUrl = Annotated[
    str | None,
    typer.Option(
        "--storage",
        envvar="ARCUATE_STORAGE",
        show_envvar=True,
        help="Database of the study, such as postgresql://USER@HOST/DATABASE; by default a file in the sweep folder.",
    ),
]


@app.command(cls=WithSettings)
def sweep(
    recipe: RecipeName,
    space: Annotated[Path, typer.Argument(help="YAML file: settings, each with a range or choices.")],
    overrides: OverrideList = None,
    data: StorePath = ...,  # type: ignore[assignment]
    out: Annotated[Path, typer.Option("--out", help="Sweep folder; one run folder per configuration.")] = ...,  # type: ignore[assignment]
    trials: Annotated[int, typer.Option(min=1, max=100_000, help="Number of configurations over all workers.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampled settings.")] = 0,
    storage: StorageUrl = None,
    as_json: Json = False,
) -> None:
    """Search hyperparameters. Start the same command several times for parallel workers."""
    from arcuate.experiments.sweep import sweep as run_sweep

    result = run_sweep(recipe, space, data, out, overrides or (), trials, seed, storage)
    if as_json:
        emit_json(result.to_dict())
    else:
        _print_result(result)
    if result.signal is not None:
        say(f"stopped by {result.signal.name}; run the same command again to continue")
    raise typer.Exit(result.exit_code)


def _print_result(result: "SweepResult") -> None:
    rows = [
        (str(t.number), t.state, percent(t.per), str(t.step or ""), "\n".join(t.overrides), t.reason or "")
        for t in sorted(result.trials, key=_rank)
    ]
    print_table(("trial", "state", result.rate_name, "step", "settings", "reason"), rows, fold=True)
    if running := sum(t.state == "running" for t in result.trials):
        say(f"{running} still running, or killed less than a minute ago: the same command then continues them")
    if result.best is None or result.command is None:
        say("no trial is complete")
        return
    out.print(f"\nbest: trial {result.best.number}, {result.rate_name} {percent(result.best.per)}, {result.best.run}")
    out.print(shlex.join(result.command), markup=False, soft_wrap=True)


def _rank(trial: "SweepTrial") -> tuple[bool, float, int]:
    """Complete trials first, best on top."""
    per = float("inf") if trial.per is None else trial.per
    return trial.state != "complete", per, trial.number
