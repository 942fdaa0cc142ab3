"""Commands from recordings to a report: demo, simulate, prepare, recipes, train, evaluate, report, import."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import SPLITS, Force, Json, WithSettings, app, complete_from, complete_recipe

recipes_app = typer.Typer(
    help="List the recipes, show one whole, compare two, list all settings.", no_args_is_help=True
)


@app.command(cls=WithSettings)
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
    layout: Annotated[
        str,
        typer.Option(
            help="b2t25 (HDF5, T15) or b2t24 (.mat, T12).", autocompletion=complete_from("b2t25", "b2t24")
        ),
    ] = "b2t25",
    sessions: Annotated[int, typer.Option(min=1, max=1000)] = 6,
    trials: Annotated[int, typer.Option(min=4, max=100_000, help="Per session, all splits together.")] = 250,
    electrodes: Annotated[int, typer.Option(min=4, max=4096)] = 128,
    difficulty: Annotated[
        str,
        typer.Option(
            help="easy, real, hard, or a number (1 = real).",
            autocompletion=complete_from("easy", "real", "hard"),
        ),
    ] = "real",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    later: Annotated[
        str, typer.Option(help="More sessions so many days after the last, such as 5,8.", metavar="DAYS")
    ] = "",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Simulate a cohort of recordings, as files in exactly the layout of a release."""
    from arcuate.cli.simulate import simulate_command

    simulate_command(out, layout, sessions, trials, electrodes, difficulty, seed, force, as_json, later)


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


@recipes_app.command("show", cls=WithSettings)
def recipes_show(
    name: Annotated[
        str, typer.Argument(help="A packaged recipe, a YAML file or a run.", autocompletion=complete_recipe)
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.sub=value")] = None,
    as_json: Json = False,
) -> None:
    """A recipe whole, with everything it inherits, and its number of parameters."""
    from arcuate.cli.recipes import show_command

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
    from arcuate.cli.recipes import diff_command

    diff_command(a, b, as_json)


@recipes_app.command("settings")
def recipes_settings(as_json: Json = False) -> None:
    """Every setting with its type, default, range and meaning, as Markdown."""
    from arcuate.cli.recipes import settings_command

    settings_command(as_json)


@app.command(cls=WithSettings)
def train(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A packaged recipe or a YAML file; see: arcuate recipes list", autocompletion=complete_recipe
        ),
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
    seeds: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="Train so many seeds, each into RUN/seed-K, and tell the spread."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a model from a recipe on prepared data."""
    from arcuate.cli.train import Asked, train_command

    asked = Asked(recipe, overrides or [], data, run, resume, parent, keep_optimizer, dry_run)
    if seeds is None:
        raise typer.Exit(train_command(asked, as_json))
    from arcuate.cli.seeds import train_seeds_command

    raise typer.Exit(train_seeds_command(asked, seeds, as_json))


@app.command()
def average(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    last: Annotated[
        int | None, typer.Option(min=2, max=1_000_000, help="Only so many of the newest checkpoints.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The mean of a run's checkpoints, as checkpoints/average; they are kept by train.keep_checkpoints."""
    from arcuate.cli.average import average_command

    average_command(run, last, as_json)


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder, or a model folder of arcuate import.")],
    split: Annotated[
        str, typer.Option(help="val, test, dev or train.", autocompletion=complete_from(*SPLITS))
    ] = "val",
    data: Annotated[Path | None, typer.Option(help="The store, if it moved since training.")] = None,
    checkpoint: Annotated[
        str,
        typer.Option(
            help="best, last, step-NNNNNNNN or stage-NAME.", autocompletion=complete_from("best", "last")
        ),
    ] = "best",
    label: Annotated[str | None, typer.Option(help="Write results/<split>.<label>.jsonl.")] = None,
    scores: Annotated[Path | None, typer.Option(help="Also write all frame scores to this .npz.")] = None,
    search: Annotated[str | None, typer.Option(help="greedy or beam; left out: as the recipe says.")] = None,
    beam: Annotated[int | None, typer.Option(min=1, max=100_000, help="Width of the beam search.")] = None,
    head: Annotated[
        str,
        typer.Option(
            help="ctc, transducer, or both together; the last two with a beam of 8 unless told otherwise."
        ),
    ] = "ctc",
    adapt: Annotated[
        str | None,
        typer.Option(
            help="Follow days in order, unknown ones too: none, statistics, one-step, replay or entropy.",
            autocompletion=complete_from("none", "statistics", "one-step", "replay", "entropy"),
        ),
    ] = None,
    session: Annotated[list[str] | None, typer.Option(help="With --adapt: these sessions only.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="With --adapt: key=value, such as rate=5e-4.")
    ] = None,
    lm: Annotated[
        str | None, typer.Option(help="With --adapt: labels through this language model, or `default`.")
    ] = None,
    lexicon: Annotated[str, typer.Option(help="Of the language model, or `default`.")] = "default",
    config: Annotated[Path | None, typer.Option(help="Weights of the search, from `arcuate tune`.")] = None,
    as_json: Json = False,
) -> None:
    """Score a run on a split: PER with its interval, by session and block, one line per trial."""
    from arcuate.cli.evaluate import evaluate_command

    following = None
    if adapt is not None:
        from arcuate.cli.follow import Following

        following = Following(adapt, tuple(session or ()), tuple(setting or ()), lm, lexicon, config)
    elif session or setting or lm or config or lexicon != "default":
        raise typer.BadParameter("--session, --set, --lm, --lexicon and --config belong to --adapt METHOD")
    evaluate_command(run, split, data, checkpoint, label, scores, as_json, search, beam, head, following)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    split: Annotated[
        str | None, typer.Option(help="Which results to show.", autocompletion=complete_from(*SPLITS))
    ] = None,
    as_json: Json = False,
) -> None:
    """One self-contained HTML page about a run."""
    from arcuate.cli.report import report_command

    report_command(run, split, as_json)


@app.command("import")
def import_(
    checkpoint: Annotated[Path, typer.Argument(help="An official PyTorch checkpoint, file or folder.")],
    out: Annotated[Path, typer.Argument(help="Model folder to write.")],
    kind: Annotated[
        str,
        typer.Option(help="nejm ('25) or cffan ('24).", autocompletion=complete_from("nejm", "cffan")),
    ] = ...,  # type: ignore[assignment]
    sessions: Annotated[
        str | None, typer.Option(help="Session names, comma between them, where the checkpoint has none.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert an official checkpoint; nothing in it is executed."""
    from arcuate.cli.import_ import import_command

    import_command(checkpoint, out, kind, sessions, as_json)
