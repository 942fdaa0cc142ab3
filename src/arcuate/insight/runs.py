"""`list_runs`: the table of runs below a folder, one per row, with the changes against a parent run."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from arcuate.config import Change, value_text
from arcuate.errors import UserError
from arcuate.experiments.recipe import Recipe, diff_recipes, load_recipe, recipe_names
from arcuate.files import to_frame
from arcuate.insight.run_data import Diagnose, Parent, RunData, lookup, read_run
from arcuate.progress import Progress, counted, percent
from arcuate.run import RUN_FILES, Run

_MAX_DEPTH = 6
_MAX_EARLIER = 60  # runs among which the nearest is searched
_BASELINE = "base"  # arm of an ablation with which the others are compared
_EXECUTION_SECTIONS = ("runtime", "track")  # how a run was executed; no influence on the result
_EXECUTION_SETTINGS = (
    *("data.workers", "train.log_every", "train.keep_checkpoints", "train.checkpoint_every", "optimizer.fused"),
    *("validate.lm", "validate.lexicon"),
)
SEED_SETTINGS = ("train.seed", "data.seed")


@dataclass(frozen=True)
class RunTable:
    """The runs of a folder in the order of their start."""

    folder: Path
    runs: tuple[RunData, ...]

    def __repr__(self) -> str:
        names = ", ".join(data.name for data in self.runs[:6]) + (", …" if len(self) > 6 else "")
        return f"RunTable('{self.folder}': {counted(len(self), 'run')}{': ' if names else ''}{names})"

    def __iter__(self) -> Iterator[RunData]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    @property
    def rate_name(self) -> str:
        """PER, or CER for runs on characters; "PER / CER" for both."""
        return " / ".join(dict.fromkeys(data.rate_name for data in self.runs)) or "PER"

    def cells(self) -> list[dict[str, str]]:
        """The table as text, by the name of the column."""
        return [run_cells(data, self.rate_name) for data in self.runs]

    def to_dicts(self) -> list[dict[str, Any]]:
        return [run_dict(data) for data in self.runs]

    def to_frame(self) -> Any:
        """One line per run as a pandas DataFrame."""
        return to_frame(self.to_dicts())


def list_runs(
    folder: str | Path = "runs", *, diagnose: Diagnose | None = None, progress: Progress | None = None
) -> RunTable:
    """Read all runs in and below a folder; damaged ones are listed with their problems.

    Args:
        folder: Folder that contains runs, at any depth.
        diagnose: Makes the verdicts; without it the runs have none.
    """
    folder = Path(folder)
    paths = find_runs(folder)
    found = []
    for i, path in enumerate(paths):
        found.append(read_run(Run(path), run_name(path, folder), diagnose))
        if progress:
            progress(i + 1, len(paths), "reading runs")
    found.sort(key=started_order)
    linked = [replace(data, parent=find_parent(data, found[:i])) for i, data in enumerate(found)]
    return RunTable(folder, tuple(linked))


def run_name(path: Path, folder: Path) -> str:
    return path.resolve().name if path == folder else str(path.relative_to(folder))


def started_order(data: RunData) -> tuple[bool, str, str]:
    return not data.started, data.started, data.name


def run_cells(data: RunData, heading: str) -> dict[str, str]:
    """One run as text; `heading` is the error rate that the heading of the column names."""
    best, done, planned = data.best, data.last_step, data.planned_steps
    also = f" ({', '.join(data.diagnosis.secondary)})" if data.diagnosis and data.diagnosis.secondary else ""
    name = "" if data.rate_name == heading else f"{data.rate_name} "  # runs on different alphabets
    steps = "–" if done is None else f"{done:,}" if planned in (None, done) else f"{done:,} of {planned:,}"
    return {
        "run": data.name,
        "verdict": f"{data.verdict or ('damaged' if data.problems else '–')}{also}".replace("_", " "),
        f"best {heading}": f"{name}{percent(best.rate)} at {best.step:,}" if best else "–",
        "WER": percent(data.best_wer[0] if data.best_wer else None),
        "steps": steps,
        "target": data.target.status if data.target else "–",
        "parent": data.parent.name if data.parent else "–",
        "changes": changes_text(data.parent.changes) if data.parent else "–",
    }


def changes_text(changes: Sequence[Change], n_shown: int = 3) -> str:
    shown = [f"{c.path} {value_text(c.before)} → {value_text(c.after)}" for c in changes[:n_shown]]
    more = f" and {len(changes) - n_shown} more" if len(changes) > n_shown else ""
    return (", ".join(shown) + more) or "no changes"


def run_dict(data: RunData) -> dict[str, Any]:
    """One run as plain values."""
    diagnosis, recipe, parent, best = data.diagnosis, data.recipe, data.parent, data.best
    rates = {"results": ("per", "per_low", "per_high"), "words": ("wer", "wer_low", "wer_high", "cer", "lm")}
    scored = {
        kind: {
            name: {key: summary.get(key) for key in (*keys, "step", "n_trials")}
            for name, summary in getattr(data, kind).items()
        }
        for kind, keys in rates.items()
    }
    return {
        "name": data.name,
        "path": str(data.run.path),
        "recipe": recipe.name if recipe else None,
        "seed": recipe.train.seed if recipe else None,
        "started": data.started or None,
        "verdict": data.verdict or None,
        "secondary": list(diagnosis.secondary) if diagnosis else [],
        "since_step": diagnosis.since_step if diagnosis else None,
        "steps": data.last_step,
        "planned_steps": data.planned_steps,
        "unfinished": data.unfinished,
        "best_per": best.rate if best else None,
        "best_step": best.step if best else None,
        "last_per": data.last_rate,
        "best_wer": data.best_wer[0] if data.best_wer else None,
        "purpose": recipe.purpose if recipe else None,
        "target": data.target.to_dict() if data.target else None,
        "seconds": data.seconds,
        "incidents": len(data.incidents),
        "parent": parent.name if parent else None,
        "parent_kind": parent.kind if parent else None,
        "changes": [asdict(change) for change in parent.changes] if parent else [],
        **scored,
        "problems": list(data.problems),
    }


# --- Run folders -----------------------------------------------------------------------------------------


def find_runs(folder: Path) -> list[Path]:
    """The run folders in and below a folder, sorted; run folders inside a run folder are not searched."""
    train = f"arcuate train tiny --data STORE --run {folder}/first"
    if not folder.is_dir():
        raise UserError(f"no such folder: {folder}; give the folder that contains your runs, or train one: {train}")
    found = sorted(_search(folder), key=str)
    if not found:
        raise UserError(f"{folder} contains no runs; train one with: {train}")
    return found


def _search(folder: Path) -> Iterator[Path]:
    """Hidden folders are not searched: those of a command in progress, such as .NAME.part, are not runs yet."""
    for name, children, _ in os.walk(folder):
        path = Path(name)
        is_run, depth = is_run_folder(path), len(path.relative_to(folder).parts)
        children[:] = [] if is_run or depth >= _MAX_DEPTH else [c for c in children if not c.startswith(".")]
        if is_run:
            yield path


def is_run_folder(folder: Path) -> bool:
    """Whether enough files are left to recognise a run; recipe.yaml alone is not sufficient."""
    if sum((folder / name).is_file() for name in RUN_FILES) >= 2:
        return True
    return (folder / "recipe.yaml").is_file() and (folder / "checkpoints").is_dir()


# --- Parents and changes ---------------------------------------------------------------------------------


def find_parent(data: RunData, earlier: Sequence[RunData]) -> Parent | None:
    """The run that this one is compared with.

    In this order: the run that provided the weights; the baseline of the ablation; the earlier run on the same data or
    packaged recipe with the fewest changed settings, which is the most informative comparison. Of equally close
    candidates the latest is used, and a run is preferred to a recipe.
    """
    recipe = data.recipe
    if recipe is None:
        return None
    known = {other.run.path.resolve(): other for other in earlier if other.recipe}

    def compared_with(other: RunData, kind: str) -> Parent:
        return Parent(other.name, kind, run_changes(other, data), other)

    if data.weights_from:
        source = known.get(data.weights_from.resolve())
        return compared_with(source, "weights") if source else Parent(str(data.weights_from), "weights", ())
    if data.ablation and (baseline := known.get(data.ablation / _BASELINE / data.run.path.resolve().name)):
        return compared_with(baseline, "base")
    candidates = []
    if name := packaged_ancestor(recipe):
        candidates.append(Parent(name, "recipe", result_changes(load_recipe(name), recipe)))
    hashes = lookup(data.environment, "data.hashes")
    for other in [*known.values()][-_MAX_EARLIER:]:
        if not other.weights_from and lookup(other.environment, "data.hashes") == hashes:
            candidates.append(compared_with(other, "run"))
    return min(reversed(candidates), key=lambda p: len(p.changes), default=None)


def packaged_ancestor(recipe: Recipe) -> str | None:
    """The packaged recipe that this one is or extends."""
    return next((name for name in (recipe.name, recipe.extends) if name in recipe_names()), None)


def run_changes(before: RunData, after: RunData) -> tuple[Change, ...]:
    """Changed settings that can affect a result; precisions that fell back to the same one do not count."""
    if before.recipe is None or after.recipe is None:
        return ()
    used = before.environment.get("precision"), after.environment.get("precision")
    same_precision = used[0] is not None and used[0] == used[1]
    return tuple(
        change
        for change in result_changes(before.recipe, after.recipe)
        if not (same_precision and change.path.startswith("train.precision"))
    )


def result_changes(before: Recipe, after: Recipe) -> tuple[Change, ...]:
    """Changed settings that can affect a result, without those of execution and logging and of disabled components."""
    return tuple(
        change
        for change in diff_recipes(before, after)
        if change.path.split(".")[0] not in _EXECUTION_SECTIONS
        and change.path not in _EXECUTION_SETTINGS
        and not _is_unused(change, before, after)
    )


# Settings below a path that do nothing while the condition holds.
_UNUSED_IF: Mapping[str, Callable[[Recipe], bool]] = {
    "ema": lambda recipe: recipe.ema.decay == 0,
    "guard": lambda recipe: not recipe.guard.enabled,
    "transducer": lambda recipe: not recipe.transducer.enabled,
    "mode": lambda recipe: not recipe.mode.enabled,
    "denoiser": lambda recipe: not recipe.denoiser.enabled,
    "augment.time_masks": lambda recipe: recipe.augment.time_masks.n_masks == 0,
    "augment.feature_masks": lambda recipe: recipe.augment.feature_masks.n_masks == 0,
}


def _is_unused(change: Change, before: Recipe, after: Recipe) -> bool:
    """Whether both values of a setting resolve to the same behaviour."""
    return any(
        (change.path == path or change.path.startswith(f"{path}.")) and is_unused(before) and is_unused(after)
        for path, is_unused in _UNUSED_IF.items()
    )


def differ_only_in_seed(changes: Sequence[Change]) -> bool:
    return all(change.path in SEED_SETTINGS for change in changes)
