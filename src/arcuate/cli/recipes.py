"""`arcuate recipes list` and `arcuate recipes show`."""

from collections.abc import Sequence

from rich.syntax import Syntax
from rich.table import Table

from arcuate.cli.console import emit_json, out
from arcuate.recipe import load_recipe, read_tree, recipe_names, to_tree, to_yaml
from arcuate.tokens import CLASSES


def list_command(as_json: bool) -> None:
    trees = {name: read_tree(name) for name in recipe_names()}
    if as_json:
        emit_json(
            {
                "recipes": [
                    {"name": n, "extends": t.get("extends"), "summary": t.get("summary")}
                    for n, t in trees.items()
                ]
            }
        )
        return
    table = Table(box=None, header_style="bold")
    for heading in ("recipe", "extends", "what it is"):
        table.add_column(heading)
    for name, tree in trees.items():
        table.add_row(name, tree.get("extends") or "", tree.get("summary") or "")
    out.print(table)


def show_command(name: str, overrides: Sequence[str], as_json: bool) -> None:
    from arcuate.models.model import count_parameters
    from arcuate.models.settings import ModelCard

    recipe = load_recipe(name, overrides)
    published = recipe.data.published
    n_channels = recipe.data.channels or published.channels
    n_sessions = recipe.data.n_sessions or published.n_sessions
    sessions = tuple(f"session {i}" for i in range(n_sessions))
    n_parameters = count_parameters(
        ModelCard(settings=recipe.model, n_channels=n_channels, sessions=sessions, classes=CLASSES)
    )
    if as_json:
        emit_json(
            {
                **to_tree(recipe),
                "n_parameters": n_parameters,
                "counted_at": {"channels": n_channels, "n_sessions": n_sessions},
            }
        )
        return
    out.print(Syntax(to_yaml(recipe), "yaml", background_color="default", word_wrap=True))
    out.print(f"{n_parameters:,} parameters at {n_sessions} sessions × {n_channels} channels")
