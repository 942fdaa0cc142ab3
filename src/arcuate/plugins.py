"""User-defined components: encoders, losses, augmentations, front-end steps, readers and live sources.

A component can be specified in two ways. An installed package registers it as an entry point of the group
`arcuate.encoders`, `arcuate.losses`, `arcuate.augmentations`, `arcuate.front_end_steps`, `arcuate.readers` or
`arcuate.live_sources`; its name is then a `kind` like the built-in ones. An import path such as `mylab.models:ConvNet`
specifies any class. Because importing runs code, its top-level package must be allowed first: by a recipe or option
that the user gives, or by `--allow-code mylab` for names found in a checkpoint, run or model folder.
"""

import importlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from arcuate.errors import UserError

GROUPS = {  # entry-point group after `arcuate.`, and the name of its components in messages
    "encoders": "encoder",
    "losses": "loss",
    "augmentations": "augmentation",
    "front_end_steps": "front-end step",
    "readers": "reader",
    "live_sources": "live source",
}
ALLOW_VARIABLE = "ARCUATE_ALLOW_CODE"  # environment variable: allowed packages, separated by commas
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_PACKAGE = re.compile(r"[A-Za-z_]\w*")
_trusted: ContextVar[bool] = ContextVar("trusted", default=False)


def is_import_path(kind: object) -> bool:
    """Whether a kind has the form package.module:Class."""
    return isinstance(kind, str) and _IMPORT_PATH.fullmatch(kind) is not None


def allow_code(*packages: str) -> None:
    """Allow importing components of these top-level packages, in this process and those that it starts."""
    for package in packages:
        if not _PACKAGE.fullmatch(package):
            raise UserError(f"--allow-code {package!r} is not the name of a package, such as mylab")
    os.environ[ALLOW_VARIABLE] = ",".join(dict.fromkeys([*_allowed_packages(), *packages]))


@contextmanager
def trust_code(trusted: bool = True) -> Iterator[None]:
    """Within the context, import paths come from the user's own input, so their packages are allowed."""
    token = _trusted.set(trusted)
    try:
        yield
    finally:
        _trusted.reset(token)


def component_names(group: str) -> tuple[str, ...]:
    """Names of the installed components of a group, sorted."""
    return tuple(sorted(_entry_points(group)))


def has_component(group: str, kind: object) -> bool:
    """Whether a kind is an import path, or the name of an installed component of the group."""
    return is_import_path(kind) or (isinstance(kind, str) and kind in _entry_points(group))


def load_component(group: str, kind: str) -> Any:
    """Load the class of an installed component or import path; UserError if it is missing, fails or is not allowed."""
    if not is_import_path(kind):
        found = _entry_points(group).get(kind)
        if found is None:
            known = ", ".join(component_names(group)) or "none"
            raise UserError(
                f"no {GROUPS[group]} is named {kind!r}; installed are {known}, or give an import path such as"
                " mylab.models:ConvNet"
            )
        with _without_current_folder():
            return _load(found, kind)
    package = kind.partition(":")[0].partition(".")[0]
    if _trusted.get():
        allow_code(package)
    elif package not in _allowed_packages():
        raise UserError(
            f"{kind!r} requires importing the package {package}, which checkpoints, runs and model folders may do only"
            f" with permission; if you trust it, add --allow-code {package}"
        )
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that it does not shadow an installed package
    return _load(EntryPoint(kind, kind, f"arcuate.{group}"), kind)


@contextmanager
def _without_current_folder() -> Iterator[None]:
    """Import installed packages as if the program had been started elsewhere.

    A project folder often has the same name as the package in it. With `python -m` in the parent of that folder, Python
    would import the folder as a namespace package instead of the installed package.
    """
    kept = sys.path[:]
    here = {"", os.getcwd()}
    sys.path[:] = [path for path in kept if path not in here]
    try:
        yield
    finally:
        sys.path[:] = kept


def _load(found: EntryPoint, kind: str) -> Any:
    module = found.value.partition(":")[0]
    try:
        importlib.import_module(module)
        component = found.load()
    except ModuleNotFoundError as error:
        raise UserError(
            f"{kind!r} cannot be imported: no module {error.name}; install the package, or run the command in the"
            " folder that contains it"
        ) from error
    except AttributeError as error:
        raise UserError(f"{kind!r} cannot be imported: {error}; check the name after the colon") from error
    except Exception as error:
        summary = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"{kind!r} cannot be imported: {type(error).__name__}: {summary}; correct the module"
        ) from error
    return component


def _allowed_packages() -> tuple[str, ...]:
    return tuple(name for name in os.environ.get(ALLOW_VARIABLE, "").split(",") if name)


@cache
def _entry_points(group: str) -> dict[str, EntryPoint]:
    if group not in GROUPS:
        raise ValueError(f"unknown group of components {group!r}")
    return {found.name: found for found in entry_points(group=f"arcuate.{group}")}
