"""The sabotage suite: its recipes, faults and outcomes; the runs themselves are a benchmark."""

from pathlib import Path
from typing import Any

import pytest

from arcuate.experiments.recipe import load_recipe
from support.benchmarks import load

suite = load("sabotage")


def test_there_are_enough_ways_and_each_is_a_valid_recipe() -> None:
    names = [sabotage.name for sabotage in suite.SABOTAGES]
    assert len(names) == len(set(names)) >= 24
    healthy = load_recipe("tiny", suite.RECIPE)
    for sabotage in (*suite.SABOTAGES, *suite.HEALTHY_RECIPES):
        recipe = load_recipe("tiny", {**suite.RECIPE, **dict(sabotage.overrides)})
        assert (recipe != healthy) == bool(sabotage.overrides), sabotage.name
        if sabotage.cure != "none":
            assert bool(sabotage.overrides) + bool(sabotage.fault) + bool(sabotage.patch) == 1, sabotage.name


@pytest.mark.parametrize("name", ["rate-10x", "corrupt-batch", "repeating-order"])
def test_a_sabotaged_run_is_trained_once_and_recorded(name: str, cohort_store: Path, tmp_path: Path) -> None:
    (tmp_path / "data/demo").mkdir(parents=True)
    (tmp_path / "data/demo/store").symlink_to(cohort_store)
    sabotage = next(s for s in suite.SABOTAGES if s.name == name)
    job = suite.Job(sabotage, "demo", 0, "guard", tmp_path, steps=2)
    record = suite.run(job)
    assert (record["name"], record["error"], record["incidents"]) == (name, None, [])
    assert 0 < record["per"] <= 2
    assert suite.run(job)["cpu_seconds"] == record["cpu_seconds"]  # read, not trained again


def made(per: float | None, arm: str = "guard", cure: str = "optimizer", error: str | None = None) -> dict[str, Any]:
    return {"name": "made up", "cohort": "demo", "arm": arm, "cure": cure, "per": per, "error": error}


def test_outcomes_are_relative_to_the_mean_healthy_run() -> None:
    healthy = [made(per, "off", "none") for per in (0.18, 0.22)]
    runs = [
        made(0.22),
        made(0.2201),
        made(0.25),
        made(0.2501),
        made(0.2, error="stopped"),
        made(None),
        made(0.9, "off"),
    ]
    summary = suite.summarise([*healthy, *runs])
    assert summary["healthy"] == {"demo": pytest.approx(0.2)}
    expected = ["within 10 %", "within 25 %", "within 25 %", "lost", "lost", "lost", "lost"]
    assert [run["outcome"] for run in summary["runs"]] == expected
    assert summary["groups"] == {
        "optimizer, guard": {"runs": 6, "within 10 %": 1, "within 25 %": 2, "lost": 3},
        "optimizer, off": {"runs": 1, "lost": 1},
    }
