"""`arcuate evaluate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from rich.table import Table

from arcuate.batches.select import check_fit, trials_of_split
from arcuate.cli.console import emit_json, out, percent, progress, say
from arcuate.errors import UserError
from arcuate.evaluate import (
    TrialResult,
    decode_trials,
    phoneme_search,
    summarise,
    write_results,
    write_scores,
)
from arcuate.models.files import load_model
from arcuate.recipe import Recipe
from arcuate.run import Run, open_run, read_json
from arcuate.runtime import set_up
from arcuate.store import Store
from arcuate.training.checkpoint import find_checkpoint
from arcuate.training.settings import Validate


@dataclass(frozen=True, eq=False)
class Scored:
    """A split as one checkpoint of a run hears it."""

    recipe: Recipe
    store: Store
    folder: Path  # of the checkpoint
    validate: Validate
    results: list[TrialResult]


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
) -> None:
    run = open_run(path)
    summary = evaluate_run(run, split, data, checkpoint, label, scores, search, beam)
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
    search: str | None = None,
    beam: int | None = None,
) -> dict[str, Any]:
    """Everything `arcuate evaluate` does; returns the summary it writes to results/<split>.json."""
    if label is not None and not label.replace("-", "").replace("_", "").isalnum():
        raise UserError(f"--label {label!r} may hold letters, digits, - and _ only")
    scored = score_run(run, split, data, checkpoint, search, beam)
    summary = {**summarise(scored.results), **provenance(run, scored, split)}
    write_results(run, split, label, scored.results, summary, scored.store)
    if scores is not None:
        write_scores(scores, scored.results)
    return summary


def score_run(
    run: Run,
    split: str,
    data: Path | None,
    checkpoint: str,
    search: str | None = None,
    beam: int | None = None,
) -> Scored:
    """Every trial of a split with its frame scores, and read by the search asked for."""
    recipe = run.recipe()
    validate = searched(recipe.validate_, search, beam)
    store = Store.open(data or remembered_store(run))
    check_fit(store, recipe.data)
    folder = find_checkpoint(run.path, checkpoint)
    model = load_model(folder)
    if model.card.n_channels != store.n_channels:
        raise UserError(
            f"the model has {model.card.n_channels} channels, {store.path.name} has {store.n_channels}"
        )
    trials = trials_of_split(store, recipe.data, recipe.front_end.patch, split, model.card.sessions)
    if not trials:
        raise UserError(f"{store.path.name} has no {split} trials in the sessions of this model")
    machine = set_up(recipe.runtime, recipe.encoder.width, recipe.validate_.batch_size)
    with progress("scoring trials") as report:
        results = decode_trials(
            model.to(machine.device),
            store,
            trials,
            batch_size=recipe.validate_.batch_size,
            loss=recipe.loss,
            keep_scores=True,
            search=phoneme_search(validate),
            progress=report,
        )
    return Scored(recipe, store, folder, validate, results)


def searched(settings: Validate, search: str | None, beam: int | None) -> Validate:
    """The recipe's search, or the one asked for; a width alone asks for the beam search."""
    kind = search or ("beam" if beam is not None else settings.search)
    if kind not in ("greedy", "beam"):
        raise UserError(f"--search {kind!r} is unknown; choose greedy or beam")
    if kind == "greedy" and beam is not None:
        raise UserError("--beam belongs to --search beam; the greedy search has no width")
    return Validate(
        batch_size=settings.batch_size,
        search=cast(Literal["greedy", "beam"], kind),
        beam=beam or settings.beam,
    )


def provenance(run: Run, scored: Scored, split: str) -> dict[str, Any]:
    """Which weights were scored on which trials, and what they had been selected on."""
    recipe, store, folder = scored.recipe, scored.store, scored.folder
    beam = {"beam": scored.validate.beam} if scored.validate.search == "beam" else {}
    state = read_json(folder / "state.json") if (folder / "state.json").exists() else {}
    return {
        "run": run.name,
        "recipe": recipe.name,
        "split": split,
        "selected_on": "dev" if recipe.data.dev_fraction > 0 else "val",
        "checkpoint": folder.name,
        "step": state.get("step"),
        "search": scored.validate.search,
        **beam,
        "data_hash": store.manifest.get("hashes", {}).get(split),
    }


def remembered_store(run: Run) -> Path:
    path = Path(str(run.environment().get("data", {}).get("path", "")))
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
    out.print(headline(summary), soft_wrap=True)
    say(f"one line per trial in {run.results_file(summary['split'])}")


def headline(summary: dict[str, Any]) -> str:
    if summary["per"] is None:
        return f"{summary['n_trials']} {summary['split']} trials decoded; they carry no labels, so there is no PER"
    same = " (the split it was selected on)" if summary["selected_on"] == summary["split"] else ""
    same = " (which it was trained on)" if summary["split"] == "train" else same
    greedy = f" (greedy {percent(summary['per_greedy'])})" if "per_greedy" in summary else ""
    return (
        f"PER {percent(summary['per'])}{greedy}, 95 % interval {percent(summary['per_low'])} to"
        f" {percent(summary['per_high'])},"
        f" on {summary['n_scored']} {summary['split']} trials{same}:"
        f" {summary['substitutions']} substitutions, {summary['insertions']} insertions,"
        f" {summary['deletions']} deletions in {summary['n_tokens']} phonemes"
    )
