"""`arcuate new`: write a working skeleton of an encoder, a reader or a recipe."""

import keyword
import re
from importlib.resources import files
from pathlib import Path

from arcuate.errors import UserError
from arcuate.files import write_text

KINDS = ("encoder", "reader", "recipe")


def new(kind: str, name: str, folder: str | Path = ".") -> tuple[Path, ...]:
    """Write a pip-installable package (encoder, reader) or a recipe file below `folder`; return the written files.

    The packages are those of `examples/`, under the given name; nothing existing is overwritten.
    """
    if kind not in KINDS:
        raise UserError(f"cannot write a skeleton of {kind!r}; choose {', '.join(KINDS)}")
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,49}", name) or keyword.iskeyword(name):
        raise UserError(f"{name!r} cannot be the name of a package; use lower-case letters, digits and _: my_{kind}")
    target = Path(folder) / (f"{name}.yaml" if kind == "recipe" else name)
    if target.exists():
        raise UserError(f"{target} exists; choose another name or folder")
    names = {"package": name, "project": name.replace("_", "-"), "component": name.replace("_", "-")}
    contents: dict[Path, str] = {}
    if kind == "recipe":
        contents[target] = _fill("recipe.yaml", names)
    else:
        contents[target / "pyproject.toml"] = _fill(f"{kind}.toml", names)
        contents[target / name / "__init__.py"] = _fill(f"{kind}.py.txt", names)
    if kind == "encoder":
        contents[target / "recipe.yaml"] = _fill("encoder_recipe.yaml", names)
    for path, text in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    return tuple(contents)


def _fill(template: str, names: dict[str, str]) -> str:
    text = (files("arcuate") / "experiments" / "skeletons" / template).read_text("utf-8")
    for key, value in names.items():
        text = text.replace("{{" + key + "}}", value)
    return text
