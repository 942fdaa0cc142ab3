"""`arcuate train`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, WithSettings, app, complete_recipe
from arcuate.cli.console import emit_json, say


@app.command(cls=WithSettings)
def train(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A packaged recipe or a YAML file; see: arcuate recipes list", autocompletion=complete_recipe
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.sub=value, such as train.steps=200")
    ] = None,
    data: Annotated[Path, typer.Option("--data", help="A prepared store.")] = ...,  # type: ignore[assignment]
    run: Annotated[
        Path, typer.Option("--run", help="Run folder to write; must not exist, unless resumed.")
    ] = ...,  # type: ignore[assignment]
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --run exactly where it stopped.")
    ] = False,
    parent: Annotated[
        str | None, typer.Option("--from", help="Start from the weights of RUN, RUN@best or RUN@last.")
    ] = None,
    keep_optimizer: Annotated[
        bool, typer.Option("--keep-optimizer", help="With --from: take over the optimizer's memory too.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check recipe and data, say what would be trained; write nothing."),
    ] = False,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="Train so many seeds, each into RUN/seed-K, and tell the spread."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a model from a recipe on prepared data."""
    from arcuate.cli.watch import TrainingDisplay
    from arcuate.experiments.train import train as train_recipe

    if seeds is not None:
        from arcuate.cli._seeds import Asked, train_seeds_command

        asked = Asked(recipe, overrides or [], data, run, resume, parent, keep_optimizer, dry_run)
        raise typer.Exit(train_seeds_command(asked, seeds, as_json))
    display = TrainingDisplay()
    result = train_recipe(
        *(recipe, data, run),
        overrides=overrides or [],
        resume=resume,
        parent=parent,
        keep_optimizer=keep_optimizer,
        dry_run=dry_run,
        callbacks=[display],
        progress=display.report,
    )
    if dry_run and result.is_main:
        say("dry run: nothing was written")
    if as_json and result.is_main:
        emit_json(result.to_dict())
    if result.signal is not None:
        raise typer.Exit(128 + result.signal)
