"""Slurm jobs: `launch` submits a command as one job or an array, and `run_task` runs it inside the job.

submitit writes and submits the batch script and detects rank and world size inside a job. The commands of a job are
stored as JSON (`tasks-*.json`), because submitit's own format is pickle. A job that is about to reach its time limit
receives SIGUSR2: it saves a checkpoint, stops its command and requeues itself, and resumes exactly when it runs again.
So does a job that is preempted with a grace time. Jobs that are preempted without one or lose their node are requeued
by Slurm.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from arcuate.errors import UserError, has_password
from arcuate.experiments.subprocess_train import PROGRAM
from arcuate.files import fields_to_dict, read_json, write_json
from arcuate.run import JOB_FOLDER, Run, check_run_folder
from arcuate.training.callbacks import GRACE_S

try:
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.helpers import TorchDistributedEnvironment
except ImportError:
    raise UserError("Slurm jobs need the package submitit: pip install 'arcuate[cluster]'") from None

_FOLDER_OPTIONS = {"train": "--run", "sweep": "--out", "ablate": "--out"}  # commands that can be launched
# Exit codes of a command that stopped with a checkpoint, or that SIGTERM ended while it was still starting.
_STOPPED = {*(128 + number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)), -signal.SIGTERM}
_SPREAD_S = 10.0  # within which Slurm signals all nodes of a job
# Of the job in which a shell runs, with those that submitit sets in it; SLURM_CONF belongs to the cluster.
_JOB_VARIABLES = re.compile(
    r"(SLURM_(?!CONF$)|SLURMD_|SRUN_|SUBMITIT_).*|MASTER_(ADDR|PORT)|(LOCAL_)?(RANK|WORLD_SIZE)", re.ASCII
)
_TIME = re.compile(r"(?:(\d{1,5})-)?(\d{1,8})(?::(\d\d))?(?::(\d\d))?", re.ASCII)


@dataclass(frozen=True)
class SlurmSettings:
    """Resources and limits of a job; None uses the default of the cluster."""

    time: str = "60"  # minutes, or another format of Slurm: 12:00:00, 1-00:00:00
    nodes: int = 1
    processes: int = 1  # per node; with GPUs, one per GPU
    gpus: int = 0  # per node
    cpus: int | None = None  # per process
    memory: str | None = None  # per node, such as 64G
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    name: str = "arcuate"
    sbatch: Mapping[str, str] = field(default_factory=dict)  # any other option of sbatch, without its dashes
    setup: tuple[str, ...] = ()  # shell lines before the command, such as "module load cuda"
    signal_s: int = int(GRACE_S)  # seconds before the time limit at which the job stops with a checkpoint
    max_requeues: int = 100
    parallel: int = 256  # tasks of an array that run at the same time

    @property
    def n_processes(self) -> int:
        """Number of processes of one task."""
        return self.nodes * (self.gpus or self.processes)

    def check(self) -> None:
        seconds = _seconds(self.time)
        if seconds is None:
            raise UserError(f"--time {self.time}: expected minutes, HH:MM:SS or D-HH:MM:SS")
        if self.signal_s >= seconds:
            raise UserError(
                f"--signal {self.signal_s} seconds before a time limit of {seconds} seconds leaves no time to train;"
                " raise --time or lower --signal"
            )
        named = {"name": self.name, "mem": self.memory, "partition": self.partition, "account": self.account}
        for key, value in {**named, "qos": self.qos, **self.sbatch}.items():
            if value is not None and not value.isprintable():  # a line break would start a line of the batch script
                raise UserError(f"the value {value!r:.60} of {key} contains a control character; leave it out")
        for key in self.sbatch:
            if not re.fullmatch(r"[a-z][a-z-]*", key):
                raise UserError(f"--sbatch {key}: expected the long name of an sbatch option, as in --sbatch nice=100")
            if key in _OWN_OPTIONS:
                raise UserError(f"--sbatch {key} is set by arcuate launch itself; leave it out")


def _seconds(time: str) -> int | None:
    """Parse a time limit in a format of Slurm: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS."""
    match = _TIME.fullmatch(time)
    if match is None:
        return None
    days, *parts = (None if part is None else int(part) for part in match.groups())
    first, second, third = (part or 0 for part in parts)
    if days is not None:
        return 86400 * days + 3600 * first + 60 * second + third
    return 60 * first + second if parts[2] is None else 3600 * first + 60 * second + third


_OWN_OPTIONS = ("array", "output", "error", "open-mode", "signal", "requeue", "no-requeue", "ntasks", "wrap")


@dataclass(frozen=True)
class Launch:
    """A submitted job; with a dry run, the job that would be submitted."""

    folder: Path  # batch script and logs
    tasks: tuple[tuple[str, ...], ...]  # arguments of `arcuate`, one per task of the array
    script: str
    job: str | None = None  # identifier; None after a dry run

    def to_dict(self) -> dict[str, Any]:
        return fields_to_dict(self)


class _Executor(SlurmExecutor):
    """submitit's Slurm executor for a shell command; it submits no pickled functions."""

    @classmethod
    def affinity(cls) -> int:
        return 2  # so that a dry run works without Slurm

    def text(self, command: str) -> str:
        return str(self._make_submission_file_text(command, ""))

    def submit_command(self, command: str) -> str:
        return str(self._submit_command(command).job_id)


