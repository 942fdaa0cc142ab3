"""The command line. Commands stand in the order a person walks the path, and import what they need when called."""

import errno
import io
import os
import re
import sys
from collections.abc import Callable
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
ORDER = (
    *("demo", "simulate", "prepare", "recipes", "train", "sweep", "ablate", "evaluate", "decode", "tune"),
    *("rescore", "combine", "submit", "report", "doctor", "runs", "compare", "ledger", "lm", "import"),
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


app = typer.Typer(
    cls=InOrder,
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes_app = typer.Typer(
    help="List the recipes, show one whole, compare two, list all settings.", no_args_is_help=True
)


def complete_recipe(incomplete: str) -> list[str]:
    from arcuate.recipe import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def complete_from(*values: str) -> Callable[[str], list[str]]:
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


class WithSettings(typer.core.TyperCommand):
    """A command that takes key.sub=value; someone who writes a setting as an option is told how it is written."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except USAGE_ERROR as error:
            from arcuate.recipe import setting_for

            if setting := setting_for(getattr(error, "option_name", "")):
                error.possibilities = None
                error.message += f"; settings are written without dashes: {setting}=VALUE"
            raise


lm_app = typer.Typer(help="Language models: import, build, score, mix, look at.", no_args_is_help=True)

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
    as_json: Json = False,
) -> None:
    """Train a model from a recipe on prepared data."""
    from arcuate.cli.train import Asked, train_command

    asked = Asked(recipe, overrides or [], data, run, resume, parent, keep_optimizer, dry_run)
    raise typer.Exit(train_command(asked, as_json))


@app.command(cls=WithSettings)
def sweep(
    recipe: Annotated[
        str, typer.Argument(help="A packaged recipe or a YAML file.", autocompletion=complete_recipe)
    ],
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
def ablate(
    recipe: Annotated[str, typer.Argument(help="The baseline: a packaged recipe or a YAML file.")],
    factors: Annotated[
        list[str],
        typer.Argument(help="name:key=value[,key=value] for each factor; key=value holds for every arm."),
    ],
    data: Annotated[Path, typer.Option("--data", help="A prepared store.")] = ...,  # type: ignore[assignment]
    out: Annotated[
        Path, typer.Option("--out", help="Experiment folder; a run folder per arm and seed.")
    ] = ...,  # type: ignore[assignment]
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Runs of each arm.")] = 3,
    split: Annotated[str, typer.Option(help="What the arms are scored on.")] = "val",
    checkpoint: Annotated[
        str, typer.Option(help="last (so that a run which went wrong counts as such) or best.")
    ] = "last",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs; write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Change one factor at a time, in both directions and with seeds: which one caused the difference?"""
    from arcuate.cli.ablate import ablate_command

    raise typer.Exit(ablate_command(recipe, factors, data, out, seeds, split, checkpoint, dry_run, as_json))


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder, or a model folder of arcuate import.")],
    split: Annotated[
        str, typer.Option(help="val, test, dev or train.", autocompletion=complete_from(*SPLITS))
    ] = "val",
    data: Annotated[Path | None, typer.Option(help="The store, if it moved since training.")] = None,
    checkpoint: Annotated[
        str,
        typer.Option(help="best, last or step-NNNNNNNN.", autocompletion=complete_from("best", "last")),
    ] = "best",
    label: Annotated[str | None, typer.Option(help="Write results/<split>.<label>.jsonl.")] = None,
    scores: Annotated[Path | None, typer.Option(help="Also write all frame scores to this .npz.")] = None,
    search: Annotated[str | None, typer.Option(help="greedy or beam; left out: as the recipe says.")] = None,
    beam: Annotated[int | None, typer.Option(min=1, max=100_000, help="Width of the beam search.")] = None,
    head: Annotated[str, typer.Option(help="ctc, transducer, or both together.")] = "ctc",
    as_json: Json = False,
) -> None:
    """Score a run on a split: PER with its interval, by session and block, one line per trial."""
    from arcuate.cli.evaluate import evaluate_command

    evaluate_command(run, split, data, checkpoint, label, scores, as_json, search, beam, head)


ScoresPath = Annotated[Path, typer.Argument(help="Frame scores (.npz), or a run folder.")]
LexiconName = Annotated[str, typer.Option("--lexicon", help="Lexicon file, or `default` (English).")]
LmOption = Annotated[str, typer.Option("--lm", help="Model file, ARPA file, or `default` (English).")]
RefsPath = Annotated[Path | None, typer.Option("--references", help="JSON lines with `text`, a trial each.")]
ConfigPath = Annotated[Path | None, typer.Option("--config", help="Weights, from `arcuate tune`.")]
Beam = Annotated[int | None, typer.Option("--beam", min=1, max=1_000_000, help="Readings kept per frame.")]
Threshold = Annotated[float | None, typer.Option("--threshold", help="Worst reading kept, in nat.")]
SplitName = Annotated[str, typer.Option("--split", help="Of a run folder: val, test, dev or train.")]
DataPath = Annotated[Path | None, typer.Option("--data", help="Of a run folder: the store, if it moved.")]
Words = Annotated[
    list[str] | None, typer.Option("--word", help="Add a word: word, word=weight or word=weight=PHONEMES.")
]


@app.command()
def decode(
    scores: ScoresPath,
    out: Annotated[Path, typer.Option("--out", help="JSON lines to write, a trial each.")] = ...,  # type: ignore[assignment]
    lexicon: LexiconName = "default",
    lm: LmOption = "default",
    beam: Beam = None,
    threshold: Threshold = None,
    config: ConfigPath = None,
    references: RefsPath = None,
    nbest: Annotated[int, typer.Option(min=1, max=10_000, help="Readings to write per trial.")] = 10,
    word: Words = None,
    split: SplitName = "val",
    data: DataPath = None,
    as_json: Json = False,
) -> None:
    """Frame scores to words, with a pronunciation lexicon and a language model."""
    from arcuate.cli.decode import Source, decode_command

    source = Source(scores, lexicon, lm, config, references, beam, threshold, split, data, tuple(word or ()))
    decode_command(source, out, nbest, as_json)


@app.command()
def tune(
    scores: ScoresPath,
    out: Annotated[Path, typer.Option("--out", help="YAML file of weights to write.")] = ...,  # type: ignore[assignment]
    lexicon: LexiconName = "default",
    lm: LmOption = "default",
    references: RefsPath = None,
    config: ConfigPath = None,
    beam: Beam = None,
    threshold: Threshold = None,
    budget: Annotated[float, typer.Option(min=1.0, help="Seconds to spend.")] = 300.0,
    folds: Annotated[int, typer.Option(min=0, max=100, help="Cross-fit by session; 0 = do not.")] = 0,
    split: SplitName = "val",
    data: DataPath = None,
    as_json: Json = False,
) -> None:
    """Find the weights of `decode` on trials with references."""
    from arcuate.cli.decode import Source, tune_command

    source = Source(scores, lexicon, lm, config, references, beam, threshold, split, data)
    tune_command(source, out, budget, folds, as_json)


@app.command()
def rescore(
    hyps: Annotated[Path, typer.Argument(help="Decodings with n-best lists, from `arcuate decode --out`.")],
    llm: Annotated[Path, typer.Option(help="A causal language model: a folder or a .gguf file.")] = ...,  # type: ignore[assignment]
    references: Annotated[
        Path | None, typer.Option(help="Lines with id and text, to fit on and score.")
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Share of the causal model; left out: fitted.")
    ] = None,
    acoustic: Annotated[float | None, typer.Option(min=0.0, help="Weight of the sound.")] = None,
    length: Annotated[float | None, typer.Option(help="Per word.")] = None,
    n_best: Annotated[int | None, typer.Option(min=1, help="Only the first entries of each list.")] = None,
    context: Annotated[
        Path | None, typer.Option(help="A text the model reads before every sentence.")
    ] = None,
    folds: Annotated[int, typer.Option(min=2, max=100, help="Of sessions, for fitting.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Write the decodings with their new scores.")] = None,
    as_json: Json = False,
) -> None:
    """Score n-best lists anew with a causal language model (extra: llm)."""
    from arcuate.cli.rescore import Asked, rescore_command

    rescore_command(
        Asked(hyps, llm, references, alpha, acoustic, length, n_best, context, folds, out), as_json
    )


@app.command()
def combine(
    sources: Annotated[
        list[Path],
        typer.Argument(help="A .jsonl with candidates per trial; or several runs, .jsonl or .npz files."),
    ],
    method: Annotated[
        str, typer.Option(help="linear, mbr or rover for words; arithmetic or geometric for frame scores.")
    ] = "auto",
    split: Annotated[str, typer.Option(help="Of runs: whose results to take.")] = "val",
    label: Annotated[str | None, typer.Option(help="Of runs: results/<split>.<label>.jsonl.")] = None,
    voters: Annotated[str, typer.Option(help="equal, or weighted by their agreement.")] = "equal",
    scale: Annotated[float, typer.Option(min=0.0, help="Of scores, before they become probabilities.")] = 1.0,
    lm: Annotated[str | None, typer.Option(help="An n-gram model as one more criterion.")] = None,
    llm: Annotated[Path | None, typer.Option(help="A causal language model as one more criterion.")] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Fit the weights of the criteria; each trial by the other folds.")
    ] = False,
    folds: Annotated[int, typer.Option(min=2, max=100)] = 5,
    weights: Annotated[Path | None, typer.Option(help="Weights fitted before.")] = None,
    save_weights: Annotated[Path | None, typer.Option(help="Write the weights fitted on all trials.")] = None,
    references: Annotated[Path | None, typer.Option(help="Lines with id and text, to score against.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the combined texts (.jsonl) or scores (.npz).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Combine several decoders' readings, word by word or frame by frame."""
    from arcuate.cli.combine import Asked, combine_command

    asked = Asked(
        sources,
        method,
        split,
        label,
        voters,
        scale,
        lm,
        llm,
        fit,
        folds,
        weights,
        save_weights,
        references,
        out,
    )
    combine_command(asked, as_json)


@app.command()
def submit(
    run: Annotated[Path, typer.Argument(help="A run folder with word decodings, or a file of them.")],
    out: Annotated[Path, typer.Option(help="File to write: CSV for '25, text for '24.")] = ...,  # type: ignore[assignment]
    split: Annotated[str, typer.Option(help="test, or another to try out.")] = "test",
    label: Annotated[str | None, typer.Option(help="Of results/<split>.<label>.jsonl.")] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="b2t25 or b2t24; else by the session names.")
    ] = None,
    allow_empty: Annotated[bool, typer.Option("--allow-empty", help="Hand in empty texts too.")] = False,
    as_json: Json = False,
) -> None:
    """Write decoded texts as the benchmarks want them handed in."""
    from arcuate.cli.submit import submit_command

    submit_command(run, out, split, label, format_, allow_empty, as_json)


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


@app.command()
def doctor(
    path: Annotated[Path, typer.Argument(help="A run folder, or a log that any trainer or tracker wrote.")],
    dataset: Annotated[str | None, typer.Option(help="b2t24 or b2t25; left out: inferred.")] = None,
    planned_steps: Annotated[
        int | None, typer.Option(min=1, help="How long the run was meant to be; left out: inferred.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a page with the curves.")] = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read a pickle; nothing in it is executed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """What happened in a training run: a verdict, since when, the evidence, causes and what to try."""
    from arcuate.cli.doctor import doctor_command

    doctor_command(path, dataset, planned_steps, allow_pickle, html, as_json)


app.add_typer(lm_app, name="lm")
LmName = Annotated[str, typer.Argument(help="A model file, an ARPA file, or `default` (English, embedded).")]
LmOut = Annotated[Path, typer.Argument(help="Model file to write.")]


@lm_app.command("import")
def lm_import(
    source: Annotated[str, typer.Argument(help="An ARPA file, plain or gzipped, or `default`.")],
    out: LmOut,
    recount: Annotated[
        bool, typer.Option("--recount", help="Accept a file whose head states wrong counts.")
    ] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Turn an ARPA file of any order and any tool into a model file that is mapped, not loaded."""
    from arcuate.cli.lm import import_command

    import_command(source, out, recount, force, as_json)


@lm_app.command("build", cls=SeveralNumbers)
def lm_build(
    corpus: Annotated[Path, typer.Argument(help="Text with a sentence per line, plain or gzipped.")],
    out: LmOut,
    order: Annotated[int, typer.Option(help="Longest n-grams.")] = 4,
    prune: Annotated[
        list[int] | None,
        typer.Option(help="Per order, leave out n-grams seen no more often, as in --prune 0 0 1."),
    ] = None,
    more: Annotated[
        list[Path] | None, typer.Option("--more", help="Further text, any number of times.")
    ] = None,
    normalise: Annotated[
        bool, typer.Option("--normalise", help="Normalise sentences as for scoring: lower case, no marks.")
    ] = False,
    leave_out: Annotated[
        Path | None, typer.Option(help="Do not train on the sentences of this text (evaluation data).")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Count how many sentences of this text were trained on.")
    ] = None,
    no_hashes: Annotated[
        bool,
        typer.Option("--no-hashes", help="Keep no hashes of the sentences; leakage cannot be told later."),
    ] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Estimate a model from text: modified Kneser–Ney with interpolation."""
    from arcuate.cli.lm import Asked, build_command

    asked = Asked(
        [corpus, *(more or ())], out, order, prune or (), normalise, leave_out, against, not no_hashes, force
    )
    build_command(asked, as_json)


@lm_app.command("score")
def lm_score(
    model: LmName,
    text: Annotated[str, typer.Argument(help="Text with a sentence per line; - for standard input.")] = "-",
    normalise: Annotated[
        bool, typer.Option("--normalise", help="Normalise sentences first: lower case, no marks.")
    ] = False,
    against: Annotated[
        Path | None, typer.Option(help="Count how many sentences of this text were trained on.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Perplexity of a text, unknown words, and sentences the model was trained on."""
    from arcuate.cli.lm import score_command

    score_command(model, text, normalise, against, as_json)


@lm_app.command("mix", cls=SeveralNumbers)
def lm_mix(
    models: Annotated[list[str], typer.Argument(help="Two or more models, then the file to write.")],
    tune: Annotated[Path | None, typer.Option(help="Held-out text; finds the weights.")] = None,
    weight: Annotated[list[float] | None, typer.Option(help="One per model, if they are known.")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Interpolate several models into one."""
    from arcuate.cli.lm import mix_command

    if len(models) < 3:
        raise UserError("name at least two models and the file to write: arcuate lm mix A B OUT --tune TEXT")
    mix_command(models[:-1], Path(models[-1]), tune, weight or (), force, as_json)


@lm_app.command("info")
def lm_info(
    model: LmName,
    check: Annotated[bool, typer.Option("--check", help="Read the whole file and check all of it.")] = False,
    as_json: Json = False,
) -> None:
    """Order, sizes and origin of a model."""
    from arcuate.cli.lm import info_command

    info_command(model, check, as_json)


@lm_app.command("export")
def lm_export(
    model: LmName,
    out: Annotated[Path, typer.Argument(help="ARPA file to write, .arpa or .arpa.gz.")],
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write a model as an ARPA file for other tools."""
    from arcuate.cli.lm import export_command

    export_command(model, out, force, as_json)


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(help="A folder that holds runs, at any depth.")] = Path("runs"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list on one line on stdout, all else on stderr.")
    ] = False,
) -> None:
    """List runs: verdict, best PER, steps, and what changed against the parent."""
    from arcuate.cli.ledger import runs_command

    runs_command(folder, as_json)


@app.command()
def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, or folders of runs; the first is the reference.")
    ],
    split: Annotated[
        str, typer.Option(help="val, test, dev or train; evaluated where that is missing.")
    ] = "val",
    label: Annotated[str | None, typer.Option(help="Compare results/<split>.<label>.jsonl.")] = None,
    over: Annotated[
        str, typer.Option(help="trials: further trials of these sessions; sessions: further sessions.")
    ] = "trials",
    html: Annotated[
        Path | None, typer.Option("--html", help="Also draw curves and differences on a page.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Is the difference real? Same trials, paired; runs that differ only in their seed count as one."""
    from arcuate.cli.compare import compare_command

    compare_command(runs, split, label, over, html, as_json)


@app.command()
def ledger(
    folder: Annotated[Path, typer.Argument(help="A folder that holds runs, at any depth.")] = Path("runs"),
    out: Annotated[Path | None, typer.Option("--out", help="File to write; left out: printed.")] = None,
) -> None:
    """Write the run diary from the run folders: purpose, changes, result, finding."""
    from arcuate.cli.ledger import ledger_command

    ledger_command(folder, out)


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


def main() -> NoReturn:
    """Run the command line; a user's mistake is one sentence and exit code 2, never a traceback."""
    fill_closed_streams()
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


def fill_closed_streams() -> None:
    """A closed stdout or stderr must not be taken by the next file that is opened, nor end in a traceback."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(handle)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the life of the process
    if sys.stdout is None:
        if "--json" in sys.argv:
            fail("stdout is closed, so there is nowhere to print the JSON to; open it or leave --json out")
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def fail(message: str) -> NoReturn:
    sys.stderr.write(f"error: {message}\n")
    sys.exit(2)
