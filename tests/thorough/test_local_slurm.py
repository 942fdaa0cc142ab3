"""Jobs of a real Slurm in miniature, where Debian's is installed: interrupted, preempted, cancelled, with two tasks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.cli import one_object
from support.command import arcuate
from support.slurm import ask, miniature, missing_programs, state_of, wait_for

pytestmark = pytest.mark.thorough

TINY = ["encoder.width=16", "encoder.depth=1", "train.validate_every=100", "train.log_every=10", "guard.enabled=false"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> object:
    if missing := missing_programs():
        pytest.skip(f"Slurm is not installed (no {', '.join(missing)}): apt-get install slurm-wlm munge")
    with miniature(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def submit(environment: dict[str, str], folder: Path, options: str, *words: object) -> str:
    """Submit a command with these options of sbatch, with its log in `folder`; returns the number of the job."""
    header = folder / "header"
    header.write_text(f"#SBATCH {options} --output={folder}/job.log --export=ALL\n")
    code = (
        "import sys; from pathlib import Path; from arcuate.experiments.slurm import submit;"
        " print(submit(Path(sys.argv[1]), sys.argv[2:]).job)"
    )
    command = [sys.executable, "-c", code, str(header), *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


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
        [
            {k: v for k, v in json.loads(line).items() if k != "cost"}
            for line in (r / "metrics.jsonl").read_text().splitlines()
        ]
        for r in (run, expected)
    )
    assert rows == reference
    for name in ("model.safetensors", "training.safetensors"):
        last = [(r / "checkpoints" / "last" / name).read_bytes() for r in (run, expected)]
        assert last[0] == last[1], name


def train_uninterrupted(words: list[str], run: Path) -> None:
    done = arcuate("train", "tiny", *words, "--run", run)
    assert done.returncode == 0, done.stderr


def test_a_job_that_is_interrupted_twice_equals_an_uninterrupted_run(
    slurm: dict[str, str], cohort_store: Path, tmp_path: Path
) -> None:
    """First by the signal that precedes a time limit, then by Slurm itself, without warning, as when a node fails."""
    words = ["--data", str(cohort_store), *TINY, "train.steps=200", "train.checkpoint_every=25"]
    run = tmp_path / "run"
    job = submit(slurm, tmp_path, "--time=5", "train", "tiny", *words, "--run", run)
    interruptions = (
        ("scancel", "--signal=TERM", job),
        ("scontrol", "requeue", job),
    )
    for n, command in enumerate(interruptions, start=1):
        wait_for(lambda n=n: steps_done(run) >= 50 * n, 300, f"step {50 * n}", tmp_path)
        ask(slurm, *command)
        wait_for(lambda n=n: state_of(slurm, job).get("Restarts") == str(n), 300, f"restart {n}", tmp_path)
    end = wait_for_end(slurm, job, tmp_path, 300)
    log = (tmp_path / "job.log").read_text()
    assert (end["JobState"], end["Restarts"]) == ("COMPLETED", "2"), log
    assert log.count("resuming after step") == 2
    assert "stopped by SIGTERM after step" in log and "requeuing the job" in log
    train_uninterrupted(words, tmp_path / "plain")
    assert_same_run(run, tmp_path / "plain")


def test_a_time_limit_that_ends_a_job_twice(slurm: dict[str, str], cohort_store: Path, tmp_path: Path) -> None:
    """A run of about two minutes on this machine, in jobs of at most 40 seconds: a minute less the signal's 20."""
    words = ["--data", str(cohort_store), *TINY, "train.checkpoint_every=1000"]
    train_uninterrupted([*words, "train.steps=200"], tmp_path / "short")
    rows = [json.loads(line) for line in (tmp_path / "short" / "metrics.jsonl").read_text().splitlines()]
    seconds = sum(row["cost"]["seconds_per_step"] for row in rows[5:] if row["split"] == "train") / len(rows[5:])
    words.append(f"train.steps={int(120 / seconds) // 100 * 100}")
    run = tmp_path / "run"
    job = submit(slurm, tmp_path, "--time=1 --signal=TERM@20", "train", "tiny", *words, "--run", run)
    end = wait_for_end(slurm, job, tmp_path, 1200)
    log = (tmp_path / "job.log").read_text()
    assert end["JobState"] == "COMPLETED" and int(end["Restarts"]) >= 2, log
    assert log.count("requeuing the job") == int(end["Restarts"])
    train_uninterrupted(words, tmp_path / "plain")
    assert_same_run(run, tmp_path / "plain")