def launch(
    arguments: Sequence[str],
    settings: SlurmSettings | None = None,
    *,
    n_workers: int = 1,
    dry_run: bool = False,
) -> Launch:
    """Submit `arcuate ARGUMENTS` (train, sweep or ablate) to Slurm; logs go to `slurm/` in its run or output folder.

    `train --seeds N` becomes an array of N tasks, one seed each. `n_workers` workers share a sweep or an ablation.
    """
    settings = settings or SlurmSettings()
    settings.check()
    folder, tasks = plan_tasks(arguments, n_workers)
    command = "train --seeds" if _value_of(arguments, "--seeds") is not None else arguments[0]
    if command != "train" and settings.n_processes > 1:
        raise UserError(
            f"{command} starts trainings of one process each, but these options start {settings.n_processes} processes"
            " per job; use --nodes 1 with --gpus 1 or --processes 1, and --workers N for N jobs of a sweep or an"
            " ablation"
        )
    if not dry_run and shutil.which("sbatch") is None:
        raise UserError("sbatch was not found; run this on a node of the Slurm cluster, or add --dry-run")
    executor = _make_executor(folder, settings, len(tasks))
    content = {"tasks": tasks, "max_requeues": settings.max_requeues}
    # Named by its content, so that jobs of the same folder do not overwrite each other's file.
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]
    tasks_file = executor.folder / f"tasks-{digest}.json"
    command = shlex.join((sys.executable, "-u", "-m", __name__, str(tasks_file)))
    if dry_run:
        return Launch(executor.folder, tasks, executor.text(command))
    executor.folder.mkdir(parents=True, exist_ok=True)
    write_json(tasks_file, content)
    try:
        with _outside_of_jobs():
            job = executor.submit_command(command)
    except (FailedJobError, FailedSubmissionError) as error:
        raise UserError(f"sbatch rejected the job: {_last_line(str(error))}") from None
    return Launch(executor.folder, tasks, executor.text(command), job)


def plan_tasks(arguments: Sequence[str], n_workers: int = 1) -> tuple[Path, tuple[tuple[str, ...], ...]]:
    """Output folder of a command, and the arguments of each task of its job."""
    words = list(arguments)
    command = words[0] if words else ""
    if command not in _FOLDER_OPTIONS:
        expected = ", ".join(_FOLDER_OPTIONS)
        raise UserError(f"cannot launch {command or 'nothing'!r}: expected one of {expected}, as in -- train tiny …")
    if "--dry-run" in words:
        raise UserError("--dry-run after -- applies to the command; put it before -- to print the batch script")
    option = _FOLDER_OPTIONS[command]
    folder = _value_of(words, option)
    if folder is None:
        raise UserError(f"{command} needs {option} FOLDER, which also receives the logs of the job")
    if not os.path.abspath(folder).isprintable() or "%" in os.path.abspath(folder):
        # a line break would start a line of the batch script, and Slurm replaces %j, %a … in the names of logs
        raise UserError(f"{option} {folder!r:.100}: the path contains a control character or %; choose another folder")
    if (url := _value_of(words, "--storage")) is not None and has_password(url):
        raise UserError(
            "--storage contains a password, which the batch script would store in a file; remove it from the URL and"
            " put it into ~/.pgpass"
        )
    if command != "train":
        return Path(folder) / JOB_FOLDER, (tuple(words),) * n_workers
    if n_workers > 1:
        raise UserError(f"--workers {n_workers} is for sweep and ablate; for train use --nodes, --gpus and --seeds")
    if "--resume" not in words:
        check_run_folder(Path(folder))
        words.append("--resume")  # for a requeued job
    seeds = _value_of(words, "--seeds")
    if seeds is None:
        return Path(folder) / JOB_FOLDER, (tuple(words),)
    if _value_of(words, "--from") is not None:
        raise UserError("--seeds and --from cannot be launched together; launch every seed with train.seed=K")
    if not re.fullmatch(r"1000|[1-9]\d{0,2}", seeds, re.ASCII):
        raise UserError(f"--seeds {seeds:.20}: expected a number of seeds, from 1 to 1000")
    return Path(folder) / JOB_FOLDER, tuple((*words, "--only", str(i)) for i in range(int(seeds)))


def _value_of(words: Sequence[str], option: str) -> str | None:
    """The value of an option on a command line, given as `--run X` or `--run=X`; the last one if repeated."""
    value = None
    for word, following in zip(words, [*words[1:], None], strict=True):
        if word == option:
            value = following
        elif word.startswith(f"{option}="):
            value = word.partition("=")[2]
    return value


