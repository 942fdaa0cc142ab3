"""`arcuate recipes list`, `show`, `diff` and `settings`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from arcuate.cli.console import emit_json, out
from arcuate.config import to_tree, to_yaml
from arcuate.data.alphabet import CLASSES
from arcuate.errors import UserError
from arcuate.experiments.recipe import (
    Place,
    diff_recipes,
    load_recipe,
    official_ancestor,
    read_tree,
    recipe_names,
)
from arcuate.experiments.recipe_settings import components, to_markdown
from arcuate.training.checks import coupling_warnings


def list_command(as_json: bool) -> None:
    trees = {name: read_tree(Place(name)) for name in recipe_names()}
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
    from arcuate.models.config import ModelConfig
    from arcuate.models.model import count_parameters

    recipe = load_recipe(name, overrides)
    published = recipe.data.published
    n_channels = recipe.data.channels or published.channels
    n_sessions = recipe.data.n_sessions or published.n_sessions
    sessions = tuple(f"session {i}" for i in range(n_sessions))
    n_parameters = count_parameters(
        ModelConfig(settings=recipe.model, n_channels=n_channels, sessions=sessions, classes=CLASSES)
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
    counted = f"# {n_parameters:,} parameters at {n_sessions} sessions × {n_channels} channels"
    if out.is_terminal:
        out.print(Syntax(to_yaml(recipe) + counted, "yaml", background_color="default", word_wrap=True))
    else:  # as it is, so that the output is a recipe again
        out.print(to_yaml(recipe) + counted, markup=False, soft_wrap=True)


def diff_command(a: str, b: str | None, as_json: bool) -> None:
    """What changed from A to B; without B, from the official recipe that A descends from to A."""
    if b is None:
        a, b = other_side(a, official_ancestor(a)), a
    recipe_a, recipe_b = load_recipe(a), load_recipe(b)
    ancestor_a, ancestor_b = official_ancestor(a), official_ancestor(b)
    changes = diff_recipes(recipe_a, recipe_b)
    sides = {a: (recipe_a, ancestor_a), b: (recipe_b, ancestor_b)}
    warnings = [
        f"{name}: {text}"
        for name, (recipe, ancestor) in sides.items()
        if ancestor
        for text in coupling_warnings(recipe, load_recipe(ancestor), ancestor)
    ]
    if as_json:
        emit_json(
            {
                "a": a,
                "b": b,
                "changes": [asdict(change) for change in changes],
                "ancestor_a": ancestor_a,
                "ancestor_b": ancestor_b,
                "warnings": warnings,
            }
        )
        return
    if not changes:
        out.print(f"no setting differs between {a} and {b}", markup=False)
    else:
        table = Table(box=None, header_style="bold")
        table.add_column("setting", no_wrap=True)
        for side in (a, b):
            table.add_column(Text(side), overflow="fold")
        for change in changes:
            table.add_row(*map(Text, (change.path, shown(change.before), shown(change.after))))
        out.print(table)
    for warning in warnings:
        out.print(f"\nwarning: {warning}", markup=False)


def settings_command(as_json: bool) -> None:
    """The table of all settings: as JSON, or as the Markdown page of the documentation."""
    if as_json:
        found = [{"kind": part.kind, **asdict(s)} for part in components() for s in part.settings]
        emit_json({"settings": found})
    else:
        out.print(to_markdown(), markup=False, soft_wrap=True, end="")


def other_side(name: str, ancestor: str | None) -> str:
    if ancestor is None:
        raise UserError(
            f"recipe {name} descends from no official recipe; name a second one to compare it with"
        )
    if ancestor == name:
        raise UserError(f"recipe {name} is itself official; name a second one to compare it with")
    return ancestor


def shown(value: Any) -> str:
    """A value as YAML would have it; a component by its kind, then its settings."""
    if isinstance(value, Mapping):
        rest = ", ".join(f"{k} {shown(v)}" for k, v in value.items() if k != "kind" and v is not None)
        return f"{value['kind']}: {rest}" if "kind" in value else rest
    return value if isinstance(value, str) else json.dumps(value)
