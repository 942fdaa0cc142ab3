"""Elastic training: torchrun starts killed processes again, with as many as there are, and the run continues."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from support.forking import PROGRAM, forking_environment
from support.slurm import free_ports

SETTINGS = [
    *("train.steps=60", "train.log_every=5", "train.validate_every=20", "train.checkpoint_every=10"),
    *("encoder.width=16", "encoder.depth=1", "data.batching.batch_size=4", "data.workers=0"),
]
WITHOUT_DROPOUT = ["encoder.dropout=0", "front_end.session_layer.dropout=0"]


def arguments(store: Path, run: Path, *more: str) -> list[str]:
    return ["train", "tiny", "--data", str(store), "--run", str(run), "--resume", *SETTINGS, *more]


def torchrun(*options: str, program: tuple[str, ...] = PROGRAM) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval=0.2"]
    return [*launcher, *options, "--no-python", "--", *program]


def start(command: list[str], log: Path) -> "subprocess.Popen[bytes]":
    # Without the second variable a node that joins waits in vain for an address (torch 2.13; docs/scaling.md).
    environment = forking_environment() | {"LOGLEVEL": "INFO", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with log.open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=environment)


def trainings(launcher: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """The training processes of a launcher, not their data loaders."""
    return psutil.Process(launcher.pid).children()


def wait_until(condition: Callable[[], bool], launcher: "subprocess.Popen[bytes]", log: Path, what: str) -> None:
    limit = time.monotonic() + 300
    while not condition():
        assert launcher.poll() is None and time.monotonic() < limit, f"{what} did not come: {log.read_text()}"
        time.sleep(0.02)


def rows(run: Path) -> list[dict]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def last_step(run: Path) -> int:
    return max((row["step"] for row in rows(run)), default=0)


def without_cost(run: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if k != "cost"} for row in rows(run)]


@pytest.fixture(scope="module")
def undisturbed(cohort_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes to the end, without dropout."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    command = [*torchrun("--standalone", "--nproc-per-node=2"), *arguments(cohort_store, run, *WITHOUT_DROPOUT)]
    subprocess.run(command, check=True, capture_output=True, env=forking_environment())
    return run


def test_a_killed_rank_changes_nothing(undisturbed: Path, cohort_store: Path, tmp_path: Path) -> None:
    run, log, draw = tmp_path / "run", tmp_path / "log", random.Random(7)
    elastic = torchrun("--standalone", "--nproc-per-node=2", "--max-restarts=3")
    launcher = start([*elastic, *arguments(cohort_store, run, *WITHOUT_DROPOUT)], log)
    for step in (15, 40):
        wait_until(lambda step=step: last_step(run) >= step, launcher, log, f"step {step}")
        time.sleep(draw.uniform(0.0, 0.2))
        victims = trainings(launcher)
        if victims:  # between two starts there may be none: the first kill is then enough
            draw.choice(victims).send_signal(signal.SIGKILL)
    assert launcher.wait(timeout=300) == 0, log.read_text()
    assert log.read_text().count("resuming after step") == 2
    assert without_cost(run) == without_cost(undisturbed)
    for name in ("model.safetensors", "training.safetensors"):
        last = [(r / "checkpoints" / "last" / name).read_bytes() for r in (run, undisturbed)]
        assert last[0] == last[1], name


def test_two_ranks_then_one_then_two(undisturbed: Path, cohort_store: Path, tmp_path: Path) -> None:
    """A node is lost and another one joins: data and schedule continue exactly, the rest up to rounding."""
    from safetensors.torch import load_file

    run, (port,) = tmp_path / "run", free_ports(1)
    logs = [tmp_path / f"log-{i}" for i in range(3)]

    def node(i: int) -> "subprocess.Popen[bytes]":
        quick = f"is_host={int(i == 0)},last_call_timeout=6,keep_alive_interval=1,keep_alive_max_attempt=3"
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={quick}"]
        options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=9", "--local-addr=127.0.0.1", *rendezvous]
        fresh = (sys.executable, "-m", "arcuate")  # one of them is suspended
        return start([*torchrun(*options, program=fresh), *arguments(cohort_store, run, *WITHOUT_DROPOUT)], logs[i])

    first, second = node(0), node(1)
    wait_until(lambda: last_step(run) >= 15, first, logs[0], "step 15")
    for process in (*trainings(second), psutil.Process(second.pid)):  # the node is gone
        process.send_signal(signal.SIGKILL)
    second.wait()
    wait_until(lambda: "now has 1" in logs[0].read_text(), first, logs[0], "training on one node")
    wait_until(lambda: last_step(run) >= 25, first, logs[0], "step 25")
    (alone,) = trainings(first)
    alone.suspend()  # so that the run does not end before the other node is there
    third = node(2)
    wait_until(lambda: "new nodes" in logs[0].read_text(), first, logs[0], "the third node")
    alone.resume()
    assert [first.wait(timeout=300), third.wait(timeout=300)] == [0, 0], [log.read_text() for log in logs]
    assert "stopped by SIGTERM after step" in logs[0].read_text()

    found, expected = without_cost(run), without_cost(undisturbed)
    exact = ("step", "split", "epoch", "lr", "n_trials")
    assert [[r.get(key) for key in exact] for r in found] == [[r.get(key) for key in exact] for r in expected]
    largest = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(found, expected, strict=True))
    assert largest < 1e-4, largest
    weights, reference = (load_file(r / "checkpoints" / "last" / "model.safetensors") for r in (run, undisturbed))
    differences = {name: float((weights[name] - reference[name]).norm() / reference[name].norm()) for name in weights}
    assert max(differences.values()) < 1e-4, differences
