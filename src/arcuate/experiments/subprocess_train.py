"""Training in subprocesses for sweeps and ablations, so that a crash affects only one run; and their folders."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any

from arcuate.config import to_tree
from arcuate.errors import UserError
from arcuate.files import LockHeld, exclusive_lock, read_json, write_json
from arcuate.progress import logger
from arcuate.run import BUSY, JOB_FOLDER, Run, check_local
from arcuate.training.callbacks import GRACE_S, PARENT_PIPE, Stop
from arcuate.training.config import DESCRIPTIVE_KEYS, TrainingConfig

PROGRAM = (sys.executable, "-m", "arcuate")
_MAY_DIFFER = (*DESCRIPTIVE_KEYS, "runtime", "track")  # between workers, and when an experiment is continued
_POLL_S = 0.25


@dataclass(frozen=True)
class SubprocessResult:
    """Outcome of a training run in a subprocess."""

    result: Mapping[str, Any] | None  # `TrainResult.to_dict()`; None if it failed or was stopped
    failure: str | None  # the reason, if it failed


def check_new_folder(folder: Path, kind: str) -> None:
    """Reject a non-empty folder that is not of this kind; `kind` is "a sweep" or "an ablation"."""
    check_local(folder, "--out")
    if folder.exists() and (not folder.is_dir() or {p.name for p in folder.iterdir()} - {JOB_FOLDER}):
        raise UserError(f"{folder} exists and is not {kind} folder; choose another --out")


def check_one_process(command: str) -> None:
    """Reject a command that starts trainings of its own in one of several processes of torchrun or of a Slurm job.

    The trainings inherit the environment, so those of different processes would join each other as one training.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            f"{command} starts one training after another, each in one process; start it without torchrun, and in a"
            " Slurm job with --gpus 1"
        )


def open_folder(file: Path, kind: str, recipe: TrainingConfig, varied: Mapping[str, Any]) -> dict[str, Any]:
    """Write the identity of an experiment into its folder and return it; reject a folder of a different experiment."""
    identity = {"recipe": {key: value for key, value in to_tree(recipe).items() if key not in _MAY_DIFFER}, **varied}
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, identity)
    old, new = read_json(file), json.loads(json.dumps(identity))
    if changed := [key for key in identity if old.get(key) != new[key]]:
        raise UserError(f"{file.parent} is {kind} with different {' and '.join(changed)}; choose another --out")
    return dict(new)


def train_arguments(recipe: str, data: Path, run: Path | str, overrides: Sequence[str]) -> list[str]:
    """Command-line arguments of `arcuate` that train these settings."""
    return ["train", recipe, "--data", str(data), "--run", str(run), *overrides]


def train_in_subprocess(
    recipe: str,
    data: Path,
    run: Run,
    overrides: Sequence[str],
    *,
    stop: Stop,
    on_metrics: Callable[[list[dict[str, Any]]], None],
    should_stop: Callable[[], bool] = lambda: False,
    resume: bool = False,
) -> SubprocessResult:
    """Run `arcuate train`; its messages are appended to RUN.log beside the run folder.

    `on_metrics` receives all rows of metrics.jsonl whenever the file has grown. The training is terminated, with a
    checkpoint, when `stop` is requested or `should_stop` returns True, and when this process ends in any way.
    """
    command = [
        *PROGRAM,
        *train_arguments(recipe, data, run.path, overrides),
        "--json",
        *(["--resume"] if resume else []),
    ]
    log = run.path.with_name(f"{run.path.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    while True:
        _wait_until_free(run, stop)
        result = _train_once(command, log, run, stop, on_metrics, should_stop)
        # The training of a worker that was killed a moment ago may still start, save and end.
        if result.failure is None or not result.failure.startswith(BUSY) or stop.requested:
            return result


def _train_once(
    command: Sequence[str],
    log: Path,
    run: Run,
    stop: Stop,
    on_metrics: Callable[[list[dict[str, Any]]], None],
    should_stop: Callable[[], bool],
) -> SubprocessResult:
    with log.open("ab") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # closes when this process ends, even if it is killed: `stop_with_parent`
            stdout=subprocess.PIPE,
            stderr=stream,
            env={**os.environ, PARENT_PIPE: "1"},
        )
    output = b""
    try:
        _follow(process, run, stop, on_metrics, should_stop)
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
        return SubprocessResult(json.loads(output), None)
    return SubprocessResult(None, _describe_failure(process.returncode, log))


def _wait_until_free(run: Run, stop: Stop) -> None:
    """Wait until no other process trains in this folder, such as one left by a killed sweep or ablation."""
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


def _follow(
    process: subprocess.Popen[bytes],
    run: Run,
    stop: Stop,
    on_metrics: Callable[[list[dict[str, Any]]], None],
    should_stop: Callable[[], bool],
) -> None:
    """Pass on metrics until training ends or has to be stopped."""
    size = 0
    while True:
        ended = process.poll() is not None or stop.requested
        if run.metrics_file.exists() and run.metrics_file.stat().st_size != size:
            size = run.metrics_file.stat().st_size
            on_metrics(run.metrics())
        if ended or should_stop():
            return
        time.sleep(_POLL_S)


def _describe_failure(returncode: int, log: Path) -> str:
    """The signal that killed the training, or the last line of its log."""
    if returncode < 0:
        return f"killed by {Signals(-returncode).name}"
    lines = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else f"exit code {returncode}"
