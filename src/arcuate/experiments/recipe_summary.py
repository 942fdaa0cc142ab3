"""List, describe and compare recipes."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arcuate.config import Change, Overrides, to_tree
from arcuate.data.alphabet import CLASSES
from arcuate.errors import UserError
from arcuate.experiments.recipe import (
    Place,
    Recipe,
    diff_recipes,
    load_recipe,
    official_ancestor,
    read_tree,
    recipe_names,
)
from arcuate.training.checks import coupling_warnings


@dataclass(frozen=True)
class RecipeEntry:
    """One packaged recipe in the list."""

    name: str
    extends: str | None
    summary: str | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RecipeDescription:
    """A resolved recipe with the size of its model."""

    recipe: Recipe
    n_parameters: int
    n_channels: int  # that the parameters are counted for
    n_sessions: int

    def to_dict(self) -> dict[str, Any]:
        return {
            **to_tree(self.recipe),
            "n_parameters": self.n_parameters,
            "counted_at": {"channels": self.n_channels, "n_sessions": self.n_sessions},
        }


@dataclass(frozen=True)
class RecipeComparison:
    """Differences between two recipes, and warnings about settings that were changed without their partners."""

    a: str
    b: str
    changes: tuple[Change, ...]
    ancestor_a: str | None  # official recipe at the root
    ancestor_b: str | None
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "a": self.a,
            "b": self.b,
            "changes": [asdict(change) for change in self.changes],
            "ancestor_a": self.ancestor_a,
            "ancestor_b": self.ancestor_b,
            "warnings": list(self.warnings),
        }


def list_recipes() -> list[RecipeEntry]:
    """The packaged recipes by name."""
    trees = {name: read_tree(Place(name)) for name in recipe_names()}
    return [RecipeEntry(name, tree.get("extends"), tree.get("summary")) for name, tree in trees.items()]


def describe_recipe(recipe: Recipe | str | Path, overrides: Overrides = ()) -> RecipeDescription:
    """The resolved recipe and its number of parameters at the channels and sessions of its data set."""
    from arcuate.models.config import ModelConfig
    from arcuate.models.model import count_parameters

    recipe = load_recipe(recipe, overrides)
    published = recipe.data.published
    n_channels = recipe.data.channels or published.channels
    n_sessions = recipe.data.n_sessions or published.n_sessions
    sessions = tuple(f"session {i}" for i in range(n_sessions))
    config = ModelConfig(settings=recipe.model, n_channels=n_channels, sessions=sessions, classes=CLASSES)
    return RecipeDescription(recipe, count_parameters(config), n_channels, n_sessions)


def compare_recipes(a: str | Path, b: str | Path | None = None) -> RecipeComparison:
    """Changes from recipe `a` to `b`; without `b`, from the official recipe that `a` extends to `a`."""
    if b is None:
        a, b = _require_ancestor(str(a)), a
    recipe_a, recipe_b = load_recipe(a), load_recipe(b)
    ancestor_a, ancestor_b = official_ancestor(a), official_ancestor(b)
    sides = {str(a): (recipe_a, ancestor_a), str(b): (recipe_b, ancestor_b)}
    warnings = tuple(
        f"{name}: {text}"
        for name, (recipe, ancestor) in sides.items()
        if ancestor
        for text in coupling_warnings(recipe, load_recipe(ancestor), ancestor)
    )
    changes = tuple(diff_recipes(recipe_a, recipe_b))
    return RecipeComparison(str(a), str(b), changes, ancestor_a, ancestor_b, warnings)


def _require_ancestor(name: str) -> str:
    ancestor = official_ancestor(name)
    if ancestor is None:
        raise UserError(f"recipe {name} does not extend an official recipe; name a second one to compare with")
    if ancestor == name:
        raise UserError(f"recipe {name} is an official recipe; name a second one to compare with")
    return ancestor
