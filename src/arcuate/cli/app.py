"""The typer application: order of commands, parsing, completion, and the options that several commands share."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import typer.core

from arcuate import __version__
from arcuate.errors import UserError

_HELP = """Decode intracortical recordings of attempted speech to text.

Workflow: [bold]simulate[/] data or download a release → [bold]prepare[/] a store → choose a recipe →
[bold]train[/] → [bold]evaluate[/] → [bold]report[/]. [bold]demo[/] runs all steps in a few minutes.
"""

COMMANDS = (  # in the order of the workflow; each is in the module of the same name
    *("demo", "simulate", "prepare", "recipes", "train"),
    *("sweep", "ablate", "evaluate", "calibrate", "decode", "tune"),
    *("rescore", "combine", "submit", "report", "board", "live", "bench", "export"),
    *("doctor", "runs", "compare", "ledger", "lm", "import", "selftest"),
    *("check-encoder", "new", "export-data", "cite", "card"),
)

SPLITS = ("val", "test", "dev", "train")

T = TypeVar("T", int, str)

_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]  # typer does not export the base class of its parsing errors


class _OrderedGroup(typer.core.TyperGroup):
    """Lists the commands in the order of `COMMANDS`, groups of commands included.

    `--allow-code PACKAGE` and `--slurm FILE` are accepted anywhere on the command line.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from arcuate.plugins import allow_code

        if "--slurm" in args[:-1]:
            from arcuate.experiments.slurm import submit

            n = args.index("--slurm")
            typer.echo(f"submitted job {submit(Path(args[n + 1]), args[:n] + args[n + 2 :]).job}")
            raise typer.Exit()
        kept: list[str] = []
        words = iter(args)
        for word in words:
            if word == "--":
                kept += [word, *words]
            elif word == "--allow-code":
                allow_code(*next(words, "").split(","))
            elif word.startswith("--allow-code="):
                allow_code(*word.partition("=")[2].split(","))
            else:
                kept.append(word)
        return super().parse_args(ctx, kept)

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
    """Command that takes key.sub=value; the error for an unknown option suggests the similar setting."""

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


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"arcuate {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    allow_code: Annotated[
        str | None,
        typer.Option(
            metavar="PACKAGE",
            help="Let checkpoints and model folders import components of this package; accepted by every command.",
        ),
    ] = None,
    slurm: Annotated[
        str | None, typer.Option(metavar="FILE", help="Submit the command to Slurm with the #SBATCH lines of FILE.")
    ] = None,
) -> None:
    pass


def complete_recipe(incomplete: str) -> list[str]:
    from arcuate.experiments.recipe import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def complete_from(*values: str) -> Callable[[str], list[str]]:
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def split_commas(text: str, kind: type[T], option: str, form: str) -> list[T]:
    """Values separated by commas; `form` describes them in an error message."""
    try:
        return [kind(part.strip()) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{option} {text!r}: expected {form}") from None


# --- Options and arguments that several commands share -------------------------------------------------------

Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")]

Force = Annotated[bool, typer.Option("--force", help="Overwrite existing output.")]

# --- Recipes and data ------------------------------------------------------------------------------------

RecipeName = Annotated[
    str,
    typer.Argument(
        help="Packaged recipe, YAML file or run folder; see: arcuate recipes list.",
        autocompletion=complete_recipe,
    ),
]
OverrideList = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings, such as train.steps=200.")
]
StorePath = Annotated[Path, typer.Option("--data", help="Prepared store.")]

# --- Decoding --------------------------------------------------------------------------------------------

ScoresPath = Annotated[
    Path, typer.Argument(help="Run folder, hf:ORG/NAME, exported model (.arcx), or frame scores (.npz).")
]
LexiconFile = Annotated[str, typer.Option("--lexicon", help="Lexicon file, or `default` (English).")]
LmFile = Annotated[str, typer.Option("--lm", help="Model file, ARPA file, or `default` (English).")]
ReferencesFile = Annotated[
    Path | None, typer.Option("--references", help="JSON Lines file with the reference `text` of each trial.")
]
WeightsFile = Annotated[Path | None, typer.Option("--config", help="Search weights written by `arcuate tune`.")]
Beam = Annotated[
    int | None, typer.Option("--beam", min=1, max=1_000_000, help="Maximum number of beam entries per frame.")
]
Threshold = Annotated[
    float | None, typer.Option("--threshold", help="Pruning threshold: maximum distance from the best score, in nats.")
]
Head = Annotated[
    str | None,
    typer.Option(
        "--head",
        help="With a run folder: ctc, transducer or both; default: both if the transducer was trained.",
        autocompletion=complete_from("ctc", "transducer", "both"),
    ),
]
SplitName = Annotated[str, typer.Option("--split", help="With a run folder: val, test, dev or train.")]
MovedStore = Annotated[
    Path | None,
    typer.Option("--data", help="Store; needed for an exported model, or if moved after training."),
]
AddedWords = Annotated[
    list[str] | None, typer.Option("--word", help="Word to add: word, word=weight or word=weight=PHONEMES.")
]

# --- Live decoding ---------------------------------------------------------------------------------------

ModelPath = Annotated[
    Path, typer.Argument(help="Run folder, exported model (.arcx), model folder of `arcuate import`, or hf:ORG/NAME.")
]
NoWords = Annotated[bool, typer.Option("--no-words", help="Phonemes only: no lexicon, no language model.")]
ReplayedStore = Annotated[Path | None, typer.Option("--data", help="Store to replay; default: that of the run.")]
SessionName = Annotated[
    str | None, typer.Option("--session", help="Session to replay; for live sources, the session whose layer is used.")
]
Adapt = Annotated[
    bool, typer.Option("--adapt", help="Adapt the session layer online, without labels; the session may be new.")
]
