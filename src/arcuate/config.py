"""Settings: the base class, overrides `key.sub=value`, error messages, YAML and differences."""

import difflib
import json
import os
import re
import reprlib
import types
import typing
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from arcuate.errors import UserError, check_regular, check_resources
from arcuate.plugins import has_component, load_component


class Settings(BaseModel):
    """Base class of all settings: unknown keys are rejected and values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _reject_booleans_for_numbers(cls, given: Any) -> Any:
        """`bool` is an `int` in Python: without this check a width of `true` would silently be 1."""
        if isinstance(given, dict):
            for name, field in cls.model_fields.items():
                value = given.get(field.alias or name)
                values = value if isinstance(value, (list, tuple)) else [value]
                is_boolean = any(isinstance(v, bool) for v in values)
                if is_boolean and not _accepts_boolean(cast(Hashable, field.annotation)):
                    raise ValueError(f"{field.alias or name}: expected a value, got true or false")
        return given


class PluginSettings(Settings):
    """Base class for the settings of a user-defined component; `kind` is its name or import path."""

    kind: str = "package.module:Class"


def _explain_plainly(problem: Any) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    where = ".".join(str(part) for part in problem["loc"])
    return f"no setting {where!r}" if problem["type"] == "extra_forbidden" else f"{where}: {message}".lstrip(": ")


def component_class(group: str, kind: str) -> Any:
    """Class of a user-defined component, which must have its settings class as attribute `Settings`."""
    found = load_component(group, kind)
    settings = getattr(found, "Settings", None)
    if not (isinstance(settings, type) and issubclass(settings, PluginSettings)):
        raise UserError(f"{kind!r} has no attribute Settings, a subclass of arcuate.config.PluginSettings; add one")
    return found


def plugin_validator(group: str, built_in: Collection[str] = ()) -> BeforeValidator:
    """Validator that parses the settings of a user-defined component with its own settings class."""

    def read(value: Any) -> Any:
        kind = value.get("kind") if isinstance(value, dict) else None
        if kind is None or kind in built_in or not (not built_in or has_component(group, kind)):
            return value
        settings: type[PluginSettings] = component_class(group, str(kind)).Settings
        try:
            return settings.model_validate(value)
        except ValidationError as error:
            problems = "; ".join(_explain_plainly(problem) for problem in error.errors())
            raise ValueError(f"{problems} (settings: {', '.join(settings.model_fields)})") from None

    return BeforeValidator(read)


@cache
def _accepts_boolean(annotation: Hashable) -> bool:
    parts = get_args(annotation)
    if not parts:
        return annotation is bool or annotation is Any
    return any(part is True or part is False or _accepts_boolean(part) for part in parts)


# --- Overrides: `key.sub=value` in a tree of plain values; list items by index or by their `name` -----------

Translate = Callable[[str, Any], str | None]  # an unknown setting and its value -> what it is called here
Overrides = Mapping[str, Any] | Sequence[str]  # {"train.steps": 200} or ["train.steps=200"]
_SCIENTIFIC = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
_EXCLUSIVE = {"steps": "epochs", "epochs": "steps"}  # in a stage, setting one removes the other


def apply_overrides(tree: dict[str, Any], overrides: Overrides) -> None:
    """Set every override in the tree. Values of a mapping are used as they are; those of strings are parsed as YAML."""
    if isinstance(overrides, str):
        raise UserError(f"overrides must be a mapping or a list, got the text {overrides!r}; write [{overrides!r}]")
    for path, value in overrides.items() if isinstance(overrides, Mapping) else map(_parse_override, overrides):
        keys = path.strip().split(".")
        if not all(keys):
            raise UserError(f"override {path!r} is not of the form key.sub, such as train.steps")
        _set(tree, keys, value, ())


def override_list(overrides: Overrides) -> list[str]:
    """Overrides as the command line takes them, `key.sub=value`."""
    if isinstance(overrides, Mapping):
        return [f"{path}={to_yaml_line(value)}" for path, value in overrides.items()]
    return list(overrides)


def to_yaml_line(value: Any) -> str:
    """A plain value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=float("inf"))
    return text.removesuffix("...\n").strip()


