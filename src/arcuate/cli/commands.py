"""The commands of `arcuate` in groups, in the order of the workflow."""

from collections.abc import Callable
from typing import Any

from cyclopts import App, Group, Parameter

from arcuate import __version__
from arcuate.cli.adapter import Call, Command, parser

_OPTIONS = Group("Options", sort_key=100)
_HELP = """Decode intracortical recordings of attempted speech to text.

Workflow: simulate data or download a release → prepare a store → choose a recipe → train → evaluate → report. \
demo runs all steps in a few minutes.

Every command also takes --json (one JSON object on one line), --allow-code PACKAGE (let checkpoints and model \
folders import components of this package) and --slurm FILE (submit the command with the #SBATCH lines of FILE).
"""

GROUPS = {
    "Start here": (
        Command(
            *("demo", ".experiments.demo:run_demo", "overrides…"),
            "Run the complete workflow on simulated data: simulate, prepare, train, evaluate, decode, report.",
            ".cli.show_runs:demo",
        ),
        Command(
            *("simulate", ".data.simulation:simulate", "out"),
            "Simulate recordings and write them as files in the layout of a release.",
            ".cli.show_data:simulate",
        ),
        Command(
            *("prepare", ".data.prepare:prepare", "source store"),
            "Check recordings and convert them to a store: one array of bins per session.",
            ".cli.show_data:prepare",
            then=".cli.show_data:report_of",
        ),
        Command(
            *("recipes list", ".cli.show_data:list_recipes", ""),
            "List the packaged recipes by group.",
            ".cli.show_data:recipes",
        ),
        Command(
            *("recipes show", ".experiments.recipe:describe_recipe", "recipe overrides…"),
            "Print a complete recipe, inherited settings included, and its number of parameters.",
            ".cli.show_data:recipe",
        ),
        Command(
            *("recipes diff", ".experiments.recipe:compare_recipes", "a b"),
            "Compare two recipes, setting by setting; one alone is compared with the official recipe it extends.",
            ".cli.show_data:recipe_changes",
        ),
        Command(
            *("recipes settings", ".cli.show_data:list_settings", ""),
            "Print every setting with its type, default, range and description, as Markdown.",
        ),
        Command(
            *("train", ".experiments.train:train", "recipe overrides…"),
            "Train a model from a recipe on prepared data.",
            ".cli.show_runs:trained",
        ),
        Command(
            *("evaluate", ".evaluation.evaluate:evaluate", "run"),
            "Evaluate a run on a split: PER with confidence interval, by session and block, one line per trial.",
            ".cli.show_results:evaluation",
        ),
        Command(
            *("report", ".cli.show_runs:write_report", "run"),
            "Write one HTML page about a run, or about the changes of a store's recordings over sessions.",
            ".cli.show_runs:report",
        ),
    ),
    "Words": (
        Command(
            *("decode", ".evaluation.decode:decode", "source"),
            "Decode a run, an exported model or frame scores to words, with a lexicon and a language model.",
            ".cli.show_results:transcription",
        ),
        Command(
            *("tune", ".evaluation.tune:tune", "source"),
            "Tune the search weights of `decode` on trials with references.",
            ".cli.show_results:weights",
        ),
        Command(
            *("rescore", ".evaluation.rescore:rescore", "hyps"),
            "Rescore n-best lists with a causal language model (extra: llm).",
        ),
        Command(
            *("combine", ".evaluation.combine:combine", "sources…"),
            "Combine several decoders, by words or by frame scores.",
        ),
        Command(
            *("decode submit", ".evaluation.submission:submit", "source"),
            "Write decoded texts in the submission format of the benchmarks.",
            ".cli.show_results:submission",
        ),
        Command(
            *("lm import", ".language.ngram.open:import_model", "source path"),
            "Convert an ARPA file of any order to a memory-mapped model file.",
            ".cli.show_data:model",
        ),
        Command(
            *("lm build", ".language.ngram.estimate:build_model", "texts… path"),
            "Estimate a model from text files: modified Kneser–Ney with interpolation.",
            ".cli.show_data:model",
        ),
        Command(
            *("lm score", ".language.ngram.perplexity:score_text", "model text"),
            "Report the perplexity of a text, its unknown words, and its overlap with the training text.",
            ".cli.show_data:perplexity",
        ),
        Command(
            *("lm mix", ".language.ngram.mix:mix_models", "models… path"),
            "Interpolate several models into one.",
            ".cli.show_data:model",
        ),
        Command(
            *("lm info", ".language.ngram.open:model_info", "name"),
            "Verify a model, and show its order, sizes and origin.",
            ".cli.show_data:model",
        ),
        Command(
            *("lm export", ".language.ngram.open:export_model", "name path"),
            "Write a model as an ARPA file for other tools.",
            ".cli.show_data:model",
        ),
    ),
    "Understand runs": (
        Command(
            *("doctor", ".cli.show_runs:doctor", "path"),
            "Diagnose a training run: verdict, first step affected, evidence, likely causes and remedies.",
            ".cli.show_runs:consultation",
        ),
        Command(
            *("runs", ".insight.runs:list_runs", "folder"),
            "List runs: verdict, best error rate, WER, steps, target, and changes relative to the parent run.",
            ".cli.show_runs:runs",
        ),
        Command(
            *("runs ledger", ".insight.ledger:write_ledger", "folder"),
            "Write the run diary from the run folders: purpose, changes, result, finding.",
            ".cli.show_runs:ledger",
        ),
        Command(
            *("runs board", ".insight.board:prepare_board", "folder"),
            "Serve one page for all runs, updated while they train (extra: live).",
            ".cli.show_runs:serve",
        ),
        Command(
            *("compare", ".insight.compare:compare", "runs…"),
            "Test whether runs differ significantly: paired by trial; runs that differ only in seed form a group.",
            ".cli.show_runs:comparison",
            hidden="evaluate_missing",
        ),
    ),
    "Many runs": (
        Command(
            *("sweep", ".experiments.sweep:sweep", "recipe space overrides…"),
            "Search hyperparameters. Start the same command several times for parallel workers.",
            ".cli.show_runs:sweep",
        ),
        Command(
            *("ablate", ".experiments.ablation:ablate", "recipe factors…"),
            "Find which change caused a difference: each factor alone, and all factors but one, over several seeds.",
            ".cli.show_runs:ablation",
            hidden="overrides",
            then=".cli.show_runs:judge",
        ),
    ),
    "New sessions": (
        Command(
            *("calibrate", ".experiments.calibrate:calibrate", "run"),
            "Add a recording session to a trained model, using a few labelled sentences from it.",
            ".cli.show_runs:calibration",
            hidden="settings",
        ),
    ),
    "Live and elsewhere": (
        Command(
            *("live", ".live.serve:prepare_server", "run"),
            "Decode live and serve a page that shows the text as speech is attempted (extra: live).",
            ".cli.show_runs:serve",
        ),
        Command(
            *("bench live", ".live.bench:bench_live", "run"),
            "Measure the delay from the last bin of each frame to its text, in a real-time replay on one thread.",
            hidden="real_time split",
        ),
        Command(
            *("bench robustness", ".evaluation.robustness:bench_robustness", "run"),
            "Measure the error rate on corrupted input: dead or permuted channels, drift, lost packets, noise.",
            ".cli.show_results:robustness",
            hidden="corruptions severities seed",
        ),
        Command(
            *("bench floor", ".experiments.floor:measure_floor", "run"),
            "Train the recipe of a run on input without neural information: a lower bound for error rates.",
        ),
        Command(
            *("export", ".experiments.export:export", "source out"),
            "Export a model to one file that decodes without torch, to the hub, its card alone, or a store to NWB.",
        ),
    ),
    "Extend": (
        Command(
            *("import", ".models.import_checkpoint:import_checkpoint", "path out"),
            "Convert an official checkpoint into a model folder; nothing in the checkpoint is executed.",
            ".cli.show_data:imported",
        ),
        Command(
            *("new", ".cli.show_data:new", "kind name"),
            "Write a working skeleton of an encoder, a reader or a recipe.",
        ),
        Command(
            *("new check", ".exported.check_encoder:check_encoder", "kind settings…"),
            "Check an encoder: streaming = offline, padding, batch order, gradients, saving, export.",
            ".cli.show_data:encoder_check",
        ),
        Command(
            *("selftest", ".experiments.selftest:selftest", ""),
            "Check numerics in every precision, multi-process training and speed; exit code 1 if a check fails.",
            ".cli.show_results:selftest",
        ),
    ),
}
_SUMMARIES = {
    "recipes": "List the recipes, show one, diff two, list all settings.",
    "lm": "Language models: import, build, score, mix, info, export.",
    "decode": "Decode a run, an exported model or frame scores to words; write a submission of decoded words.",
    "runs": "List runs; their diary, and a page of all of them.",
    "new": "Write a working skeleton of an encoder, a reader or a recipe; check an encoder.",
    "bench": "Benchmarks: latency on this machine, robustness to corrupted input, and a lower bound.",
}
COMMANDS = {command.name: command for commands in GROUPS.values() for command in commands}


