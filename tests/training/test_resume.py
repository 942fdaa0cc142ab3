"""A run killed at any moment and resumed ends with the weights and metrics of an uninterrupted run."""

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from support.cli import assert_refused, one_object
from support.command import arcuate
from support.forking import PROGRAM, forking_environment

SETTINGS = [
    "train.steps=36",
    "train.log_every=3",
    "train.validate_every=10",
    "train.checkpoint_every=4",
    "encoder.width=32",
    "data.batching.batch_size=8",
    "ema.decay=0.9",
]


def metrics(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "cost"} for row in rows]


def weights(run: Path, which: str = "last") -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted((run / "checkpoints" / which).glob("*.safetensors"))}


def command(store: Path, run: Path, *more: str) -> list[str]:
    return ["train", "tiny", "--data", str(store), "--run", str(run), *SETTINGS, *more]


def train(store: Path, run: Path, *more: str) -> "subprocess.CompletedProcess[str]":
    done = arcuate(*command(store, run, *more))
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def uninterrupted(cohort_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    train(cohort_store, run)
    return run


def wait_for_rows(run: Path, n_rows: int, process: subprocess.Popen[bytes]) -> None:
    file = run / "metrics.jsonl"
    while process.poll() is None:
        if file.exists() and file.read_bytes().count(b"\n") >= n_rows:
            return
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.thorough)]
)
def test_signals_finish_the_step_and_save(
    uninterrupted: Path, cohort_store: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """Signals go to the process group including workers, as from terminals and batch systems."""
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "arcuate", *command(cohort_store, run, "data.workers=1")],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for_rows(run, 3, process)
    os.killpg(process.pid, number)
    assert process.wait(timeout=120) == code
    state = json.loads((run / "checkpoints/last/state.json").read_text())
    assert 9 <= state["step"] < 36
    train(cohort_store, run, "--resume")
    assert metrics(run) == metrics(uninterrupted)
    assert weights(run) == weights(uninterrupted)


