"""The application: how commands are listed, parsed and completed; options that several commands share."""

import re
from collections.abc import Callable
from typing import Annotated, Any

import typer
import typer.core

from arcuate import __version__

HELP = """Intracortical recordings of attempted speech to text.

The path: [bold]simulate[/] data or take a release → [bold]prepare[/] it once → choose a recipe →
[bold]train[/] → [bold]evaluate[/] → [bold]report[/]. [bold]demo[/] walks all of it in a few minutes.
"""

ORDER = (
    *("demo", "simulate", "prepare", "recipes", "train", "average"),
    *("sweep", "ablate", "evaluate", "calibrate", "drift", "decode", "tune"),
    *("rescore", "combine", "submit", "report", "live", "bench"),
    *("doctor", "runs", "compare", "ledger", "lm", "import"),
)

SPLITS = ("val", "test", "dev", "train")

USAGE_ERROR: Any = typer.BadParameter.__mro__[1]  # typer does not export the base of its parsing errors


class InOrder(typer.core.TyperGroup):
    """Lists the commands in the order a person walks the path."""

    def list_commands(self, ctx: Any) -> list[str]:
        known = super().list_commands(ctx)
        return sorted(known, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


class SeveralNumbers(typer.core.TyperCommand):
    """Lets one option take several numbers, as in --prune 0 0 1."""

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
    """A command that takes key.sub=value; someone who writes a setting as an option is told how it is written."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except USAGE_ERROR as error:
            from arcuate.experiments.recipe import setting_for

            if setting := setting_for(getattr(error, "option_name", "")):
                error.possibilities = None
                error.message += f"; settings are written without dashes: {setting}=VALUE"
            raise


app = typer.Typer(
    cls=InOrder,
    help=HELP,
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


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, all else on stderr.")]

Force = Annotated[bool, typer.Option("--force", help="Replace what is there.")]


def version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"arcuate {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