def __getattr__(name: str) -> Callable[..., Call] | App:
    """The parser of a command or `group NAME`, made when it is first used: its functions are imported then."""
    group = name.removeprefix("group ")
    if group == name and name not in COMMANDS:
        raise AttributeError(name)
    if group == name:
        return parser(COMMANDS[name])
    app = App(group)
    if group in COMMANDS:
        app = App(group, default_command=parser(COMMANDS[group]), usage=_usage(COMMANDS[group]))
    for place, command in enumerate(COMMANDS.values()):
        if command.name.startswith(f"{group} "):
            _add(app, command, place)
    return app


# Commands of earlier snapshots, and what does the same now.
SUCCESSORS = {
    "average": "ema.decay=0.999 averages the weights while training",
    "board": "use runs board",
    "card": "use export RUN CARD.md",
    "check-encoder": "use new check",
    "cite": "export RUN CARD.md says what to cite",
    "drift": "use report STORE",
    "export-data": "use export STORE FOLDER",
    "falcon": "use examples/falcon_h2.py",
    "launch": "use --slurm FILE with the command itself",
    "ledger": "use runs ledger",
    "load": "name the model as hf:ORG/NAME in any command",
    "push": "use export RUN hf:ORG/NAME",
    "submit": "use decode submit",
    "verify": "use prepare SOURCE --dry-run",
}


def make_app() -> App:
    """The application; the functions of its commands are imported when they are used."""
    settings: dict[str, Any] = {"default_parameter": Parameter(negative=()), "help_format": "plaintext"}
    app = App("arcuate", help=_HELP, version=__version__, **settings)
    for order, (title, commands) in enumerate(GROUPS.items()):
        group = Group(title, sort_key=order)
        for place, command in enumerate(commands):
            name = command.name.split()[0]
            if name not in _SUMMARIES:
                _add(app, command, place, group)
            elif name not in app:
                app.command(f"{__name__}:group {name}", name=name, help=_SUMMARIES[name], sort_key=place, group=group)
    app.register_install_completion_command(group=_OPTIONS)
    for option in (*app.help_flags, *app.version_flags):
        app[option].group = _OPTIONS
    return app


def _usage(command: Command) -> str:
    return f"Usage: arcuate {command.name} [OPTIONS] {command.positional.upper().replace('…', '...')}"


def _add(app: App, command: Command, place: int, group: Group | None = None) -> None:
    *_, name = command.name.split()
    path = f"{__name__}:{command.name}"
    app.command(path, name=name, help=command.summary, usage=_usage(command), sort_key=place, group=group)
