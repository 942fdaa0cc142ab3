"""`arcuate recipes`."""

from typing import Annotated

import typer

from arcuate.cli.app import Json, WithSettings, app, complete_recipe

recipes_app = typer.Typer(
    help="List the recipes, show one whole, compare two, list all settings.", no_args_is_help=True
)


app.add_typer(recipes_app, name="recipes")


@recipes_app.command("list")
def recipes_list(as_json: Json = False) -> None:
    """The packaged recipes, a line each."""
    from arcuate.cli._recipes import list_command

    list_command(as_json)


@recipes_app.command("show", cls=WithSettings)
def recipes_show(
    name: Annotated[
        str, typer.Argument(help="A packaged recipe, a YAML file or a run.", autocompletion=complete_recipe)
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value")] = None,
    as_json: Json = False,
) -> None:
    """A recipe whole, with everything it inherits, and its number of parameters."""
    from arcuate.cli._recipes import show_command

    show_command(name, overrides or [], as_json)


@recipes_app.command("diff")
def recipes_diff(
    a: Annotated[
        str, typer.Argument(help="A packaged recipe, a YAML file or a run.", autocompletion=complete_recipe)
    ],
    b: Annotated[
        str | None,
        typer.Argument(
            help="Another one; left out: A against the official one it descends from.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """What changed between two recipes."""
    from arcuate.cli._recipes import diff_command

    diff_command(a, b, as_json)


@recipes_app.command("settings")
def recipes_settings(as_json: Json = False) -> None:
    """Every setting with its type, default, range and meaning, as Markdown."""
    from arcuate.cli._recipes import settings_command

    settings_command(as_json)
