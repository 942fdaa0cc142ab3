"""`arcuate new`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, app, complete_from
from arcuate.cli.console import emit_json, say


@app.command()
def new(
    kind: Annotated[
        str,
        typer.Argument(help="encoder, reader or recipe.", autocompletion=complete_from("encoder", "reader", "recipe")),
    ],
    name: Annotated[str, typer.Argument(help="Name of the package or recipe, such as my_encoder.")],
    folder: Annotated[Path, typer.Option("--folder", help="Folder to write it to.")] = Path(),
    as_json: Json = False,
) -> None:
    """Write a working skeleton of an encoder, a reader or a recipe."""
    from arcuate.experiments.new import new as write_skeleton

    written = write_skeleton(kind, name, folder)
    component = name.replace("_", "-")
    following = {
        "encoder": f"pip install -e {folder / name} && arcuate check-encoder {component}",
        "reader": f"pip install -e {folder / name} && arcuate prepare SOURCE STORE --layout {component}",
        "recipe": f"arcuate train {folder / name}.yaml --data STORE --run RUN",
    }
    for path in written:
        say(f"wrote {path}")
    say(f"next: {following[kind]}")
    if as_json:
        emit_json({"files": [str(path) for path in written]})
