"""`arcuate train`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from arcuate.cli.app import Json, OverrideList, RecipeName, StorePath, WithSettings, app
from arcuate.cli.console import TrainingDisplay, counted, emit_json, say
from arcuate.errors import UserError


@app.command(cls=WithSettings)
def train(
    recipe: RecipeName,
    overrides: OverrideList = None,
    data: StorePath = ...,  # type: ignore[assignment]
    run: Annotated[Path, typer.Option("--run", help="Run folder to write; must not exist unless resumed.")] = ...,  # type: ignore[assignment]
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run exactly where it stopped.")] = False,
    parent: Annotated[
        str | None, typer.Option("--from", help="Start from the weights of RUN, RUN@best or RUN@last.")
    ] = None,
    keep_optimizer: Annotated[
        bool, typer.Option("--keep-optimizer", help="With --from: also load the optimizer state.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check recipe and data, print the plan, write nothing.")
    ] = False,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="Train N seeds, each into RUN/seed-K, and report the spread."),
    ] = None,
    only: Annotated[
        int | None, typer.Option("--only", min=0, help="With --seeds: train only the seed with this index, from 0.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a model from a recipe on prepared data."""
    from arcuate.training.callbacks import Stop, stop_with_parent

    display, stop = TrainingDisplay(), Stop()
    stop_with_parent(stop)
    options: dict[str, Any] = {
        "overrides": overrides or [],
        "resume": resume,
        "parent": parent,
        "keep_optimizer": keep_optimizer,
        "dry_run": dry_run,
        "callbacks": [display],
        "stop": stop,
        "progress": display.report,
    }
    if seeds is None:
        if only is not None:
            raise UserError("--only requires --seeds; it selects one of the seeds")
        from arcuate.experiments.train import train as train_recipe

        result = train_recipe(recipe, data, run, **options)
        if result.is_main:
            _print_result(result.to_dict(), dry_run, as_json)
        raise typer.Exit(128 + result.signal if result.signal else 0)
    from arcuate.experiments.multi_seed import train_seeds

    summary = train_seeds(recipe, data, run, seeds, only=only, **options)
    if dry_run:
        say(f"{counted(seeds, 'seed')}: {summary.seeds[0].run.path} … {summary.seeds[-1].run.path}")
    _print_result(summary.to_dict(), dry_run, as_json)
    if summary.signal is not None:
        raise typer.Exit(128 + summary.signal)
    raise typer.Exit(2 if any(seed.error for seed in summary.seeds) else 0)


def _print_result(values: dict[str, Any], dry_run: bool, as_json: bool) -> None:
    if dry_run:
        say("dry run: nothing was written")
    if as_json:
        emit_json(values)