def _make_executor(folder: Path, settings: SlurmSettings, n_tasks: int) -> _Executor:
    executor = _Executor(folder)
    processes = settings.gpus or settings.processes
    executor.update_parameters(
        job_name=settings.name,
        nodes=settings.nodes,
        ntasks_per_node=processes,
        signal_delay_s=settings.signal_s,
        array_parallelism=settings.parallel,
        stderr_to_stdout=True,
        setup=list(settings.setup) or None,
        cpus_per_task=settings.cpus,
        srun_args=_srun_options(settings),
        gpus_per_node=settings.gpus or None,
        partition=settings.partition,
        account=settings.account,
        qos=settings.qos,
        wckey=settings.name,
        additional_parameters={
            "time": settings.time,
            "requeue": True,
            "signal": f"USR2@{settings.signal_s}",  # which `run_task` handles; submitit reads another from a variable
            **({"mem": settings.memory} if settings.memory else {}),
            **settings.sbatch,
        },
    )
    if n_tasks > 1:
        executor.parameters["map_count"] = n_tasks
    return executor


@contextmanager
def _outside_of_jobs() -> Iterator[None]:
    """Hide the variables of the job in which this process runs, such as an interactive one on a GPU node.

    sbatch passes them on to the new job, whose srun takes them for its own options: it refuses two kinds of memory
    (SLURM_MEM_PER_CPU and --mem) or GPUs that its node does not have.
    """
    inside = "SLURM_JOB_ID" in os.environ
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if inside and _JOB_VARIABLES.fullmatch(name)}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _srun_options(settings: SlurmSettings) -> list[str]:
    """Options that srun, which starts the processes of a job, does not take over from sbatch.

    Without the first, the other processes of a training wait for one that failed until NCCL's time limit, half an hour.
    srun of Slurm 22.05 and 23.02 ignores the number of cores in the batch script and starts every process with one.
    """
    cores = [] if settings.cpus is None else [f"--cpus-per-task={settings.cpus}"]
    return ["--kill-on-bad-exit=1", *cores]


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), text)


# --- Inside the job ----------------------------------------------------------------------------------------


def run_task(tasks_file: Path) -> int:
    """Run the command of one task of a job; return its exit code.

    On SIGUSR2, sent before the time limit, the command stops with a checkpoint and rank 0 requeues the job. SIGTERM (a
    cancelled or preempted job) stops the command too. Slurm requeues a preempted job only if it is still running at the
    end of its grace time, so rank 0 does it here.
    """
    content = read_json(tasks_file)
    arguments = _resumed(content["tasks"][int(os.environ.get("SLURM_ARRAY_TASK_ID", "0"))])
    if os.environ.get("SLURM_NTASKS", "1") != "1":
        TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
    received: list[int] = []
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    _say(f"job {os.environ.get('SLURM_JOB_ID')}, start {restarts + 1}: arcuate {' '.join(arguments)}")
    process: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)

    for number in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, stop)
    if not received:
        # Slurm signals every process of a job: the command ignores SIGUSR2, which only this process handles.
        process = subprocess.Popen(
            [*PROGRAM, *arguments], preexec_fn=partial(signal.signal, signal.SIGUSR2, signal.SIG_IGN)
        )
        if received:  # the signal arrived before `process` was set
            process.send_signal(signal.SIGTERM)
        code = process.wait()
        if code not in _STOPPED:
            return code if code >= 0 else 128 - code
    limit = time.monotonic() + _SPREAD_S
    while not received and time.monotonic() < limit:  # another process was signalled first, and stopped all of them
        time.sleep(0.1)
    is_main = os.environ.get("SLURM_PROCID", "0") == "0"
    why = "approaching the time limit"
    if signal.SIGUSR2 not in received:
        why = "preempted"
        if is_main and not _is_preempted():
            return 128 + signal.SIGTERM  # Slurm then ends the other processes
    elif restarts >= content["max_requeues"]:
        _say(f"{why} after {restarts} restarts: stopped, not requeued again")
        return 128 + signal.SIGUSR2
    n_received = len(received)
    if is_main:
        _say(f"{why}: stopped, requeuing the job")
        _requeue()
    while len(received) == n_received:  # until Slurm ends the job; if it exited first, it would be marked as failed
        time.sleep(0.1)
    return 0


def _resumed(arguments: Sequence[str]) -> list[str]:
    """Arguments of `train` for this start of the job: --from applies to the first start, --resume to later ones."""
    words, folder = list(arguments), _value_of(arguments, "--run")
    if _value_of(words, "--from") is None or folder is None:
        return words
    if not Run(Path(folder)).recipe_file.is_file():
        return [word for word in words if word != "--resume"]
    start = next(i for i, word in enumerate(words) if word.partition("=")[0] == "--from")
    del words[start : start + (1 if "=" in words[start] else 2)]
    return [word for word in words if word != "--keep-optimizer"]


def _is_preempted() -> bool:
    """Whether this job is in the grace time of a preemption; not if it was cancelled, or Slurm has requeued it."""
    command = ["scontrol", "show", "job", os.environ.get("SLURM_JOB_ID", "")]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    entries = dict(word.split("=", 1) for word in shown.split() if "=" in word)
    return entries.get("JobState") == "RUNNING" and entries.get("PreemptTime", "None") != "None"


def _requeue() -> None:
    subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True, timeout=60)


def _say(message: str) -> None:
    sys.stdout.write(f"{message}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(run_task(Path(sys.argv[1])))
