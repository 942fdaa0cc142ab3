"""Remedies: recipes that extend the run's own, and the comparison of a trained remedy with its run."""

import json
from pathlib import Path

import numpy as np
import pytest

from arcuate.doctor import diagnose, try_remedy, write_remedy
from arcuate.doctor.log_table import Series, TrainingLog
from arcuate.doctor.measurements import Measurements
from arcuate.doctor.page import diagnosis_page
from arcuate.doctor.updates import judge_updates
from arcuate.errors import UserError
from arcuate.experiments.recipe import diff_recipes, load_recipe
from arcuate.experiments.train import train
from arcuate.run import Run
from support.cli import assert_refused, one_object
from support.command import arcuate
from support.fabricate_runs import make_run, stuck_run

EXPLODING = Path(__file__).parents[2] / "examples" / "exploding-run.log"
SMALL = {"encoder.width": 16, "encoder.depth": 1, "train.steps": 12, "train.log_every": 1, "train.validate_every": 2}


def small_updates(path: Path) -> Run:
    return stuck_run(path, ["optimizer.eps=0.1"], np.linspace(3.3, 3.2, 24), 1.0, 0.0015, 150_000)


def large_updates(path: Path) -> Run:
    return stuck_run(path, ["schedule.peak_lr=0.3"], 3.5 + 0.2 * np.sin(np.arange(24)), 1.0, 0.3, 150_000)


def test_updates_that_are_too_small_get_larger(tmp_path: Path) -> None:
    diagnosis = diagnose(small_updates(tmp_path / "run").path)
    first = diagnosis.causes[0]
    assert (first.factor, diagnosis.fix().overrides) == ("eps", {"optimizer.eps": 1e-8})
    assert "schedule.peak_lr=" in first.change  # the alternative at this eps is a higher learning rate
    assert float(first.change.split("schedule.peak_lr=")[1].split(":")[0]) > 0.03
    assert "data" not in diagnosis.suggestion


def test_updates_that_are_too_large_get_smaller(tmp_path: Path) -> None:
    remedy = diagnose(large_updates(tmp_path / "run").path).fix()
    assert remedy.overrides["schedule.peak_lr"] <= 0.01


@pytest.mark.parametrize(("ratio", "direction"), [(1e-6, "too_small"), (0.2, "too_large")])
def test_logged_size_of_updates_decides(ratio: float, direction: str) -> None:
    steps = np.arange(1.0, 25.0)
    blank = Series(steps, np.ones(24))
    log = TrainingLog(
        per=blank, train_loss=Series(steps, np.full(24, 3.0)), update_ratio=Series(steps, np.full(24, ratio))
    )
    assert judge_updates(Measurements(log)).direction == direction


def test_remedy_file_extends_the_run_and_states_the_reason(tmp_path: Path) -> None:
    run = small_updates(tmp_path / "runs" / "stuck")
    out = tmp_path / "cured.yaml"
    done = arcuate("doctor", run.path, "--fix", out)
    assert done.returncode == 0, done.stderr
    text = out.read_text()
    assert "extends: runs/stuck/recipe.yaml" in text
    assert "# optimizer.eps: eps is too large" in text
    changes = diff_recipes(load_recipe(run.path), load_recipe(out))
    assert [(c.path, c.after) for c in changes] == [("optimizer.eps", 1e-8)]
    command = " ".join(done.stdout.split()).split("arcuate train ")[1]
    assert command.startswith(str(out)) and command.endswith(f"--run {run.path}-remedy")
    Path(f"{run.path}-remedy").mkdir()  # the command names a folder that does not exist
    assert diagnose(run.path).fix().train_command(out, None).endswith(f"--run {run.path}-remedy-2")
    assert_refused(arcuate("doctor", run.path, "--fix", out), "exists", "not overwritten")
    assert out.read_text() == text