def _parse_override(override: str) -> tuple[str, Any]:
    path, sign, text = override.partition("=")
    if not sign or not path:
        raise UserError(f"override {override!r} is not of the form key.sub=value, such as train.steps=200")
    try:
        value = parse_yaml(text)
    except ValueError:
        value = text
    if isinstance(value, str) and _SCIENTIFIC.fullmatch(value):
        value = float(value)  # YAML parses 1e4 as text
    return path, value


def _set(node: Any, keys: Sequence[str], value: Any, parents: tuple[str, ...]) -> None:
    """Descend and set. Containers along the path are copied, because recipes with a common ancestor share them."""
    key: Any = keys[0]
    if isinstance(node, list):
        key = _find_item(node, key, ".".join(parents))
    if len(keys) > 1:
        child = node[key] if isinstance(node, list) else node.get(key)
        copied: Any = list(child) if isinstance(child, list) else {}
        node[key] = dict(child) if isinstance(child, Mapping) else copied
        _set(node[key], keys[1:], value, (*parents, keys[0]))
        return
    if key == "kind" and node.get("kind") != value:
        node.clear()
    if parents[:1] == ("stages",) and len(parents) == 2 and key in _EXCLUSIVE:
        node.pop(_EXCLUSIVE[key], None)
    node[key] = value


def _find_item(items: Sequence[Any], key: str, where: str) -> int:
    """Index of a list item that is given by index or by name."""
    names = [str(item.get("name")) if isinstance(item, Mapping) else None for item in items]
    if key in names:
        return names.index(key)
    if key.isdecimal() and int(key) < len(items):
        return int(key)
    known = ", ".join(f"{i} ({name})" for i, name in enumerate(names)) or "none"
    raise UserError(f"{where} has no item {key!r}; it has {known}")


# --- Error messages ----------------------------------------------------------------------------------------


def _explain(error: ValidationError, where: str, settings: type[BaseModel], translate: Translate) -> Iterator[str]:
    """One sentence per problem: the setting, what is wrong, and the nearest known setting or a valid form."""
    known = sorted(known_paths(settings))
    for problem in error.errors():
        path = _strip_tags(problem["loc"], known)
        if problem["type"] == "extra_forbidden":
            near, parent = _nearest_in_lists(path, known), path.rpartition(".")[0]
            is_misspelt = near is not None and near.replace("_", "") == path.replace("_", "").lower()
            if not is_misspelt and (ours := translate(path, problem["input"])) is not None:
                yield f"{where}: no setting {path!r}; here it is {ours}"
                continue
            siblings = [
                k.rpartition(".")[2] for k in known if parent and k.rpartition(".")[0] == _strip_indices(parent)
            ]
            others = f"; {parent} has {', '.join(siblings)}" if siblings and near is None else ""
            yield f"{where}: {_explain_unknown(path, near, problem['loc'])}{others}"
        elif problem["type"] == "value_error":
            yield f"{where}: {path + ': ' if path else ''}{problem['ctx']['error']}"
        elif problem["type"] == "missing" and "." in path:
            parent, given = path.rpartition(".")[0], problem["input"]
            kind = given.get("kind") if isinstance(given, Mapping) else None
            of = f" of kind {kind}" if kind else ""
            yield f"{where}: {parent}{of} needs {path}; add {path}=VALUE"
        else:
            yield (
                f"{where}: {path} = {reprlib.repr(problem['input'])} is invalid:"
                f" {_remedy(problem['type'], path, problem['input'], known, settings) or problem['msg']}"
            )


def _remedy(kind: str, path: str, value: Any, known: Sequence[str], settings: type[BaseModel]) -> str | None:
    """A valid form for a value of the wrong type."""
    if kind in ("tuple_type", "list_type"):
        return f"expected a list, {path}=[{value}]"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        kinds = _kinds_at(path, settings)
        wrong = value.get("kind") if isinstance(value, Mapping) else None
        near = difflib.get_close_matches(str(wrong), kinds, n=1, cutoff=0.4)
        return f"{path}.kind is one of {', '.join(kinds)}" + (f"; did you mean {near[0]}?" if near else "")
    if kind in ("model_attributes_type", "model_type", "dict_type"):
        children = [name for name in known if name.rpartition(".")[0] == path]
        if f"{path}.kind" in children:
            return f"it is a group of settings, such as {path}.kind={value}"
        return f"it is a group of settings, such as {children[0]}" if children else None
    return None


