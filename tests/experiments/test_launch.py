"""Slurm jobs: tasks and batch scripts anywhere, and jobs of a real Slurm in miniature where Debian's is installed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from arcuate.errors import UserError
from support.cli import assert_refused, one_object
from support.command import arcuate
from support.slurm import ask, miniature, missing_programs, state_of, wait_for

pytest.importorskip("submitit", reason="submitit is not installed")
import arcuate.experiments.launch as module
from arcuate.experiments.launch import SlurmSettings, launch, plan_tasks

TRAIN = ["train", "tiny", "--data", "STORE", "--run", "RUN"]
TINY = ["encoder.width=16", "encoder.depth=1", "train.validate_every=100", "train.log_every=10", "guard.enabled=false"]


# Tasks and scripts


def test_a_training_continues_when_its_job_starts_again(tmp_path: Path) -> None:
    folder, tasks = plan_tasks([*TRAIN[:-1], str(tmp_path / "run"), "train.steps=5"])
    assert folder == tmp_path / "run" / "slurm"
    assert tasks == ((*TRAIN[:-1], str(tmp_path / "run"), "train.steps=5", "--resume"),)


def test_logs_go_to_the_folder_that_the_command_uses(tmp_path: Path) -> None:
    folder, _ = plan_tasks([*TRAIN, f"--run={tmp_path / 'last'}"])
    assert folder == tmp_path / "last" / "slurm"


def test_every_seed_is_a_task_of_an_array(tmp_path: Path) -> None:
    job = launch([*TRAIN[:-1], str(tmp_path / "run"), "--seeds", "3"], dry_run=True)
    assert [task[-2:] for task in job.tasks] == [("--only", "0"), ("--only", "1"), ("--only", "2")]
    assert "#SBATCH --array=0-2%3" in job.script
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["sweep", "ablate"])
def test_workers_share_an_experiment(command: str, tmp_path: Path) -> None:
    _, tasks = plan_tasks([command, "tiny", "x", "--data", "STORE", f"--out={tmp_path}"], n_workers=2)
    assert len(tasks) == 2 and tasks[0] == tasks[1]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["doctor", "RUN"], "expected one of train, sweep, ablate"),
        ([], "cannot launch"),
        (TRAIN[:4], "needs --run"),
        ([*TRAIN, "--dry-run"], "before --"),
        ([*TRAIN, "--seeds", "x"], "--seeds x"),
        ([*TRAIN, "--seeds", "9" * 5000], "--seeds 999"),
        ([*TRAIN[:4], "--run", "a\nrm -r x"], "control character or %"),
        (["sweep", "--out=a%j"], "control character or %"),
        ([*TRAIN, "--seeds", "2", "--from", "OTHER"], "cannot be launched together"),
        (["sweep", "--out", "D", "--storage", "postgresql://me:secret@host/db"], "contains a password"),
    ],
)
def test_impossible_jobs_are_refused(words: list[str], problem: str) -> None:
    with pytest.raises(UserError, match=problem) as refusal:
        plan_tasks(words)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (SlurmSettings(time="soon"), "--time soon"),
        (SlurmSettings(time="2", signal_s=120), "leaves no time"),
        (SlurmSettings(time="1:59", signal_s=119), "leaves no time"),
        (SlurmSettings(time="9" * 5000), "expected minutes"),
        (SlurmSettings(name="a\nrm -r x #"), "control character"),
        (SlurmSettings(sbatch={"comment": "a\nrm -r x #"}), "control character"),
        (SlurmSettings(sbatch={"array": "0-3"}), "set by arcuate launch itself"),
        (SlurmSettings(sbatch={"x\n#SBATCH --uid": "0"}), "long name"),
    ],
)
def test_impossible_settings_are_refused(settings: SlurmSettings, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=problem):
        launch([*TRAIN[:-1], str(tmp_path / "run")], settings, dry_run=True)


@pytest.mark.parametrize("options", [{"gpus": 4}, {"processes": 2}, {"nodes": 2, "gpus": 1}])
@pytest.mark.parametrize("words", [["sweep", "tiny", "x", "--out"], ["ablate", "tiny", "a:b=c", "--out"], None])
def test_trainings_of_different_processes_never_join(
    words: list[str] | None, options: dict[str, int], tmp_path: Path
) -> None:
    """Every process of a job gets a rank, and the trainings that a sweep starts would form one group."""
    arguments = [*(words or [*TRAIN[:-1]]), str(tmp_path / "out"), *([] if words else ["--seeds", "2"])]
    with pytest.raises(UserError, match=r"one process each, but .* start \d processes per job"):
        launch(arguments, SlurmSettings(**options), dry_run=True)
    assert launch(arguments, SlurmSettings(gpus=1), dry_run=True).tasks


def test_the_dry_run_prints_the_script_and_writes_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["--time", "1-00:00:00", "--gpus", "8", "--cpus", "6", "--nodes", "2", "--mem", "64G"]
    more = ["--partition", "gpu", "--sbatch", "nice=100", "--setup", "module load cuda"]
    words = ["launch", "slurm", *options, *more, "--dry-run"]
    script = arcuate(*words, "--", *TRAIN[:-1], run).stdout
    for line in ("time=1-00:00:00", "gpus-per-node=8", "ntasks-per-node=8", "nodes=2", "mem=64G", "nice=100"):
        assert f"#SBATCH --{line}" in script.splitlines()
    assert "#SBATCH --signal=USR2@120" in script and "#SBATCH --requeue" in script
    assert "\nmodule load cuda\n" in script
    started = next(line for line in script.splitlines() if line.startswith("srun ")).split()
    assert "--cpus-per-task=6" in started  # srun of Slurm 22.05 does not read it from the batch script
    assert "--kill-on-bad-exit=1" in started  # the others would wait for a process that failed
    assert one_object(arcuate(*words, "--json", "--", *TRAIN[:-1], run).stdout)["script"] == script
    assert not run.exists()


def test_the_job_gets_the_signal_that_it_handles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """submitit uses another one if SUBMITIT_PREEMPT_SIGNAL names it, and an unhandled signal would end the job."""
    monkeypatch.setattr("submitit.core.job_environment.JobEnvironment.USR_SIG", "USR1")
    script = launch([*TRAIN[:-1], str(tmp_path / "run")], SlurmSettings(signal_s=30), dry_run=True).script
    assert "--signal=USR2@30" in script and "USR1" not in script


def test_a_mistyped_option_is_refused_before_it_waits_in_the_queue(tmp_path: Path) -> None:
    words = ["launch", "slurm", "--dry-run", "--"]
    assert_refused(arcuate(*words, *TRAIN[:-1], tmp_path / "run", "--sedes", "3"), "--sedes")
    assert_refused(arcuate(*words, "sweep", "tiny", "s", "--data", "x", "--out", "y", "--trails", "3"), "--trails")


# A real Slurm


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> object:
    if missing := missing_programs():
        pytest.skip(f"Slurm is not installed (no {', '.join(missing)}): apt-get install slurm-wlm munge")
    with miniature(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def submit(environment: dict[str, str], *words: object) -> dict:
    command = [sys.executable, "-m", "arcuate", "launch", "slurm", "--json", *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return one_object(done.stdout)


def wait_for_end(environment: dict[str, str], job: str, folder: Path, seconds: float) -> dict[str, str]:
    ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    wait_for(lambda: state_of(environment, job).get("JobState") in ended, seconds, "the end of the job", folder)
    return state_of(environment, job)


def steps_done(run: Path) -> int:
    """The last step in metrics.jsonl."""
    file = run / "metrics.jsonl"
    lines = [line for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def assert_same_run(run: Path, expected: Path) -> None:
    rows, reference = (
        [{k: v for k, v in json.loads(line).items() if k != "cost"} for line in (r / "metrics.jsonl").open()]
        for r in (run, expected)
    )
    assert rows == reference
    for name in ("model.safetensors", "training.safetensors"):
        last = [(r / "checkpoints" / "last" / name).read_bytes() for r in (run, expected)]
        assert last[0] == last[1], name


def train_uninterrupted(words: list[str], run: Path) -> None:
    done = arcuate("train", "tiny", *words, "--run", run)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_a_job_that_is_interrupted_twice_equals_an_uninterrupted_run(
    slurm: dict[str, str], cohort_store: Path, tmp_path: Path
) -> None:
    """First by the signal that precedes a time limit, then by Slurm itself, without warning, as when a node fails."""
    words = ["--data", str(cohort_store), *TINY, "train.steps=200", "train.checkpoint_every=25"]
    run = tmp_path / "run"
    job = submit(slurm, "--time", "5", "--", "train", "tiny", *words, "--run", run)
    interruptions = (
        ("scancel", "--signal=USR2", job["job"]),
        ("scontrol", "requeue", job["job"]),
    )
    for n, command in enumerate(interruptions, start=1):
        wait_for(lambda n=n: steps_done(run) >= 50 * n, 300, f"step {50 * n}", run / "slurm")
        ask(slurm, *command)
        wait_for(lambda n=n: state_of(slurm, job["job"]).get("Restarts") == str(n), 300, f"restart {n}", run / "slurm")
    end = wait_for_end(slurm, job["job"], run / "slurm", 300)
    log = next((run / "slurm").glob("*_log.out")).read_text()
    assert (end["JobState"], end["Restarts"]) == ("COMPLETED", "2"), log
    assert log.count("resuming after step") == 2
    assert "stopped by SIGTERM after step" in log and "requeuing the job" in log
    train_uninterrupted(words, tmp_path / "plain")
    assert_same_run(run, tmp_path / "plain")


@pytest.mark.thorough
def test_a_time_limit_that_ends_a_job_twice(slurm: dict[str, str], cohort_store: Path, tmp_path: Path) -> None:
    """A run of about two minutes on this machine, in jobs of at most 40 seconds: a minute less the signal's 20."""
    words = ["--data", str(cohort_store), *TINY, "train.checkpoint_every=1000"]
    train_uninterrupted([*words, "train.steps=200"], tmp_path / "short")
    rows = [json.loads(line) for line in (tmp_path / "short" / "metrics.jsonl").open()]
    seconds = sum(row["cost"]["seconds_per_step"] for row in rows[5:] if row["split"] == "train") / len(rows[5:])
    words.append(f"train.steps={int(120 / seconds) // 100 * 100}")
    run = tmp_path / "run"
    job = submit(slurm, "--time", "1", "--signal", "20", "--", "train", "tiny", *words, "--run", run)
    end = wait_for_end(slurm, job["job"], run / "slurm", 1200)
    log = next((run / "slurm").glob("*_log.out")).read_text()
    assert end["JobState"] == "COMPLETED" and int(end["Restarts"]) >= 2, log
    assert log.count("approaching the time limit") == int(end["Restarts"])
    train_uninterrupted(words, tmp_path / "plain")
    assert_same_run(run, tmp_path / "plain")


