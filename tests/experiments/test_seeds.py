"""Seeds: complete run folders, the spread, resuming, and what is rejected."""

import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from arcuate.errors import UserError
from arcuate.experiments.recipe import load_recipe, run_recipe
from arcuate.experiments.seeds import SeedsResult, seed_overrides
from arcuate.experiments.train import train
from arcuate.run import Run
from support.cli import one_object
from support.command import arcuate

SMALL = (
    *("encoder.width=16", "train.steps=4", "train.log_every=2", "train.validate_every=2"),
    *("train.checkpoint_every=1", "train.keep_checkpoints=9", "data.batching.batch_size=4"),
)


def seeds(data: Path, run: Path, n: int, overrides: Sequence[str] = SMALL, **options: Any) -> SeedsResult:
    result = train("tiny", data, run, overrides, seeds=n, **options)
    assert isinstance(result, SeedsResult)
    return result


@pytest.fixture(scope="module")
def ensemble(cohort_store: Path, tmp_path_factory) -> tuple[Path, dict]:
    """Two seeds, trained by the command."""
    run = tmp_path_factory.mktemp("seeds") / "ensemble"
    done = arcuate("train", "tiny", "--seeds", 2, "--data", cohort_store, "--run", run, *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    assert "± " in done.stderr
    return run, one_object(done.stdout)


def test_each_seed_is_a_full_run(ensemble):
    run, output = ensemble
    assert [Path(s["run"]) for s in output["seeds"]] == [run / "seed-0", run / "seed-1"]
    for seed in (0, 1):
        one = Run(run / f"seed-{seed}")
        assert (run_recipe(one).train.seed, run_recipe(one).data.seed) == (seed, seed + 1)
        assert one.environment()["data"]["sessions"]
        assert [r["step"] for r in one.metrics() if r["split"] == "val"] == [2, 4]
        assert (one.checkpoints / "best" / "model.safetensors").is_file()
    weights = [load_file(run / f"seed-{s}" / "checkpoints" / "last" / "model.safetensors") for s in (0, 1)]
    assert not torch.equal(weights[0]["head.weight"], weights[1]["head.weight"])


def test_mean_and_spread(ensemble):
    _, output = ensemble
    rates = [s["best_per"] for s in output["seeds"]]
    mean = sum(rates) / 2
    assert output["mean_per"] == pytest.approx(mean)
    assert output["sd_per"] == pytest.approx((2 * (rates[0] - mean) ** 2) ** 0.5)
    assert (output["low_per"], output["high_per"]) == (min(rates), max(rates))
    assert (output["n_seeds"], output["n_finished"], output["selected_on"]) == (2, 2, "val")


def test_combine_reads_the_seeds_as_they_are(ensemble):
    run, output = ensemble
    seeds = [run / "seed-0", run / "seed-1"]
    pooled = one_object(arcuate("combine", *seeds, "--json").stdout)  # no words are decoded yet
    assert (pooled["method"], pooled["n_models"]) == ("geometric", 2)
    single = [s["best_per"] for s in output["seeds"]]
    assert pooled["single_per"] == pytest.approx(single, abs=0.03)  # scores are kept in half precision
    assert 0 < pooled["per"] <= 2


def test_resume_trains_what_is_missing_and_nothing_else(ensemble, cohort_store, tmp_path, forked_training):
    run = tmp_path / "ensemble"
    shutil.copytree(ensemble[0], run, symlinks=True)
    shutil.rmtree(run / "seed-1")
    before = {p: p.stat().st_mtime_ns for p in (run / "seed-0").rglob("*") if p.suffix == ".safetensors"}
    output = seeds(cohort_store, run, 3, resume=True).to_dict()
    assert [s["seed"] for s in output["seeds"]] == [0, 1, 2]
    assert before == {p: p.stat().st_mtime_ns for p in before}
    first = ensemble[1]["seeds"]
    assert [s["best_per"] for s in output["seeds"][:2]] == [s["best_per"] for s in first]  # bit for bit


def test_one_seed_that_fails_does_not_stop_the_others(cohort_store, tmp_path, monkeypatch):
    """A full disk, for example: the first training ends with an error, and the second takes place."""
    program = "import sys; from pathlib import Path; run = Path(sys.argv[sys.argv.index('--run') + 1]);"
    program += " sys.exit('error: the disk is full' if run.name == 'seed-0' else run.mkdir() or print('{}'))"
    monkeypatch.setattr("arcuate.experiments.train_many.PROGRAM", (sys.executable, "-c", program))
    output = seeds(cohort_store, tmp_path / "ensemble", 2).to_dict()
    assert output["missing"] == {"0": "the disk is full", "1": "not started"}
    assert (tmp_path / "ensemble" / "seed-1").is_dir()
    assert (output["n_finished"], output["mean_per"], output["sd_per"]) == (0, None, None)


def test_a_signal_ends_the_series(cohort_store, tmp_path, messages, forked_training):
    """The interrupted seed is saved, the next one is not started, and the command that continues is logged."""
    run = tmp_path / "ensemble"

    sent: list[int] = []

    def interrupt(done: int, total: int, name: str) -> None:
        if done and not sent:
            sent.append(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    summary = seeds(cohort_store, run, 3, [*SMALL, "train.steps=4000"], progress=interrupt)
    assert summary.signal == signal.SIGINT and summary.mean_per is None
    assert "reached step" in summary.missing[0] and summary.missing[1] == "not started"
    assert any(f"--seeds 3 --data {cohort_store} --run {run} --resume" in line for line in messages)


def test_dry_run_writes_nothing(cohort_store, tmp_path):
    run = tmp_path / "ensemble"
    output = seeds(cohort_store, run, 3, dry_run=True).to_dict()
    assert [s["run"] for s in output["seeds"]] == [str(run / f"seed-{k}") for k in range(3)]
    assert not run.exists()


def refusal(data: Path, run: Path, overrides: Sequence[str] = SMALL, resume: bool = False) -> str:
    with pytest.raises(UserError) as error:
        seeds(data, run, 2, overrides, resume=resume)
    return str(error.value)


def test_folders_of_other_content_are_left_alone(ensemble, cohort_store, tmp_path):
    run, _ = ensemble
    (tmp_path / "notes.txt").write_text("mine")
    assert "--resume" in refusal(cohort_store, run)
    assert "is a run folder" in refusal(cohort_store, run / "seed-0")
    assert "is a run folder" in refusal(cohort_store, run / "seed-0", resume=True)
    assert "encoder.dropout" in refusal(cohort_store, run, [*SMALL, "encoder.dropout=0.3"], resume=True)
    assert "notes.txt" in refusal(cohort_store, tmp_path, resume=True)
    assert "exists and is not empty" in refusal(cohort_store, tmp_path)


def test_the_seed_of_the_dev_split_does_not_change(cohort_store):
    assert seed_overrides(load_recipe("tiny"), 2) == ["train.seed=2", "data.seed=3"]
    assert seed_overrides(load_recipe("tiny", ["data.dev_fraction=0.1"]), 2) == ["train.seed=2"]
