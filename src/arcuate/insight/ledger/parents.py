"""Which run, or which recipe, a run descends from, and what changed against it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arcuate.config import Change
from arcuate.errors import UserError
from arcuate.experiments.recipe import Recipe, diff_recipes, load_recipe, recipe_names
from arcuate.insight.ledger.entries import Entry

SEEDS = ("train.seed", "data.seed")
BASE = "base"  # the arm of an ablation that the others are measured against
FREE = ("runtime", "track")  # how a run was carried out, not what it was
CARRIED_OUT = ("data.workers", "train.log_every", "train.keep_checkpoints", "train.checkpoint_every")


@dataclass(frozen=True)
class Parent:
    """What a run is measured against, and how that was decided."""

    name: str
    kind: str  # "weights" (started with --from), "base" (of its ablation), "run" (nearest earlier), "recipe" (packaged)
    changes: tuple[Change, ...]
    entry: Entry | None = None


def changes_between(before: Recipe, after: Recipe) -> tuple[Change, ...]:
    """Settings that can change a result; where and how it was computed and logged is left out."""
    return tuple(
        c
        for c in diff_recipes(before, after)
        if c.path.split(".")[0] not in FREE and c.path not in CARRIED_OUT
    )


def only_seeds(changes: Sequence[Change]) -> bool:
    return all(c.path in SEEDS for c in changes)


def same_but_seed(a: Recipe, b: Recipe) -> bool:
    return only_seeds(changes_between(a, b))


def find_parent(entry: Entry, earlier: Sequence[Entry]) -> Parent | None:
    """The run whose weights it began with, or the baseline of its ablation; else whatever it differs least from.

    Nobody writes down which run an idea came from, but the one with the fewest changed settings is the one to read
    the result against. Of equally near ones the latest counts, and a run before a recipe.
    """
    if entry.recipe is None:
        return None
    if entry.weights_from:
        return started_from(entry, earlier)
    if base := baseline(entry, entry.recipe, earlier):
        return base
    candidates = [*from_recipe(entry.recipe), *from_runs(entry, entry.recipe, earlier)]
    return min(reversed(candidates), key=lambda p: len(p.changes), default=None)


def started_from(entry: Entry, earlier: Sequence[Entry]) -> Parent:
    assert entry.recipe is not None and entry.weights_from is not None
    path = Path(entry.weights_from.partition("@")[0])
    for other in reversed(earlier):
        if other.recipe and other.run.path.resolve() == path.resolve():
            return Parent(other.name, "weights", changes_between(other.recipe, entry.recipe), other)
    return Parent(entry.weights_from, "weights", ())


def baseline(entry: Entry, recipe: Recipe, earlier: Sequence[Entry]) -> Parent | None:
    """For an arm of an ablation: the baseline with the same seed, which is what its arm was made to differ from."""
    home, path = entry.ablation, entry.run.path.resolve()
    if home is None or path.parent.name == BASE:
        return None
    wanted = home / BASE / path.name
    other = next((e for e in earlier if e.recipe and e.run.path.resolve() == wanted), None)
    if other is None or other.recipe is None:
        return None
    return Parent(other.name, "base", changes_between(other.recipe, recipe), other)


def from_recipe(recipe: Recipe) -> list[Parent]:
    name = next((n for n in (recipe.name, recipe.extends) if n in recipe_names()), None)
    if name is None:
        return []
    try:
        return [Parent(name, "recipe", changes_between(load_recipe(name), recipe))]
    except UserError:  # the packaged recipe is of another version
        return []


def from_runs(entry: Entry, recipe: Recipe, earlier: Sequence[Entry]) -> list[Parent]:
    return [
        Parent(other.name, "run", changes_between(other.recipe, recipe), other)
        for other in earlier
        if other.recipe is not None and not other.weights_from and other.data_hashes == entry.data_hashes
    ]


def parents(entries: Sequence[Entry]) -> list[Parent | None]:
    return [find_parent(entry, entries[:i]) for i, entry in enumerate(entries)]


# The list of runs as plain values, for `arcuate runs --json` and whoever draws it.


def listing(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    return [row(entry, parent) for entry, parent in zip(entries, parents(entries), strict=True)]


def row(entry: Entry, parent: Parent | None) -> dict[str, Any]:
    logged, diagnosis, recipe = entry.logged, entry.diagnosis, entry.recipe
    return {
        "name": entry.name,
        "path": str(entry.run.path),
        "recipe": recipe.name if recipe else None,
        "seed": recipe.train.seed if recipe else None,
        "started": entry.started or None,
        "verdict": entry.verdict,
        "secondary": list(diagnosis.secondary) if diagnosis else [],
        "since_step": diagnosis.since_step if diagnosis else None,
        "steps": logged.steps,
        "planned_steps": entry.planned_steps,
        "best_per": logged.best_per,
        "best_step": logged.best_step,
        "last_per": logged.last_per,
        "seconds": logged.seconds,
        "incidents": entry.n_incidents,
        "parent": parent.name if parent else None,
        "parent_kind": parent.kind if parent else None,
        "changes": [asdict(c) for c in parent.changes] if parent else [],
        "results": {
            name: {key: summary.get(key) for key in ("per", "per_low", "per_high", "step", "n_trials")}
            for name, summary in entry.results.items()
        },
        "problems": list(entry.problems),
    }
