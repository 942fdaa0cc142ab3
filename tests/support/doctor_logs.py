"""Fabricated logs for the tests of the doctor."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from arcuate.doctor.log_table import Series, TrainingLog

STEPS = np.arange(0, 10_000, 100.0)  # a hundred evaluations, as in the '24 trainer


def falling(start: float = 0.95, end: float = 0.21, speed: float = 8.0, n: int = len(STEPS)) -> np.ndarray:
    """An exponentially falling learning curve."""
    share = np.linspace(0, 1, n)
    drop = (1 - np.exp(-speed * share)) / (1 - np.exp(-speed))
    return start - (start - end) * drop


def log(per: np.ndarray, val_loss: np.ndarray | None = None, train_loss: np.ndarray | None = None) -> TrainingLog:
    longest = max(len(values) for values in (per, val_loss, train_loss) if values is not None)
    steps = np.arange(longest) * 100.0

    def series(values: np.ndarray | None) -> Series:
        return Series() if values is None else Series(steps[: len(values)], values, "batches")

    return TrainingLog("made up", series(per), series(val_loss), series(train_loss))


def write_jsonl(path: Path, made: TrainingLog, extra: Sequence[str] = ()) -> Path:
    """Write JSON lines with separate rows for training and validation."""
    lines = []
    for split, names in (
        ("train", {"loss": made.train_loss, "grad_norm": made.grad_norm, "lr": made.lr}),
        ("val", {"per": made.per, "loss": made.val_loss}),
    ):
        rows: dict[float, dict[str, float | str]] = {}
        for name, series in names.items():
            for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
                rows.setdefault(step, {"step": int(step), "split": split})[name] = value
        lines += [json.dumps(row) for row in rows.values()]
    path.write_text("\n".join([*lines, *extra]) + "\n", "utf-8")
    return path
