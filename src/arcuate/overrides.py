"""`key.sub=value` set in a tree of plain values; items of a list are named by index or by their `name`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from arcuate.errors import UserError

NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
EITHER = {"steps": "epochs", "epochs": "steps"}  # of a stage: whoever gives one takes the other back


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set `key.sub=value` in the tree; the value is read as YAML."""
    path, sign, text = override.partition("=")
    keys = path.strip().split(".")
    if not sign or not all(keys):
        raise UserError(f"override {override!r} is not of the form key.sub=value, such as train.steps=200")
    put(tree, keys, read_value(text), ())


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
