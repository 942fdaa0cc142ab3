"""Writing a run folder: one process at a time, and never over other files."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from arcuate.errors import UserError
from arcuate.experiments.recipe import load_recipe, run_recipe
from arcuate.experiments.train_many import open_folder
from arcuate.files import append_jsonl
from arcuate.run import Run, check_run_folder, create_run, is_untouched, lock_run
from support.cli import assert_refused
from support.command import arcuate

TINY = load_recipe("tiny")
HOLDER = """
import sys, time
from pathlib import Path
from arcuate.run import Run
from arcuate.run import lock_run
with lock_run(Run(Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(600)
"""


@contextmanager
def held_elsewhere(run: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(run)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_second_process_is_rejected_and_the_lock_dies_with_its_holder(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    with held_elsewhere(run.path) as process:
        with pytest.raises(UserError, match="another process"), lock_run(run):
            pass
        process.kill()
        process.wait()
        with lock_run(run):
            pass


def test_workers_do_not_hold_the_lock(tmp_path: Path) -> None:
    """A forked worker may outlive the training that was killed."""
    run = Run(tmp_path / "run")
    with lock_run(run):
        worker = os.fork()
        if worker == 0:
            time.sleep(600)
            os._exit(0)
        time.sleep(0.2)
    try:
        with lock_run(run):
            pass
    finally:
        os.kill(worker, 9)
        os.waitpid(worker, 0)


@pytest.mark.parametrize("resume", [False, True])
def test_training_into_a_run_in_use_is_rejected(cohort_store: Path, tmp_path: Path, resume: bool) -> None:
    run = tmp_path / "run"
    if resume:
        create_run(run, TINY, {"data": {}})
    with held_elsewhere(run):
        before = sorted(p.name for p in run.rglob("*"))
        more = ["--resume"] if resume else []
        done = arcuate("train", "tiny", "--data", cohort_store, "--run", run, *more)
    assert_refused(done, "another process")
    assert sorted(p.name for p in run.rglob("*")) == before


@pytest.mark.parametrize("n_made", range(7))
def test_an_incomplete_folder_is_new_when_resumed(tmp_path: Path, n_made: int) -> None:
    run = create_run(tmp_path / "run", TINY, {"data": {}})
    made = ["results", "checkpoints", "metrics.jsonl", "incidents.jsonl", "environment.json", "recipe.yaml"]
    for name in made[n_made:]:
        path = run.path / name
        path.rmdir() if path.is_dir() else path.unlink()
    (run.path / ".recipe.yaml.123.part").write_text("na")
    with pytest.raises(UserError, match="--resume"):
        create_run(run.path, TINY, {})
    other = load_recipe("tiny", ["train.steps=7"])
    assert run_recipe(create_run(run.path, other, {"data": {}}, resume=True)) == other


@pytest.mark.parametrize("theirs", ["recipe.yaml", "thesis.tex", "results/table.csv", "checkpoints/step-1/x"])
def test_a_folder_with_other_files_is_not_untouched(tmp_path: Path, theirs: str) -> None:
    run = Run(tmp_path / "run")
    path = run.path / theirs
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    assert not is_untouched(run)
    made = create_run(tmp_path / "made", TINY, {"data": {}})
    assert is_untouched(made)
    append_jsonl(made.metrics_file, {"step": 1})
    assert not is_untouched(made)


@pytest.mark.parametrize("exists", [False, True])
def test_a_refusal_under_the_lock_leaves_nothing(tmp_path: Path, exists: bool) -> None:
    run = Run(tmp_path / "run")
    if exists:
        run.path.mkdir()
    with pytest.raises(UserError, match="other data"), lock_run(run):
        raise UserError("other data")
    assert [p.name for p in tmp_path.rglob("*")] == (["run"] if exists else [])


def test_resuming_a_folder_that_is_not_a_run_writes_nothing(cohort_store: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    done = arcuate("train", "tiny", "--data", cohort_store, "--run", tmp_path, "--resume")
    assert_refused(done, "not a run folder")
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def open_sweep(path: Path) -> None:
    open_folder(path / "sweep.json", "a sweep", load_recipe("tiny"), {})


@pytest.mark.parametrize("check", [check_run_folder, open_sweep])
def test_a_model_on_the_hub_is_not_an_output_folder(check: Callable[[Path], None]) -> None:
    with pytest.raises(UserError, match="hf:lab/x: names with hf: are models on the hub"):
        check(Path("hf:lab/x"))


@pytest.mark.parametrize("check", [check_run_folder, open_sweep])
def test_an_unwritable_folder_is_noticed_before_anything_else(
    check: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # root may write anywhere
    with pytest.raises(UserError, match=f"{tmp_path} is not writable"):
        check(tmp_path / "new" / "run")
