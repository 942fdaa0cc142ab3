"""Recipe: one experiment as data. Packaged YAML files, `extends`, overrides, and refusals that help."""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from arcuate.config import (
    Change,
    OneOfEach,
    Overrides,
    Settings,
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


class Identity(Settings):
    name: str = Field(min_length=1, max_length=100, description="left out: the name of the file")
    extends: str | None = Field(None, description="the recipe this one states its differences from")
    summary: str = Field("", description="one line for `arcuate recipes list`")
    notes: str = Field("", description="anything worth remembering")


class Recipe(TrainingConfig, Identity):
    """One experiment as data: its name and parent, and everything that determines training."""


def recipe_names() -> list[str]:
    folder = files("arcuate") / "experiments" / "recipes"
    return sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml"))


def load_recipe(recipe: Recipe | str | Path, overrides: Overrides = ()) -> Recipe:
    """A packaged recipe by name, a YAML file or run folder by path, or a `Recipe`; with overrides applied."""
    if isinstance(recipe, Recipe):
        tree, name = to_tree(recipe), recipe.name
    else:
        name = str(recipe)
        tree = resolve(name)
    apply_overrides(tree, overrides)
    migrate = not isinstance(recipe, Recipe) and is_run_recipe(name)
    return parse_recipe(tree, name, migrate=migrate)


def is_run_recipe(name: str) -> bool:
    """Whether a recipe is the resolved one of a run folder, which an earlier version may have written."""
    if name in recipe_names():
        return False
    path = Path(name)
    folder = path if path.is_dir() else path.parent
    return (folder / "recipe.yaml").is_file() and (folder / "environment.json").is_file()


def parse_recipe(tree: Mapping[str, Any], where: str, *, migrate: bool = False) -> Recipe:
    return parse_settings(Recipe, tree, where, migrate=migrate)


def run_recipe(run: Run) -> Recipe:
    """The recipe a run was trained with."""
    return parse_recipe(run.recipe_tree(), str(run.recipe_file), migrate=True)


def resolve(name: str) -> dict[str, Any]:
    """The recipe as a tree of plain values, its ancestors merged in.

    `extends` of the whole names a packaged recipe or none, so that a run's recipe does not need files elsewhere.
    """
    chain = lineage(name)
    tree: dict[str, Any] = {}
    for _, own in reversed(chain):
        tree = merge(tree, own)
    packaged = [place.name for place, _ in chain[1:] if place.path is None]
    return {**tree, "extends": packaged[0] if packaged else None}


@dataclass(frozen=True)
class Place:
    """Where a recipe stands: packaged under its name, or in a file."""

    name: str
    path: Path | None = None


def lineage(name: str) -> list[tuple[Place, dict[str, Any]]]:
    """The recipe, its parent and so on up to the one that extends nothing; each with what it states itself."""
    chain: list[tuple[Place, dict[str, Any]]] = []
    place = locate(name)
    while True:
        if place in (seen := [earlier for earlier, _ in chain]):
            names = " -> ".join(earlier.name for earlier in (*seen, place))
            raise UserError(f"recipe {name!r} extends itself: {names}")
        tree = read_tree(place)
        chain.append((place, tree))
        parent = tree.get("extends")
        if parent is None:
            return chain
        place = locate(str(parent), place)


def locate(name: str, by: Place | None = None) -> Place:
    """A recipe by name or path; what a recipe file extends is looked for in its own folder first."""
    if by is None:
        if name in recipe_names():
            return Place(name)
        for path in (Path(name), Path(name) / "recipe.yaml"):  # a file, or a run folder
            if os.path.isfile(path):
                return Place(name, path.resolve())
    else:
        if by.path is not None and os.path.isfile(path := by.path.parent / name):
            return Place(name, path.resolve())
        if name in recipe_names():
            return Place(name)
    raise UserError(unknown_recipe(name, by))


def read_tree(place: Place) -> dict[str, Any]:
    """What a recipe states itself."""
    if place.path is None:
        text = (files("arcuate") / "experiments" / "recipes" / f"{place.name}.yaml").read_text("utf-8")
    else:
        try:
            text = place.path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"recipe {place.name} cannot be read as text: {error}") from None
    try:
        tree = yaml.load(text, OneOfEach)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"recipe {place.name} is no valid YAML: {first}") from None
    if not isinstance(tree, dict):
        raise UserError(f"recipe {place.name} must be a mapping of settings, such as 'train: {{steps: 100}}'")
    return {"name": place.path.stem if place.path else place.name, **tree}


def unknown_recipe(name: str, by: Place | None) -> str:
    known = recipe_names()
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known recipes: {', '.join(known)}"
    where = f" (named by 'extends' in {by.name}, and looked for beside it)" if by else ""
    return f"there is no recipe {name!r}{where}, nor a file of that name; {hint}"


def setting_for(option: str) -> str | None:
    """The setting that someone means who writes --steps or --log-every."""
    word = option.lstrip("-").replace("-", "_")
    if not word:
        return None
    known = sorted(known_paths(Recipe), key=lambda path: (path.partition(".")[0] != "train", path))
    leaves = [path.rpartition(".")[2] for path in known]
    close = difflib.get_close_matches(word, leaves, n=1, cutoff=0.75)
    return known[leaves.index(close[0])] if close else None


def diff_recipes(a: TrainingConfig, b: TrainingConfig) -> list[Change]:
    """Every resolved setting that differs; name, parent and description are not compared."""
    return diff(a, b, ignore=DESCRIPTIVE_KEYS)


def ancestry(name: str) -> tuple[str, ...]:
    """The recipe, its parent, and so on up to the one that extends nothing."""
    return tuple(place.name for place, _ in lineage(name))


def official_ancestor(recipe: Recipe | str | Path) -> str | None:
    """The official recipe at the root, or None. The recipe.yaml of a run is identified by the name it states."""
    if isinstance(recipe, Recipe):
        recipe = recipe.extends or recipe.name
        if recipe not in recipe_names():
            return None
    place, tree = lineage(str(recipe))[-1]
    for candidate in (place.name, tree["name"]):
        if candidate in OFFICIAL:
            return str(candidate)
    return None
