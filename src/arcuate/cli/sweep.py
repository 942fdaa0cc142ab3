"""`arcuate sweep`."""

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
    from arcuate.cli._sweep import sweep_command

    raise typer.Exit(sweep_command(recipe, space, overrides or [], data, out, trials, seed, as_json))
