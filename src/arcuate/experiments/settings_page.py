"""Reference of all settings of a recipe, from the JSON schema of its settings classes (`arcuate recipes settings`)."""

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from arcuate.experiments.recipe import Recipe

_HEAD = """# Settings

Every setting of a recipe, as printed by `arcuate recipes settings`.

Settings are given in a recipe file, or on the command line as `key.sub=value`. Changing the `kind`
of a component replaces the component: set the kind first, then the settings that it needs
(`schedule.kind=constant schedule.peak_lr=0.001`).
"""
_PLUGIN = "package.module:Class"  # kind of a component from outside the package
_TYPES = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text", "null": "null"}
_LIMITS = {"minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "exclusiveMaximum": "< {}"}
_LIMITS |= {"minLength": "length ≥ {}", "maxLength": "length ≤ {}", "minItems": "length ≥ {}", "pattern": "`{}`"}


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


def list_components() -> Iterator[ComponentEntry]:
    """The recipe's own settings, then those of each component, in the order of the recipe."""
    schema = Recipe.model_json_schema()
    yield from _components(schema, schema["$defs"], "", {})


def _components(node: Mapping[str, Any], defs: Mapping[str, Any], path: str, default: Any) -> Iterator[ComponentEntry]:
    """The class `node` and the classes below it; `default` are the values of a recipe there."""
    kinds = node["properties"].get("kind", {})
    kind = kinds.get("const")
    is_default = isinstance(default, Mapping) and default.get("kind") == kind
    settings: list[SettingEntry] = []
    inner: list[tuple[str, Mapping[str, Any], Any]] = []
    for name, entry in node["properties"].items():
        own = f"{path}.{name}".lstrip(".")
        value = default[name] if is_default and name in default else entry.get("default", ...)
        found = list(_references(entry, defs))
        inner += [(own, part, value) for part in found]
        if not found:
            settings.append(_describe(own, entry, value))
    if settings:
        description = node.get("description", "") if path else ""
        yield ComponentEntry(path, kind, is_default, description, tuple(settings))
    for own, part, value in inner:
        yield from _components(part, defs, own, value)


def _references(entry: Any, defs: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The settings classes in a type; components from outside the package are left out."""
    if isinstance(entry, list):
        for part in entry:
            yield from _references(part, defs)
    elif isinstance(entry, Mapping):
        if "$ref" in entry:
            part = defs[entry["$ref"].rpartition("/")[2]]
            if part["properties"].get("kind", {}).get("default") != _PLUGIN:
                yield part
        for key in ("anyOf", "oneOf", "items"):
            yield from _references(entry.get(key), defs)


def _describe(path: str, entry: Mapping[str, Any], default: Any) -> SettingEntry:
    text = "required" if default is ... else f"`{json.dumps(default, ensure_ascii=False)}`"
    meaning = entry.get("description") or (f"Type of {path.split('.')[-2]}." if path.endswith(".kind") else "")
    return SettingEntry(path, _type_name(entry), text, ", ".join(dict.fromkeys(_limits(entry))), meaning)


def _type_name(entry: Mapping[str, Any]) -> str:
    if "anyOf" in entry:
        return " or ".join(_type_name(part) for part in entry["anyOf"])
    if "const" in entry or "enum" in entry:
        return ", ".join(f"`{value}`" for value in entry.get("enum", [entry.get("const")]))
    if "prefixItems" in entry:
        return f"list of {len(entry['prefixItems'])} × {_type_name(entry['prefixItems'][0])}"
    if entry.get("type") == "array":
        return f"list of {_type_name(entry['items'])}"
    return _TYPES.get(entry.get("type", ""), "component")


def _limits(entry: Any) -> Iterator[str]:
    """Limits of a value, and of a part of it such as the numbers in a list."""
    for key, sign in _LIMITS.items():
        if key in entry and "prefixItems" not in entry:
            yield sign.format(_number(entry[key])).replace("|", "\\|")
    for part in (
        *entry.get("anyOf", ()),
        *entry.get("prefixItems", ()),
        *([entry["items"]] if "items" in entry else ()),
    ):
        yield from _limits(part)


def _number(value: Any) -> str:
    if value == 2**63:
        return "2^63"
    if isinstance(value, float) and not (value >= 1000 and value.is_integer()):
        return f"{value:g}"
    return str(value) if isinstance(value, str) else f"{int(value):,}"


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
