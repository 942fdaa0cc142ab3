"""The typer application: order of commands, parsing of settings, completion, options of every command."""

import re
from collections.abc import Callable
from typing import Annotated, Any

import typer
import typer.core

from arcuate import __version__

_HELP = """Decode intracortical recordings of attempted speech to text.

Workflow: [bold]simulate[/] data or download a release → [bold]prepare[/] a store → choose a recipe →
[bold]train[/] → [bold]evaluate[/] → [bold]report[/]. [bold]demo[/] runs all steps in a few minutes.
"""

COMMANDS = (  # in the order of the workflow; every command has a module of its name
    *("demo", "simulate", "prepare", "recipes", "train", "average"),
    *("sweep", "ablate", "evaluate", "calibrate", "drift", "decode", "tune"),
    *("rescore", "combine", "submit", "report", "live", "bench"),
    *("doctor", "runs", "compare", "ledger", "lm", "import"),
)

SPLITS = ("val", "test", "dev", "train")

_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]  # typer does not export the base class of its parsing errors


class _OrderedGroup(typer.core.TyperGroup):
    """Lists the commands in the order of `COMMANDS`, groups of commands included."""

    def list_commands(self, ctx: Any) -> list[str]:
        known = super().list_commands(ctx)
        return sorted(known, key=lambda name: COMMANDS.index(name) if name in COMMANDS else len(COMMANDS))


class SeveralNumbers(typer.core.TyperCommand):
    """Command with options that take several numbers, as in --prune 0 0 1."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spread: list[str] = []
        option = None
        for word in args:
            if option and re.fullmatch(r"\d+(\.\d*)?|\.\d+", word):
                spread += [option, word]
                continue
            option = word if word in ("--prune", "--weight") else None
            spread += [] if option else [word]
        return super().parse_args(ctx, spread)


class WithSettings(typer.core.TyperCommand):
    """Command that takes key.sub=value; an unknown option that resembles a setting is answered with that form."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except _USAGE_ERROR as error:
            from arcuate.experiments.recipe import setting_for

            if setting := setting_for(getattr(error, "option_name", "")):
                error.possibilities = None
                error.message += f"; settings are written without dashes: {setting}=VALUE"
            raise


app = typer.Typer(
    cls=_OrderedGroup,
    help=_HELP,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def complete_recipe(incomplete: str) -> list[str]:
    from arcuate.experiments.recipe import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def complete_from(*values: str) -> Callable[[str], list[str]]:
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")]

Force = Annotated[bool, typer.Option("--force", help="Overwrite existing output.")]


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"arcuate {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