def test_a_cancelled_job_stops_with_a_checkpoint_and_is_not_queued_again(
    slurm: dict[str, str], cohort_store: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = ["--data", cohort_store, *TINY, "train.steps=100000"]
    job = submit(slurm, tmp_path, "--time=5", "train", "tiny", *words, "--run", run)
    wait_for(lambda: steps_done(run) >= 20, 300, "step 20", tmp_path)
    ask(slurm, "scancel", job)
    end = wait_for_end(slurm, job, tmp_path, 300)
    assert (end["JobState"], end["Restarts"]) == ("CANCELLED", "0")
    log = (tmp_path / "job.log").read_text()
    assert "stopped by SIGTERM after step" in log
    step = json.loads((run / "checkpoints" / "last" / "state.json").read_text())["step"]
    assert step >= 20


def test_a_job_that_is_preempted_with_a_grace_time_continues(
    slurm: dict[str, str], cohort_store: Path, tmp_path: Path
) -> None:
    """Slurm does not put a job back that ends within its grace time, so the job does it itself."""
    run, log = tmp_path / "run", tmp_path / "urgent.log"
    words = ["--data", cohort_store, *TINY, "train.steps=60"]
    job = submit(slurm, tmp_path, "--time=5 --ntasks=2", "train", "tiny", *words, "--run", run)
    wait_for(lambda: steps_done(run) >= 10, 300, "step 10", tmp_path)
    urgent = ["sbatch", "--partition=urgent", "--ntasks=2", f"--output={log}", "--wrap=true"]
    subprocess.run(urgent, env=slurm, capture_output=True, timeout=60, check=True)
    end = wait_for_end(slurm, job, tmp_path, 300)
    logs = (tmp_path / "job.log").read_text()
    assert (end["JobState"], end["Restarts"]) == ("COMPLETED", "1"), logs
    assert "requeuing the job" in logs
    assert "resuming after step" in logs


def test_two_processes_of_a_job_share_every_batch(slurm: dict[str, str], cohort_store: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--data", cohort_store, *TINY, "train.steps=4"]
    job = submit(slurm, tmp_path, "--time=5 --ntasks=2", "train", "tiny", *words, "--run", run)
    end = wait_for_end(slurm, job, tmp_path, 300)
    log = (tmp_path / "job.log").read_text()
    assert end["JobState"] == "COMPLETED", log
    assert "2 processes share every batch" in log
    assert json.loads((run / "environment.json").read_text())["processes"] == 2


def test_seeds_are_shared_by_the_jobs_of_an_array(slurm: dict[str, str], cohort_store: Path, tmp_path: Path) -> None:
    words = ["train", "tiny", "--data", cohort_store, "--run", tmp_path / "seeds", "--seeds", "2", *TINY]
    job = submit(slurm, tmp_path, "--time=5 --array=0-1", *words, "train.steps=4")
    for i in range(2):
        assert wait_for_end(slurm, f"{job}_{i}", tmp_path, 300)["JobState"] == "COMPLETED"
    summary = one_object(arcuate(*words, "train.steps=4", "--resume", "--json").stdout)  # nothing is left to train
    assert summary["n_finished"] == 2
    assert (tmp_path / "seeds" / "seed-1" / "results").is_dir()