def test_damaged_checkpoint_is_skipped(uninterrupted: Path, cohort_store: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(uninterrupted, run, symlinks=True)
    last = (run / "checkpoints/last").resolve()
    os.truncate(last / "training.safetensors", 1000)
    done = train(cohort_store, run, "--resume")
    assert "damaged" in done.stderr
    assert metrics(run) == metrics(uninterrupted)
    assert weights(run) == weights(uninterrupted)


def test_without_usable_checkpoint_nothing_is_overwritten(
    uninterrupted: Path, cohort_store: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(uninterrupted, run, symlinks=True)
    for path in run.glob("checkpoints/step-*/model.safetensors"):
        os.truncate(path, 100)
    before = (run / "metrics.jsonl").read_bytes()
    done = arcuate(*command(cohort_store, run, "--resume"))
    assert_refused(done, "complete and consistent")
    assert (run / "metrics.jsonl").read_bytes() == before


def test_full_disk_keeps_earlier_checkpoints(uninterrupted: Path, cohort_store: Path, tmp_path: Path) -> None:
    """A limit on file sizes stands for the disk: the next checkpoint exceeds it."""
    run = tmp_path / "run"
    shutil.copytree(uninterrupted, run, symlinks=True)
    for name in ("step-00000036", "last"):
        path = run / "checkpoints" / name
        path.unlink() if path.is_symlink() else shutil.rmtree(path)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and "checkpoints" in p.parts}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        done = arcuate(*command(cohort_store, run, "--resume"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_refused(done, "too large", "checkpoints")
    assert {p: p.read_bytes() for p in before} == before
    train(cohort_store, run, "--resume")
    assert metrics(run) == metrics(uninterrupted)
    assert weights(run) == weights(uninterrupted)


def test_other_recipe_or_data_is_rejected(uninterrupted: Path, cohort_store: Path) -> None:
    done = arcuate(*command(cohort_store, uninterrupted, "--resume", "optimizer.eps=0.1"))
    assert_refused(done, "optimizer")


def test_from_starts_a_new_run_and_records_its_parent(uninterrupted: Path, cohort_store: Path, tmp_path: Path) -> None:
    run = tmp_path / "child"
    more = [
        "--from",
        f"{os.path.relpath(uninterrupted)}@last",
        "train.steps=2",
        "train.log_every=1",
        "encoder.width=32",
        "schedule={kind: constant, peak_lr: 0.0}",
    ]
    done = arcuate("train", "tiny", "--data", cohort_store, "--run", run, *more, "data.batching.batch_size=8")
    assert done.returncode == 0, done.stderr
    assert json.loads((run / "environment.json").read_text())["parent"] == f"{uninterrupted}@last"
    assert weights(run)["model.safetensors"] == weights(uninterrupted)["model.safetensors"]
    assert_refused(
        arcuate("train", "tiny", "--data", cohort_store, "--run", tmp_path / "x", "--from", "nowhere"),
        "nowhere",
    )
    other = arcuate("train", "tiny", "--data", cohort_store, "--run", tmp_path / "x", "--from", uninterrupted)
    assert_refused(other, "does not match")
    assert not (tmp_path / "x").exists()


@pytest.mark.thorough
def test_guard_does_not_change_a_healthy_run(uninterrupted: Path, cohort_store: Path, tmp_path: Path) -> None:
    run = tmp_path / "unguarded"
    train(cohort_store, run, "guard.enabled=false")
    assert weights(run) == weights(uninterrupted)
    assert metrics(run) == metrics(uninterrupted)
    assert (uninterrupted / "incidents.jsonl").read_text() == ""


def shared_command(store: Path, run: Path, *more: str) -> list[str]:
    """The same training in two processes, started by torchrun."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python", "--"]
    return [*launch, *PROGRAM, *command(store, run, *more)]


def kill_all(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a launcher and all its children."""
    family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    for pid in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    process.wait(timeout=120)


@pytest.mark.thorough
def test_two_processes_killed_and_resumed_equal_two_uninterrupted(cohort_store: Path, tmp_path: Path) -> None:
    """Killed at random moments, then stopped by a signal: all processes stop after the same step and save."""
    uninterrupted, run, rng = tmp_path / "uninterrupted", tmp_path / "run", random.Random(3)
    short = ["train.steps=24", "train.validate_every=8"]
    env = forking_environment()
    subprocess.run(shared_command(cohort_store, uninterrupted, *short), check=True, capture_output=True, env=env)
    for n_rows, number in ((3, signal.SIGKILL), (6, signal.SIGTERM)):
        resumed = shared_command(cohort_store, run, *short, "--resume")
        process = subprocess.Popen(resumed, stderr=subprocess.DEVNULL, env=env)
        wait_for_rows(run, n_rows, process)
        time.sleep(rng.uniform(0, 0.3))
        kill_all(process, number)
    done = subprocess.run(
        shared_command(cohort_store, run, *short, "--resume", "--json"), capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    assert one_object(done.stdout)["steps"] == 24  # only rank 0 prints
    assert metrics(run) == metrics(uninterrupted)
    assert weights(run) == weights(uninterrupted)
    assert weights(run, "best") == weights(uninterrupted, "best")


# Two trials for one process, one for the other; session layers may occur in the first of two batches only.
ACCUMULATED = ["encoder.dropout=0", "train.accumulate=2", "train.steps=6", "data.batching.batch_size=3"]
TWO_HEADS = [
    "encoder={kind: ssm, width: 16, depth: 2, n_heads: 4, state_dim: 8, dropout: 0}",
    "transducer={enabled: true, predictor: lstm, width: 16, dropout: 0}",
]


@pytest.mark.thorough
@pytest.mark.parametrize("model", [ACCUMULATED, TWO_HEADS], ids=["gru, accumulated", "ssm and transducer"])
def test_two_processes_equal_one(model: list[str], cohort_store: Path, tmp_path: Path) -> None:
    """Half the batch each with averaged gradients gives the same weights up to rounding."""
    import torch
    from safetensors.torch import load_file

    still = ["front_end.session_layer.dropout=0", "ema.decay=0", "train.steps=12", "data.workers=0"]
    still += ["data.batching.batch_size=5", *model]  # three trials for one process, two for the other
    alone, both = tmp_path / "alone", tmp_path / "both"
    train(cohort_store, alone, *still)
    words = shared_command(cohort_store, both, *still)
    done = subprocess.run(words, capture_output=True, text=True, env=forking_environment())
    assert done.returncode == 0, done.stderr
    one, two = (load_file(r / "checkpoints/last/model.safetensors") for r in (alone, both))
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=2e-5)
    assert [r["step"] for r in metrics(both)] == [r["step"] for r in metrics(alone)]
    for a, b in zip(metrics(alone), metrics(both), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)
        for name in ("n_trials", "blank_share", "length_ratio") if a["split"] == "train" else ():
            assert a[name] == pytest.approx(b[name], rel=2e-2, abs=1e-3), name


@pytest.mark.thorough
def test_diverging_run_is_rewound_with_evidence(cohort_store: Path, tmp_path: Path) -> None:
    run = tmp_path / "wild"
    wild = [
        "schedule={kind: warmup_cosine, peak_lr: 3.0, warmup_steps: 60, decay_steps: 120}",
        "train.steps=80",
        "train.validate_every=40",
        "train.clip_norm=null",
        "guard.stuck.patience=50",
        "guard.max_rewinds=20",
    ]
    done = train(cohort_store, run, *wild)
    incidents = [json.loads(line) for line in (run / "incidents.jsonl").read_text().splitlines()]
    rewinds = [i for i in incidents if i["action"] == "rewind"]
    assert rewinds
    assert rewinds[0]["trials"]
    assert "rewind" in done.stderr
    steps = [r["step"] for r in metrics(run) if r["split"] == "train"]
    assert steps == sorted(set(steps))
    assert steps[-1] == 80
