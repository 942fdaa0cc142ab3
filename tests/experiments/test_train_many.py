"""Training in a subprocess ends with the process that started it, and waits for another one in the same folder."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import arcuate
from arcuate.errors import UserError
from arcuate.experiments.train_many import Job, claim, train_job
from arcuate.files import exclusive_lock
from arcuate.run import Run
from arcuate.training.callbacks import PARENT_PIPE, Stop
from support.forking import start

LIMIT_S = 100.0

TRAINING = """
import os, sys, time
from pathlib import Path
from arcuate.training.callbacks import Stop, stop_with_parent

run = Path(sys.argv[sys.argv.index("--run") + 1])
run.mkdir(parents=True, exist_ok=True)
stop = Stop()
stop_with_parent(stop)
(run / "pid.part").write_text(str(os.getpid()))
(run / "pid.part").rename(run / "pid")
while not stop.requested:
    time.sleep(0.02)
(run / "saved").write_text(str(stop.exit_code))
"""

PARENT = """
import sys
from pathlib import Path
import arcuate.experiments.train_many as module
from arcuate.run import Run
from arcuate.training.callbacks import Stop

module.PROGRAM = (sys.executable, "-c", sys.argv[1])
module.train_job(module.Job(Run(Path(sys.argv[2])), "tiny", Path("store")), Stop(), print)
"""


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < limit:
        time.sleep(0.02)
    assert condition()


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_parent_takes_its_training_along(tmp_path: Path) -> None:
    run = tmp_path / "run"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, TRAINING, str(run)])
    wait_for((run / "pid").exists)
    pid = int((run / "pid").read_text())
    try:
        parent.kill()
        parent.wait()
        wait_for((run / "saved").exists)
        wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
        assert (run / "saved").read_text() == str(128 + signal.SIGTERM)
    finally:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


def test_the_train_command_stops_with_a_checkpoint_when_its_parent_ends(cohort_store: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    settings = ["train.steps=100000", "train.log_every=1", "encoder.width=16", "encoder.depth=1"]
    words = ["train", "tiny", "--data", cohort_store, "--run", run.path, *settings]
    environment = {**os.environ, PARENT_PIPE: "1"}
    process = start(*words, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    assert process.stdin is not None
    try:
        wait_for(lambda: process.poll() is not None or bool(run.metrics()))
        process.stdin.close()
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert int((run.checkpoints / "last").readlink().name.removeprefix("step-")) > 0


def test_training_waits_for_the_lock_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    """The training of a killed ablation saves its last checkpoint before the restarted ablation continues it."""
    monkeypatch.setattr("arcuate.experiments.train_many.PROGRAM", (sys.executable, "-c", "print('{}')"))
    run, stop, started = Run(tmp_path / "run"), Stop(), threading.Event()

    def train() -> None:
        train_job(Job(run, "tiny", tmp_path), stop, lambda rows: None)
        started.set()

    with exclusive_lock(run.lock_file, "in use"):
        thread = threading.Thread(target=train)
        thread.start()
        wait_for(lambda: any("waiting for another process" in line for line in messages))
        assert not started.is_set()
    thread.join(LIMIT_S)
    assert started.is_set()


@pytest.mark.parametrize("size", ["2", "x", ""])
def test_experiments_in_several_processes_are_rejected(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainings they start would inherit the ranks of torchrun or Slurm, and join as one training."""
    pytest.importorskip("optuna", reason="optuna is not installed")
    monkeypatch.setenv("WORLD_SIZE", size)
    store, out = tmp_path / "store", tmp_path / "out"
    calls: dict[str, Callable[[], object]] = {
        "sweep": lambda: arcuate.sweep("tiny", {"train.seed": [1, 2]}, store, out),
        "ablate": lambda: arcuate.ablate("tiny", ["seed:train.seed=1"], store, out),
        "train --seeds": lambda: arcuate.train("tiny", store, out, seeds=2),
    }
    for command, call in calls.items():
        with pytest.raises(UserError, match=f"{command} starts one training after another.*without torchrun"):
            call()
    assert not out.exists()


def test_a_job_is_claimed_by_one_worker(tmp_path: Path) -> None:
    job = Job(Run(tmp_path / "run"), "tiny", tmp_path)
    with claim(job) as first, claim(job) as second:
        assert first and not second
    with claim(job) as again:
        assert again
