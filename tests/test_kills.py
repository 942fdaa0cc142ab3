"""SIGKILL at file operations of every kind: while the folder is made, in a checkpoint, in a rewind, at a link."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from counts import THOROUGH, count
from killing import train_and_kill

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
    *("train.steps=60", "train.clip_norm=null", "train.seed=8"),
    "schedule={kind: one_cycle, peak: 3.0, pct_start: 0.5}",
    "guard.spike={warmup: 20, patience: 5, window: 20, ratio: 1.3, deviations: 1.5}",
    "guard.max_rewinds=50",
]
LONG = [  # past the first judgements of every rule of the guard, which then stand in what is saved
    *SMALL,
    *("train.steps=90", "train.checkpoint_every=15", "train.validate_every=45"),
    "guard.spike={warmup: 20}",
    "guard.stuck={action: warn, patience: 50, fall: 0.5}",
    "guard.adaptive={threshold: 0.01, window: 20, max_times: 3}",
]
SIGNS = {"calm": (), "wild": ("rewound_to",), "long": ("stuck", "gradient_norm")}


def without_cost(value: Any) -> Any:
    """Rows as they must be after a resume: timings and memory aside."""
    if isinstance(value, dict):
        return {k: without_cost(v) for k, v in value.items() if k != "cost"}
    return [without_cost(v) for v in value] if isinstance(value, list) else value


def outcome(run: Path) -> dict[str, Any]:
    rows = {
        name: [without_cost(json.loads(line)) for line in (run / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "incidents.jsonl")
    }
    links = {
        name: {p.name: p.read_bytes() for p in (run / "checkpoints" / name).glob("*.safetensors")}
        for name in ("last", "best")
    }
    return {**rows, **links, "recipe": (run / "recipe.yaml").read_text()}


def assert_kills_leave_no_trace(arguments: list[str], folder: Path, points: list[int]) -> None:
    jobs = [(folder / f"at-{n}", kill) for n in points for kill in (n, None)]
    ended = train_and_kill(arguments, jobs)
    assert [code for code, _ in ended] == [-9, 0] * len(points)
    whole = outcome(folder / "whole")
    for n in points:
        run = folder / f"at-{n}"
        assert outcome(run) == whole, f"killed at operation {n}"
        left = [p.name for p in (*run.glob(".*"), *run.glob("checkpoints/.*"))]
        assert left == [".lock"]


def test_killed_while_the_folder_is_made_or_soon_after(cohort_store: Path, tmp_path: Path) -> None:
    arguments = [*SMALL, "train.steps=4", "--data", str(cohort_store)]
    train_and_kill(arguments, [(tmp_path / "whole", None)])
    assert_kills_leave_no_trace(arguments, tmp_path, list(range(1, 16)) if THOROUGH else [1, 3, 5, 9])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "n_points"), [("calm", count(3, 12)), ("wild", count(4, 16)), ("long", count(2, 8))]
)
def test_killed_at_any_file_operation(cohort_store: Path, tmp_path: Path, kind: str, n_points: int) -> None:
    arguments = [*{"calm": CALM, "wild": WILD, "long": LONG}[kind], "--data", str(cohort_store)]
    [(_, n_operations)] = train_and_kill(arguments, [(tmp_path / "whole", None)])
    incidents = (tmp_path / "whole" / "incidents.jsonl").read_text()
    assert all(sign in incidents for sign in SIGNS[kind]) and bool(incidents) == bool(SIGNS[kind])
    points = sorted(random.Random(n_points).sample(range(13, n_operations), n_points))
    assert_kills_leave_no_trace(arguments, tmp_path, points)
