"""Recipes: one experiment as data. Loading by name or path, `extends`, overrides, comparison."""

import difflib
import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from arcuate.config import (
    Change,
    Overrides,
    Settings,
    UniqueKeyLoader,
    apply_overrides,
    diff,
    known_paths,
    merge,
    parse_settings,
    to_tree,
)
from arcuate.errors import UserError
from arcuate.run import Run
from arcuate.training.config import DESCRIPTIVE_KEYS, TrainingConfig

OFFICIAL = ("b2t24-gru", "b2t25-gru")


class _Identity(Settings):
    name: str = Field(
        min_length=1, max_length=100, description="Name of the recipe; a recipe file defaults to its file name."
    )
    extends: str | None = Field(None, description="Recipe that this one inherits from.")
    summary: str = Field("", description="One line for `arcuate recipes list`.")
    notes: str = Field("", description="Free text.")


class Recipe(TrainingConfig, _Identity):
    """One experiment as data: name and parent, and everything that determines training."""


def recipe_names() -> list[str]:
    """Names of the packaged recipes."""
    folder = files("arcuate") / "experiments" / "recipes"
    return sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml"))


def load_recipe(recipe: Recipe | str | Path, overrides: Overrides = ()) -> Recipe:
    """A packaged recipe by name, a YAML file or run folder by path, or a `Recipe`; with overrides applied."""
    if isinstance(recipe, Recipe):
        tree, name, migrate = to_tree(recipe), recipe.name, False
    else:
        name = str(recipe)
        tree, migrate = resolve_recipe(name), _is_run_recipe(name)
    apply_overrides(tree, overrides)
    return parse_settings(Recipe, tree, name, migrate=migrate)


def _is_run_recipe(name: str) -> bool:
    """Whether a recipe belongs to a run folder, which an earlier version may have written."""
    if name in recipe_names():
        return False
    path = Path(name)
    folder = path if path.is_dir() else path.parent
    return (folder / "recipe.yaml").is_file() and (folder / "environment.json").is_file()


def run_recipe(run: Run) -> Recipe:
    """The recipe a run was trained with."""
    return parse_settings(Recipe, run.recipe_tree(), str(run.recipe_file), migrate=True)


def resolve_recipe(name: str) -> dict[str, Any]:
    """The recipe as a tree of plain values, merged with its ancestors.

    Its `extends` names a packaged recipe or none, so that the recipe of a run does not depend on other files.
    """
    chain = _lineage(name)
    tree: dict[str, Any] = {}
    for _, own in reversed(chain):
        tree = merge(tree, own)
    packaged = [place.name for place, _ in chain[1:] if place.path is None]
    return {**tree, "extends": packaged[0] if packaged else None}


@dataclass(frozen=True)
class Place:
    """Location of a recipe: packaged under its name, or in a file."""

    name: str
    path: Path | None = None


def _lineage(name: str) -> list[tuple[Place, dict[str, Any]]]:
    """The recipe and its ancestors, nearest first, each with the settings that it states itself."""
    chain: list[tuple[Place, dict[str, Any]]] = []
    place = _locate(name)
    while True:
        if place in (seen := [earlier for earlier, _ in chain]):
            names = " -> ".join(earlier.name for earlier in (*seen, place))
            raise UserError(f"recipe {name!r} extends itself: {names}")
        tree = read_tree(place)
        chain.append((place, tree))
        parent = tree.get("extends")
        if parent is None:
            return chain
        place = _locate(str(parent), place)


def _locate(name: str, child: Place | None = None) -> Place:
    """Find a recipe by name or path; the parent of a recipe file is searched in the folder of that file first."""
    if child is None:
        if name in recipe_names():
            return Place(name)
        for path in (Path(name), Path(name) / "recipe.yaml"):  # a file, or a run folder
            if os.path.isfile(path):
                return Place(name, path.resolve())
    else:
        if child.path is not None and os.path.isfile(path := child.path.parent / name):
            return Place(name, path.resolve())
        if name in recipe_names():
            return Place(name)
    known = recipe_names()
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known recipes: {', '.join(known)}"
    where = f" ('extends' of {child.name})" if child else ""
    raise UserError(f"no recipe and no file named {name!r}{where}; {hint}")


def read_tree(place: Place) -> dict[str, Any]:
    """The settings that a recipe states itself."""
    if place.path is None:
        text = (files("arcuate") / "experiments" / "recipes" / f"{place.name}.yaml").read_text("utf-8")
    else:
        try:
            text = place.path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"recipe {place.name} cannot be read as text: {error}") from None
    try:
        tree = yaml.load(text, UniqueKeyLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"recipe {place.name} is not valid YAML: {first}") from None
    if not isinstance(tree, dict):
        raise UserError(f"recipe {place.name} must be a mapping of settings, such as 'train: {{steps: 100}}'")
    return {"name": place.path.stem if place.path else place.name, **tree}


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


def official_ancestor(recipe: Recipe | str | Path) -> str | None:
    """The official recipe at the root, or None. The recipe.yaml of a run is identified by the name it states."""
    if isinstance(recipe, Recipe):
        recipe = recipe.extends or recipe.name
        if recipe not in recipe_names():
            return None
    place, tree = _lineage(str(recipe))[-1]
    for candidate in (place.name, tree["name"]):
        if candidate in OFFICIAL:
            return str(candidate)
    return None
