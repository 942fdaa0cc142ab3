"""Sweeps: invalid spaces are rejected, workers share a study, failures and interruptions are recorded."""

import errno
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arcuate.config import to_yaml_line
from arcuate.errors import UserError
from arcuate.training.callbacks import Stop
from support.cli import assert_refused, one_object
from support.command import arcuate
from support.forking import start

pytest.importorskip("optuna", reason="Optuna is not installed")

from arcuate.experiments.journal import Journal
from arcuate.experiments.search_space import Choices, Dimension, Range, read_space
from arcuate.experiments.sweep import (
    SweepPlan,
    claim_trial,
    open_study,
    run_trial,
    summarise_study,
    to_distribution,
)
from arcuate.experiments.sweep import sweep as run_sweep

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
        ("train.stepz: {choices: [1, 2]}", ["train.steps"]),
        ("encoder.dropout: {low: 0.0, high: 1.5}", ["encoder.dropout cannot be 1.5"]),
        ("encoder.width: {low: 0, high: 64}", ["encoder.width cannot be 0"]),
        ("encoder.width: {low: 16.5, high: 64}", ["encoder.width cannot be 16.5"]),
        ("encoder.bidirectional: {choices: [true, perhaps]}", ["perhaps"]),
        ("schedule.peak_lr: {low: 0.1, high: 0.01}", ["below"]),
        ("schedule.peak_lr: {low: 0.0, high: 0.01, log: true}", ["above 0"]),
        ("schedule.peak_lr: {low: 0.1, high: 0.3, log: true, step: 0.1}", ["combined"]),
        ("encoder.width: {low: 16, high: 40, step: 16}", ["32"]),
        ("encoder.width: {low: 16}", ["high"]),
        ("encoder.width: {low: 16, high: .inf}", ["high"]),
        ("encoder.width: {low: 16, high: 32, lgo: true}", ["lgo"]),
        ("encoder.width: {choices: [16]}", ["choices"]),
        ("encoder.width: {choices: [16, 16]}", ["twice"]),
        ("encoder.width: 16", ["range or choices"]),
        ("encoder.width: {low: 16, high: 32}\nencoder: {choices: [{}, {width: 3}]}", ["encoder.width"]),
        ("train.steps: {low: 2, high: 8}", ["train.steps is varied"]),
        ("name: {choices: [a, b]}", ["name"]),
        ("[1, 2]", ["should name"]),
        ("", ["should name"]),
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
    width, decay, gain = read_space(space_file(tmp_path, "\n".join(paths)), "tiny")
    assert (width.is_integer, decay.is_integer, gain.is_integer) == (True, False, False)


def test_values_survive_the_command_line(tmp_path: Path) -> None:
    text = "schedule: {choices: [{kind: constant, peak_lr: 1.0e-5}, {kind: linear, peak_lr: 0.1, min_lr: 0.0}]}"
    (schedule,) = read_space(space_file(tmp_path, text), "tiny")
    assert isinstance(schedule.values, Choices)
    assert schedule.to_override(schedule.values.texts[0]) == "schedule={kind: constant, peak_lr: 1.0e-05}"
    assert Dimension("optimizer.eps", Range(low=0, high=1)).to_override(1e-8) == "optimizer.eps=1.0e-08"
    assert to_yaml_line("16") != to_yaml_line(16)


# Studies without training


@pytest.fixture
def sweep(cohort_store: Path, tmp_path: Path) -> Any:
    space = read_space(space_file(tmp_path, SPACE), "tiny", FEW)
    return SweepPlan("tiny", tuple(FEW), space, cohort_store, tmp_path / "out", n_trials=2)


def test_an_abandoned_trial_fails_and_its_settings_are_queued_again(sweep: Any) -> None:
    shared, study = open_study(sweep)
    with claim_trial(sweep, shared, study) as first, claim_trial(sweep, *open_study(sweep)) as second:
        assert (first.number, second.number) == (0, 1)  # the second worker leaves the first one's alone
        assert first.params != second.params
        with claim_trial(sweep, shared, study) as third:
            assert third is None
    with claim_trial(sweep, *open_study(sweep)) as again:
        assert again.params in (first.params, second.params)
    states = [t.state for t in summarise_study(sweep.out, study).trials]
    assert states == ["fail", "fail", "running"]


