"""Targets: success criteria stated in a recipe, judged from the validation rows of a run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from arcuate.config import Settings
from arcuate.files import fields_to_dict
from arcuate.progress import percent
from arcuate.training.schedule import Steps

_RATES = ("per", "wer")


class Target(Settings):
    """Success criteria of the run: all given error rates must be reached in the same validation, by step `by_step`."""

    per: float | None = Field(None, gt=0.0, le=100.0, description="Maximum validation PER, as a fraction; null = none.")
    wer: float | None = Field(None, gt=0.0, le=100.0, description="Maximum validation WER, as a fraction; null = none.")
    by_step: Steps | None = Field(None, description="Step by which the target must be met; null = the end of the run.")

    @model_validator(mode="after")
    def _has_a_criterion(self) -> "Target":
        if not self.rates:
            raise ValueError("a target needs an error rate; set target.per or target.wer, or target to null")
        for name, rate in self.rates.items():
            if rate >= 1:
                raise ValueError(f"{name} is a fraction below 1, got {rate:g}; for {rate:g} % use {rate / 100:g}")
        return self

    @property
    def rates(self) -> dict[str, float]:
        """The criteria by name of the error rate."""
        return {name: rate for name in _RATES if (rate := getattr(self, name)) is not None}

    def text(self, rate_name: str = "PER") -> str:
        """The criteria in words; `rate_name` is what `per` is called: PER, or CER for characters."""
        limits = " and ".join(f"{_shown(n, rate_name)} ≤ {percent(rate)}" for n, rate in self.rates.items())
        return limits + ("" if self.by_step is None else f" by step {self.by_step:,}")


@dataclass(frozen=True)
class TargetOutcome:
    """Whether a run met its target, with the validation that decided it."""

    status: Literal["met", "missed", "open"]
    step: int | None  # first validation that met the target
    text: str  # one clause

    def to_dict(self) -> dict[str, Any]:
        return fields_to_dict(self)


def judge_target(
    target: Target, rows: Iterable[Mapping[str, Any]], ended: bool, rate_name: str = "PER"
) -> TargetOutcome:
    """Check a target against validation rows of metrics.jsonl; `ended`: no further validations will follow.

    `rate_name` is what `per` is called in the text: PER, or CER for characters.
    """
    limit = target.by_step
    known = [row for row in rows if all(_rate(row, name) is not None for name in target.rates)]
    counted = [row for row in known if limit is None or int(row["step"]) <= limit]
    for row in counted:
        if all((_rate(row, name) or 0.0) <= rate for name, rate in target.rates.items()):
            return TargetOutcome("met", int(row["step"]), _rates_text(target, row, rate_name))
    best = min(counted, key=lambda row: [_rate(row, name) or 0.0 for name in target.rates], default=None)
    so_far = "not measured" if best is None else f"best {_rates_text(target, best, rate_name)}"
    if ended or (limit is not None and any(int(row["step"]) >= limit for row in known)):
        return TargetOutcome("missed", None, so_far)
    return TargetOutcome("open", None, so_far)


def _rate(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value else None


def _rates_text(target: Target, row: Mapping[str, Any], rate_name: str) -> str:
    rates = " and ".join(f"{_shown(name, rate_name)} {percent(_rate(row, name))}" for name in target.rates)
    return f"{rates} at step {int(row['step']):,}"


def _shown(name: str, rate_name: str) -> str:
    return rate_name if name == "per" else name.upper()


def find_impossible_target(target: Target, steps: int, validate_every: int, words: bool) -> str | None:
    """Reason why no validation of the planned run can decide the target; None if one can."""
    if "wer" in target.rates and not words:
        return (
            f"the target {target.text()} is not checked during training, because validations do not decode words; set"
            " validate.words=true"
        )
    first = min(steps, validate_every)
    if target.by_step is not None and target.by_step < first:
        return (
            f"the target {target.text()} cannot be met: the first validation is at step {first:,}; lower"
            " train.validate_every, or raise target.by_step"
        )
    return None
