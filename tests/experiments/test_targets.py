"""Targets: judged by validations, and impossible ones."""

from pathlib import Path
from typing import Any

import pytest

from arcuate.errors import UserError
from arcuate.experiments.recipe import load_recipe
from arcuate.experiments.targets import Target, judge_target
from arcuate.experiments.train import train

SMALL = ["encoder.width=8", "encoder.depth=1", "data.batching.batch_size=4", "train.steps=4", "train.validate_every=2"]


def rows(**rates: tuple[float, ...]) -> list[dict[str, Any]]:
    names = list(rates)
    return [
        {"step": 100 * (i + 1), "split": "val", **dict(zip(names, values, strict=True))}
        for i, values in enumerate(zip(*rates.values(), strict=True))
    ]


@pytest.mark.parametrize(
    ("target", "ended", "status", "step"),
    [
        (Target(per=0.3), False, "met", 200),
        (Target(per=0.1), False, "open", None),
        (Target(per=0.1), True, "missed", None),
        (Target(per=0.3, wer=0.45), False, "met", 300),
    ],
)
def test_judgement(target: Target, ended: bool, status: str, step: int | None) -> None:
    outcome = judge_target(target, rows(per=(0.5, 0.3, 0.2), wer=(0.6, 0.5, 0.4)), ended)
    assert (outcome.status, outcome.step) == (status, step)


def test_rates_that_were_not_measured_do_not_count() -> None:
    outcome = judge_target(Target(wer=0.1), rows(per=(0.5, 0.01)), ended=True)
    assert (outcome.status, outcome.text) == ("missed", "not measured")


def test_training_says_whether_the_target_was_met(cohort_store: Path, tmp_path: Path, messages: list[str]) -> None:
    longer = ["train.steps=60", "train.validate_every=20", "train.log_every=20"]
    overrides = [*SMALL, *longer, "purpose=A first look", "target.per=0.999"]
    result = train("tiny", cohort_store, tmp_path / "run", overrides=overrides)
    assert result.target is not None and (result.target.status, result.target.step) == ("met", 20)
    assert any("purpose: A first look" in message for message in messages)
    assert any("target met: PER ≤ 99.9 %" in message for message in messages)
    changed = [*overrides[:-1], "target.per=0.001", "target.wer=0.5"]  # may differ in a resumed run
    assert train("tiny", cohort_store, result.run, overrides=changed, resume=True).target.status == "missed"
    assert any("set validate.lm=default" in message for message in messages)


@pytest.mark.parametrize("target", ["{per: 0}", "{per: 0.1, by: 4}", "null"])
def test_invalid_targets_are_rejected(target: str) -> None:
    with pytest.raises(UserError, match="target"):
        load_recipe("tiny", [f"target={target}"])


@pytest.mark.parametrize("rate", [1, 5, 25])
def test_percentages_are_rejected_with_the_fraction(rate: float) -> None:
    with pytest.raises(UserError, match=f"for {rate} % use {rate / 100:g}"):
        load_recipe("tiny", [f"target={{per: {rate}}}"])