def _kinds_at(path: str, settings: type[BaseModel]) -> list[str]:
    """The possible kinds of the component at this path."""
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


def _explain_unknown(path: str, near: str | None, location: Sequence[int | str]) -> str:
    """Why a key is unknown here, and the nearest known one."""
    if "." in str(location[-1]):
        nested = path.replace(".", ": {") + ": …" + "}" * path.count(".")
        return f"{path!r} is a dotted path; nest settings in a file: {nested}"
    if near == path:
        parent = path.rpartition(".")[0]
        return f"{path!r} belongs to a different {parent}.kind; leave it out, or change {parent}.kind"
    return f"no setting {path!r}" + (f"; did you mean {near!r}?" if near else "")


def _nearest_in_lists(path: str, known: Sequence[str]) -> str | None:
    """`nearest` for a path through a list, such as stages.0.stps; `known` has no indices."""
    near = nearest(_strip_indices(path), known)
    parent = path.rpartition(".")[0]
    if near is not None and parent and near.rpartition(".")[0] == _strip_indices(parent):
        return f"{parent}.{near.rpartition('.')[2]}"
    return near


def _strip_indices(path: str) -> str:
    return ".".join(part for part in path.split(".") if not part.isdecimal())


def nearest(path: str, known: Sequence[str]) -> str | None:
    """The known setting nearest to a misspelt one: a sibling first, then the same name elsewhere."""
    parent, _, leaf = path.rpartition(".")
    if leaf in ("lr", "learning_rate"):
        return "schedule.peak_lr"
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == parent}
    if close := difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.6):
        return siblings[close[0]]
    if same_name := [k for k in known if k.rpartition(".")[2] == leaf]:
        return same_name[0]
    if parent in known:  # the caller lists the siblings, which helps more than a similar path elsewhere
        return None
    close = difflib.get_close_matches(path, known, n=1, cutoff=0.6)
    return close[0] if close else None


def _strip_tags(location: tuple[int | str, ...], known: Sequence[str]) -> str:
    """Dotted path of a problem, without the union tags that pydantic adds."""
    parts: list[str] = []
    for part in location:
        candidate = ".".join([*parts, str(part)])
        is_tag = bool(parts) and ".".join([*parts, "kind"]) in known and candidate not in known
        if is_tag and part is not location[-1]:
            continue
        parts.append(str(part))
    return ".".join(parts)


def known_paths(model: type[BaseModel], prefix: str = "") -> set[str]:
    """Dotted paths of all settings, those of every member of a union included."""
    paths: set[str] = set()
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        paths.add(path)
        for inner in inner_models(field.annotation):
            paths |= known_paths(inner, f"{path}.")
    return paths


def inner_models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The settings classes of the package in a type annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if not issubclass(annotation, PluginSettings):
            yield annotation
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated, tuple):
        for part in typing.get_args(annotation):
            yield from inner_models(part)


# --- Trees of plain values ---------------------------------------------------------------------------------


_MAX_YAML_CHARACTERS = 500_000
_MAX_YAML_DEPTH = 50
_SCALARS = {  # tag -> first characters and form; YAML 1.1 reads more, such as `no` as false and 010 as eight
    "null": ("~nN", "~|null|Null|NULL|"),
    "bool": ("tTfF", "true|True|TRUE|false|False|FALSE"),
    "int": ("-+0123456789", "[-+]?(0|[1-9][0-9_]*)"),
    "float": ("-+.0123456789", r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+][0-9]+)?|[-+]?\.inf|\.nan"),
}


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Constructs numbers, text, lists and mappings; a date is text, and a key that is given twice an error."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if duplicates := [key for key, n in keys.items() if n > 1]:
            raise ValueError(f"{duplicates[0]!r} is given twice; keep one of them")
        return cast(dict[Any, Any], super().construct_mapping(node, deep))


for _tag, (_first, _form) in _SCALARS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"({_form})$"), [*_first, ""])


