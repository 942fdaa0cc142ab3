"""`arcuate ablate`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, app


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
    from arcuate.cli._ablate import ablate_command

    raise typer.Exit(ablate_command(recipe, factors, data, out, seeds, split, checkpoint, dry_run, as_json))
