"""Studies in a database: the laws of the journal hold there too, dead workers lose nothing, passwords stay hidden."""

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from arcuate.errors import UserError, has_password, without_password
from support.cases import cases
from support.cli import assert_refused, one_object
from support.command import arcuate
from support.forking import start
from support.postgres import PASSWORD, find_programs, server

pytest.importorskip("optuna", reason="Optuna is not installed")
pytest.importorskip("psycopg", reason="psycopg is not installed")
import optuna

from arcuate.experiments import storage as storage_module
from arcuate.experiments import sweep as sweep_module
from arcuate.experiments.search_space import read_space
from arcuate.experiments.sweep import (
    SweepPlan,
    claim_trial,
    open_study,
    run_trial,
    summarise_study,
    sweep,
)
from arcuate.training.callbacks import Stop

FEW = ["train.steps=4", "train.validate_every=2", "train.log_every=2", "encoder.width=16", "encoder.depth=1"]
SPACE = {"schedule.peak_lr": {"low": 1e-4, "high": 1e-2, "log": True}}


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    programs = find_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed (no initdb): apt-get install postgresql")
    with server(programs) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'study.db'}"
    return request.getfixturevalue("postgres")


@pytest.fixture
def plan(url: str, cohort_store: Path, tmp_path: Path) -> SweepPlan:
    space = read_space(SPACE, "tiny", FEW)
    out = tmp_path / f"sweep-{tmp_path.name}"
    return SweepPlan("tiny", tuple(FEW), space, cohort_store, out, n_trials=2, storage=url, heartbeat_s=1)


# Passwords


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:secret@host:5432/db", "postgresql://me@host:5432/db"),
        ("postgresql://me:se/cr@et@host/db", "postgresql://me@host/db"),
        ("postgresql://host/db?user=me&password=secret", "postgresql://host/db?user=me"),
        ("postgresql://host/db?sslpassword=secret", "postgresql://host/db"),
        ("postgresql://:secret@host/db", "postgresql://@host/db"),
    ],
)
def test_passwords_are_removed(url: str, shown: str) -> None:
    assert has_password(url)
    assert without_password(url) == shown
    assert not has_password(shown)


