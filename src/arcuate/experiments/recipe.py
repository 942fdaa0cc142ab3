"""Recipes, the settings of one experiment: loading by name or path, `extends`, overrides, `arcuate recipes`."""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import Field

from arcuate.config import (
    Change,
    Overrides,
    Settings,
    apply_overrides,
    diff,
    known_paths,
    merge,
    parse_settings,
    parse_yaml,
    read_yaml,
    to_tree,
)
from arcuate.data.alphabet import ALPHABETS
from arcuate.errors import UserError
from arcuate.experiments.other_names import translate
from arcuate.experiments.targets import Target
from arcuate.files import Result
from arcuate.hub import RECORD, is_hub_name, local_path
from arcuate.plugins import trust_code
from arcuate.run import Run
from arcuate.training.config import DESCRIPTIVE_KEYS, TrainingConfig
from arcuate.training.step_size import coupling_warnings

OFFICIAL = ("b2t24-gru", "b2t25-gru")
_OF_ONE_RUN = ("summary", "purpose", "target", "notes")  # not inherited


class _Identity(Settings):
    name: str = Field(
        min_length=1, max_length=100, description="Name of the recipe; a recipe file defaults to its file name."
    )
    extends: str | None = Field(None, description="Recipe that this one inherits from.")
    summary: str = Field("", description="One line for `arcuate recipes list`.")
    purpose: str = Field("", max_length=1000, description="Purpose of the run: the question it is meant to answer.")
    target: Target = Target()
    notes: str = Field("", description="Free text.")


class Recipe(TrainingConfig, _Identity):
    """Settings of one experiment: name, parent recipe, and everything that determines training."""


def recipe_names() -> list[str]:
    """Names of the packaged recipes."""
    return list(_recipe_names())


