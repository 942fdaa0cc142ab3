"""Reference learning curves: aggregated over real healthy runs and packaged with their sources."""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from arcuate.insight.doctor.training_log import TrainingLog

_OFFICIAL = {"b2t24": "b2t24-biGRU-official-10k", "b2t25": "b2t25-GRU-official-120k"}
_SLOWER = {"b2t24": "b2t24-uniGRU-1024-10k-30k"}  # a healthy model that learns more slowly
OFFICIAL_STEPS = {"b2t24": 10_000, "b2t25": 120_000}


@dataclass(frozen=True)
class Reference:
    """Mean and standard deviation of the error rate of healthy runs, by step."""

    dataset: str
    model: str
    unit: str
    source: str
    n_runs: int
    grid: np.ndarray
    mean: np.ndarray
    sd: np.ndarray

    def at(self, step: float) -> float | None:
        """The mean at a step; None outside the range of the curve."""
        inside = self.grid[0] <= step <= self.grid[-1]
        return float(np.interp(step, self.grid, self.mean)) if inside else None


@cache
def _packaged() -> dict[str, Any]:
    file = files("arcuate") / "insight" / "doctor" / "reference_curves.json"
    return dict(json.loads(file.read_text("utf-8")))


@cache
def references() -> dict[str, Reference]:
    return {
        name: Reference(
            dataset=curve["dataset"],
            model=curve["model"],
            unit=curve["unit"],
            source=curve["source"],
            n_runs=curve["n_runs"],
            grid=np.array(curve["grid"], dtype=float),
            mean=np.array(curve["mean"], dtype=float),  # null becomes NaN
            sd=np.nan_to_num(np.array(curve["sd"], dtype=float)),
        )
        for name, curve in _packaged()["curves"].items()
    }


def reference_level(dataset: str) -> float:
    """The final error rate of healthy runs on a data set, rounded."""
    return float(_packaged()["levels"][dataset])


def expected_rate(dataset: str, step: float) -> float | None:
    """The error rate of a healthy run at a batch, taken from the slowest healthy model."""
    tables = (_OFFICIAL, _SLOWER)
    rates = [references()[table[dataset]].at(step) for table in tables if dataset in table]
    return max((rate for rate in rates if rate is not None), default=None)


def matching_reference(log: TrainingLog, dataset: str | None) -> Reference | None:
    """The reference with the same axis: the official one for batches; None if steps are not comparable."""
    if dataset is None or log.error_name != "PER" or not len(log.per):
        return None
    if log.per.unit == "batches":
        return references()[_OFFICIAL[dataset]]
    if log.per.unit != "epochs":
        return None
    last = float(log.per.steps[-1])
    candidates = [r for r in references().values() if r.dataset == dataset and r.unit == "epochs"]
    return min(candidates, key=lambda r: abs(float(r.grid[-1]) - last), default=None)


def compare_with_official(log: TrainingLog, dataset: str | None) -> tuple[str, ...]:
    """A sentence that compares the run with the official model at the last common batch, if there is one."""
    per = log.per.finite
    if dataset is None or per.unit != "batches" or log.error_name != "PER":
        return ()
    reference = references()[_OFFICIAL[dataset]]
    inside = np.flatnonzero(per.steps <= reference.grid[-1])
    if not len(inside) or per.steps[inside[-1]] <= 0:
        return ()
    step = float(per.steps[inside[-1]])
    return (
        f"at batch {int(step):,} this run had PER {per.values[inside[-1]]:.3f}, the official {dataset} model"
        f" {reference.at(step):.3f} (mean of {reference.n_runs} runs)",
    )
