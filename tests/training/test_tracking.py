"""Trackers: names of metrics, resuming, failures, and what is not sent."""

import json
import math
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from arcuate.config import to_tree
from arcuate.data.alphabet import token_names
from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.experiments.recipe import load_recipe
from arcuate.files import append_jsonl
from arcuate.run import Run, create_run
from arcuate.training import tracking
from arcuate.training.callbacks import CallbackList
from arcuate.training.tracking import Tracker, check_trackers, make_trackers, to_scalars
from support.command import arcuate

TRAIN_ROW = {
    "step": 5,
    "split": "train",
    "loss": 2.5,
    "losses": {"ctc": 2.5},
    "grad_norm": 0.5,
    "grad_norm_max": 0.9,
    "blank_share": 0.8,
    "n_distinct": 12.0,
    "length_ratio": 0.5,
    "lr": 1e-3,
    "lr_bias": 1e-3,
    "lr_session": 2e-3,
    "skipped": {"non_finite": 2},
    "n_trials": 16,
    "cost": {"seconds_per_step": 0.1, "waiting_for_data_s": 0.01, "memory_mb": 300.0},
}
VAL_ROW = {"step": 5, "split": "val", "loss": 2.0, "per": 0.25, "per_by_session": {"s": 0.25}}


def val_row(step: int, per: float = 0.25) -> dict[str, Any]:
    return {**VAL_ROW, "step": step, "per": per}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_run(tmp_path / "run", load_recipe("tiny"), {})


def test_names_of_metrics() -> None:
    named = to_scalars(TRAIN_ROW)
    assert named["train/loss"] == named["train/loss_ctc"] == 2.5
    assert (named["train/grad_norm"], named["train/batch_time"], named["learning_rate"]) == (0.5, 0.1, 1e-3)
    assert named["train/skipped_non_finite"] == 2
    named = to_scalars({**VAL_ROW, "wer": 0.5, "mode_accuracy": 1.0})
    assert named["val/phoneme_accuracy"] == 0.75
    assert {"val/loss", "val/per", "val/wer", "val/mode_accuracy"} <= set(named)


def test_missing_values_are_omitted_and_nonfinite_ones_counted() -> None:
    named = to_scalars({**TRAIN_ROW, "loss": None, "losses": {"ctc": None}, "grad_norm": math.nan})
    assert "train/loss" not in named and "train/grad_norm" not in named
    assert named["train/non_finite_values"] == 1
    assert "val/wer" not in to_scalars(VAL_ROW) and "val/non_finite_values" not in to_scalars(VAL_ROW)


class Recorder:
    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.sent, self.closed = error, [], None

    def send(self, step: int, values: dict[str, float]) -> None:
        if self.error:
            raise self.error
        self.sent.append(step)

    def rewind(self, step: int) -> None:
        self.sent.append((step, "rewind"))

    def close(self, failed: bool) -> None:
        self.closed = failed


def test_failing_tracker_is_closed_with_one_warning(messages: list[str]) -> None:
    failing, working = Recorder(ConnectionResetError("gone")), Recorder()
    callbacks = CallbackList(Tracker("failing", "f", lambda: failing), Tracker("working", "w", lambda: working))
    with callbacks as callback:
        callback.on_metrics(TRAIN_ROW)
        callback.on_metrics(VAL_ROW)
    assert len(messages) == 1 and "failing" in messages[0] and "gone" in messages[0]
    assert working.sent == [5, 5] and working.closed is False


def test_internal_errors_are_raised() -> None:
    tracker = Tracker("t", "elsewhere", lambda: Recorder(KeyError("bug")))
    with pytest.raises(KeyError), CallbackList(tracker) as callback:
        callback.on_metrics(TRAIN_ROW)


def test_missing_package_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracking, "installed_version", lambda name: None)
    for tracker in ("tensorboard", "wandb"):
        track = load_recipe("tiny", [f"track.{tracker}.enabled=true"]).track
        with pytest.raises(UserError, match=r"pip install 'arcuate\[track\]'"):
            check_trackers(track)


# TensorBoard