@cache
def _recipe_names() -> tuple[str, ...]:
    folder = files("arcuate") / "experiments" / "recipes"
    return tuple(sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml")))


def load_recipe(recipe: Recipe | str | Path, overrides: Overrides = ()) -> Recipe:
    """A packaged recipe by name, a YAML file or run folder by path, or a `Recipe`; with overrides applied."""
    if isinstance(recipe, Recipe):
        tree, name, of_run = to_tree(recipe), recipe.name, False
    else:
        name = str(recipe)
        if not overrides and name in _recipe_names():
            return _packaged_recipe(name)
        tree, of_run = resolve_recipe(name), any(_is_run_recipe(location) for location, _ in _lineage(name))
    apply_overrides(tree, overrides)
    with trust_code(not of_run):  # a recipe that the user names may import code, the one of a run folder may not
        return parse_settings(Recipe, tree, name, translate=translate)


@cache
def _packaged_recipe(name: str) -> Recipe:
    return parse_settings(Recipe, resolve_recipe(name), name)


def _is_run_recipe(location: "RecipeLocation") -> bool:
    """Whether a recipe belongs to a run folder, which an earlier version or another person may have written."""
    return location.path is not None and any(location.path.with_name(n).is_file() for n in ("environment.json", RECORD))


def run_recipe(run: Run) -> Recipe:
    """The recipe a run was trained with."""
    return parse_settings(Recipe, run.recipe_tree(), str(run.recipe_file))


def resolve_recipe(name: str) -> dict[str, Any]:
    """The recipe as a tree of plain values, merged with its ancestors.

    Its `extends` names a packaged recipe or none, so that the recipe of a run does not depend on other files.
    """
    chain = _lineage(name)
    tree: dict[str, Any] = {}
    for _, own in reversed(chain):
        tree = merge({key: value for key, value in tree.items() if key not in _OF_ONE_RUN}, own)
    packaged = [location.name for location, _ in chain[1:] if location.path is None]
    return {**tree, "extends": packaged[0] if packaged else None}


@dataclass(frozen=True)
class RecipeLocation:
    """Location of a recipe: packaged under its name, or in a file."""

    name: str
    path: Path | None = None


def _lineage(name: str) -> list[tuple[RecipeLocation, dict[str, Any]]]:
    """The recipe and its ancestors, nearest first, each with its own settings only."""
    chain: list[tuple[RecipeLocation, dict[str, Any]]] = []
    location = _locate(name)
    while True:
        if location in (seen := [earlier for earlier, _ in chain]):
            names = " -> ".join(earlier.name for earlier in (*seen, location))
            raise UserError(f"recipe {name!r} extends itself: {names}")
        tree = read_tree(location)
        chain.append((location, tree))
        parent = tree.get("extends")
        if parent is None:
            return chain
        location = _locate(str(parent), location)


def _locate(name: str, child: RecipeLocation | None = None) -> RecipeLocation:
    """Find a recipe by name or path; the parent of a recipe file is searched in the folder of that file first."""
    if child is None and is_hub_name(name):
        name = str(local_path(name))
    if child is None:
        if name in recipe_names():
            return RecipeLocation(name)
        for path in (Path(name), Path(name) / "recipe.yaml"):  # a file, or a run folder
            if os.path.isfile(path):
                return RecipeLocation(name, path.resolve())
    else:
        if child.path is not None and os.path.isfile(path := child.path.parent / name):
            return RecipeLocation(name, path.resolve())
        if name in recipe_names():
            return RecipeLocation(name)
    known = recipe_names()
    near = difflib.get_close_matches(name, known, n=1)
    shown = ", ".join(recipe for recipe in known if _group(recipe) != DOCUMENTED_RUNS)
    hint = f"did you mean {near[0]!r}?" if near else f"known recipes: {shown}; all: arcuate recipes list --all"
    where = f" ('extends' of {child.name})" if child else ""
    raise UserError(f"no recipe and no file named {name!r}{where}; {hint}")


def read_tree(location: RecipeLocation) -> dict[str, Any]:
    """The settings in the file of a recipe, without inherited ones."""
    if location.path is None:
        tree = parse_yaml((files("arcuate") / "experiments" / "recipes" / f"{location.name}.yaml").read_text("utf-8"))
    else:
        tree = read_yaml(location.path, "recipe ")
    if not isinstance(tree, dict):
        raise UserError(f"recipe {location.name} must be a mapping of settings, such as 'train: {{steps: 100}}'")
    return {"name": location.path.stem if location.path else location.name, **tree}


def setting_for(option: str) -> str | None:
    """The setting nearest to a misspelt option, such as train.log_every for --log-every."""
    word = option.lstrip("-").replace("-", "_")
    if not word:
        return None
    known = sorted(known_paths(Recipe), key=lambda path: (path.partition(".")[0] != "train", path))
    leaves = [path.rpartition(".")[2] for path in known]
    close = difflib.get_close_matches(word, leaves, n=1, cutoff=0.75)
    return known[leaves.index(close[0])] if close else None


def diff_recipes(a: TrainingConfig, b: TrainingConfig) -> list[Change]:
    """All settings that differ; name, parent and description are ignored."""
    return diff(a, b, ignore=DESCRIPTIVE_KEYS)


def lineage(recipe: Recipe | str | Path) -> list[str]:
    """Names of a recipe and of those that it extends, nearest first."""
    if isinstance(recipe, Recipe):
        ancestors = lineage(recipe.extends) if recipe.extends in recipe_names() else []
        return list(dict.fromkeys([recipe.name, *ancestors]))
    return [str(tree["name"]) for _, tree in _lineage(str(recipe))]


def official_ancestor(recipe: Recipe | str | Path) -> str | None:
    """The official recipe at the root, or None. The recipe.yaml of a run is identified by the name it states."""
    if isinstance(recipe, Recipe):
        recipe = recipe.extends or recipe.name
        if recipe not in recipe_names():
            return None
    location, tree = _lineage(str(recipe))[-1]
    for candidate in (location.name, tree["name"]):
        if candidate in OFFICIAL:
            return str(candidate)
    return None


# --- List, description and comparison --------------------------------------------------------------------


@dataclass(frozen=True)
class RecipeEntry:
    """One packaged recipe in the list."""

    name: str
    extends: str | None
    summary: str | None
    group: str


@dataclass(frozen=True)
class RecipeDescription:
    """A resolved recipe with the size of its model."""

    recipe: Recipe
    n_parameters: int
    n_channels: int  # assumed for the number of parameters
    n_sessions: int

    def to_dict(self) -> dict[str, Any]:
        return {
            **to_tree(self.recipe),
            "n_parameters": self.n_parameters,
            "counted_at": {"channels": self.n_channels, "n_sessions": self.n_sessions},
        }


@dataclass(frozen=True)
class RecipeComparison(Result):
    """Differences between two recipes, and warnings about coupled settings that were changed separately."""

    a: str
    b: str
    changes: tuple[Change, ...]
    ancestor_a: str | None  # official recipe at the root
    ancestor_b: str | None
    warnings: tuple[str, ...]


def list_recipes() -> list[RecipeEntry]:
    """The packaged recipes by group and name."""
    trees = {name: read_tree(RecipeLocation(name)) for name in recipe_names()}
    entries = [RecipeEntry(n, tree.get("extends"), tree.get("summary"), _group(n)) for n, tree in trees.items()]
    return sorted(entries, key=lambda entry: (list(RECIPE_GROUPS).index(entry.group), entry.name))


DOCUMENTED_RUNS = "documented runs"
RECIPE_GROUPS: Mapping[str, tuple[str, ...]] = {  # prefixes of the recipe names
    "laptop size": ("tiny", "mode-ssm-small"),
    "published systems": ("b2t24-", "b2t25-", "falcon-", "mode-ssm"),
    DOCUMENTED_RUNS: ("",),  # reproductions of documented training runs
}


def _group(name: str) -> str:
    return next(group for group, starts in RECIPE_GROUPS.items() if name.startswith(starts))


def describe_recipe(recipe: Recipe | str | Path, overrides: Overrides = ()) -> RecipeDescription:
    """The resolved recipe and its number of parameters at the channels and sessions of its data set.

    Args:
        recipe: Packaged recipe by name, YAML file or run folder; in Python also a `Recipe`.
        overrides: Settings `key=value`; in Python also a mapping.
    """
    from arcuate.models.config import ModelConfig
    from arcuate.models.model import count_parameters

    recipe = load_recipe(recipe, overrides)
    size = recipe.data.size
    n_channels, n_sessions = size.n_channels, size.n_sessions
    sessions = tuple(f"session {i}" for i in range(n_sessions))
    classes = ALPHABETS[size.targets]
    config = ModelConfig(settings=recipe.model, n_channels=n_channels, sessions=sessions, classes=classes)
    return RecipeDescription(recipe, count_parameters(config), n_channels, n_sessions)


def compare_recipes(a: str | Path, b: str | Path | None = None) -> RecipeComparison:
    """Compare two recipes, setting by setting.

    Args:
        a: Packaged recipe by name, YAML file or run folder.
        b: Recipe to compare with; default: `a` against the official recipe that it extends.
    """
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
        raise UserError(f"recipe {name} does not extend an official recipe; give a second one to compare with")
    if ancestor == name:
        raise UserError(f"recipe {name} is an official recipe; give a second one to compare with")
    return ancestor
