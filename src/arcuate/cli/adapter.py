"""Functions of the library as commands: the words of a command line are the parameters of its function."""

import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from cyclopts import Parameter
from cyclopts.token import Token
from cyclopts.validators import Number
from pydantic import BaseModel

from arcuate.errors import UserError

# Parameters that only Python has, most of them filled by `console.run`.
HOOKS = ("progress", "callbacks", "stop", "diagnose", "diagnosis_page", "write_report")
_NAMES = {
    "n_sessions": "--sessions",
    "n_trials": "--trials",
    "n_electrodes": "--electrodes",
    "licence": "--license",
}
_VARIABLES = {
    "token": "ARCUATE_TOKEN",
    "send_token": "ARCUATE_SEND_TOKEN",
    "redis": "ARCUATE_REDIS",
    "storage": "ARCUATE_STORAGE",
}
_MAY_BE_ZERO = ("seed", "port", "folds", "n_trials")
_SIMPLE = (str, int, float, bool, Path, type(None))


@dataclass(frozen=True)
class Command:
    """A command: its words after `arcuate`, the function it runs, and what prints the result."""

    name: str
    function: str  # import path, below `arcuate` if it begins with a dot
    positional: str  # parameters given without a flag; one of them may take several words: `models… path`
    summary: str
    show: str = ""  # function of this package that prints the result; by default its summary
    hidden: str = ""  # parameters that only Python has
    then: str = ""  # function of the result and the arguments whose value is printed


@dataclass(frozen=True)
class Call:
    """A parsed command line."""

    command: Command
    function: Callable[..., Any]
    values: dict[str, Any]  # arguments by parameter

    @property
    def trains(self) -> bool:
        return "callbacks" in inspect.signature(self.function).parameters

    def __call__(self, **hooks: Any) -> Any:
        """Run the command; of `hooks`, the function gets those that it takes."""
        parameters = inspect.signature(self.function).parameters
        named = self.values | {name: hook for name, hook in hooks.items() if name in parameters}
        several = [p.name for p in parameters.values() if p.kind == inspect.Parameter.VAR_POSITIONAL]
        words = [word for name in several for word in named.pop(name, ())]
        return self.function(*words, **named)


def load(path: str) -> Any:
    """The object at an import path `module:name`."""
    module, name = path.split(":")
    return getattr(import_module(f"arcuate{module}" if module.startswith(".") else module), name)


def parser(command: Command) -> Callable[..., Call]:
    """A function with the parameters of a command, as Cyclopts reads them, that returns the call without running it."""
    function = load(command.function)
    given = inspect.signature(function).parameters
    annotations = {name: hint for name, hint in function.__annotations__.items() if name != "return"}
    hints = get_type_hints(types.SimpleNamespace(__annotations__=annotations), function.__globals__)
    words = command.positional.split()
    names = [word.removesuffix("…") for word in words]
    parameters = []
    for name in (*names, *(name for name in given if name not in names)):
        if name in HOOKS or name in command.hidden.split():
            continue
        kind: Any = inspect.Parameter.POSITIONAL_ONLY if name in names else inspect.Parameter.KEYWORD_ONLY
        default, hint = given[name].default, _plain(hints[name])
        if words and f"{name}…" == words[-1]:
            kind, default, hint = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.empty, _item(hints[name])
        annotation = _annotated(name, hint, kind, default)
        parameters.append(given[name].replace(kind=kind, default=default, annotation=annotation))
    signature = inspect.Signature(parameters)

    def parse(*args: Any, **kwargs: Any) -> Call:
        return Call(command, function, dict(signature.bind(*args, **kwargs).arguments))

    parse.__signature__ = signature  # type: ignore[attr-defined]
    parse.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    parse.__doc__ = function.__doc__
    return parse


def _plain(hint: Any, in_union: bool = False) -> Any:
    """A type hint without the types that a command line cannot give; None if nothing is left."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        kept = [plain for member in inner if (plain := _plain(member, in_union=str in inner)) is not None]
        return Union[tuple(kept)]  # noqa: UP007 - made of a list
    if origin is Annotated:
        return _plain(inner[0], in_union)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return list[_plain(inner[0])]  # type: ignore[misc]
    if origin is Literal or hint in _SIMPLE or (not in_union and _is_options(hint)):
        return hint
    return None


def _item(hint: Any) -> Any:
    """The type of one of several words."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    lists = [found for member in members if get_origin(found := _plain(member)) is list]
    return get_args(lists[0])[0] if lists else _plain(hint)


def _is_options(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseModel)


def _annotated(name: str, hint: Any, kind: Any, default: Any) -> Any:
    """A type hint with its flag, its environment variable, its converter and what the shell completes."""
    details: dict[str, Any] = {"env_var": _VARIABLES.get(name), "completer": _COMPLETERS.get(name)}
    members = get_args(hint) if get_origin(hint) is Union else (hint,)
    if default is False or default == ():
        details["show_default"] = False
    if {str, Path} <= {*members}:
        details["metavar"] = "PATH"
    if any(map(_is_options, members)):
        details["name"] = "*"  # each of its settings is an option
    elif kind == inspect.Parameter.KEYWORD_ONLY:
        details["name"] = _NAMES.get(name)
        if int in members:
            details["validator"] = Number(gte=int(name not in _MAY_BE_ZERO))
        for member in members:
            if get_origin(member) is list:
                details |= {"converter": _split, "consume_multiple": get_args(member)[0] in (int, float)}
    return Annotated[hint, Parameter(**details)]


def _recipes(context: Any) -> list[str]:
    from arcuate.experiments.recipe import recipe_names

    return [name for name in recipe_names() if name.startswith(context.incomplete)]


def _splits(context: Any) -> list[str]:
    return ["val", "test", "dev", "train"]


_COMPLETERS = {"recipe": _recipes, "a": _recipes, "b": _recipes, "split": _splits}


def _split(hint: Any, tokens: Sequence[Token]) -> list[Any]:
    """Values separated by commas or given one after the other; `none` for none."""
    kind = next(get_args(member)[0] for member in (hint, *get_args(hint)) if get_origin(member) is list)
    texts = [text.strip() for token in tokens for text in token.value.split(",")]
    try:
        return [kind(text) for text in texts if text != "none"]
    except ValueError:
        noun = "whole numbers" if kind is int else "numbers"
        raise UserError(f"{tokens[0].keyword} {','.join(texts)!r}: expected {noun}, such as 5,8") from None
