"""The command line. Commands stand in the order a person walks the path, and import what they need when called."""

import errno
import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from arcuate import __version__
from arcuate.errors import UserError

HELP = """Intracortical recordings of attempted speech to text.

The path: [bold]simulate[/] data or take a release → [bold]prepare[/] it once → choose a recipe →
[bold]train[/] → [bold]evaluate[/] → [bold]report[/]. [bold]demo[/] walks all of it in a few minutes.
"""
ORDER = ("demo", "simulate", "prepare", "recipes", "train", "sweep", "evaluate", "report", "import")


class InOrder(typer.core.TyperGroup):
    """Lists the commands in the order a person walks the path."""

    def list_commands(self, ctx: Any) -> list[str]:
        known = super().list_commands(ctx)
        return sorted(known, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


app = typer.Typer(
    cls=InOrder,
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes_app = typer.Typer(help="List the recipes, show one whole, or compare two.", no_args_is_help=True)

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


@app.command()
def demo(
    run: Annotated[Path, typer.Option(help="Run folder; replaced if the demo made it.")] = Path("runs/demo"),
    data: Annotated[Path, typer.Option(help="Data folder; replaced if the demo made it.")] = Path(
        "data/demo"
    ),
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value, as for train.")] = None,
    as_json: Json = False,
) -> None:
    """Walk the whole path on simulated data: simulate, prepare, train, evaluate, report."""
    from arcuate.cli.demo import run_demo

    run_demo(run, data, overrides or [], as_json)


@app.command()
def simulate(
    out: Annotated[Path, typer.Argument(help="Folder to write, in the layout of a release.")],
    layout: Annotated[str, typer.Option(help="b2t25 (HDF5, T15) or b2t24 (.mat, T12).")] = "b2t25",
    sessions: Annotated[int, typer.Option(min=1, max=1000)] = 6,
    trials: Annotated[int, typer.Option(min=4, max=100_000, help="Per session, all splits together.")] = 250,
    electrodes: Annotated[int, typer.Option(min=4, max=4096)] = 128,
    difficulty: Annotated[str, typer.Option(help="easy, real, hard, or a number (1 = real).")] = "real",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Simulate a cohort of recordings, as files in exactly the layout of a release."""
    from arcuate.cli.simulate import simulate_command

    simulate_command(out, layout, sessions, trials, electrodes, difficulty, seed, force, as_json)


@app.command()
def prepare(
    source: Annotated[Path, typer.Argument(help="A Brain-to-Text '24 or '25 release, or any parent folder.")],
    store: Annotated[Path, typer.Argument(help="Folder to write the canonical store to.")],
    force: Force = False,
    features: Annotated[
        str, typer.Option(help="'24 only: which recordings of which area, such as tx1+spikePow:6v.")
    ] = "tx1+spikePow:6v",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be read; write nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Turn recording files into the canonical store: checked, hashed, ready for random access."""
    from arcuate.cli.prepare import prepare_command

    raise typer.Exit(
        prepare_command(source, store, force=force, dry_run=dry_run, as_json=as_json, features=features)
    )


app.add_typer(recipes_app, name="recipes")


@recipes_app.command("list")
def recipes_list(as_json: Json = False) -> None:
    """The packaged recipes, a line each."""
    from arcuate.cli.recipes import list_command

    list_command(as_json)


@recipes_app.command("show")
def recipes_show(
    name: Annotated[str, typer.Argument(help="A packaged recipe or a YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value")] = None,
    as_json: Json = False,
) -> None:
    """A recipe whole, with everything it inherits, and its number of parameters."""
    from arcuate.cli.recipes import show_command

    show_command(name, overrides or [], as_json)


@recipes_app.command("diff")
def recipes_diff(
    a: Annotated[str, typer.Argument(help="A packaged recipe or a YAML file.")],
    b: Annotated[
        str | None, typer.Argument(help="Another one; left out: the official one A descends from.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What changed between two recipes."""
    from arcuate.cli.recipes import diff_command

    diff_command(a, b, as_json)


@app.command()
def train(
    recipe: Annotated[
        str, typer.Argument(help="A packaged recipe or a YAML file; see: arcuate recipes list")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.sub=value, such as train.steps=200")
    ] = None,
    data: Annotated[Path, typer.Option("--data", help="A prepared store.")] = ...,  # type: ignore[assignment]
    run: Annotated[
        Path, typer.Option("--run", help="Run folder to write; must not exist, unless resumed.")
    ] = ...,  # type: ignore[assignment]
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --run exactly where it stopped.")
    ] = False,
    parent: Annotated[
        str | None, typer.Option("--from", help="Start from the weights of RUN, RUN@best or RUN@last.")
    ] = None,
    keep_optimizer: Annotated[
        bool, typer.Option("--keep-optimizer", help="With --from: take over the optimizer's memory too.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check recipe and data, say what would be trained; write nothing."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a model from a recipe on prepared data."""
    from arcuate.cli.train import Asked, train_command

    asked = Asked(recipe, overrides or [], data, run, resume, parent, keep_optimizer, dry_run)
    raise typer.Exit(train_command(asked, as_json))


@app.command()
def sweep(
    recipe: Annotated[str, typer.Argument(help="A packaged recipe or a YAML file.")],
    space: Annotated[Path, typer.Argument(help="YAML: setting paths, each with a range or choices.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value, for every trial")] = None,
    data: Annotated[Path, typer.Option("--data", help="A prepared store.")] = ...,  # type: ignore[assignment]
    out: Annotated[Path, typer.Option("--out", help="Sweep folder; a run folder per trial.")] = ...,  # type: ignore[assignment]
    trials: Annotated[int, typer.Option(min=1, max=100_000, help="In all, over all workers.")] = 20,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Search for better settings; start the same command several times to share the work."""
    from arcuate.cli.sweep import sweep_command

    raise typer.Exit(sweep_command(recipe, space, overrides or [], data, out, trials, seed, as_json))


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    split: Annotated[str, typer.Option(help="val, test, dev or train.")] = "val",
    data: Annotated[Path | None, typer.Option(help="The store, if it moved since training.")] = None,
    checkpoint: Annotated[str, typer.Option(help="best, last or step-NNNNNNNN.")] = "best",
    label: Annotated[str | None, typer.Option(help="Write results/<split>.<label>.jsonl.")] = None,
    scores: Annotated[Path | None, typer.Option(help="Also write all frame scores to this .npz.")] = None,
    head: Annotated[str, typer.Option(help="ctc, transducer, or both together.")] = "ctc",
    as_json: Json = False,
) -> None:
    """Score a run on a split: PER with its interval, by session and block, one line per trial."""
    from arcuate.cli.evaluate import evaluate_command

    evaluate_command(run, split, data, checkpoint, label, scores, as_json, head)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    split: Annotated[str | None, typer.Option(help="Which results to show.")] = None,
    as_json: Json = False,
) -> None:
    """One self-contained HTML page about a run."""
    from arcuate.cli.report import report_command

    report_command(run, split, as_json)


@app.command("import")
def import_(
    checkpoint: Annotated[Path, typer.Argument(help="An official PyTorch checkpoint, file or folder.")],
    out: Annotated[Path, typer.Argument(help="Model folder to write.")],
    kind: Annotated[str, typer.Option(help="nejm ('25) or cffan ('24).")] = ...,  # type: ignore[assignment]
    sessions: Annotated[
        str | None, typer.Option(help="Session names, comma between them, where the checkpoint has none.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert an official checkpoint; nothing in it is executed."""
    from arcuate.cli.import_ import import_command

    import_command(checkpoint, out, kind, sessions, as_json)


def main() -> NoReturn:
    """Run the command line; a user's mistake is one sentence and exit code 2, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a terminal that cannot show a sign still gets the rest
    try:
        app(standalone_mode=True)
    except UserError as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if error.errno is None:
            raise
        place = f" ({error.filename})" if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fail(
            f"{error.strerror}{place}; {'free some space' if full else 'check the path and your rights to it'}"
        )
    sys.exit(0)


def fail(message: str) -> NoReturn:
    sys.stderr.write(f"error: {message}\n")
    sys.exit(2)
