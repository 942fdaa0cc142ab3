"""Damaged run folders, and suggestions that depend on the recipe."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from arcuate.doctor import diagnose
from arcuate.doctor.advice import find_causes
from arcuate.doctor.diagnose import measure
from arcuate.doctor.rules import Finding
from arcuate.insight.run_data import read_run
from arcuate.insight.runs import run_dict
from support.doctor_logs import falling, log
from support.fabricate_runs import make_run

MASKED = {"augment.time_masks.n_masks": 20, "augment.time_masks.max_fraction": 0.075}


def test_healthy_short_run_gets_no_advice(tmp_path: Path) -> None:
    """Heavy time masks raise the error rate of a run of ten epochs; they were advised for every healthy run."""
    diagnosis = diagnose(make_run(tmp_path / "plain").path)
    assert (diagnosis.suggestion, diagnosis.causes) == ("nothing needs to be fixed", ())


@pytest.mark.parametrize(("epochs", "advised"), [(8, False), (250, True)])
def test_masks_are_advised_to_long_healthy_runs_with_their_evidence(epochs: int, advised: bool) -> None:
    long = replace(log(falling(end=0.2)), n_trials_seen=100 * epochs, n_train=100)
    measurements, _, _ = measure(long)
    causes = find_causes(Finding("healthy", (), None), measurements)
    assert [cause.because for cause in causes] == (
        ["the run has 250 epochs; published results show 18 % fewer word errors from heavy masking after 250 epochs"]
        if advised
        else []
    )


def test_suggestions_exclude_current_settings() -> None:
    overfit = log(falling(end=0.3), np.r_[falling(6.5, 1.0, n=40), np.linspace(1, 3, 60)], falling(7.0, 0.01))
    for settings, advised in (({}, True), (dict(MASKED), False)):
        measurements, _, _ = measure(replace(overfit, settings=settings, is_arcuate=True))
        changes = " ".join(cause.change for cause in find_causes(Finding("overfit", (), 4000), measurements))
        assert ("n_masks=20" in changes) == advised


def test_learning_rate_is_named_as_in_the_recipe(tmp_path: Path) -> None:
    run = make_run(tmp_path / "flat", ["schedule.peak_lr=0.001"], per=0.9, recipe="b2t24-gru")
    changes = " ".join(cause.change for cause in diagnose(run.path).causes)
    assert "schedule.peak_lr=" in changes


def test_damaged_recipe_is_reported_with_its_error(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.recipe_file.write_text("train:\n  steps: [1,\n")
    note = next(note for note in diagnose(run.path).notes if "recipe" in note)
    assert "node content" in note
    assert "line 3" in note
    assert read_run(run, "run", diagnose).problems[0].endswith("(line 3)")


def test_log_with_damaged_lines_keeps_its_best(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    best = diagnose(run.path).best_per
    text = run.metrics_file.read_text()
    run.metrics_file.write_text(text[:200] + "\x7f\x00\n" + text)
    row = run_dict(read_run(run, "run", diagnose))
    assert (row["verdict"], row["best_per"]) == ("healthy", best)
    assert "not JSON" in row["problems"][0]
    run.metrics_file.write_text("nothing left\n")
    row = run_dict(read_run(run, "run", diagnose))
    assert (row["verdict"], row["best_per"]) == (None, None)


def test_finished_healthy_run_is_not_also_unfinished(tmp_path: Path) -> None:
    diagnosis = diagnose(make_run(tmp_path / "run", per=0.05).path)
    assert (diagnosis.primary, diagnosis.secondary) == ("healthy", ())
