"""`arcuate evaluate`."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from rich.table import Table

from arcuate.cli.console import counted, emit_json, out, percent, progress, say
from arcuate.data.selection import select_split
from arcuate.data.store import Store, TrialInfo
from arcuate.data.trial import SPLITS
from arcuate.decoding.transducer import require_transducer
from arcuate.errors import UserError
from arcuate.evaluation.evaluate import (
    HEAD_BEAM,
    HEAD_NAMES,
    Head,
    TrialResult,
    decode_trials,
    phoneme_search,
    summarise,
    write_results,
    write_scores,
)
from arcuate.experiments.recipe import Recipe, run_recipe
from arcuate.models.config import ModelConfig
from arcuate.models.io import load_model, load_model_config
from arcuate.models.model import Model
from arcuate.models.runtime import set_up
from arcuate.run import Run, find_checkpoint, open_run, read_json
from arcuate.training.config import Validate

if TYPE_CHECKING:
    from arcuate.cli._follow import Following


@dataclass(frozen=True)
class Subject:
    """What is scored: a run, or a model folder of `arcuate import`, which was not trained here."""

    run: Run
    folder: Path  # of the weights
    recipe: Recipe
    trained_on: dict[str, Any] | None  # the store, as the run describes it

    @property
    def selected_on(self) -> str | None:
        if self.trained_on is None:
            return None
        return "dev" if self.recipe.data.dev_fraction > 0 else "val"


@dataclass(frozen=True)
class Reading:
    """How frames are read: by which search, and by which head."""

    search: str | None = None  # greedy or beam; None: as the recipe says
    beam: int | None = None
    head: str = "ctc"


AS_TRAINED = Reading()


@dataclass(frozen=True, eq=False)
class Scored:
    """A split as one checkpoint of a run hears it."""

    subject: Subject
    store: Store
    model: Model
    validate: Validate
    head: Head
    head_beam: int | None
    results: list[TrialResult]

    @property
    def config(self) -> ModelConfig:
        return self.model.config


def evaluate_command(
    path: Path,
    split: str,
    data: Path | None,
    checkpoint: str,
    label: str | None,
    scores: Path | None,
    as_json: bool,
    search: str | None = None,
    beam: int | None = None,
    head: str = "ctc",
    following: "Following | None" = None,
) -> None:
    run = open_run(path)
    reading = Reading(search, beam, head)
    if following is not None:
        from arcuate.cli import _follow as follow

        told = follow.follow_run(run, split, data, checkpoint, label, scores, following, reading)
        emit_json(told) if as_json else follow.show(run, told)
        return
    summary = evaluate_run(run, split, data, checkpoint, label, scores, reading=reading)
    if as_json:
        emit_json(summary)
    else:
        show(run, summary)


def evaluate_run(
    run: Run,
    split: str,
    data: Path | None,
    checkpoint: str,
    label: str | None,
    scores: Path | None,
    quiet: bool = False,
    reading: Reading = AS_TRAINED,
) -> dict[str, Any]:
    """Everything `arcuate evaluate` does; returns the summary it writes to results/<split>.json."""
    check_places(label, scores)
    scored = score_run(run, split, data, checkpoint, reading, quiet)
    summary = {
        **summarise(scored.results),
        **provenance(scored, split, label),
        "left_out": left_out(scored.store, split, scored.config),
    }
    write_results(run, split, label, scored.results, summary, scored.store)
    if scores is not None:
        write_scores(scores, scored.results)
    return summary


def score_run(
    run: Run,
    split: str,
    data: Path | None,
    checkpoint: str,
    reading: Reading = AS_TRAINED,
    quiet: bool = False,
    keep_frames: bool = False,
) -> Scored:
    """Every trial of a split with its frame scores, and read by the search asked for."""
    subject = find_subject(run, checkpoint)
    recipe = subject.recipe
    head = check_head(reading.head)
    validate = searched(recipe.validate_, reading)
    head_beam = searched_head(head, reading)
    validate = validate if head == "ctc" else recipe.validate_
    if head != "ctc":
        refuse_without_transducer(subject)
    store = Store.open(data or remembered_store(subject))
    model = load_model(subject.folder)
    trials = choose_trials(subject, store, split, model.config)
    machine = set_up(recipe.runtime, recipe.encoder.width, recipe.validate_.batch_size)
    tell_differences(subject, store, split, model.config)
    with nullcontext() if quiet else progress("checking trials") as report:
        store.refuse_changed(trials, report)
    with nullcontext() if quiet else progress("scoring trials") as report:
        results = decode_trials(
            model.to(machine.device),
            store,
            trials,
            batch_size=recipe.validate_.batch_size,
            loss=recipe.loss,
            keep_scores=True,
            keep_frames=keep_frames,
            search=phoneme_search(validate),
            head=head,
            head_beam=head_beam,
            progress=report,
        )
    return Scored(subject, store, model, validate, head, head_beam, results)


def refuse_without_transducer(subject: Subject) -> None:
    if not subject.recipe.transducer.enabled:
        require_transducer(None, str(subject.run.path))


def check_head(name: str) -> Head:
    for head in HEAD_NAMES:
        if head == name:
            return head
    raise UserError(f"--head {name!r} is unknown; choose {', '.join(HEAD_NAMES)}")


def searched(settings: Validate, reading: Reading) -> Validate:
    """The recipe's search, or the one asked for; a width alone asks for the beam search."""
    beam = reading.beam
    kind = reading.search or ("beam" if beam is not None else settings.search)
    if kind not in ("greedy", "beam"):
        raise UserError(f"--search {kind!r} is unknown; choose greedy or beam")
    if kind == "greedy" and beam is not None:
        raise UserError("--beam belongs to --search beam; the greedy search has no width")
    return Validate(
        batch_size=settings.batch_size,
        search=cast(Literal["greedy", "beam"], kind),
        beam=beam or settings.beam,
    )