def open_events(run: Run, step: int, *overrides: str) -> CallbackList:
    recipe = load_recipe("tiny", ["track.tensorboard.enabled=true", *overrides])
    return CallbackList(*make_trackers(recipe, run, step))


def read_events(run: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    return events.Reload()


def curve(events: Any, name: str) -> list[tuple[int, float]]:
    return [(e.step, round(e.value, 6)) for e in events.Scalars(name)]


def test_tensorboard_discards_repeated_steps(run: Run) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    with open_events(run, 0) as callback:
        for step in (1, 2, 3):
            callback.on_metrics(val_row(step, 0.9))
    with open_events(run, 2) as callback:  # resumed from the checkpoint of step 2
        for step in (3, 4):
            callback.on_metrics(val_row(step, 0.5))
        callback.on_incident({"step": 4, "action": "rewind", "rewound_to": 3})
        callback.on_metrics(val_row(4, 0.25))
    assert curve(read_events(run.path), "val/per") == [(1, 0.9), (2, 0.9), (3, 0.5), (4, 0.25)]


FULL_DISK = """
import logging, resource, signal, sys
from pathlib import Path
from arcuate.run import Run
from test_tracking import TRAIN_ROW, open_events
logging.basicConfig(stream=sys.stdout)
with open_events(Run(Path(sys.argv[1])), 0) as callback:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))  # writing beyond is an OSError, as on a full disk
    for step in range(100):
        callback.on_metrics(TRAIN_ROW | {"step": step})
    print("still training")
"""


def run_script(script: str, run: Run) -> str:
    paths = [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    done = subprocess.run(
        [sys.executable, "-c", script, str(run.path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_training_continues_if_tensorboard_has_no_disk_space(run: Run) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    output = run_script(FULL_DISK, run)
    assert "still training" in output and output.count("TensorBoard was closed") == 1


# Weights & Biases, offline


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    found = pytest.importorskip("wandb", reason="Weights & Biases is not installed")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_SERVICE", raising=False)  # commands started by a test have a service of their own
    return found


def open_wandb(run: Run, *overrides: str) -> CallbackList:
    more = ["track.wandb.enabled=true", *overrides]
    return CallbackList(*make_trackers(load_recipe("tiny", more), run, 0))


def offline_records(run: Path) -> list[Any]:
    """Records of all parts of an offline run in order: a 7-byte file header, then blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        for _ in range(100):  # another process of W&B writes the end of the file
            if path.stat().st_size > 7:
                break
            time.sleep(0.05)
        data, at, record = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            record += data[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # complete, or the last piece
                found.append(Record.FromString(record))
                record = b""
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
    return found


def history(run: Path) -> list[dict[str, Any]]:
    rows = [r.history for r in offline_records(run) if r.HasField("history")]
    return [{i.key or i.nested_key[0]: json.loads(i.value_json) for i in row.item} for row in rows]


def test_wandb_has_metrics_and_complete_recipe(run: Run, wandb: Any) -> None:
    chosen = ["track.wandb.run_name=first", "track.wandb.tags=[a, b]", "purpose=why"]
    with open_wandb(run, *chosen) as callback:
        callback.on_metrics(TRAIN_ROW)
        callback.on_metrics(VAL_ROW)
    first, second = history(run.path)
    assert (first["step"], first["train/loss"], first["learning_rate"]) == (5, 2.5, 1e-3)
    assert (second["step"], second["val/per"], second["val/phoneme_accuracy"]) == (5, 0.25, 0.75)
    (started,) = [r.run for r in offline_records(run.path) if r.HasField("run")][:1]
    assert (started.project, started.display_name, started.notes) == ("arcuate", "first", "why")
    assert list(started.tags) == ["a", "b"]
    config = {i.key: json.loads(i.value_json) for i in started.config.update}
    tree = to_tree(load_recipe("tiny"))
    same = [k for k in tree if k not in ("track", "purpose")]
    assert {k: config[k] for k in same} == {k: tree[k] for k in same}


def test_wandb_resumes_its_run_and_numbers_rows_by_their_place(run: Run, wandb: Any) -> None:
    def write(callback: CallbackList, step: int, per: float = 0.25) -> None:
        append_jsonl(run.metrics_file, val_row(step, per))
        callback.on_metrics(val_row(step, per))

    with open_wandb(run) as callback:
        for step in (1, 2, 3):
            write(callback, step)
    lines = run.metrics_file.read_text().splitlines(keepends=True)
    run.metrics_file.write_text("".join(lines[:2]))  # resumed from the checkpoint of step 2
    with open_wandb(run) as callback:
        write(callback, 3)
        write(callback, 4, 0.5)
        rewound = {"step": 4, "action": "rewind", "rewound_to": 3, "rows": [val_row(4, 0.5)]}
        run.metrics_file.write_text("".join(lines))
        append_jsonl(run.incidents_file, rewound)
        callback.on_incident(rewound)
        write(callback, 4)
    with open_wandb(run) as callback:
        write(callback, 5)
    rows = [(r["_step"], r["step"]) for r in history(run.path)]
    assert rows == [(0, 1), (1, 2), (2, 3), (2, 3), (3, 4), (4, 4), (5, 5)]  # W&B keeps one of two rows of a number
    ids = {r.run.run_id for r in offline_records(run.path) if r.HasField("run")}
    assert len(ids) == 1


# End to end


def assert_no_transcripts(store: Path, run: Path) -> None:
    files = [p for place in ("wandb", "tensorboard") for p in (run / place).rglob("*") if p.is_file()]
    text = b"\n".join(p.read_bytes() for p in files)
    assert b"train/loss" in text
    for trial in Store.open(store).trials:
        assert trial.id.encode() not in text and not (trial.text and trial.text.encode() in text)
        assert not trial.tokens or " ".join(token_names(trial.tokens)[:6]).encode() not in text


@pytest.mark.thorough
def test_wandb_has_all_stages_of_a_curriculum(cohort_store: Path, tmp_path: Path, wandb: Any) -> None:
    """Every stage has its losses, one curve per loss, and no non-finite value."""
    small = [
        *(
            "encoder.width=8",
            "encoder.depth=1",
            "encoder.n_heads=2",
            "encoder.state_dim=4",
            "transducer.width=8",
        ),
        *(
            "data.batching.batch_size=4",
            "train.log_every=2",
            "train.validate_every=4",
        ),
        *(f"stages.{i}.steps=4" for i in range(4)),
    ]
    if find_spec("tensorboard"):
        small.append("track.tensorboard.enabled=true")
    asked = ["train", "mode-ssm-small", "--data", cohort_store, "--run", tmp_path / "run", *small]
    words = [f"validate.lm={Path(__file__).parents[1] / 'golden' / 'words.alm'}"]
    done = arcuate(*asked, *words, "track.wandb.enabled=true")
    assert done.returncode == 0, done.stderr
    rows = history(tmp_path / "run")
    stages = {int(r["train/stage"]): {k for k in r if k.startswith("train/loss_")} for r in rows if "train/stage" in r}
    names = [f"train/loss_{head}" for head in ("ctc", "rnnt", "mode", "denoise")]
    assert stages == {i: set(names[: i + 1]) for i in range(4)}
    validated = [r for r in rows if "val/per" in r]
    assert len(validated) == 4 and all({"val/mode_accuracy", "val/wer", "epoch"} <= r.keys() for r in validated)
    logged = [r for r in Run(tmp_path / "run").metrics() if r["split"] == "val"]
    assert [(r["val/wer"], r["epoch"]) for r in validated] == [(r["wer"], r["epoch"]) for r in logged]
    epochs = [r["epoch"] for r in rows if "train/loss" in r]
    assert epochs == sorted(epochs) and epochs[-1] > epochs[0] > 0
    assert not any(key.endswith("non_finite_values") for r in rows for key in r)
    if "track.tensorboard.enabled=true" in asked:
        events = curve(read_events(tmp_path / "run"), "train/loss")
        assert events == [(r["step"], pytest.approx(r["train/loss"], abs=1e-4)) for r in rows if "train/loss" in r]
    assert_no_transcripts(cohort_store, tmp_path / "run")
