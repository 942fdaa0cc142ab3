"""`arcuate recipes`."""

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from arcuate.cli.app import Json, OverrideList, RecipeName, WithSettings, app, complete_recipe
from arcuate.cli.console import emit_json, out, print_table, say

_recipes_app = typer.Typer(help="List the recipes, show one, diff two, list all settings.", no_args_is_help=True)
app.add_typer(_recipes_app, name="recipes")


@_recipes_app.command("list")
def recipes_list(
    show_all: Annotated[bool, typer.Option("--all", help="Also list recipes that reproduce documented runs.")] = False,
    as_json: Json = False,
) -> None:
    """List the packaged recipes by group."""
    from arcuate.experiments.recipe import DOCUMENTED_RUNS, RECIPE_GROUPS, list_recipes

    entries = list_recipes()
    if as_json:
        emit_json({"recipes": entries})
        return
    for group in RECIPE_GROUPS:
        members = [entry for entry in entries if entry.group == group]
        if group == DOCUMENTED_RUNS and not show_all:
            say(f"{len(members)} recipes of {group} are not listed; add --all")
            continue
        rows = [(entry.name, entry.extends or "", entry.summary or "") for entry in members]
        print_table(("recipe", "extends", "summary"), rows, title=group)


@_recipes_app.command("show", cls=WithSettings)
def recipes_show(name: RecipeName, overrides: OverrideList = None, as_json: Json = False) -> None:
    """Print a complete recipe, inherited settings included, and its number of parameters."""
    from rich.syntax import Syntax

    from arcuate.config import to_yaml
    from arcuate.experiments.recipe import describe_recipe

    described = describe_recipe(name, overrides or [])
    if as_json:
        emit_json(described.to_dict())
        return
    size = f"{described.n_sessions} sessions × {described.n_channels} channels"
    text = to_yaml(described.recipe) + f"# {described.n_parameters:,} parameters at {size}"
    if out.is_terminal:
        out.print(Syntax(text, "yaml", background_color="default", word_wrap=True))
    else:  # unwrapped, so that the output can be used as a recipe
        out.print(text, markup=False, soft_wrap=True)


@_recipes_app.command("diff")
def recipes_diff(
    a: RecipeName,
    b: Annotated[
        str | None,
        typer.Argument(
            help="Recipe to compare with; default: A against the official recipe that it extends.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare two recipes, setting by setting."""
    from arcuate.config import value_text
    from arcuate.experiments.recipe import compare_recipes

    comparison = compare_recipes(a, b)
    if as_json:
        emit_json(comparison.to_dict())
        return
    if comparison.changes:
        table = Table(box=None, header_style="bold")
        table.add_column("setting", no_wrap=True)
        for side in (comparison.a, comparison.b):
            table.add_column(Text(side), overflow="fold")
        for change in comparison.changes:
            row = (change.path, value_text(change.before), value_text(change.after))
            table.add_row(*map(Text, row))
        out.print(table)
    else:
        out.print(f"no setting differs between {comparison.a} and {comparison.b}", markup=False)
    for warning in comparison.warnings:
        out.print(f"\nwarning: {warning}", markup=False)


@_recipes_app.command("settings")
def recipes_settings(as_json: Json = False) -> None:
    """Print every setting with its type, default, range and description, as Markdown."""
    from arcuate.experiments.settings_page import list_settings, to_markdown

    if as_json:
        emit_json({"settings": list_settings()})
    else:
        out.print(to_markdown(), markup=False, soft_wrap=True, end="")
