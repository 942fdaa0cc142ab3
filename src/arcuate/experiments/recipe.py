"""Recipes, the settings of one experiment: loading by name or path, `extends`, overrides, `arcuate recipes`."""

import difflib
import inspect
import json
import os
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from arcuate.config import (
    Change,
    Overrides,
    Settings,
    apply_overrides,
    diff,
    inner_models,
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
from arcuate.files import fields_to_dict
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
    target: Target | None = Field(None, description="Success criteria of the run; null = none.")
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
class RecipeComparison:
    """Differences between two recipes, and warnings about coupled settings that were changed separately."""

    a: str
    b: str
    changes: tuple[Change, ...]
    ancestor_a: str | None  # official recipe at the root
    ancestor_b: str | None
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return fields_to_dict(self)


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
    """The resolved recipe and its number of parameters at the channels and sessions of its data set."""
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
        raise UserError(f"recipe {name} does not extend an official recipe; give a second one to compare with")
    if ancestor == name:
        raise UserError(f"recipe {name} is an official recipe; give a second one to compare with")
    return ancestor


# --- Reference of all settings, collected from the settings classes ----------------------------------------

_HEAD = """# Settings

Every setting of a recipe, as printed by `arcuate recipes settings`.

Settings are given in a recipe file, or on the command line as `key.sub=value`. Changing the `kind`
of a component replaces the component: set the kind first, then the settings that it needs
(`schedule.kind=constant schedule.peak_lr=0.001`).
"""


@dataclass(frozen=True)
class SettingEntry:
    """One line of the reference."""

    path: str
    type: str
    default: str
    range: str
    meaning: str


@dataclass(frozen=True)
class ComponentEntry:
    """A settings class and its path in the recipe."""

    path: str
    kind: str | None
    is_default: bool  # the kind that a recipe has by default
    description: str
    settings: tuple[SettingEntry, ...]


def list_settings() -> list[dict[str, Any]]:
    """All settings as plain values, as `arcuate recipes settings --json` prints them."""
    return [{"kind": part.kind, **asdict(s)} for part in list_components() for s in part.settings]


def list_components(
    model: type[BaseModel] = Recipe, path: str = "", default: BaseModel | None = None
) -> Iterator[ComponentEntry]:
    """The recipe's own settings, then those of each component, in the order of the recipe.

    `default` is the component that a recipe has by default; its values are the default values.
    """
    inner: list[tuple[str, type[BaseModel], Any]] = []
    settings: list[SettingEntry] = []
    for name, field in model.model_fields.items():
        field_path = f"{path}.{field.alias or name}".lstrip(".")
        models = list(inner_models(field.annotation))
        value = getattr(default, name) if type(default) is model else field.default
        inner += [(field_path, part, value) for part in models]
        if not models:
            settings.append(_describe_setting(field_path, field, value))
    kinds = typing.get_args(model.model_fields["kind"].annotation) if "kind" in model.model_fields else ()
    kind = kinds[0] if len(kinds) == 1 else None  # with several values, `kind` is an ordinary setting
    description = "" if model is Recipe else inspect.cleandoc(model.__dict__.get("__doc__") or "")
    if settings:
        yield ComponentEntry(path, kind, type(default) is model, description, tuple(settings))
    for field_path, part, value in inner:
        yield from list_components(part, field_path, value)


def to_markdown() -> str:
    """All settings as a page of Markdown."""
    lines = [_HEAD]
    first_path: dict[tuple[str, ...], str] = {}
    for part in list_components():
        names = tuple(s.path.rpartition(".")[2] for s in part.settings)
        title = f"`{part.path}`" if part.path else "The recipe itself"
        if part.kind:
            title += f", kind `{part.kind}`" + (" (default)" if part.is_default else "")
        earlier = first_path.setdefault((*names, str(part.kind), part.description), part.path)
        if earlier != part.path and part.kind:
            continue  # already listed under another path
        lines += [f"## {title}", ""]
        if part.description:
            paragraphs = part.description.split("\n\n")
            wrapped = [textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False) for text in paragraphs]
            lines += ["\n\n".join(wrapped), ""]
        lines += ["| setting | type | default | range | description |", "|---|---|---|---|---|"]
        for s in part.settings:
            meaning = s.meaning.replace("|", "\\|")
            lines.append(f"| `{s.path}` | {s.type} | {s.default} | {s.range or '–'} | {meaning} |")
        lines.append("")
    return "\n".join(lines) + "\n"


def _describe_setting(path: str, field: FieldInfo, default: Any) -> SettingEntry:
    is_required = default is PydanticUndefined
    default_text = "required" if is_required else f"`{json.dumps(default, ensure_ascii=False)}`"
    meaning = field.description or (f"Type of {path.split('.')[-2]}." if path.endswith(".kind") else "")
    limits = ", ".join(dict.fromkeys([*_limits(field.metadata), *_inner_limits(field.annotation)]))
    return SettingEntry(path, _type_name(field.annotation), default_text, limits, meaning)


def _type_name(annotation: Any) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(parts[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(part) for part in parts)
    if origin is typing.Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin is tuple:
        inner = _type_name(parts[0])
        return f"list of {inner}" if parts[-1] is Ellipsis else f"list of {len(parts)} × {inner}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "component"
    names = {int: "integer", float: "number", bool: "true or false", str: "text", type(None): "null"}
    return names[annotation]


def _limits(metadata: typing.Iterable[Any]) -> Iterator[str]:
    signs = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}"}
    signs |= {"min_length": "length ≥ {}", "max_length": "length ≤ {}", "pattern": "`{}`"}
    for part in metadata:
        for name, sign in signs.items():
            value = getattr(part, name, None)
            if value is not None:
                yield sign.format(_format_limit(value)).replace("|", "\\|")
        if isinstance(part, FieldInfo):
            yield from _limits(part.metadata)


def _inner_limits(annotation: Any) -> Iterator[str]:
    """Limits of a part of the type, such as the numbers in a list."""
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        yield from _limits(parts[1:])
    if typing.get_origin(annotation) is not typing.Literal:
        for part in parts:
            yield from _inner_limits(part)


def _format_limit(value: Any) -> str:
    if value == 2**63:
        return "2^63"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)