def test_the_proposals_of_one_worker_depend_on_seed_and_results_alone(sweep: Any) -> None:
    def propose(folder: str, seed: int, pers: tuple[float, ...]) -> list[dict[str, Any]]:
        plan = replace(sweep, out=sweep.out / folder, seed=seed, n_trials=len(pers))
        shared, study = open_study(plan)
        found = []
        for per in pers:
            with claim_trial(plan, shared, study) as trial:
                found.append(dict(trial.params))
                study.tell(trial, per)
        return found

    pers = tuple(0.5 - 0.02 * i for i in range(12))  # the first ten proposals of TPE are random
    assert propose("a", 0, pers) == propose("b", 0, pers)
    assert propose("c", 1, pers[:3]) != propose("d", 0, pers[:3])


def test_another_sweep_is_rejected_in_the_same_folder(sweep: Any, tmp_path: Path) -> None:
    open_study(sweep)
    open_study(replace(sweep, overrides=(*FEW, "runtime.threads=1")))
    with pytest.raises(UserError, match="different recipe"):
        open_study(replace(sweep, overrides=("train.steps=9",)))
    with pytest.raises(UserError, match="different space"):
        open_study(replace(sweep, space=sweep.space[:1]))
    with pytest.raises(UserError, match="is not a sweep folder"):
        open_study(replace(sweep, out=tmp_path))


HOPELESS = """
import json, sys, time
from pathlib import Path
run = Path(sys.argv[sys.argv.index("--run") + 1])
run.mkdir()
(run / "metrics.jsonl").write_text(json.dumps({"step": 2, "split": "val", "per": 1.0}) + "\\n")
time.sleep(60)
"""