def test_a_wrong_password_is_not_printed(postgres: str, cohort_store: Path, tmp_path: Path) -> None:
    space = tmp_path / "space.yaml"
    space.write_text("encoder.dropout: {low: 0.0, high: 0.5}")
    wrong = postgres.replace(PASSWORD, "wr0ng-w0rd")
    words = ["sweep", "tiny", space, "--data", cohort_store, "--out", tmp_path / "out"]
    done = arcuate(*words, "--storage", wrong)
    assert_refused(done, "--storage postgresql://arcuate@127.0.0.1", "password authentication failed")
    assert "wr0ng" not in done.stderr
    assert not (tmp_path / "out" / "sweep.json").exists()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://me:secret@host/db", ["expected postgresql://", "mysql://me@host/db"]),
        ("study.db", ["expected postgresql://"]),
        ("sqlite:///:memory:", ["expected sqlite:///FILE"]),
        ("grpc://localhost", ["expected grpc://HOST:PORT"]),
        ("postgresql://me:secret@127.0.0.1:1/db", ["postgresql://me@127.0.0.1:1/db cannot be opened"]),
        ("sqlite:////no/such/folder/study.db", ["cannot be opened"]),
    ],
)
def test_unusable_storages_are_refused(url: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError) as refusal:
        storage_module.open_storage(url, tmp_path, "sweep")
    assert all(word in str(refusal.value) for word in words), refusal.value
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("server", ["sqlite", "grpc"])
def test_a_storage_that_fails_during_the_sweep_is_one_sentence(
    server: str, cohort_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "study.db"
    url = f"sqlite:///{file}" if server == "sqlite" else "grpc://127.0.0.1:1"

    def claim(*arguments: object) -> contextlib.AbstractContextManager[optuna.Trial | None]:
        file.write_bytes(b"x" * 5000)
        return claim_trial(*arguments)  # type: ignore[arg-type]

    if server == "grpc":
        proxy = optuna.storages.GrpcStorageProxy(host="127.0.0.1", port=1)
        monkeypatch.setattr(storage_module, "_connect_proxy", lambda url: proxy)
    monkeypatch.setattr(sweep_module, "claim_trial", claim)
    with pytest.raises(UserError, match=f"--storage {url} no longer answers: .*the same command continues"):
        sweep("tiny", SPACE, cohort_store, tmp_path / "out", overrides=FEW, n_trials=1, storage=url)


# The study


def test_workers_without_a_shared_folder_share_a_study(plan: SweepPlan, tmp_path: Path) -> None:
    elsewhere = replace(plan, out=tmp_path / "machine-2" / plan.out.name)
    shared, study = open_study(plan)
    with claim_trial(plan, shared, study) as first, claim_trial(elsewhere, *open_study(elsewhere)) as second:
        assert first is not None and second is not None
        assert (first.number, second.number) == (0, 1)
        with claim_trial(plan, shared, study) as third:
            assert third is None
        study.tell(first, 0.5)
        study.tell(second, 0.4)
    assert [t.state for t in summarise_study(plan.out, study).trials] == ["complete", "complete"]


@pytest.mark.thorough
def test_a_worker_without_heartbeats_loses_its_trial_to_another(plan: SweepPlan, messages: list[str]) -> None:
    shared, study = open_study(plan)
    lost = claim_trial(plan, shared, study)
    trial = lost.__enter__()
    assert trial is not None
    shared.storage.record_heartbeat = lambda trial_id: None  # this worker is suspended from now on
    again, other = open_study(plan)
    limit = time.monotonic() + 300
    while True:
        with claim_trial(plan, again, other) as found:
            assert found is not None
            retried = found.params == trial.params
            other.tell(found, 0.5)
        if retried:
            break
        assert time.monotonic() < limit
        plan = replace(plan, n_trials=plan.n_trials + 1)
        time.sleep(0.5)
    run_trial(replace(plan, data=Path("missing")), study, trial, Stop())  # it wakes up, and its result does not count
    lost.__exit__(None, None, None)
    assert any("another worker took over its settings" in line for line in messages)
    states = {t.number: t.state for t in summarise_study(plan.out, study).trials}
    assert states[0] == "fail" and "complete" in states.values()


def test_a_trial_that_was_never_claimed_is_not_lost(plan: SweepPlan) -> None:
    """Its worker died between asking for the trial and its first heartbeat, which Optuna alone never notices."""
    shared, study = open_study(plan)
    orphan = study.ask({d.path: optuna.distributions.FloatDistribution(1e-4, 1e-2, log=True) for d in plan.space})
    with claim_trial(plan, shared, study) as again:
        assert again is not None
        assert again.params == orphan.params


def test_a_study_of_the_same_name_but_another_sweep_is_rejected(plan: SweepPlan, tmp_path: Path) -> None:
    open_study(plan)
    other = replace(plan, out=tmp_path / "elsewhere" / plan.out.name, overrides=(*FEW, "encoder.dropout=0.3"))
    with pytest.raises(UserError, match="belongs to a different sweep"):
        open_study(other)


# Real workers


def start_worker(plan: SweepPlan, space: Path) -> "subprocess.Popen[str]":
    words = [
        "sweep",
        "tiny",
        space,
        "--data",
        plan.data,
        "--out",
        plan.out,
        "--trials",
        plan.n_trials,
        "--heartbeat",
        "1",
    ]
    environment = os.environ | {"ARCUATE_STORAGE": str(plan.storage)}
    return start(*words, "--json", *FEW, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.thorough
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_workers_killed_at_random_lose_no_trial(plan: SweepPlan, tmp_path: Path) -> None:
    """Every proposal that was ever made ends with a result, and there are as many results as were asked for."""
    space = tmp_path / "space.yaml"
    space.write_text("schedule.peak_lr: {low: 1.0e-4, high: 1.0e-2, log: true}\n")
    plan, draw = replace(plan, n_trials=3), random.Random(5)
    _, study = open_study(plan)
    for _ in range(cases(0.1)):
        worker = start_worker(plan, space)
        before = len(study.get_trials(deepcopy=False))
        while worker.poll() is None and len(study.get_trials(deepcopy=False)) == before:
            time.sleep(0.05)  # until it has a trial: importing takes seconds
        time.sleep(draw.uniform(0.0, 2.5))  # anywhere in it: claiming, starting, training, reporting
        worker.send_signal(signal.SIGKILL)
        worker.communicate()
    end = start_worker(plan, space)
    output, errors = end.communicate(timeout=300)
    assert end.returncode == 0, errors
    while True:  # trials of the workers killed last have to be noticed
        last = one_object(output)
        states = [t["state"] for t in last["trials"]]
        if "running" not in states:
            break
        end = start_worker(plan, space)
        output, errors = end.communicate(timeout=300)
        assert end.returncode == 0, errors
    assert states.count("complete") == 3, last
    proposed = {tuple(t["overrides"]) for t in last["trials"]}
    finished = {tuple(t["overrides"]) for t in last["trials"] if t["state"] == "complete"}
    waiting = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.WAITING,))
    assert len(proposed - finished) <= len(waiting)
    assert PASSWORD not in output + errors
    for file in plan.out.rglob("*"):
        assert not file.is_file() or PASSWORD.encode() not in file.read_bytes(), file


@pytest.mark.usefixtures("forked_training")
def test_an_interrupted_trial_continues_in_its_folder(cohort_store: Path, tmp_path: Path) -> None:
    """A sweep whose time limit is shorter than a training still ends."""
    few = ["train.steps=60", "train.validate_every=30", "train.log_every=5", "guard.enabled=false", *FEW[3:]]
    plan = SweepPlan("tiny", tuple(few), read_space(SPACE, "tiny", few), cohort_store, tmp_path / "out", n_trials=1)
    shared, study = open_study(plan)
    stop, metrics = Stop(), plan.out / "trial-0000" / "metrics.jsonl"

    def interrupt() -> None:
        while not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.02)
        stop.request()

    with claim_trial(plan, shared, study) as trial:
        assert trial is not None
        threading.Thread(target=interrupt, daemon=True).start()
        run_trial(plan, study, trial, stop)
    with claim_trial(plan, *open_study(plan)) as again:
        assert again is not None
        assert again.params == trial.params
        run_trial(plan, study, again, Stop())
    result = summarise_study(plan.out, study)
    assert [(t.state, Path(t.run).name) for t in result.trials] == [("fail", "trial-0000"), ("complete", "trial-0000")]
    assert "resuming after step" in (plan.out / "trial-0000.log").read_text()
