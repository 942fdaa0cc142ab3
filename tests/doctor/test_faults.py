"""Faults in arcuate runs, produced by training or injected into the files of a trained run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from arcuate.doctor import diagnose
from support.cli import one_object
from support.command import arcuate

SHORT = [
    *("train.steps=80", "train.validate_every=8", "train.log_every=4", "train.checkpoint_every=40"),
    *("encoder.depth=1", "data.batching.batch_size=8", "schedule.peak_lr=0.008"),
]
BROKEN = ("exploded", "collapsed", "degraded", "restarted")


def train(store: Path, path: Path, *overrides: str) -> Path:
    done = arcuate("train", "tiny", "--data", store, "--run", path, "--json", *SHORT, *overrides)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def run(cohort_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(cohort_store, tmp_path_factory.mktemp("runs") / "good")


def edited(run: Path, to: Path, change: Callable[[dict], dict]) -> Path:
    """A copy of a run folder with each row of its log changed."""
    shutil.copytree(run, to, ignore=shutil.ignore_patterns("checkpoints"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (to / "metrics.jsonl").write_text("".join(json.dumps(change(row)) + "\n" for row in rows))
    return to


def test_good_run_has_no_failure_verdict(run: Path) -> None:
    diagnosis = one_object(arcuate("doctor", run, "--json").stdout)
    assert diagnosis["primary"] not in BROKEN
    assert (diagnosis["planned_steps"], diagnosis["last_step"], diagnosis["dataset"]) == (80, 80, None)
    assert diagnosis["best_per"] == min(r["per"] for r in rows_of(run) if r["split"] == "val")


def rows_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_non_finite_loss_from_step_40_on(run: Path, tmp_path: Path, value: float | None) -> None:
    def change(row: dict) -> dict:
        broken = row["split"] == "train" and row["step"] >= 40
        return {**row, "loss": value} if broken else row

    diagnosis = diagnose(edited(run, tmp_path / "nan", change))
    assert (diagnosis.primary, diagnosis.since_step) == ("exploded", 40)


@pytest.mark.thorough
def test_forty_times_the_learning_rate(cohort_store: Path, tmp_path: Path) -> None:
    diagnosis = diagnose(train(cohort_store, tmp_path / "fast", "schedule.peak_lr=0.32", "guard.enabled=false"))
    assert diagnosis.primary in ("collapsed", "exploded", "degraded")
    assert "learning rate" in diagnosis.causes[0].cause
    assert "schedule.peak_lr=" in diagnosis.suggestion


def test_blank_output(run: Path, tmp_path: Path) -> None:
    def blank(row: dict) -> dict:
        return {**row, "per": 1.0, "loss": 6.0} if row["split"] == "val" and row["step"] >= 24 else row

    def mute(row: dict) -> dict:
        return {**row, "blank_share": 1.0, "n_distinct": 0.0} if row["split"] == "train" and row["step"] > 50 else row

    diagnosis = diagnose(edited(run, tmp_path / "blank", blank))
    assert (diagnosis.primary, diagnosis.since_step) == ("collapsed", 24)
    diagnosis = diagnose(edited(run, tmp_path / "mute", mute))
    assert (diagnosis.primary, diagnosis.since_step) == ("collapsed", 52)


def test_guard_incidents_are_evidence(run: Path, tmp_path: Path) -> None:
    copy = edited(run, tmp_path / "skipped", lambda row: row)
    incident = {"step": 33, "kind": "non_finite", "action": "skip", "reason": "loss not finite", "trials": []}
    (copy / "incidents.jsonl").write_text(json.dumps(incident) + "\nhalf a li")
    diagnosis = diagnose(copy)
    assert diagnosis.primary == diagnose(run).primary
    assert "exploded" in diagnosis.secondary
    assert any("step 33" in sentence for sentence in diagnosis.evidence)


def test_run_that_has_just_started(run: Path, tmp_path: Path) -> None:
    young = edited(run, tmp_path / "young", lambda row: row)
    (young / "metrics.jsonl").write_text("".join((run / "metrics.jsonl").read_text().splitlines(True)[:5]))
    assert diagnose(young).primary == "too_short"
    (young / "metrics.jsonl").write_text("")
    assert diagnose(young).primary == "too_short"
