"""`arcuate evaluate`."""

from pathlib import Path
from typing import Any

from rich.table import Table

from arcuate.batches.select import check_fit, trials_of_split
from arcuate.cli.console import emit_json, out, percent, progress, say
from arcuate.errors import UserError
from arcuate.evaluate import HEAD_NAMES, decode_trials, summarise, write_results, write_scores
from arcuate.models.files import load_model
from arcuate.recipe import Recipe
from arcuate.run import Run, open_run, read_json
from arcuate.runtime import set_up
from arcuate.store import Store
from arcuate.training.checkpoint import find_checkpoint


def evaluate_command(
    path: Path,
    split: str,
    data: Path | None,
    checkpoint: str,
    label: str | None,
    scores: Path | None,
    as_json: bool,
    head: str = "ctc",
) -> None:
    run = open_run(path)
    summary = evaluate_run(run, split, data, checkpoint, label, scores, head)
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
    head: str = "ctc",
) -> dict[str, Any]:
    """Everything `arcuate evaluate` does; returns the summary it writes to results/<split>.json."""
    if label is not None and not label.replace("-", "").replace("_", "").isalnum():
        raise UserError(f"--label {label!r} may hold letters, digits, - and _ only")
    if head not in HEAD_NAMES:
        raise UserError(f"--head {head!r} is unknown; choose {', '.join(HEAD_NAMES)}")
    recipe = run.recipe()
    if head != "ctc" and not recipe.transducer.enabled:
        raise UserError(
            f"{run.path} has no transducer; use --head ctc, or train with transducer.enabled=true"
        )
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
            head=head,
            progress=report,
        )
    summary = {**summarise(results), **provenance(run, recipe, store, folder, split, head)}
    write_results(run, split, label, results, summary, store)
    if scores is not None:
        write_scores(scores, results)
    return summary


def provenance(run: Run, recipe: Recipe, store: Store, folder: Path, split: str, head: str) -> dict[str, Any]:
    """Which weights were scored on which trials, and what they had been selected on."""
    state = read_json(folder / "state.json") if (folder / "state.json").exists() else {}
    return {
        "run": run.name,
        "recipe": recipe.name,
        "split": split,
        "selected_on": "dev" if recipe.data.dev_fraction > 0 else "val",
        "checkpoint": folder.name,
        "step": state.get("step"),
        "search": "greedy" if head == "ctc" else "beam",
        "head": head,
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
    return (
        f"PER {percent(summary['per'])}, 95 % interval {percent(summary['per_low'])} to {percent(summary['per_high'])},"
        f" on {summary['n_scored']} {summary['split']} trials{same}:"
        f" {summary['substitutions']} substitutions, {summary['insertions']} insertions,"
        f" {summary['deletions']} deletions in {summary['n_tokens']} phonemes"
    )
