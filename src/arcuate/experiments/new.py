"""`arcuate new`: write a working skeleton of an encoder, a reader or a recipe."""

import keyword
import re
import sys
from importlib.resources import files
from pathlib import Path

from arcuate.errors import UserError
from arcuate.files import locked_folder, write_text

KINDS = ("encoder", "reader", "recipe")


def new(kind: str, name: str, folder: str | Path = ".") -> tuple[Path, ...]:
    """Write a pip-installable package (encoder, reader) or a recipe file below `folder`; return the written files.

    The packages are those of `examples/`, under the given name; nothing existing is overwritten.
    """
    if kind not in KINDS:
        raise UserError(f"cannot write a skeleton of {kind!r}; choose {', '.join(KINDS)}")
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,49}", name) or keyword.iskeyword(name):
        raise UserError(f"{name!r} cannot be the name of a package; use lower-case letters, digits and _: my_{kind}")
    if kind != "recipe" and name in (*sys.stdlib_module_names, "arcuate"):
        raise UserError(f"{name!r} is the name of a module of Python or of arcuate itself; choose another: my_{name}")
    target = Path(folder) / (f"{name}.yaml" if kind == "recipe" else name)
    if target.exists():
        raise UserError(f"{target} exists; choose another name or folder")
    names = {"package": name, "project": name.replace("_", "-"), "component": name.replace("_", "-")}
    if kind == "recipe":
        write_text(target, _fill("recipe.yaml", names))
        return (target,)
    contents = {"pyproject.toml": _fill(f"{kind}.toml", names), f"{name}/__init__.py": _fill(f"{kind}.py.txt", names)}
    if kind == "encoder":
        contents["recipe.yaml"] = _fill("encoder_recipe.yaml", names)
    with locked_folder(target) as temporary:
        if target.exists():  # written by another process since
            raise UserError(f"{target} exists; choose another name or folder")
        for file, text in contents.items():
            write_text(temporary / file, text)
    return tuple(target / file for file in contents)


def _fill(template: str, names: dict[str, str]) -> str:
    text = (files("arcuate") / "experiments" / "skeletons" / template).read_text("utf-8")
    for key, value in names.items():
        text = text.replace("{{" + key + "}}", value)
    return text
