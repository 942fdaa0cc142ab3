"""SIGKILL at file operations of every kind: while the folder is created, in a checkpoint, in a rewind, at a link."""

import random
from pathlib import Path

import pytest

from support.cases import cases
from support.kill_checks import assert_kills_leave_no_trace
from support.killing import train_and_kill

SMALL = [
    "tiny",
    *(
        "encoder.width=8",
        "encoder.depth=1",
        "data.batching.batch_size=4",
        "front_end.patch={bins: 14, stride: 8}",
    ),
    *("train.log_every=3", "train.validate_every=8", "train.checkpoint_every=4", "ema.decay=0.9"),
]
CALM = [*SMALL, "train.steps=10"]
WILD = [
    *SMALL,
    *("train.steps=60", "train.clip_norm=null", "train.seed=8", "train.checkpoint_every=8"),
    "schedule={kind: one_cycle, peak_lr: 3.0, pct_start: 0.5}",
    *("guard.max_rewinds=50", "guard.stuck.patience=50"),
]
LONG = [  # long enough for the mean gradient norm, whose window is saved
    *SMALL,
    *("train.steps=110", "train.checkpoint_every=15", "train.validate_every=55"),
    "guard.adaptive={threshold: 0.01, max_reductions: 3}",
]
SIGNS = {"calm": (), "wild": ("rewound_to",), "long": ("gradient_norm",)}


def test_killed_while_the_folder_is_created_or_soon_after(cohort_store: Path, tmp_path: Path) -> None:
    arguments = [*SMALL, "train.steps=4", "--data", str(cohort_store)]
    train_and_kill(arguments, [(tmp_path / "uninterrupted", None)])
    assert_kills_leave_no_trace(arguments, tmp_path, list(range(1, 16)))


@pytest.mark.parametrize("kind", ["calm", "wild", "long"])
def test_killed_at_any_file_operation(cohort_store: Path, tmp_path: Path, kind: str) -> None:
    arguments = [*{"calm": CALM, "wild": WILD, "long": LONG}[kind], "--data", str(cohort_store)]
    [(_, n_operations)] = train_and_kill(arguments, [(tmp_path / "uninterrupted", None)])
    incidents = (tmp_path / "uninterrupted" / "incidents.jsonl").read_text()
    assert all(sign in incidents for sign in SIGNS[kind]) and bool(incidents) == bool(SIGNS[kind])
    points = sorted(random.Random(kind).sample(range(13, n_operations), cases(0.05)))
    assert_kills_leave_no_trace(arguments, tmp_path, points)