def parse_yaml(text: str) -> Any:
    """Plain values of YAML text. Anything else, or text beyond the bounds, raises ValueError with a one-line message.

    Anchors, aliases, merge keys and tags are not supported: ten lines of aliases can stand for a billion nodes.
    """
    if len(text) > _MAX_YAML_CHARACTERS:
        raise ValueError(f"longer than {_MAX_YAML_CHARACTERS} characters")
    return deepcopy(_parse_once(text))


@lru_cache(maxsize=256)  # a recipe is read by several parts of a program
def _parse_once(text: str) -> Any:
    try:
        depth = 0
        for event in yaml.parse(text, _Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_YAML_DEPTH:
                raise ValueError(f"nested deeper than {_MAX_YAML_DEPTH} levels{_line(event.start_mark)}")
            _check_event(event)
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise ValueError(problem + _line(error.problem_mark or error.context_mark)) from None
    except (yaml.YAMLError, KeyError, TypeError, IndexError, ArithmeticError, RecursionError) as error:
        raise ValueError((str(error) or type(error).__name__).splitlines()[0]) from None


def _check_event(event: yaml.Event) -> None:
    where = _line(event.start_mark)
    if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
        raise ValueError(f"anchors and aliases are not supported, repeat the value{where}")
    if tag := getattr(event, "tag", None):
        short = tag.replace("tag:yaml.org,2002:", "!!")
        raise ValueError(f"the tag {short:.40} is not supported, write the plain value{where}")
    if not isinstance(event, yaml.ScalarEvent):
        return
    try:
        has_null = b"\0" in os.fsencode(event.value)
    except UnicodeEncodeError:  # a lone surrogate
        has_null = True
    if has_null:
        raise ValueError(f"text contains a character that no path can have{where}")


def _line(mark: Any) -> str:
    return "" if mark is None else f" (line {mark.line + 1})"


def read_yaml(path: Path, noun: str = "") -> Any:
    """Plain values of a YAML file; `noun` describes the file in messages."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            content = file.read(4 * _MAX_YAML_CHARACTERS + 1)  # bytes of the longest text
        return parse_yaml(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise UserError(f"{noun}{path} is not valid YAML: it is not UTF-8 text") from None
    except OSError as error:
        check_resources(error, path)
        raise UserError(f"{noun}{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{noun}{path} is not valid YAML: {error}") from None


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `changes` into `base` recursively; a component of a different `kind` replaces the old one."""
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


def parse_settings(
    kind: type[S],
    tree: Mapping[str, Any],
    where: str,
    *,
    noun: str = "recipe",
    translate: Translate = lambda path, value: None,
) -> S:
    """Validate a tree of plain values; all problems are reported in one `UserError`.

    `noun` and `where` name the file in messages.
    """
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise UserError("; ".join(dict.fromkeys(_explain(error, f"{noun} {where}".strip(), kind, translate)))) from None


def to_tree(settings: Settings) -> dict[str, Any]:
    """All settings as plain values, defaults included."""
    return settings.model_dump(mode="json", by_alias=True)


def to_yaml(settings: Settings) -> str:
    return yaml.safe_dump(to_tree(settings), sort_keys=False, allow_unicode=True, width=100)


@dataclass(frozen=True)
class Change:
    """A setting that differs, or a component of a different kind, with both values."""

    path: str
    before: Any
    after: Any


def value_text(value: Any) -> str:
    """A setting on one line; a component as its kind followed by its settings."""
    if isinstance(value, Mapping):
        rest = ", ".join(f"{k} {value_text(v)}" for k, v in value.items() if k != "kind" and v is not None)
        return f"{value['kind']} ({rest})" if value.get("kind") else rest
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def diff(a: Settings, b: Settings, ignore: Collection[str] = ()) -> list[Change]:
    """All settings that differ, in the order of the settings class."""
    before, after = ({k: v for k, v in to_tree(s).items() if k not in ignore} for s in (a, b))
    return list(_changes("", before, after))


def _changes(path: str, before: Any, after: Any) -> Iterator[Change]:
    """Differences below `path`; a component with other settings is one change."""
    if before == after:
        return
    if isinstance(before, Mapping) and isinstance(after, Mapping) and before.keys() == after.keys():
        for key in before:
            yield from _changes(f"{path}.{key}" if path else key, before[key], after[key])
    else:
        yield Change(path, before, after)
