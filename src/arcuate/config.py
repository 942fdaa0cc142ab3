"""The base of every settings class: unknown keys are refused, values never change after validation."""

import difflib
import re
import reprlib
import types
import typing
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar, cast, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator

from arcuate.errors import UserError


class Settings(BaseModel):
    """Base class: unknown keys are refused and values are frozen.

    A setting that was renamed stays listed in `renamed`, and a value in `renamed_values`. Recipes that use the old name
    are refused with the new one; files written by earlier versions are read with `migrate=True`, which translates them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    renamed: ClassVar[Mapping[str, str]] = {}  # old key -> new key of the same class
    renamed_values: ClassVar[Mapping[str, Mapping[Any, Any]]] = {}  # new key -> old value -> new value

    @model_validator(mode="before")
    @classmethod
    def _translate_old_names(cls, given: Any, info: ValidationInfo) -> Any:
        if not isinstance(given, dict) or not (cls.renamed or cls.renamed_values):
            return given
        migrate = bool(info.context and info.context.get("migrate"))
        translated: dict[Any, Any] = {}
        for key, value in given.items():
            new_key = cls.renamed.get(key, key)
            if new_key != key and not migrate:
                raise ValueError(f"{key} is now called {new_key}")
            values = cls.renamed_values.get(new_key, {})
            if isinstance(value, Hashable) and value in values:
                if not migrate:
                    raise ValueError(f"{new_key}: {value} is now called {values[value]}")
                value = values[value]
            translated[new_key] = value
        return translated

    @model_validator(mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, given: Any) -> Any:
        """Python takes true for 1: a width of `true` or steps of `on` would train another model without a word."""
        if isinstance(given, dict):
            for name, field in cls.model_fields.items():
                value = given.get(field.alias or name)
                values = value if isinstance(value, (list, tuple)) else [value]
                if any(isinstance(v, bool) for v in values) and not takes_truth(
                    cast(Hashable, field.annotation)
                ):
                    raise ValueError(f"{field.alias or name} is no switch; give a value, not true or false")
        return given


@cache
def takes_truth(annotation: Hashable) -> bool:
    """Whether true and false are among the values of a type."""
    parts = get_args(annotation)
    if not parts:
        return annotation is bool or annotation is Any
    return any(part is True or part is False or takes_truth(part) for part in parts)


# `key.sub=value` set in a tree of plain values; items of a list are named by index or by their `name`.

NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
EITHER = {"steps": "epochs", "epochs": "steps"}  # of a stage: whoever gives one takes the other back


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set `key.sub=value` in the tree; the value is read as YAML."""
    path, sign, text = override.partition("=")
    keys = path.strip().split(".")
    if not sign or not all(keys):
        raise UserError(f"override {override!r} is not of the form key.sub=value, such as train.steps=200")
    put(tree, keys, read_value(text), ())


Overrides = Mapping[str, Any] | Sequence[str]  # {"train.steps": 200} or ["train.steps=200"]


def apply_overrides(tree: dict[str, Any], overrides: Overrides) -> None:
    """Set every override in the tree. Values of a mapping are used as they are; those of strings are read as YAML."""
    if isinstance(overrides, str):
        raise UserError(
            f"overrides must be a mapping or a list, got the text {overrides!r}; write [{overrides!r}]"
        )
    if not isinstance(overrides, Mapping):
        for override in overrides:
            apply_override(tree, override)
        return
    for path, value in overrides.items():
        keys = path.split(".")
        if not all(keys):
            raise UserError(f"override {path!r} is not of the form key.sub, such as train.steps")
        put(tree, keys, value, ())


