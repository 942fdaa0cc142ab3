"""Several trainings as jobs: the seeds of a recipe, the arms of an ablation, the trials of a sweep.

Each job runs `arcuate train` in a subprocess, so that a crash affects only one run. Any number of workers share a list
of jobs: a job belongs to the worker that holds its lock.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any

from arcuate.config import to_tree
from arcuate.errors import UserError
from arcuate.files import LockHeld, exclusive_lock, read_json, write_json
from arcuate.progress import Progress, logger
from arcuate.run import BUSY, Run, check_local, unfinished_reason
from arcuate.training.callbacks import GRACE_S, PARENT_PIPE, Stop
from arcuate.training.config import DESCRIPTIVE_KEYS, TrainingConfig

PROGRAM = (sys.executable, "-m", "arcuate")
_MAY_DIFFER = (*DESCRIPTIVE_KEYS, "runtime", "track")  # between workers, and when an experiment is continued
_POLL_S = 0.25

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Job:
    """One training: recipe, data, settings, and the run folder it writes."""

    run: Run
    recipe: str
    data: Path
    overrides: tuple[str, ...] = ()
    n_steps: int = 0
    from_: str | None = None  # run whose weights it starts from

    def words(self, run: str | None = None) -> list[str]:
        """Command-line arguments of `arcuate` that train this job, or train it again into another run folder."""
        parent = ["--from", self.from_] if self.from_ else []
        folder = str(self.run.path) if run is None else run
        return ["train", self.recipe, "--data", str(self.data), "--run", folder, *parent, *self.overrides]

    @property
    def is_trained(self) -> bool:
        """Whether it was trained to its end: not interrupted, failed or stopped by the guard."""
        return missing_training(self.run) is None


def missing_training(run: Run) -> str | None:
    """Why a run of several is not trained to its end; None if it is."""
    return unfinished_reason(run) if run.recipe_file.is_file() else "not started"


@dataclass(frozen=True)
class Outcome:
    """Outcome of a job."""

    result: Mapping[str, Any] | None  # `TrainResult.to_dict()`; None if it failed or was stopped
    failure: str | None  # the reason, if it failed


# --- Jobs ------------------------------------------------------------------------------------------------


def train_jobs(
    jobs: Sequence[Job],
    stop: Stop,
    *,
    score: Callable[[Run], None],
    progress: Progress | None = None,
) -> dict[Path, str]:
    """Train the jobs that are not trained yet, one after another; return the runs that failed, with the reason.

    `score` is called with every trained run. A job that another worker holds is left to it.
    """
    n_steps, done = sum(job.n_steps for job in jobs), 0
    failed: dict[Path, str] = {}
    for n, job in enumerate(jobs, start=1):
        path = job.run.path

        def report(rows: Rows, done: int = done, name: str = path.name) -> None:
            if progress is not None:
                progress(done + max((row["step"] for row in rows), default=0), n_steps, name)

        with claim(job) as is_mine:
            if is_mine and not job.is_trained and not stop.requested:
                logger.info(f"{n} of {len(jobs)}: {path}")
                if (failure := train_job(job, stop, report).failure) is not None and not stop.requested:
                    failed[path] = failure
                    logger.error(f"{path}: {failure}")
            if stop.requested:
                break
            if is_mine and job.is_trained:
                score(job.run)
        done += job.n_steps
        if progress is not None:
            progress(done, n_steps, "training")
    return failed


@contextmanager
def claim(job: Job) -> Iterator[bool]:
    """Reserve a job for this worker within the context; yields False if another worker holds it."""
    path = job.run.path
    with ExitStack() as stack:
        try:
            stack.enter_context(exclusive_lock(path.with_name(f".{path.name}.lock"), f"{path} is in use"))
        except LockHeld:
            yield False
            return
        yield True


def train_job(
    job: Job, stop: Stop, on_metrics: Callable[[Rows], None], should_stop: Callable[[], bool] = lambda: False
) -> Outcome:
    """Train or resume one job; its messages are appended to RUN.log beside the run folder.

    `on_metrics` receives all rows of metrics.jsonl whenever the file has grown. The training is terminated, with a
    checkpoint, when `stop` is requested or `should_stop` returns True, and when this process ends in any way.
    """
    log = job.run.path.with_name(f"{job.run.path.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    while True:
        _wait_until_free(job.run, stop)
        outcome = _train_once(
            [*PROGRAM, *job.words(), "--json", "--resume"], log, job.run, stop, on_metrics, should_stop
        )
        # The training of a worker that was killed a moment ago may still start, save and end.
        if outcome.failure is None or not outcome.failure.startswith(BUSY) or stop.requested:
            return outcome


def _wait_until_free(run: Run, stop: Stop) -> None:
    """Wait until no other process trains in this folder, such as one left by a killed worker."""
    waiting = False
    while run.lock_file.exists() and not stop.requested:
        try:
            with exclusive_lock(run.lock_file, "in use"):
                return
        except LockHeld:
            if not waiting:
                logger.info(f"waiting for another process that is training into {run.path}")
            waiting = True
            time.sleep(_POLL_S)


def _train_once(
    command: Sequence[str],
    log: Path,
    run: Run,
    stop: Stop,
    on_metrics: Callable[[Rows], None],
    should_stop: Callable[[], bool],
) -> Outcome:
    with log.open("ab") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # closes when this process ends, even if it is killed: `stop_with_parent`
            stdout=subprocess.PIPE,
            stderr=stream,
            env={**os.environ, PARENT_PIPE: "1"},
        )
    output, size, ended = b"", 0, False
    try:
        while not ended:
            ended = process.poll() is not None or stop.requested
            if run.metrics_file.exists() and run.metrics_file.stat().st_size != size:
                size = run.metrics_file.stat().st_size
                on_metrics(run.metrics())
            if ended or should_stop():
                break
            time.sleep(_POLL_S)
        if process.poll() is None:
            process.terminate()
        output, _ = process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    if process.returncode == 0:
        return Outcome(json.loads(output), None)
    return Outcome(None, _describe_failure(process.returncode, log))


def _describe_failure(returncode: int, log: Path) -> str:
    """The signal that killed the training, or the last line of its log."""
    if returncode < 0:
        return f"killed by {Signals(-returncode).name}"
    lines = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else f"exit code {returncode}"


# --- Folders of experiments ------------------------------------------------------------------------------


def check_one_process(command: str) -> None:
    """Reject a command that starts trainings of its own in one of several processes of torchrun or of a Slurm job.

    The trainings inherit the environment, so those of different processes would join each other as one training.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            f"{command} starts one training after another, each in one process; start it without torchrun, and in a"
            " Slurm job with one task"
        )


def open_folder(file: Path, kind: str, recipe: TrainingConfig, varied: Mapping[str, Any]) -> dict[str, Any]:
    """Create or continue the folder of an experiment, whose identity is written to `file`; return the identity.

    `kind` is "a sweep" or "an ablation". A folder of other content or of a different experiment is rejected.
    """
    folder = file.parent
    identity = {"recipe": {key: value for key, value in to_tree(recipe).items() if key not in _MAY_DIFFER}, **varied}
    if not file.exists():
        check_local(folder, "--out")
        foreign = folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir())
        if (foreign or (folder.exists() and not folder.is_dir())) and not file.exists():  # another worker may create it
            raise UserError(f"{folder} exists and is not {kind} folder; choose another --out")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, identity)
    old, new = read_json(file), json.loads(json.dumps(identity))
    if changed := [key for key in identity if old.get(key) != new[key]]:
        raise UserError(f"{folder} is {kind} with different {' and '.join(changed)}; choose another --out")
    return dict(new)