def test_healthy_run_has_nothing_to_fix(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    done = arcuate("doctor", run.path, "--fix", tmp_path / "out.yaml", "--try", "--json")
    answer = one_object(done.stdout)
    assert (done.returncode, answer["fix"], answer["tried"], answer["remedy"]["changes"]) == (0, None, None, [])
    assert "nothing to fix" in answer["remedy"]["message"]
    assert not (tmp_path / "out.yaml").exists()
    assert_refused(arcuate("doctor", run.path, "--out", tmp_path / "tried"), "--try")


def test_log_of_another_trainer_has_no_recipe_to_extend(tmp_path: Path) -> None:
    loss = [*np.linspace(9.0, 3.4, 20), *np.linspace(3.4, 3.2, 20)]  # half of the run until the loss of blanks
    rows = [{"step": 100 * i, "per": 0.97, "val_loss": v, "lr": 0.0001} for i, v in enumerate(loss)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    diagnosis = diagnose(tmp_path / "log.jsonl")
    assert "too low" in diagnosis.causes[0].cause
    remedy = diagnosis.fix()
    assert [(c.key, c.times) for c in remedy.changes] == [("schedule.peak_lr", 10.0)]
    assert "raise the learning rate (schedule.peak_lr) to 10 times its value" in diagnosis.suggestion
    with pytest.raises(UserError, match="--dataset states the release"):
        write_remedy(remedy, tmp_path / "out.yaml")
    stated = diagnose(tmp_path / "log.jsonl", dataset="b2t24").fix()
    with pytest.raises(UserError, match="does not state"):
        write_remedy(stated, tmp_path / "out.yaml")


def test_log_of_a_known_release_gets_a_recipe_that_extends_the_official_one(tmp_path: Path) -> None:
    rows = [{"step": 100 * i, "per": 0.9 - 0.01 * i, "val_loss": 4 - 0.05 * i, "lr": 0.02} for i in range(40)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    remedy = diagnose(tmp_path / "log.jsonl", dataset="b2t24", planned_steps=10_000).fix()
    assert remedy.overrides == {"train.steps": 10_000}
    out = write_remedy(remedy, tmp_path / "out.yaml")
    assert load_recipe(out).extends == "b2t24-gru"
    assert "arcuate train b2t24-gru" in str(remedy.packaged_command(None))


def test_page_of_another_trainers_log_states_the_same_change_as_the_json_object() -> None:
    """Without a learning rate in the log and with unknown data the change is relative, and there is no command."""
    diagnosis = diagnose(EXPLODING)
    page = diagnosis_page(diagnosis)
    assert "arcuate doctor · exploding-run</p>" in page
    assert "<pre>arcuate train" not in page
    change = "lower the learning rate (schedule.peak_lr) to 0.25 of its value"
    assert change in page and change in diagnosis.suggestion
    assert diagnosis.to_dict()["causes"][0]["changes"] == [{"setting": "schedule.peak_lr", "times": 0.25}]


@pytest.mark.thorough
def test_remedy_is_trained_beside_the_run_and_compared(tmp_path: Path, cohort_store: Path) -> None:
    run = train("tiny", cohort_store, tmp_path / "run", overrides={**SMALL, "optimizer.eps": 0.1})
    remedy = diagnose(run.path).fix()
    assert remedy.overrides == {"optimizer.eps": 1e-8}
    tried = try_remedy(remedy)
    assert tried.run.path == tmp_path / "run-remedy"
    assert tried.outcome in ("better", "worse", "no_evidence")
    changed = [change.path for change in tried.comparison.differences[0].changes]
    assert changed == ["optimizer.eps"]  # same store, seed and steps
    assert "run-remedy" in tried.sentence
    with pytest.raises(UserError, match="not empty"):
        try_remedy(remedy)


@pytest.mark.parametrize(("scale", "peak"), [(1.0, None), (0.3, 0.0009)])
def test_settings_that_the_guard_found_are_advised(tmp_path: Path, scale: float, peak: float | None) -> None:
    """A run that became healthy because the guard lowered eps."""
    run = make_run(tmp_path / "run", ["optimizer.eps=0.1"], per=0.2)
    rewind = {"action": "rewind", "rewound_to": 0, "lr_scale": scale, "eps": 1e-8}
    rows = [
        {"step": 200, "kind": "stuck", **rewind},
        {"step": 40, "kind": "search", "reason": "next test run", **rewind},
    ]
    run.incidents_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    diagnosis = diagnose(run.path)
    assert diagnosis.primary == "healthy"
    assert diagnosis.causes[0].factor == "eps"
    assert "the guard rewound" in str(diagnosis.evidence) and "next test run" not in str(diagnosis.evidence)
    expected = {"optimizer.eps": 1e-8} | ({} if peak is None else {"schedule.peak_lr": pytest.approx(peak)})
    assert {
        k: v for k, v in diagnosis.fix().overrides.items() if k in ("optimizer.eps", "schedule.peak_lr")
    } == expected
