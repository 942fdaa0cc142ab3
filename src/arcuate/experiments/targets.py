"""Targets: success criteria stated in a recipe, judged from the validation rows of a run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from arcuate.config import Settings
from arcuate.files import Result, finite_number
from arcuate.progress import percent

_RATES = ("per", "wer")


class Target(Settings):
    """Success criteria of the run: all given error rates must be reached in the same validation."""

    per: float | None = Field(None, gt=0.0, le=100.0, description="Maximum validation PER, as a fraction; null = none.")
    wer: float | None = Field(None, gt=0.0, le=100.0, description="Maximum validation WER, as a fraction; null = none.")

    @model_validator(mode="after")
    def _are_fractions(self) -> "Target":
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
        return " and ".join(f"{_shown(n, rate_name)} ≤ {percent(rate)}" for n, rate in self.rates.items())


@dataclass(frozen=True)
class TargetOutcome(Result):
    """Whether a run met its target, with the validation that decided it."""

    status: Literal["met", "missed", "open"]
    step: int | None  # first validation that met the target
    text: str  # one clause


def judge_target(
    target: Target, rows: Iterable[Mapping[str, Any]], ended: bool, rate_name: str = "PER"
) -> TargetOutcome:
    """Check a target against validation rows of metrics.jsonl; `ended`: no further validations will follow.

    `rate_name` is what `per` is called in the text: PER, or CER for characters.
    """
    measured = [(row, [finite_number(row.get(name)) for name in target.rates]) for row in rows]
    known = [(row, [rate for rate in rates if rate is not None]) for row, rates in measured if None not in rates]
    for row, rates in known:
        if all(rate <= limit for rate, limit in zip(rates, target.rates.values(), strict=True)):
            return TargetOutcome("met", int(row["step"]), _rates_text(target, row, rate_name))
    best = min(known, key=lambda found: found[1], default=None)
    so_far = "not measured" if best is None else f"best {_rates_text(target, best[0], rate_name)}"
    return TargetOutcome("missed" if ended else "open", None, so_far)


def _rates_text(target: Target, row: Mapping[str, Any], rate_name: str) -> str:
    rates = " and ".join(f"{_shown(name, rate_name)} {percent(row[name])}" for name in target.rates)
    return f"{rates} at step {int(row['step']):,}"


def _shown(name: str, rate_name: str) -> str:
    return rate_name if name == "per" else name.upper()
