"""Comparison of killed and resumed runs with an uninterrupted one."""

import json
from pathlib import Path
from typing import Any

from support.killing import train_and_kill


def without_cost(value: Any) -> Any:
    """Rows without timings and memory, which differ after a resume."""
    if isinstance(value, dict):
        return {k: without_cost(v) for k, v in value.items() if k != "cost"}
    return [without_cost(v) for v in value] if isinstance(value, list) else value


def outcome(run: Path) -> dict[str, Any]:
    rows = {
        name: [without_cost(json.loads(line)) for line in (run / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "incidents.jsonl", "predictions.jsonl")
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
    uninterrupted = outcome(folder / "uninterrupted")
    for n in points:
        run = folder / f"at-{n}"
        assert outcome(run) == uninterrupted, f"killed at operation {n}"
        left = [p.name for p in (*run.glob(".*"), *run.glob("checkpoints/.*"))]
        assert left == [".lock"]
