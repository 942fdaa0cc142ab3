"""Recipe: one experiment as data. Packaged YAML files, `extends`, overrides, and refusals that help."""

import difflib
import re
import reprlib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from arcuate.augment.settings import Augment
from arcuate.batches.settings import Data
from arcuate.errors import UserError
from arcuate.losses.settings import Loss
from arcuate.models.settings import Encoder, FrontEnd, GRUEncoder, ModelSettings, Transducer
from arcuate.settings import Settings
from arcuate.tracking.settings import Track
from arcuate.training.guard_settings import Guard
from arcuate.training.settings import (
    Average,
    Constant,
    Ema,
    Optimizer,
    Runtime,
    Schedule,
    Train,
    Validate,
    WarmupCosine,
)

NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")


class Recipe(Settings):
    name: str = Field(min_length=1, max_length=100)
    extends: str | None = Field(None, description="the recipe this one states its differences from")
    summary: str = ""
    notes: str = ""
    data: Data = Data()
    front_end: FrontEnd = FrontEnd()
    encoder: Encoder = GRUEncoder()
    transducer: Transducer = Transducer()
    output_init: typing.Literal["default", "xavier"] = "default"
    augment: Augment = Augment()
    loss: Loss = Loss()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Constant(rate=1e-3)
    session_schedule: Schedule | None = Field(
        None, description="for the session layers; null = as `schedule`"
    )
    ema: Ema = Ema()
    average: Average = Average()
    guard: Guard = Guard()
    train: Train = Train()
    validate_: Validate = Field(Validate(), alias="validate")
    runtime: Runtime = Runtime()
    track: Track = Track()

    @property
    def model(self) -> ModelSettings:
        return ModelSettings(
            front_end=self.front_end,
            encoder=self.encoder,
            transducer=self.transducer,
            output_init=self.output_init,
        )

    @model_validator(mode="after")
    def _something_is_learnt(self) -> "Recipe":
        if self.loss.ctc.weight == 0 and not (self.transducer.enabled and self.loss.rnnt.weight > 0):
            raise ValueError(
                "all losses weigh 0, so nothing would be learnt; set loss.ctc.weight, or transducer.enabled"
                " with loss.rnnt.weight, above 0"
            )
        return self

    @model_validator(mode="after")
    def _warmup_fits(self) -> "Recipe":
        for name in ("schedule", "session_schedule"):
            schedule = getattr(self, name)
            follows_run = isinstance(schedule, WarmupCosine) and schedule.decay_steps is None
            if follows_run and schedule.warmup > self.train.steps:
                raise ValueError(
                    f"{name}.warmup {schedule.warmup} is longer than train.steps {self.train.steps};"
                    " shorten the warm-up or train longer"
                )
        return self


def recipe_names() -> list[str]:
    folder = files("arcuate") / "recipes"
    return sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml"))


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """A packaged recipe by name, or a YAML file by path, with `key.sub=value` overrides applied."""
    tree = resolve(name, ())
    for override in overrides:
        apply_override(tree, override)
    return parse_recipe(tree, name)


def parse_recipe(tree: Mapping[str, Any], where: str) -> Recipe:
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise UserError("; ".join(dict.fromkeys(explain(error, where)))) from None


def resolve(name: str, chain: tuple[str, ...]) -> dict[str, Any]:
    """The recipe as a tree of plain values, its ancestors merged in."""
    if name in chain:
        raise UserError(f"recipe {name!r} extends itself: {' -> '.join((*chain, name))}")
    tree = read_tree(name, chain)
    parent = tree.get("extends")
    if parent is None:
        return tree
    return merge(resolve(str(parent), (*chain, name)), tree)


def read_tree(name: str, chain: tuple[str, ...] = ()) -> dict[str, Any]:
    if name in recipe_names():
        text, default_name = (files("arcuate") / "recipes" / f"{name}.yaml").read_text("utf-8"), name
    else:
        path = Path(name)
        if not path.is_file():
            raise UserError(unknown_recipe(name, chain))
        try:
            text, default_name = path.read_text("utf-8"), path.stem
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"recipe {name} cannot be read as text: {error}") from None
    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"recipe {name} is no valid YAML: {first}") from None
    if not isinstance(tree, dict):
        raise UserError(f"recipe {name} must be a mapping of settings, such as 'train: {{steps: 100}}'")
    return {"name": default_name, **tree}