def read_value(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        value = text
    if isinstance(value, str) and NUMBER.fullmatch(value):
        value = float(value)  # YAML takes 1e4 for text
    return value


def put(node: Any, keys: Sequence[str], value: Any, above: tuple[str, ...]) -> None:
    """Walk down and set; what is walked through is copied, for ancestors may share it."""
    key: Any = keys[0]
    if isinstance(node, list):
        key = find_item(node, key, ".".join(above))
    if len(keys) > 1:
        child = node[key] if isinstance(node, list) else node.get(key)
        copied: Any = list(child) if isinstance(child, list) else {}
        node[key] = dict(child) if isinstance(child, Mapping) else copied
        put(node[key], keys[1:], value, (*above, keys[0]))
        return
    if key == "kind" and node.get("kind") != value:
        node.clear()
    if above[:1] == ("stages",) and len(above) == 2 and key in EITHER:
        node.pop(EITHER[key], None)
    node[key] = value


def find_item(items: Sequence[Any], key: str, where: str) -> int:
    """The place of an item: its index, or the one whose name it is."""
    names = [str(item.get("name")) if isinstance(item, Mapping) else None for item in items]
    if key in names:
        return names.index(key)
    if key.isdecimal() and int(key) < len(items):
        return int(key)
    known = ", ".join(f"{i} ({name})" for i, name in enumerate(names)) or "none"
    raise UserError(f"{where} has no item {key!r}; it has {known}")


# What is wrong with settings, one sentence per mistake: the path, the nearest known setting, the form that works.


def explain(error: ValidationError, where: str, settings: type[BaseModel]) -> Iterator[str]:
    """One sentence per problem, with the path of the setting and the nearest known one."""
    known = sorted(known_paths(settings))
    for problem in error.errors():
        path = plain_path(problem["loc"], known)
        if problem["type"] == "extra_forbidden":
            near, parent = nearest_of(path, known), path.rpartition(".")[0]
            inside = [
                k.rpartition(".")[2] for k in known if parent and k.rpartition(".")[0] == unnumbered(parent)
            ]
            others = f"; {parent} has {', '.join(inside)}" if inside and near is None else ""
            yield f"recipe {where}: {absent(path, near, problem['loc'])}{others}"
        elif problem["type"] == "value_error":
            yield f"recipe {where}: {path + ': ' if path else ''}{problem['ctx']['error']}"
        elif problem["type"] == "missing" and "." in path:
            parent, given = path.rpartition(".")[0], problem["input"]
            kind = given.get("kind") if isinstance(given, Mapping) else None
            of = f" of kind {kind}" if kind else ""
            yield f"recipe {where}: {parent}{of} needs {path}; add {path}=VALUE"
        else:
            yield (
                f"recipe {where}: {path} = {reprlib.repr(problem['input'])} is refused:"
                f" {remedy(problem['type'], path, problem['input'], known, settings) or problem['msg']}"
            )


def remedy(kind: str, path: str, value: Any, known: Sequence[str], settings: type[BaseModel]) -> str | None:
    """The form that works, where a value has the wrong form altogether."""
    if kind in ("tuple_type", "list_type"):
        return f"a list is wanted, {path}=[{value}]"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        kinds = kinds_of(path, settings)
        wrong = value.get("kind") if isinstance(value, Mapping) else None
        near = difflib.get_close_matches(str(wrong), kinds, n=1, cutoff=0.4)
        return f"{path}.kind is one of {', '.join(kinds)}" + (f"; did you mean {near[0]}?" if near else "")
    if kind in ("model_attributes_type", "model_type", "dict_type"):
        inside = [name for name in known if name.rpartition(".")[0] == path]
        if f"{path}.kind" in inside:
            return f"it has settings of its own, {path}.kind={value} and so on"
        return f"it has settings of its own, such as {inside[0]}" if inside else None
    return None


def kinds_of(path: str, settings: type[BaseModel]) -> list[str]:
    """The kinds that a component at this path may have."""
    models: list[type[BaseModel]] = [settings]
    for key in path.split("."):
        models = [
            inner
            for model in models
            for name, field in model.model_fields.items()
            if key == (field.alias or name)
            for inner in inner_models(field.annotation)
        ]
    return [model.model_fields["kind"].default for model in models if "kind" in model.model_fields]


def absent(path: str, near: str | None, place: Sequence[int | str]) -> str:
    """Why a key is refused, and the key that was likely meant."""
    if "." in str(place[-1]):
        nested = path.replace(".", ": {") + ": …" + "}" * path.count(".")
        return f"{path!r} is a path; in a file settings are nested: write {nested}"
    if near == path:
        parent = path.rpartition(".")[0]
        return f"{path!r} belongs to another {parent}.kind than the one chosen; leave it out, or change {parent}.kind"
    return f"there is no setting {path!r}" + (f"; did you mean {near!r}?" if near else "")


def nearest_of(path: str, known: Sequence[str]) -> str | None:
    """The same of a path through a list, such as stages.0.stps: `known` has no numbers in it, and the answer has."""
    near = nearest(unnumbered(path), known)
    parent = path.rpartition(".")[0]
    if near is not None and parent and near.rpartition(".")[0] == unnumbered(parent):
        return f"{parent}.{near.rpartition('.')[2]}"
    return near


def unnumbered(path: str) -> str:
    return ".".join(part for part in path.split(".") if not part.isdecimal())


def nearest(path: str, known: Sequence[str]) -> str | None:
    """The known setting a misspelt one most likely meant: a sibling first, then the same word elsewhere."""
    parent, _, leaf = path.rpartition(".")
    if leaf in ("lr", "learning_rate"):
        return "schedule.peak_lr"
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == parent}
    if close := difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.6):
        return siblings[close[0]]
    if same_word := [k for k in known if k.rpartition(".")[2] == leaf]:
        return same_word[0]
    if parent in known:  # the others beside it say more than a word that is like the whole path
        return None
    close = difflib.get_close_matches(path, known, n=1, cutoff=0.6)
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
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated, tuple):
        for part in typing.get_args(annotation):
            yield from inner_models(part)


class OneOfEach(yaml.SafeLoader):
    """YAML in which a setting is given once: of two schedules, the first would vanish without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1 and key != "<<"]:
            raise ValueError(f"{twice[0]!r} is given twice; keep one of them")
        return super().construct_mapping(node, deep)


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


S = TypeVar("S", bound=Settings)


def parse_settings(kind: type[S], tree: Mapping[str, Any], where: str, *, migrate: bool = False) -> S:
    """Validate a tree of plain values; every problem is reported in one `UserError`.

    `migrate` translates settings renamed since the file was written, for files that arcuate itself wrote.
    """
    try:
        return kind.model_validate(tree, context={"migrate": migrate})
    except ValidationError as error:
        raise UserError("; ".join(dict.fromkeys(explain(error, where, kind)))) from None


def to_tree(settings: Settings) -> dict[str, Any]:
    """All settings, defaults included, as plain values."""
    return settings.model_dump(mode="json", by_alias=True)


def to_yaml(settings: Settings) -> str:
    return yaml.safe_dump(to_tree(settings), sort_keys=False, allow_unicode=True, width=100)


@dataclass(frozen=True)
class Change:
    """One setting, or one component replaced by another kind, with its value on either side."""

    path: str
    before: Any
    after: Any


def diff(a: Settings, b: Settings, ignore: Collection[str] = ()) -> list[Change]:
    """Every resolved setting that differs, in the order of the settings class."""
    return list(_changes("", _tree(a, ignore), _tree(b, ignore)))


def _tree(settings: Settings, ignore: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in to_tree(settings).items() if key not in ignore}


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