def searched_head(head: Head, reading: Reading) -> int | None:
    """The width of the beam over a transducer's readings, None for its greedy search."""
    if reading.search != "greedy":
        return reading.beam or HEAD_BEAM
    if head == "both":
        raise UserError("--head both has no greedy search; leave --search out, or take --head transducer")
    return None


def check_places(label: str | None, scores: Path | None) -> None:
    if label is not None and not label.replace("-", "").replace("_", "").isalnum():
        raise UserError(f"--label {label!r} may hold letters, digits, - and _ only")
    if scores is not None and scores.is_dir():
        raise UserError(f"--scores {scores} is a folder; name a file, such as {scores / 'scores.npz'}")


def find_subject(run: Run, checkpoint: str) -> Subject:
    folder = find_checkpoint(run.path, checkpoint)
    if run.recipe_file.is_file():
        return Subject(run, folder, run_recipe(run), run.data())
    settings = load_model_config(folder).settings
    recipe = Recipe(
        name=run.name,
        front_end=settings.front_end,
        encoder=settings.encoder,
        transducer=settings.transducer,
        mode=settings.mode,
        denoiser=settings.denoiser,
        output_init=settings.output_init,
    )
    return Subject(run, folder, recipe, None)


def choose_trials(subject: Subject, store: Store, split: str, config: ModelConfig) -> tuple[TrialInfo, ...]:
    """The trials to score: those of the split in sessions that the model knows."""
    if config.n_channels != store.n_channels:
        raise UserError(
            f"the model has {config.n_channels} channels, {store.path.name} has {store.n_channels}"
        )
    recipe = subject.recipe
    trials = select_split(store, recipe.data, recipe.front_end.patch.count_frames, split, config.sessions)
    if not trials:
        raise UserError(f"{store.path.name} has no {split} trials in the sessions of this model")
    return trials


def left_out(store: Store, split: str, config: ModelConfig) -> dict[str, Any]:
    """Trials of the split that the model cannot read, because they are of sessions it has no layer for."""
    stored = "train" if split == "dev" else split
    unknown = [t.session for t in store.trials if t.split == stored and t.session not in config.sessions]
    return {"trials": len(unknown), "sessions": list(dict.fromkeys(unknown))}


