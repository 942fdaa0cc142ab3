"""`arcuate train`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from arcuate.cli.app import Json, OverrideList, RecipeName, StorePath, WithSettings, app
from arcuate.cli.console import TrainingDisplay, emit_json, say


@app.command(cls=WithSettings)
def train(
    recipe: RecipeName,
    overrides: OverrideList = None,
    data: StorePath = ...,  # type: ignore[assignment]
    run: Annotated[Path, typer.Option("--run", help="Run folder to write; must not exist unless resumed.")] = ...,  # type: ignore[assignment]
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run exactly where it stopped.")] = False,
    from_: Annotated[
        str | None, typer.Option("--from", help="Start from the weights of RUN, RUN@best or RUN@last.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check recipe and data, print the plan, write nothing.")
    ] = False,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="Train N seeds, each into RUN/seed-K, and report the spread."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a model from a recipe on prepared data."""
    from arcuate.experiments.train import train as train_recipe
    from arcuate.training.callbacks import Stop, stop_with_parent

    display, stop = TrainingDisplay(), Stop()
    stop_with_parent(stop)
    result = train_recipe(
        *(recipe, data, run, overrides or (), from_, resume),
        seeds=seeds,
        dry_run=dry_run,
        callbacks=[display],
        stop=stop,
        progress=display.report,
    )
    if getattr(result, "is_main", True):
        _print_result(result.to_dict(), dry_run, as_json)
    raise typer.Exit(result.exit_code)


def _print_result(values: dict[str, Any], dry_run: bool, as_json: bool) -> None:
    if dry_run:
        say("dry run: nothing was written")
    if as_json:
        emit_json(values)