@pytest.mark.thorough
def test_a_cancelled_job_stops_with_a_checkpoint_and_is_not_queued_again(
    slurm: dict[str, str], cohort_store: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = ["--data", cohort_store, *TINY, "train.steps=100000"]
    job = submit(slurm, "--time", "5", "--", "train", "tiny", *words, "--run", run)
    wait_for(lambda: steps_done(run) >= 20, 300, "step 20", run / "slurm")
    ask(slurm, "scancel", job["job"])
    end = wait_for_end(slurm, job["job"], run / "slurm", 300)
    assert (end["JobState"], end["Restarts"]) == ("CANCELLED", "0")
    log = next((run / "slurm").glob("*_log.out")).read_text()
    assert "stopped by SIGTERM after step" in log
    step = json.loads((run / "checkpoints" / "last" / "state.json").read_text())["step"]
    assert step >= 20


@pytest.mark.thorough
def test_a_job_that_is_preempted_with_a_grace_time_continues(
    slurm: dict[str, str], cohort_store: Path, tmp_path: Path
) -> None:
    """Slurm does not put a job back that ends within its grace time, so the job does it itself."""
    run, log = tmp_path / "run", tmp_path / "urgent.log"
    words = ["--data", cohort_store, *TINY, "train.steps=60"]
    job = submit(slurm, "--processes", "2", "--time", "5", "--", "train", "tiny", *words, "--run", run)
    wait_for(lambda: steps_done(run) >= 10, 300, "step 10", run / "slurm")
    urgent = ["sbatch", "--partition=urgent", "--ntasks=2", f"--output={log}", "--wrap=true"]
    subprocess.run(urgent, env=slurm, capture_output=True, timeout=60, check=True)
    end = wait_for_end(slurm, job["job"], run / "slurm", 300)
    logs = "".join(p.read_text() for p in (run / "slurm").glob("*_log.out"))
    assert (end["JobState"], end["Restarts"]) == ("COMPLETED", "1"), logs
    assert "preempted: stopped, requeuing the job" in logs
    assert "resuming after step" in logs


@pytest.mark.thorough
def test_two_processes_of_a_job_share_every_batch(slurm: dict[str, str], cohort_store: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--data", cohort_store, *TINY, "train.steps=4"]
    job = submit(slurm, "--processes", "2", "--time", "5", "--", "train", "tiny", *words, "--run", run)
    end = wait_for_end(slurm, job["job"], run / "slurm", 300)
    logs = {p.name: p.read_text() for p in (run / "slurm").glob("*_log.out")}
    assert end["JobState"] == "COMPLETED", logs
    assert "2 processes share every batch" in "".join(logs.values())
    assert json.loads((run / "environment.json").read_text())["processes"] == 2


@pytest.mark.thorough
def test_seeds_are_an_array(slurm: dict[str, str], cohort_store: Path, tmp_path: Path) -> None:
    words = [
        "train",
        "tiny",
        "--data",
        cohort_store,
        "--run",
        tmp_path / "seeds",
        "--seeds",
        "2",
        *TINY,
        "train.steps=4",
    ]
    job = submit(slurm, "--time", "5", "--", *words)
    for i in range(2):
        end = wait_for_end(slurm, f"{job['job']}_{i}", tmp_path / "seeds" / "slurm", 300)
        assert end["JobState"] == "COMPLETED"
    summary = one_object(arcuate(*words, "--resume", "--json").stdout)  # nothing is left to train
    assert summary["n_finished"] == 2
    assert (tmp_path / "seeds" / "seed-1" / "results").is_dir()


def test_a_job_gives_up_after_its_last_restart(tmp_path: Path) -> None:
    """Without Slurm: the program inside the job, with the environment of a job that was restarted three times."""
    tasks = tmp_path / "tasks.json"
    tasks.write_text(json.dumps({"tasks": [["train", "tiny", "--data", "x", "--run", "y"]], "max_requeues": 3}))
    program = (
        "import os, signal, sys; from arcuate.experiments import launch; from pathlib import Path;"
        " launch.PROGRAM = (sys.executable, '-c', 'import os, signal, sys, time;"
        " signal.signal(15, lambda *_: os._exit(143)); os.kill(os.getppid(), signal.SIGUSR2); time.sleep(60)');"
        f" sys.exit(launch.run_task(Path({str(tasks)!r})))"
    )
    environment = os.environ | {"SLURM_JOB_ID": "1", "SLURM_RESTART_COUNT": "3"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 128 + signal.SIGUSR2, done.stderr
    assert "after 3 restarts" in done.stdout


@pytest.mark.parametrize(
    ("job", "starting", "code"),
    [
        ("JobState=RUNNING PreemptTime=2026-01-02T03:04:05", False, 0),
        ("JobState=RUNNING PreemptTime=2026-01-02T03:04:05", True, 0),
        ("JobState=RUNNING PreemptTime=None", False, 128 + signal.SIGTERM),
        ("JobState=CANCELLED PreemptTime=2026-01-02T03:04:05", False, 128 + signal.SIGTERM),
    ],
)
def test_only_a_preempted_job_requeues_itself(
    job: str, starting: bool, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without Slurm: its commands are replaced, and a program that stops at SIGTERM is the training."""
    tasks, calls = tmp_path / "tasks.json", []
    tasks.write_text(json.dumps({"tasks": [["train", "tiny", "--data", "x", "--run", "y"]], "max_requeues": 3}))
    handler = "" if starting else "signal.signal(15, lambda *_: os._exit(143)); "
    program = f"import os, signal, time; {handler}os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    monkeypatch.setattr(module, "PROGRAM", (sys.executable, "-S", "-c", program))

    def requeue() -> None:
        calls.append("requeue")
        os.kill(os.getpid(), signal.SIGTERM)  # Slurm ends the processes of a job that it has requeued

    monkeypatch.setattr(module, "_requeue", requeue)
    shown = SimpleNamespace(stdout=f"JobId=1 JobName=a\n   {job} Restarts=0\n")
    monkeypatch.setattr(module.subprocess, "run", lambda *words, **options: shown)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGTERM)}
    try:
        assert module.run_task(tasks) == code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert calls == ([] if code else ["requeue"])


def test_a_job_launched_from_within_another_does_not_inherit_its_resources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """srun refuses the memory of two jobs, and GPUs of another node."""
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\nenv > {tmp_path}/environment\necho Submitted batch job 7\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    of_job = {"SLURM_JOB_ID": "3", "SLURM_MEM_PER_CPU": "4096", "SLURM_GPUS_ON_NODE": "1", "MASTER_PORT": "2"}
    kept = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "lab", "WANDB_MODE": "offline"}
    for name, value in (of_job | kept).items():
        monkeypatch.setenv(name, value)
    assert launch([*TRAIN[:-1], str(tmp_path / "run")], SlurmSettings(memory="64G")).job == "7"
    passed_on = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines() if "=" in line)
    assert not of_job.keys() & passed_on.keys()
    assert kept.items() <= passed_on.items()
    assert os.environ["SLURM_MEM_PER_CPU"] == "4096"
    assert "SLURM_JOB_ID" in os.environ