def unknown_recipe(name: str, chain: tuple[str, ...]) -> str:
    known = recipe_names()
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known recipes: {', '.join(known)}"
    by = f" (named by 'extends' in {chain[-1]})" if chain else ""
    return f"there is no recipe {name!r}{by}, nor a file of that name; {hint}"


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` over `base`, mapping by mapping; another `kind` replaces a component instead of mixing with it."""
    out = dict(base)
    for key, value in changes.items():
        old = out.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            other_kind = "kind" in value and value["kind"] != old.get("kind")
            out[key] = dict(value) if other_kind else merge(old, value)
        else:
            out[key] = value
    return out


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set `key.sub=value` in the tree; the value is read as YAML."""
    path, sign, text = override.partition("=")
    keys = path.strip().split(".")
    if not sign or not all(keys):
        raise UserError(f"override {override!r} is not of the form key.sub=value, such as train.steps=200")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        value = text
    if isinstance(value, str) and NUMBER.fullmatch(value):
        value = float(value)  # YAML takes 1e4 for text
    *parents, last = keys
    node = tree
    for key in parents:
        child = node.get(key)
        node[key] = dict(child) if isinstance(child, Mapping) else {}
        node = node[key]
    if last == "kind" and node.get("kind") != value:
        node.clear()
    node[last] = value


def explain(error: ValidationError, where: str) -> Iterator[str]:
    """One sentence per problem, with the path of the setting and the nearest known one."""
    known = sorted(known_paths(Recipe))
    for problem in error.errors():
        path = plain_path(problem["loc"], known)
        if problem["type"] == "extra_forbidden":
            near = nearest(path, known)
            yield f"recipe {where}: there is no setting {path!r}" + (
                f"; did you mean {near!r}?" if near else ""
            )
        elif problem["type"] == "value_error":
            yield f"recipe {where}: {path + ': ' if path else ''}{problem['ctx']['error']}"
        else:
            yield f"recipe {where}: {path} = {reprlib.repr(problem['input'])} is refused: {problem['msg']}"


def nearest(path: str, known: Sequence[str]) -> str | None:
    """The known setting a misspelt one most likely meant: a sibling first, then the same word elsewhere."""
    parent, _, leaf = path.rpartition(".")
    if leaf in ("lr", "learning_rate"):
        return "schedule.peak"
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == parent}
    if close := difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.6):
        return siblings[close[0]]
    same_word = [k for k in known if k.rpartition(".")[2] == leaf]
    close = same_word or difflib.get_close_matches(path, known, n=1, cutoff=0.6)
    return close[0] if close else None


def plain_path(location: tuple[int | str, ...], known: Sequence[str]) -> str:
    """The dotted path of a problem, without the union tags that pydantic adds to it."""
    parts: list[str] = []
    for part in location:
        candidate = ".".join([*parts, str(part)])
        is_tag = bool(parts) and ".".join([*parts, "kind"]) in known and candidate not in known
        if is_tag and part is not location[-1]:
            continue
        parts.append(str(part))
    return ".".join(parts)


def known_paths(model: type[BaseModel], prefix: str = "") -> set[str]:
    """Dotted paths of every setting, all members of unions included."""
    paths: set[str] = set()
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        paths.add(path)
        for inner in inner_models(field.annotation):
            paths |= known_paths(inner, f"{path}.")
    return paths


def inner_models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        for part in typing.get_args(annotation):
            yield from inner_models(part)


def to_tree(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe, complete, as plain values."""
    return recipe.model_dump(mode="json", by_alias=True)


def to_yaml(recipe: Recipe) -> str:
    return yaml.safe_dump(to_tree(recipe), sort_keys=False, allow_unicode=True, width=100)
