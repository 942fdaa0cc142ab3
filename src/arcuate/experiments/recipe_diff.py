"""What changed between two recipes, and which official recipe one descends from."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from arcuate.experiments.recipe import Recipe, lineage, to_tree

OFFICIAL = ("b2t24-gru", "b2t25-gru")
ABOUT = ("name", "extends", "summary", "notes")  # what a recipe says about itself, no setting


@dataclass(frozen=True)
class Change:
    """One setting, or one component replaced by another kind, with its value on either side."""

    path: str
    before: Any
    after: Any


def diff(a: Recipe, b: Recipe) -> list[Change]:
    """Every resolved setting that differs, in the order of the recipe."""
    return list(_changes("", _settings(a), _settings(b)))


def _settings(recipe: Recipe) -> dict[str, Any]:
    return {key: value for key, value in to_tree(recipe).items() if key not in ABOUT}


def _changes(path: str, before: Any, after: Any) -> Iterator[Change]:
    if before == after:
        return
    if _comparable(before, after):
        for key in before:
            yield from _changes(f"{path}.{key}" if path else key, before[key], after[key])
    else:
        yield Change(path, before, after)


def _comparable(before: Any, after: Any) -> bool:
    """The same settings on both sides; a component of another kind with other settings is one change."""
    return isinstance(before, Mapping) and isinstance(after, Mapping) and before.keys() == after.keys()


def ancestry(name: str) -> tuple[str, ...]:
    """The recipe, its parent, and so on up to the one that extends nothing."""
    return tuple(place.name for place, _ in lineage(name))


def official_ancestor(name: str) -> str | None:
    """The official recipe at the root, or None; the recipe.yaml of a run is known by the name within it."""
    place, tree = lineage(name)[-1]
    for candidate in (place.name, tree["name"]):
        if candidate in OFFICIAL:
            return str(candidate)
    return None
