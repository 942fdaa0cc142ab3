"""The base of every settings class: unknown keys are refused, values never change after validation."""

from collections.abc import Hashable
from functools import cache
from typing import Any, cast, get_args

from pydantic import BaseModel, ConfigDict, model_validator


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, given: Any) -> Any:
        """Python takes true for 1: a width of `true` or steps of `on` would train another model without a word."""
        if isinstance(given, dict):
            for name, field in cls.model_fields.items():
                value = given.get(field.alias or name)
                values = value if isinstance(value, (list, tuple)) else [value]
                if any(isinstance(v, bool) for v in values) and not takes_truth(
                    cast(Hashable, field.annotation)
                ):
                    raise ValueError(f"{field.alias or name} is no switch; give a value, not true or false")
        return given


@cache
def takes_truth(annotation: Hashable) -> bool:
    """Whether true and false are among the values of a type."""
    parts = get_args(annotation)
    if not parts:
        return annotation is bool or annotation is Any
    return any(part is True or part is False or takes_truth(part) for part in parts)
