"""Every setting of a recipe with its type, default, range and meaning, gathered from the settings classes."""

import inspect
import json
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from arcuate.config import inner_models
from arcuate.experiments.recipe import Recipe

HEAD = """# Settings

Every setting of a recipe. Written by `arcuate recipes settings > docs/settings.md`; a test keeps it up to date.

A setting is given in a recipe file, or on the command line as `key.sub=value`. A component with a `kind` is replaced as
a whole when its kind changes: give the kind first, then what that kind needs (`schedule.kind=constant
schedule.lr=0.001`).
"""

# Words that mean the same wherever they stand, for fields that do not say it themselves.
MEANINGS = {
    "dropout": "share of values set to 0 in training",
    "width": "units in a layer",
    "depth": "layers",
    "bidirectional": "reads the trial in both directions; such a model cannot stream",
    "normalise": "by the statistics of the block, of the past (rolling), or not at all",
    "taps": "length of the kernel",
    "activation": "after the map",
    "layer_norm": "normalise across channels after the map",
    "enabled": "false switches it off",
    "batch_size": "trials in one batch",
    "device": "where the model runs",
    "kind": "which one",
}


@dataclass(frozen=True)
class Setting:
    path: str
    type: str
    default: str
    range: str
    meaning: str


@dataclass(frozen=True)
class Component:
    """A settings class at its place in the recipe."""

    path: str
    kind: str | None
    is_usual: bool  # what a recipe has if it says nothing
    about: str
    settings: tuple[Setting, ...]


def components(
    model: type[BaseModel] = Recipe, path: str = "", usual: BaseModel | None = None
) -> Iterator[Component]:
    """The recipe's own settings, then those of each component, in the order of the recipe.

    `usual` is the component that a recipe has if it says nothing; its values are the defaults.
    """
    inside: list[tuple[str, type[BaseModel], Any]] = []
    settings: list[Setting] = []
    for name, field in model.model_fields.items():
        place = f"{path}.{field.alias or name}".lstrip(".")
        parts = list(inner_models(field.annotation))
        default = getattr(usual, name) if type(usual) is model else field.default
        inside += [(place, part, default) for part in parts]
        if not parts:
            settings.append(setting(place, field, default))
    kinds = typing.get_args(model.model_fields["kind"].annotation) if "kind" in model.model_fields else ()
    kind = kinds[0] if len(kinds) == 1 else None  # several: an ordinary setting
    about = "" if model is Recipe else inspect.cleandoc(model.__dict__.get("__doc__") or "")
    if settings:
        is_usual = type(usual) is model
        yield Component(path, kind, is_usual, about, tuple(settings))
    for place, part, default in inside:
        yield from components(part, place, default)


def setting(path: str, field: FieldInfo, default: Any) -> Setting:
    if default is PydanticUndefined:
        told = "required"
    else:
        told = f"`{json.dumps(default, ensure_ascii=False)}`"
    meaning = field.description or MEANINGS.get(path.rpartition(".")[2], "")
    limits = ", ".join(dict.fromkeys([*limits_of(field.metadata), *limits_within(field.annotation)]))
    return Setting(path, type_name(field.annotation), told, limits, meaning)


def type_name(annotation: Any) -> str:
    """A type as a person would say it."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(parts[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(part) for part in parts)
    if origin is typing.Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin is tuple:
        inner = type_name(parts[0])
        return f"list of {inner}" if parts[-1] is Ellipsis else f"list of {len(parts)} × {inner}"
    names = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null"}
    return names[annotation]


def limits_of(metadata: typing.Iterable[Any]) -> Iterator[str]:
    signs = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}"}
    signs |= {"min_length": "at least {} long", "max_length": "at most {} long", "pattern": "`{}`"}
    for part in metadata:
        for name, sign in signs.items():
            value = getattr(part, name, None)
            if value is not None:
                yield sign.format(limit(value)).replace("|", "\\|")
        if isinstance(part, FieldInfo):
            yield from limits_of(part.metadata)


def limit(value: Any) -> str:
    if value == 2**63:
        return "2^63"
    return (
        f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
    )


def limits_within(annotation: Any) -> Iterator[str]:
    """Limits that belong to a part of the type, such as the numbers in a list."""
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        yield from limits_of(parts[1:])
    if typing.get_origin(annotation) is not typing.Literal:
        for part in parts:
            yield from limits_within(part)


def to_markdown() -> str:
    """The page docs/settings.md."""
    lines = [HEAD]
    shown: dict[tuple[str, ...], str] = {}
    for part in components():
        own = tuple(s.path.rpartition(".")[2] for s in part.settings), part.kind, part.about
        title = f"`{part.path}`" if part.path else "The recipe itself"
        if part.kind:
            title += f", kind `{part.kind}`" + (
                " (unless the recipe says otherwise)" if part.is_usual else ""
            )
        earlier = shown.setdefault(tuple(map(str, own)), part.path)
        if earlier != part.path and part.kind:
            continue  # the same kinds at a second place; the first one's table says so
        lines += [f"## {title}", ""]
        if part.about:
            lines += [part.about, ""]
        lines += ["| setting | type | default | range | meaning |", "|---|---|---|---|---|"]
        for s in part.settings:
            meaning = s.meaning.replace("|", "\\|")
            lines.append(f"| `{s.path}` | {s.type} | {s.default} | {s.range or '–'} | {meaning} |")
        lines.append("")
    lines.append(
        "`session_schedule` takes the same kinds as `schedule`; null gives the session layers that one."
    )
    return "\n".join(lines) + "\n"