def tell_differences(subject: Subject, store: Store, split: str, config: ModelConfig) -> None:
    """Where the store is not the one of training, or has more than the model knows, a person should hear it."""
    if differ := changed_splits(subject, store):
        say(f"note: {store.path} has other {' and '.join(differ)} trials than the run was trained with")
    missing = left_out(store, split, config)
    if missing["trials"]:
        names = ", ".join(missing["sessions"][:3]) + (" …" if len(missing["sessions"]) > 3 else "")
        say(
            f"note: {counted(missing['trials'], f'{split} trial')} of {counted(len(missing['sessions']), 'session')}"
            f" that this model does not know left out: {names}; read them with --adapt none, or calibrate"
        )


def changed_splits(subject: Subject, store: Store) -> list[str] | None:
    """Splits whose content is not what the run was trained with; None where nothing is on record."""
    before = (subject.trained_on or {}).get("hashes")
    if not isinstance(before, dict):
        return None
    now = store.manifest.get("hashes", {})
    return [split for split in SPLITS if before.get(split) != now.get(split)]


def provenance(scored: Scored, split: str, label: str | None) -> dict[str, Any]:
    """Which weights were scored on which trials, and what they had been selected on."""
    subject, store = scored.subject, scored.store
    width = scored.validate.beam if scored.validate.search == "beam" else None
    if scored.head != "ctc":
        width = scored.head_beam
    state_file = subject.folder / "state.json"
    state = read_json(state_file) if state_file.exists() else {}
    return {
        "run": subject.run.name,
        "recipe": subject.recipe.name if subject.trained_on is not None else None,
        "split": split,
        "label": label,
        "selected_on": subject.selected_on,
        "checkpoint": subject.folder.name,
        "step": state.get("step"),
        "search": "greedy" if width is None else "beam",
        **({} if width is None else {"beam": width}),
        "head": scored.head,
        "data_hash": store.manifest.get("hashes", {}).get(split),
        "data_differ_in": changed_splits(subject, store),
    }


def remembered_store(subject: Subject) -> Path:
    if subject.trained_on is None:
        raise UserError(f"{subject.run.path} was imported, not trained here; name the data with --data STORE")
    path = Path(str(subject.trained_on.get("path", "")))
    if not path.is_dir():
        raise UserError(f"the store this run was trained on ({path}) is not there; name it with --data STORE")
    return path


def show(run: Run, summary: dict[str, Any]) -> None:
    """The result for a person."""
    table = Table(
        box=None, header_style="bold", title=f"PER by session ({summary['split']})", title_justify="left"
    )
    table.add_column("session")
    table.add_column("PER", justify="right")
    for session, rate in summary["per_by_session"].items():
        table.add_row(session, percent(rate))
    if summary["per_by_session"]:
        out.print(table)
    if modes := summary.get("per_by_mode"):
        told = summary.get("mode_accuracy")
        right = f"; mode told right in {percent(told)} of trials" if told is not None else ""
        out.print(", ".join(f"{mode} {percent(rate)}" for mode, rate in modes.items()) + right)
    out.print(headline(summary), soft_wrap=True)
    say(f"one line per trial in {run.results_file(summary['split'], summary['label'])}")


def headline(summary: dict[str, Any]) -> str:
    if summary["per"] is None:
        decoded = counted(summary["n_trials"], f"{summary['split']} trial")
        return f"{decoded} decoded without labels, so there is no PER"
    same = " (the split it was selected on)" if summary["selected_on"] == summary["split"] else ""
    same = " (which it was trained on)" if summary["split"] == "train" else same
    greedy = f" (greedy {percent(summary['per_greedy'])})" if "per_greedy" in summary else ""
    interval = f"95 % interval {percent(summary['per_low'])} to {percent(summary['per_high'])}"
    if summary["per_low"] is None:
        interval = "no interval from a single trial"
    return (
        f"PER {percent(summary['per'])}{greedy}, {interval},"
        f" on {counted(summary['n_scored'], summary['split'] + ' trial')}{same}:"
        f" {summary['substitutions']} substitutions, {summary['insertions']} insertions,"
        f" {summary['deletions']} deletions in {summary['n_tokens']} phonemes"
    )
