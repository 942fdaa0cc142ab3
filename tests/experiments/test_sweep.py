"""Sweeps: invalid spaces are rejected, workers share a study, failures and interruptions are recorded."""

import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arcuate.errors import UserError, without_password
from arcuate.experiments.sweep import SweepPlan, SweepResult, open_study, read_space, sweep, to_override
from arcuate.training.callbacks import Stop
from support.cli import one_object
from support.command import arcuate
from support.forking import start

pytest.importorskip("optuna", reason="Optuna is not installed")

from optuna.distributions import CategoricalDistribution
from optuna.trial import create_trial

FEW = ["train.steps=4", "train.validate_every=2", "train.log_every=2", "encoder.width=16", "encoder.depth=1"]
SPACE = "schedule.peak_lr: {low: 1.0e-4, high: 1.0e-2, log: true}\naugment.white_noise_sd: {choices: [0.0, 0.5]}\n"


def space_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "space.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schedule.peek_lr: {low: 0.001, high: 0.01}", ["schedule.peek_lr", "schedule.peak_lr"]),
        ("encoder.dropout: {low: 0.0, high: 1.5}", ["encoder.dropout cannot be 1.5"]),
        ("encoder.width: {low: 0, high: 64}", ["encoder.width cannot be 0"]),
        ("encoder.bidirectional: {choices: [true, perhaps]}", ["perhaps"]),
        ("schedule.peak_lr: {low: 0.0, high: 0.01, log: true}", ["low"]),
        ("encoder.width: {low: 16, high: 40, step: 16}", ["divisible"]),
        ("encoder.width: {low: 16}", ["high"]),
        ("encoder.width: {low: 16, high: 32, lgo: true}", ["lgo"]),
        ("encoder.width: {choices: [16, 16]}", ["twice"]),
        ("encoder.width: 16", ["range or choices"]),
        ("encoder.width: {low: 16, high: 32}\nencoder: {choices: [{}, {width: 3}]}", ["encoder.width"]),
        ("train.steps: {low: 2, high: 8}", ["train.steps is varied"]),
        ("name: {choices: [a, b]}", ["name"]),
        ("[1, 2]", ["should name"]),
        ("{", ["YAML"]),
    ],
)
def test_bad_spaces_are_rejected(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(UserError) as refusal:
        read_space(space_file(tmp_path, text), "tiny", FEW[:1])
    for word in words:
        assert word in str(refusal.value)


def test_ranges_are_integer_if_the_setting_is(tmp_path: Path) -> None:
    paths = (
        "encoder.width: {low: 16, high: 64}",
        "ema.decay: {low: 0, high: 0.5}",
        "augment.offset_sd: {low: 0, high: 1}",
    )
    found = read_space(space_file(tmp_path, "\n".join(paths)), "tiny").values()
    assert [type(d).__name__ for d in found] == ["IntDistribution", "FloatDistribution", "FloatDistribution"]


def test_values_survive_the_command_line(tmp_path: Path) -> None:
    text = "schedule: {choices: [{kind: constant, peak_lr: 1.0e-5}, {kind: linear, peak_lr: 0.1, min_lr: 0.0}]}"
    (schedule,) = read_space(space_file(tmp_path, text), "tiny").values()
    assert isinstance(schedule, CategoricalDistribution)
    assert to_override("schedule", schedule.choices[0]) == "schedule={kind: constant, peak_lr: 1.0e-05}"
    assert to_override("optimizer.eps", 1e-8) == "optimizer.eps=1.0e-08"


# Studies with a program in place of the training


@pytest.fixture
def plan(cohort_store: Path, tmp_path: Path) -> SweepPlan:
    space = read_space(space_file(tmp_path, SPACE), "tiny", FEW)
    return SweepPlan("tiny", tuple(FEW), space, cohort_store, tmp_path / "out", n_trials=2)


def run_plan(plan: SweepPlan, **options: Any) -> SweepResult:
    space = plan.out.parent / "space.yaml"
    return sweep("tiny", space, plan.data, plan.out, plan.overrides, plan.n_trials, plan.seed, **options)


def replace_training(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """`PER` is the error rate that the program reports, from its arguments."""
    monkeypatch.setattr("arcuate.experiments.train_many.PROGRAM", (sys.executable, "-c", HEAD + program))


HEAD = """
import json, os, signal, sys, time
from pathlib import Path
run = Path(sys.argv[sys.argv.index("--run") + 1])
settings = dict(word.split("=") for word in sys.argv if "=" in word)
def save(step, per, **result):
    run.mkdir(exist_ok=True)
    (run / "recipe.yaml").write_text("train: {steps: 4}")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "split": "val", "per": per}) + "\\n")
    print(json.dumps({"best_per": per, "steps": step}))
"""
DONE = "save(4, float(settings['schedule.peak_lr']))"


def test_the_proposals_of_one_worker_depend_on_seed_and_results_alone(
    plan: SweepPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_training(monkeypatch, DONE)

    def propose(name: str, seed: int, n_trials: int = 3) -> list[tuple[str, ...]]:
        found = run_plan(replace(plan, out=plan.out.with_name(name), seed=seed, n_trials=n_trials))
        return [trial.overrides for trial in found.trials]

    first = propose("a", 0, 12)  # the first ten proposals of TPE are random
    assert len(set(first)) == 12
    assert propose("b", 0, 12) == first
    assert propose("c", 1) != first[:3]
    enough = run_plan(replace(plan, out=plan.out.with_name("a"), n_trials=1))  # only the results
    best = min(enough.trials, key=lambda trial: trial.per or 1.0)
    assert [trial.overrides for trial in enough.trials] == first and enough.best == best
    assert enough.command is not None and enough.command[-len(best.overrides) :] == best.overrides


def test_another_sweep_is_rejected_in_the_same_folder(plan: SweepPlan, tmp_path: Path) -> None:
    with open_study(plan), open_study(replace(plan, overrides=(*FEW, "runtime.threads=1"))):
        pass
    with pytest.raises(UserError, match="different recipe"), open_study(replace(plan, overrides=("train.steps=9",))):
        pass
    fewer = replace(plan, space=dict([*plan.space.items()][:1]))
    with pytest.raises(UserError, match="different space"), open_study(fewer):
        pass
    with pytest.raises(UserError, match="is not a sweep folder"), open_study(replace(plan, out=tmp_path)):
        pass


def test_a_trial_worse_than_the_median_is_pruned(plan: SweepPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_training(monkeypatch, "save(2, 1.0)\ntime.sleep(60)")
    with open_study(plan) as study:
        for per in (0.5, 0.4, 0.3, 0.2, 0.1):
            study.add_trial(create_trial(value=per, params={}, distributions={}, intermediate_values={2: per}))
    started = time.monotonic()
    result = run_plan(replace(plan, n_trials=6))
    assert time.monotonic() - started < 30
    assert (result.trials[-1].state, result.trials[-1].per) == ("pruned", 1.0)
    assert result.best is not None and (result.best.number, result.best.per) == (4, 0.1)


def test_a_trial_that_did_not_finish_is_never_the_best(plan: SweepPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = "save(2, 0.01)\n(run / 'incidents.jsonl').write_text(json.dumps({'step': 2, 'action': 'stop'}) + '\\n')"
    replace_training(monkeypatch, stopped)
    result = run_plan(replace(plan, n_trials=1))
    assert result.best is None and result.trials[0].state == "fail"
    assert result.trials[0].reason == "stopped by the guard at step 2 of 4"
    assert len(run_plan(replace(plan, n_trials=1)).trials) == 1  # it has a result and is not repeated


def test_a_trial_that_ended_with_an_error_is_tried_again_by_the_same_command(
    plan: SweepPlan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    full = "if not (run.parents[1] / 'space is free').exists(): sys.exit('error: the disk is full')\n"
    replace_training(monkeypatch, full + DONE)
    first = run_plan(plan).trials
    assert [(t.state, t.reason) for t in first] == [("fail", "the disk is full")] * 2
    (tmp_path / "space is free").touch()
    second = run_plan(plan).trials
    assert [(t.state, t.run, t.overrides) for t in second] == [("complete", t.run, t.overrides) for t in first]
    assert [t.number for t in second] == [2, 3]


def test_an_interrupted_trial_continues_in_its_folder(plan: SweepPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep whose time limit is shorter than a training still ends."""
    replace_training(monkeypatch, "if run.exists(): save(4, 0.5); sys.exit()\nsave(2, 0.9)\ntime.sleep(60)")
    plan, stop = replace(plan, n_trials=1), Stop()
    threading.Thread(target=lambda: request_when(plan.out / "trial-0000", stop), daemon=True).start()
    (trial,) = run_plan(plan, stop=stop).trials
    assert (trial.state, trial.reason) == ("fail", "interrupted")
    (again,) = run_plan(plan).trials
    assert (again.state, again.run, again.overrides) == ("complete", trial.run, trial.overrides)


def request_when(folder: Path, stop: Stop) -> None:
    while not (folder / "metrics.jsonl").exists():
        time.sleep(0.02)
    stop.request()


WORKER = """
import sys
from pathlib import Path
import arcuate.experiments.train_many as module
from arcuate.experiments import sweep
sweep._HEARTBEAT_S, sweep._DEAD_S = 1, 2
module.PROGRAM = (sys.executable, "-c", sys.argv[1])
_, _, space, data, out, *overrides = sys.argv
sweep.sweep("tiny", space, data, out, overrides, 1)
"""


@pytest.mark.thorough
def test_the_trial_of_a_killed_worker_is_continued(plan: SweepPlan, tmp_path: Path) -> None:
    program = HEAD + "if run.exists(): save(4, 0.5); sys.exit()\nsave(2, 0.9)\ntime.sleep(600)"
    words = [sys.executable, "-c", WORKER, program, tmp_path / "space.yaml", plan.data, plan.out, *plan.overrides]
    worker = subprocess.Popen([str(word) for word in words])
    limit = time.monotonic() + 120
    while not (plan.out / "trial-0000" / "metrics.jsonl").exists() and time.monotonic() < limit:
        time.sleep(0.05)
    worker.kill()
    worker.wait()
    time.sleep(3)  # until it counts as dead
    subprocess.run([str(word) for word in words], check=True, timeout=120)
    with open_study(plan) as study:
        states = [trial.state.name for trial in study.get_trials()]
    assert states == ["FAIL", "COMPLETE"]
    assert sorted(path.name for path in plan.out.glob("trial-*/")) == ["trial-0000"]


# Storage


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://me:secret@host/db", ["expected the URL", "mysql://me@host/db"]),
        ("study.db", ["expected the URL"]),
        ("postgresql://me:secret@127.0.0.1:1/db", ["postgresql://me@127.0.0.1:1/db does not answer", "same command"]),
        ("sqlite:////no/such/folder/study.db", ["does not answer"]),
    ],
)
def test_unusable_storages_are_refused(url: str, words: list[str], plan: SweepPlan) -> None:
    with pytest.raises(UserError) as refusal:
        run_plan(plan, storage=url)
    assert all(word in str(refusal.value) for word in words), refusal.value
    assert "secret" not in str(refusal.value)


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
    assert without_password(url) == shown == without_password(shown) != url


# The command


def command(store: Path, space: Path, out: Path, *more: str) -> list[str]:
    return ["sweep", "tiny", str(space), "--data", str(store), "--out", str(out), "--json", *FEW, *more]


@pytest.mark.thorough
def test_two_workers_share_a_study(cohort_store: Path, tmp_path: Path) -> None:
    space, out = space_file(tmp_path, SPACE), tmp_path / "out"
    words = command(cohort_store, space, out, "--trials", "4")
    workers = [start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    ends = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], ends
    assert all("PER" in stderr for _, stderr in ends), "each had one to try"
    again = arcuate(*words)  # enough trials: only prints the results
    output = one_object(again.stdout)
    assert 4 <= len(output["trials"]) <= 5 and {t["state"] for t in output["trials"]} == {"complete"}
    best = min(output["trials"], key=lambda t: t["per"])
    rows = [json.loads(line) for line in (Path(best["run"]) / "metrics.jsonl").read_text().splitlines()]
    assert min(r["per"] for r in rows if r["split"] == "val") == best["per"] == output["best_per"]
    assert output["command"][:4] == ["arcuate", "train", "tiny", "--data"]


def test_a_failed_trial_is_recorded_and_the_sweep_continues(cohort_store: Path, tmp_path: Path) -> None:
    space = space_file(tmp_path, "data.release: {choices: [b2t24, falcon-h2]}")
    done = arcuate(*command(cohort_store, space, tmp_path / "out", "--trials", "2"))
    assert done.returncode == 1
    output = one_object(done.stdout)
    assert [t["state"] for t in output["trials"]] == ["fail", "fail"]
    assert "channels" in output["trials"][0]["reason"]
    assert output["best_per"] is None


def test_ctrl_c_stops_the_training_subprocess(cohort_store: Path, tmp_path: Path) -> None:
    space, out = space_file(tmp_path, SPACE), tmp_path / "out"
    words = command(cohort_store, space, out, "train.steps=100000")
    worker = start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = out / "trial-0000" / "metrics.jsonl"
    while worker.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    worker.send_signal(signal.SIGINT)
    stdout, stderr = worker.communicate(timeout=60)
    assert worker.returncode == 130, stderr
    assert "Traceback" not in stderr
    (trial,) = one_object(stdout)["trials"]
    assert (trial["state"], trial["reason"]) == ("fail", "interrupted")
    assert "stopped by SIGTERM" in (out / "trial-0000.log").read_text()
