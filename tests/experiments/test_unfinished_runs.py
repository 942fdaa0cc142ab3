"""Runs that are unfinished, failed or were stopped by the guard enter no comparison, and no cause is named."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from arcuate.doctor import diagnose
from arcuate.errors import UserError
from arcuate.experiments.ablation import Experiment, cells, is_scored, overview, parse_factors
from arcuate.experiments.recipe import load_recipe
from arcuate.experiments.seeds import SeedRun, SeedsResult
from arcuate.files import append_jsonl, read_json, write_json, write_jsonl
from arcuate.insight.ablation import ablation_page, judge_ablation
from arcuate.insight.compare import compare
from arcuate.insight.ledger import write_ledger
from arcuate.run import Run, unfinished_reason
from support.fabricate_runs import make_run, write_val
from support.pages import check_page

N_STEPS = 600  # of the recipe `tiny`


def save_at(run: Run, step: int, stages_done: int = 0) -> None:
    """A last checkpoint at this step, as far as readers of a run folder look at it."""
    folder = run.checkpoints / f"step-{step:08d}"
    folder.mkdir()
    write_json(folder / "state.json", {"step": step, "curriculum": {"index": stages_done, "began": 0}})
    (run.checkpoints / "last").unlink(missing_ok=True)
    (run.checkpoints / "last").symlink_to(folder.name)


def interrupt(run: Run) -> None:
    write_jsonl(run.metrics_file, [row for row in run.metrics() if row["step"] <= 150])
    save_at(run, 150)


def stop_by_guard(run: Run) -> None:
    interrupt(run)
    append_jsonl(run.incidents_file, {"step": 170, "kind": "diverged", "action": "stop", "reason": "the loss exploded"})


def test_completion_is_read_from_the_last_checkpoint_or_the_log(tmp_path: Path) -> None:
    run = make_run(tmp_path / "logged")
    assert unfinished_reason(run) is None  # its checkpoints were deleted
    save_at(run, N_STEPS)
    assert unfinished_reason(run) is None
    interrupt(run)
    assert unfinished_reason(run) == "reached step 150 of 600"
    stopped = make_run(tmp_path / "stopped")
    stop_by_guard(stopped)
    assert unfinished_reason(stopped) == "stopped by the guard at step 170 of 600"
    assert unfinished_reason(Run(tmp_path)) is None  # not a trained run


def test_a_curriculum_that_ended_early_is_complete(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    text = run.recipe_file.read_text().replace("stages: []", "stages: [{name: a}, {name: b}]")
    run.recipe_file.write_text(text)
    save_at(run, 150, stages_done=1)
    assert unfinished_reason(run) == "reached step 150 of 600"
    save_at(run, 200, stages_done=2)
    assert unfinished_reason(run) is None


@pytest.mark.parametrize("harm", [interrupt, stop_by_guard])
def test_an_ablation_with_an_unfinished_arm_has_no_verdict(tmp_path: Path, harm: Callable[[Run], None]) -> None:
    factors, overrides = parse_factors(["eps:optimizer.eps=1e-4"])
    experiment = Experiment("tiny", overrides, factors, tmp_path / "store", tmp_path / "out", 3)
    for i, cell in enumerate(cells(experiment)):
        run = make_run(cell.run.path, cell.overrides, results=False)
        write_val(run, 0.9 if cell.arm.name == "eps" else 0.3, seed=i, label="last")
    (eps, *_) = [cell for cell in cells(experiment) if cell.arm.name == "eps"]
    assert "eps caused it" in judge_ablation(experiment).verdict
    harm(eps.run)
    result = judge_ablation(experiment)
    assert "No verdict yet" in result.verdict and "eps" in result.verdict
    assert result.total is None and result.n_comparisons == 0
    assert all(not factor.effects for factor in result.factors)
    assert len(result.missing) == 1 and unfinished_reason(eps.run) in result.missing[0]
    assert [row["state"] for row in overview(experiment)].count("missing") == 1
    page = ablation_page(result)
    check_page(page)
    assert "of 600" in page and "caused" not in page


def test_no_cause_is_named_while_another_arm_is_missing(tmp_path: Path) -> None:
    factors, overrides = parse_factors(["eps:optimizer.eps=1e-4", "rate:schedule.peak_lr=0.001"])
    experiment = Experiment("tiny", overrides, factors, tmp_path / "store", tmp_path / "out", 2)
    for i, cell in enumerate(cells(experiment)):
        run = make_run(cell.run.path, cell.overrides, results=False)
        write_val(run, 0.6 if "eps" in cell.arm.changed else 0.3, seed=i, label="last")
        if cell.arm.name == "rate":
            interrupt(run)
    result = judge_ablation(experiment)
    assert result.total is not None and result.total.significant  # both of its sides are complete
    assert "No verdict yet on the factors" in result.verdict and "rate" in result.verdict
    assert "caused" not in result.verdict and "largest first" not in result.verdict


def test_scores_of_an_earlier_checkpoint_do_not_count(tmp_path: Path) -> None:
    factors, overrides = parse_factors(["eps:optimizer.eps=1e-4"])
    experiment = Experiment("tiny", overrides, factors, tmp_path / "store", tmp_path / "out", 1)
    cell = cells(experiment)[0]
    run = make_run(cell.run.path, cell.overrides, results=False)
    write_val(run, 0.3, label="last")
    summary = run.results_file("val", "last", "json")
    write_json(summary, {**read_json(summary), "checkpoint": "step-00000150"})
    save_at(run, N_STEPS)
    assert not is_scored(experiment, cell)
    other = make_run(tmp_path / "other", results=False)
    write_val(other, 0.3, label="last")
    with pytest.raises(UserError, match="scores step-00000150, but the last checkpoint is now step-00000600"):
        compare(run, other, label="last")
    write_json(summary, {**read_json(summary), "checkpoint": "step-00000600"})
    assert is_scored(experiment, cell)


@pytest.mark.parametrize("harm", [interrupt, stop_by_guard])
def test_compare_rejects_unfinished_runs(tmp_path: Path, harm: Callable[[Run], None]) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", ["optimizer.eps=1e-4"], per=0.9)
    assert compare(a, b).differences[0].significant
    harm(b)
    with pytest.raises(UserError, match="of 600") as refusal:
        compare(a, b)
    assert str(b.path) in str(refusal.value) and str(a.path) + " (" not in str(refusal.value)


@pytest.mark.parametrize("harm", [interrupt, stop_by_guard])
def test_the_diary_tests_no_difference_from_an_unfinished_run(tmp_path: Path, harm: Callable[[Run], None]) -> None:
    make_run(tmp_path / "runs" / "a")
    b = make_run(tmp_path / "runs" / "b", ["optimizer.eps=1e-4"], per=0.9, minute=1)
    assert "worse than a" in write_ledger(tmp_path / "runs", diagnose=diagnose)
    harm(b)
    text = write_ledger(tmp_path / "runs", diagnose=diagnose)
    assert f"Not compared with a: b {unfinished_reason(b)}" in text
    assert "worse than" not in text and "is the only setting that changed" not in text


def test_the_diary_quotes_no_verdict_of_an_unfinished_ablation(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "why"
    make_run(out / "base" / "seed-0")
    run = make_run(out / "eps" / "seed-0", ["optimizer.eps=1e-4"], minute=1)
    write_json(out / "experiment.json", {})
    write_json(out / "ablation.json", {"verdict": "eps caused it"})
    assert "eps caused it" in write_ledger(tmp_path / "runs", diagnose=diagnose)
    interrupt(run)
    text = write_ledger(tmp_path / "runs", diagnose=diagnose)
    assert "eps caused it" not in text and "no verdict, because runs are unfinished: eps/seed-0" in text


def test_seeds_that_are_missing_are_named(tmp_path: Path) -> None:
    trained, stopped = (make_run(tmp_path / f"seed-{i}") for i in range(2))
    save_at(trained, N_STEPS)
    state = trained.checkpoints / "last" / "state.json"
    write_json(state, {**read_json(state), "best": {"step": 400, "per": 0.3, "wer": None}})
    stop_by_guard(stopped)
    seeds = [SeedRun(0, trained), SeedRun(1, stopped), SeedRun(2, Run(tmp_path / "seed-2"), error="the disk is full")]
    summary = SeedsResult(tmp_path, load_recipe("tiny"), (*seeds, SeedRun(3, Run(tmp_path / "seed-3"))))
    expected = {"1": "stopped by the guard at step 170 of 600", "2": "the disk is full", "3": "not started"}
    assert json.loads(json.dumps(summary.to_dict()))["missing"] == expected
    assert (summary.best_pers, summary.mean_per, summary.sd_per) == ([0.3], 0.3, None)