def test_a_trial_worse_than_the_median_is_pruned(sweep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arcuate.experiments.subprocess_train.PROGRAM", (sys.executable, "-c", HOPELESS))
    _, study = open_study(sweep)
    dimensions = {d.path: to_distribution(d) for d in sweep.space}
    for per in (0.5, 0.4, 0.3, 0.2, 0.1):
        trial = study.ask(dimensions)
        trial.report(per, 2)
        study.tell(trial, per)
    trial, started = study.ask(dimensions), time.monotonic()
    run_trial(sweep, study, trial, Stop())
    assert time.monotonic() - started < 30
    result = summarise_study(sweep.out, study)
    assert (result.trials[-1].state, result.trials[-1].per) == ("pruned", 1.0)
    assert result.best is not None
    assert (result.best.number, result.best.per) == (4, 0.1)


STOPPED_BY_THE_GUARD = """
import json, sys
from pathlib import Path
run = Path(sys.argv[sys.argv.index("--run") + 1])
run.mkdir()
(run / "recipe.yaml").write_text("train: {steps: 600}")
(run / "metrics.jsonl").write_text(json.dumps({"step": 2, "split": "val", "per": 0.01}) + "\\n")
(run / "incidents.jsonl").write_text(json.dumps({"step": 2, "action": "stop"}) + "\\n")
print(json.dumps({"best_per": 0.01, "steps": 2}))
"""


def test_a_trial_that_did_not_finish_is_never_the_best(sweep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arcuate.experiments.subprocess_train.PROGRAM", (sys.executable, "-c", STOPPED_BY_THE_GUARD))
    _, study = open_study(sweep)
    run_trial(sweep, study, study.ask({d.path: to_distribution(d) for d in sweep.space}), Stop())
    result = summarise_study(sweep.out, study)
    assert result.best is None and result.trials[0].state == "fail"
    assert result.trials[0].reason == "stopped by the guard at step 2 of 600"


FAILS_AT_FIRST = """
import json, sys
from pathlib import Path
run = Path(sys.argv[sys.argv.index("--run") + 1])
if not (run.parents[1] / "space is free").exists():
    sys.exit("error: the disk is full")
run.mkdir()
(run / "recipe.yaml").write_text("train: {steps: 4}")
(run / "metrics.jsonl").write_text(json.dumps({"step": 4, "split": "val", "per": 0.5}) + "\\n")
print(json.dumps({"best_per": 0.5, "steps": 4}))
"""


def test_a_trial_that_ended_with_an_error_is_tried_again_by_the_same_command(
    cohort_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arcuate.experiments.subprocess_train.PROGRAM", (sys.executable, "-c", FAILS_AT_FIRST))
    monkeypatch.setattr("arcuate.experiments.sweep.unfinished_reason", lambda run: None)
    arguments = ("tiny", space_file(tmp_path, SPACE), cohort_store, tmp_path / "out")

    def states() -> list[str]:
        return [t.state for t in run_sweep(*arguments, overrides=FEW, n_trials=2).trials]

    assert states() == ["fail", "fail"]
    (tmp_path / "space is free").touch()
    assert states() == ["fail", "fail", "complete", "complete"]
    result = run_sweep(*arguments, overrides=FEW, n_trials=2)
    assert [t.state for t in result.trials] == ["fail", "fail", "complete", "complete"]
    assert [t.overrides for t in result.trials[:2]] == [t.overrides for t in result.trials[2:]]
    assert [Path(t.run).name for t in result.trials] == ["trial-0000", "trial-0001"] * 2


# The command


def command(store: Path, space: Path, out: Path, *more: str) -> list[str]:
    return ["sweep", "tiny", str(space), "--data", str(store), "--out", str(out), "--json", *FEW, *more]


@pytest.mark.thorough
def test_two_workers_share_a_study(cohort_store: Path, tmp_path: Path) -> None:
    space, out = space_file(tmp_path, SPACE), tmp_path / "out"
    words = command(cohort_store, space, out, "--trials", "2")
    workers = [start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    ends = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], ends
    assert all("PER" in stderr for _, stderr in ends), "each had one to try"
    output = max((one_object(stdout) for stdout, _ in ends), key=n_complete)
    assert [(t["number"], t["state"]) for t in output["trials"]] == [(0, "complete"), (1, "complete")]
    best = min(output["trials"], key=lambda t: t["per"])
    assert (output["best_per"], output["best_overrides"]) == (best["per"], best["overrides"])
    rows = [json.loads(line) for line in (Path(best["run"]) / "metrics.jsonl").read_text().splitlines()]
    assert min(r["per"] for r in rows if r["split"] == "val") == best["per"]
    again = arcuate(*(a for a in words if a != "--json"))  # enough trials: only prints the results
    assert f"best: trial {best['number']}," in again.stdout
    assert f"arcuate train tiny --data {cohort_store} --run runs/best {' '.join(FEW)}" in again.stdout


def n_complete(output: dict[str, Any]) -> int:
    return sum(t["state"] == "complete" for t in output["trials"])


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


def test_a_bad_space_writes_nothing(cohort_store: Path, tmp_path: Path) -> None:
    space = space_file(tmp_path, "encoder.widht: {low: 16, high: 32}")
    assert_refused(arcuate(*command(cohort_store, space, tmp_path / "out")), "encoder.width")
    assert not (tmp_path / "out").exists()


# The journal


def test_a_torn_line_of_the_journal_is_skipped(sweep: Any, messages: list[str]) -> None:
    (_, study), journal = open_study(sweep), sweep.out / "study.journal"
    trial = study.ask({d.path: to_distribution(d) for d in sweep.space})
    study.tell(trial, 0.4)
    with journal.open("ab") as file:
        file.write(b'{"op_code": 4, "worker_id": "0a')  # a worker killed while it wrote
    _, again = open_study(sweep)
    assert [t.value for t in again.get_trials()] == [0.4]
    second = again.ask({d.path: to_distribution(d) for d in sweep.space})
    again.tell(second, 0.3)
    _, third = open_study(sweep)
    assert [t.value for t in third.get_trials()] == [0.4, 0.3]
    assert any("incomplete line" in line for line in messages)
    assert [t.value for t in study.get_trials()] == [0.4, 0.3]  # a worker that had read the lines before


def test_a_full_disk_leaves_no_part_of_an_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "study.journal", tmp_path / "lock")
    journal.append_logs([{"n": 1}])

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("arcuate.experiments.journal.os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            journal.append_logs([{"n": 2}, {"n": 3}])
    journal.append_logs([{"n": 4}])
    assert list(journal.read_logs(0)) == [{"n": 1}, {"n": 4}]
    assert list(journal.read_logs(1)) == [{"n": 4}]
    assert (tmp_path / "study.journal").read_text() == '{"n":1}\n{"n":4}\n'


def test_a_folder_that_another_worker_is_creating_is_a_sweep_folder(tmp_path: Path) -> None:
    """Of workers started at the same time, some were refused because the folder existed."""
    from arcuate.experiments.sweep import _is_started

    assert not _is_started(tmp_path) and not _is_started(tmp_path / "missing")
    for name in ("locks", "study.journal"):
        (tmp_path / name).mkdir()
        assert _is_started(tmp_path)
    (tmp_path / "thesis.txt").touch()
    assert not _is_started(tmp_path)
