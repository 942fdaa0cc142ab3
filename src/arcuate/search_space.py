"""The settings a sweep varies: ranges and choices by path, checked by parsing recipes at their ends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, model_validator

from arcuate.errors import UserError
from arcuate.recipe import Recipe, load_recipe
from arcuate.recipe_diff import ABOUT
from arcuate.recipe_mistakes import known_paths, nearest
from arcuate.settings import Settings

EXAMPLE = "schedule.peak: {low: 0.001, high: 0.01, log: true}"


class Range(Settings):
    low: float
    high: float
    log: bool = Field(False, description="drawn evenly by ratio instead of by difference")
    step: float | None = Field(None, gt=0.0, description="only low, low + step, low + 2 step …")

    @model_validator(mode="after")
    def _can_be_drawn_from(self) -> "Range":
        if not self.low < self.high:
            raise ValueError(f"low {self.low:g} must lie below high {self.high:g}")
        if self.log and self.low <= 0:
            raise ValueError(f"log needs a low above 0, not {self.low:g}")
        if self.log and self.step is not None:
            raise ValueError("log and step do not go together; leave one of them out")
        if self.step is not None:
            n_steps = (self.high - self.low) / self.step
            if abs(n_steps - round(n_steps)) > 1e-6 * n_steps:
                reached = self.low + int(n_steps) * self.step
                raise ValueError(f"steps of {self.step:g} miss high {self.high:g}; use high: {reached:g}")
        return self

    @property
    def between(self) -> float:
        """A value inside the range that is whole only where all of them are."""
        return self.low + (self.step if self.step is not None else 0.37 * (self.high - self.low))


class Choices(Settings):
    choices: tuple[Any, ...] = Field(min_length=2)


@dataclass(frozen=True)
class Dimension:
    """One setting to vary."""

    path: str
    values: Range | Choices
    whole: bool = False  # the range has whole numbers only

    def override(self, value: Any) -> str:
        """As it is given to `arcuate train`; of choices, `value` is the text already."""
        return f"{self.path}={value if isinstance(self.values, Choices) else as_text(value)}"

    def texts(self) -> list[str]:
        """Every choice as YAML on one line."""
        return [as_text(choice) for choice in self.values.choices] if isinstance(self.values, Choices) else []

    def to_json(self) -> dict[str, Any]:
        return {**self.values.model_dump(mode="json"), "whole": self.whole}


def as_text(value: Any) -> str:
    """A value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=float("inf"))
    return text.removesuffix("...\n").strip()


def read_space(file: Path, recipe: str, overrides: Sequence[str] = ()) -> tuple[Dimension, ...]:
    """The dimensions a space file names, each checked against the recipe it will vary."""
    tree = read_mapping(file)
    fixed = [o.partition("=")[0].strip() for o in overrides]
    known = known_paths(Recipe)
    for path in tree:
        refuse_path(file, path, known)
        for other in [p for p in tree if p != path] + fixed:
            if path == other or path.startswith(f"{other}."):
                raise UserError(
                    f"{file}: {path} is varied, but {other} is set as well; leave one of them out"
                )
    return tuple(read_dimension(file, path, values, recipe, overrides) for path, values in tree.items())


def read_mapping(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the search space {file} cannot be read: {error}") from None
    except (yaml.YAMLError, RecursionError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{file} is no valid YAML: {first}") from None
    if not isinstance(tree, dict) or not tree or not all(isinstance(path, str) for path in tree):
        raise UserError(f"{file} should name the settings to vary, such as '{EXAMPLE}'")
    return tree


def refuse_path(file: Path, path: str, known: set[str]) -> None:
    if path in ABOUT:
        raise UserError(f"{file}: {path} only describes a recipe; vary a setting")
    if path not in known:
        near = nearest(path, sorted(known))
        hint = f"; did you mean {near!r}?" if near else "; see: arcuate recipes show"
        raise UserError(f"{file}: there is no setting {path!r}{hint}")


def read_dimension(file: Path, path: str, given: Any, recipe: str, overrides: Sequence[str]) -> Dimension:
    if not isinstance(given, Mapping):
        raise UserError(f"{file}: {path} needs a range or choices, such as '{EXAMPLE}'")
    kind = Choices if "choices" in given else Range
    try:
        values = kind.model_validate(dict(given))
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise UserError(
            f"{file}: {path}{f'.{place}' if place else ''}: {problem['msg'].removeprefix('Value error, ')};"
            " a range has low, high, log and step, a choice has choices"
        ) from None

    def refusal(text: str) -> str | None:
        try:
            load_recipe(recipe, [*overrides, f"{path}={text}"])
        except UserError as error:
            return str(error)
        return None

    if isinstance(values, Choices):
        dimension = Dimension(path, values)
        tried = dimension.texts()
        if len(set(tried)) < len(tried):
            raise UserError(f"{file}: {path} has a choice twice")
    else:
        numbers = [values.low, values.high] + ([values.step] if values.step is not None else [])
        may_be_whole = all(n == int(n) for n in numbers)
        whole = may_be_whole and (values.step is not None or refusal(as_text(values.between)) is not None)
        dimension = Dimension(path, values, whole)
        ends = (values.low, values.high) if whole else (values.low, values.high, values.between)
        tried = [as_text(int(v) if whole else v) for v in ends]
    for text in tried:
        if reason := refusal(text):
            raise UserError(f"{file}: {path} cannot be {text}: {reason}")
    return dimension
