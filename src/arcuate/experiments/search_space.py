"""The search space of a sweep: a range or choices per setting, validated by loading recipes with the end values."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from arcuate.config import Overrides, Settings, known_paths, nearest, override_list, read_yaml, to_yaml_line
from arcuate.errors import UserError
from arcuate.experiments.recipe import Recipe, load_recipe
from arcuate.training.config import DESCRIPTIVE_KEYS

_EXAMPLE = "schedule.peak_lr: {low: 0.001, high: 0.01, log: true}"


class Range(Settings):
    low: float = Field(description="Lowest value.")
    high: float = Field(description="Highest value.")
    log: bool = Field(False, description="Sample uniformly in the logarithm.")
    step: float | None = Field(None, gt=0.0, description="Distance between values, starting at `low`.")

    @model_validator(mode="after")
    def _check(self) -> "Range":
        if not self.low < self.high:
            raise ValueError(f"low {self.low:g} must be below high {self.high:g}")
        if self.log and self.low <= 0:
            raise ValueError(f"log needs a low above 0, got {self.low:g}")
        if self.log and self.step is not None:
            raise ValueError("log and step cannot be combined; leave one of them out")
        if self.step is not None:
            n_steps = (self.high - self.low) / self.step
            if abs(n_steps - round(n_steps)) > 1e-6 * n_steps:
                reached = self.low + int(n_steps) * self.step
                raise ValueError(f"steps of {self.step:g} do not reach high {self.high:g}; use high: {reached:g}")
        return self

    @property
    def _inner_value(self) -> float:
        """A value inside the range; an integer only if all its values are integers."""
        return self.low + (self.step if self.step is not None else 0.37 * (self.high - self.low))


class Choices(Settings):
    choices: tuple[Any, ...] = Field(min_length=2, description="Values to choose from.")

    @property
    def texts(self) -> list[str]:
        """Every choice as YAML on one line."""
        return [to_yaml_line(choice) for choice in self.choices]


@dataclass(frozen=True)
class Dimension:
    """One setting that a sweep varies."""

    path: str
    values: Range | Choices
    is_integer: bool = False  # a range of integers

    def to_override(self, value: Any) -> str:
        """`path=value` for the command line. A choice is given as its text."""
        return to_override(self.path, value)


def to_override(path: str, value: Any) -> str:
    """`path=value` of a proposed value; choices are proposed as their text."""
    return f"{path}={value if isinstance(value, str) else to_yaml_line(value)}"


def read_space(
    space: Mapping[str, Any] | str | Path, recipe: str | Path, overrides: Overrides = ()
) -> tuple[Dimension, ...]:
    """The dimensions of a mapping or YAML file, each validated against the recipe that it varies."""
    if isinstance(space, Mapping):
        tree, where = dict(space), "search space"
    else:
        tree, where = read_yaml(Path(space)), str(space)
        if not isinstance(tree, dict) or not tree or not all(isinstance(path, str) for path in tree):
            raise UserError(f"{space} should name the settings to vary, such as '{_EXAMPLE}'")
    listed = override_list(overrides)
    fixed = [o.partition("=")[0].strip() for o in listed]
    known = known_paths(Recipe)
    for path in tree:
        _check_path(where, path, known)
        for other in [p for p in tree if p != path] + fixed:
            if path == other or path.startswith(f"{other}."):
                raise UserError(f"{where}: {path} is varied, but {other} is also set; leave one of them out")
    return tuple(_read_dimension(where, path, values, recipe, listed) for path, values in tree.items())


def _check_path(where: str, path: str, known: set[str]) -> None:
    if path in DESCRIPTIVE_KEYS:
        raise UserError(f"{where}: {path} only describes a recipe; vary a setting")
    if path not in known:
        near = nearest(path, sorted(known))
        hint = f"; did you mean {near!r}?" if near else "; see: arcuate recipes show"
        raise UserError(f"{where}: no setting {path!r}{hint}")


def _read_dimension(where: str, path: str, given: Any, recipe: str | Path, overrides: list[str]) -> Dimension:
    if not isinstance(given, Mapping):
        raise UserError(f"{where}: {path} needs a range or choices, such as '{_EXAMPLE}'")
    kind = Choices if "choices" in given else Range
    try:
        values = kind.model_validate(dict(given))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise UserError(
            f"{where}: {path}{f'.{key}' if key else ''}: {problem['msg'].removeprefix('Value error, ')};"
            " a range needs low and high (optionally log or step); otherwise give choices"
        ) from None

    def find_problem(text: str) -> str | None:
        try:
            load_recipe(recipe, [*overrides, f"{path}={text}"])
        except UserError as error:
            return str(error)
        return None

    if isinstance(values, Choices):
        dimension, texts = Dimension(path, values), values.texts
        if len(set(texts)) < len(texts):
            raise UserError(f"{where}: {path} lists a choice twice")
    else:
        numbers = [values.low, values.high] + ([values.step] if values.step is not None else [])
        # A range of integers, unless the setting also accepts a value between two of them.
        is_integer = all(n == int(n) for n in numbers) and (
            values.step is not None or find_problem(to_yaml_line(values._inner_value)) is not None
        )
        dimension = Dimension(path, values, is_integer)
        ends = (values.low, values.high) if is_integer else (values.low, values.high, values._inner_value)
        texts = [to_yaml_line(int(v) if is_integer else v) for v in ends]
    for text in texts:
        if problem_text := find_problem(text):
            raise UserError(f"{where}: {path} cannot be {text}: {problem_text}")
    return dimension
