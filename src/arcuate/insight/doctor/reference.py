"""What is normal: learning curves of real healthy runs, aggregated, packaged with their sources."""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np

from arcuate.insight.doctor.curve import Log

OFFICIAL = {"b2t24": "b2t24-biGRU-official-10k", "b2t25": "b2t25-GRU-official-120k"}
SLOWER = {
    "b2t24": "b2t24-uniGRU-1024-10k-30k"
}  # a healthy model that takes longer, so nobody is called late too early
OFFICIAL_STEPS = {"b2t24": 10_000, "b2t25": 120_000}


@dataclass(frozen=True)
class Reference:
    """Mean and standard deviation of the error rate over healthy runs, by step."""

    name: str
    dataset: str
    model: str
    unit: str
    n_runs: int
    source: str
    grid: np.ndarray
    mean: np.ndarray
    sd: np.ndarray

    def at(self, step: float) -> float | None:
        """The mean at a step; None outside of what the runs cover."""
        inside = self.grid[0] <= step <= self.grid[-1]
        return float(np.interp(step, self.grid, self.mean)) if inside else None


@cache
def _packaged() -> dict[str, object]:
    return dict(
        json.loads((files("arcuate") / "insight" / "doctor" / "reference_curves.json").read_text("utf-8"))
    )


@cache
def references() -> dict[str, Reference]:
    curves = _packaged()["curves"]
    assert isinstance(curves, dict)
    return {name: _reference(name, curve) for name, curve in curves.items()}


def _reference(name: str, curve: dict[str, object]) -> Reference:
    def column(key: str) -> np.ndarray:
        return np.array([np.nan if v is None else v for v in curve[key]], dtype=float)  # type: ignore[attr-defined]

    return Reference(
        name=name,
        dataset=str(curve["dataset"]),
        model=str(curve["model"]),
        unit=str(curve["unit"]),
        n_runs=int(curve["n_runs"]),  # type: ignore[call-overload]
        source=str(curve["source"]),
        grid=column("grid"),
        mean=column("mean"),
        sd=np.nan_to_num(column("sd")),
    )


def level(dataset: str) -> float:
    """The error rate at which healthy runs on a data set end, as a round number."""
    levels = _packaged()["levels"]
    assert isinstance(levels, dict)
    return float(levels[dataset])


def official(dataset: str) -> Reference:
    return references()[OFFICIAL[dataset]]


def course(dataset: str, step: float) -> float | None:
    """What a healthy run has at a batch, the slowest of the healthy models counting."""
    known = [references()[table[dataset]].at(step) for table in (OFFICIAL, SLOWER) if dataset in table]
    there = [value for value in known if value is not None]
    return max(there) if there else None


def fitting(log: Log, dataset: str | None) -> Reference | None:
    """The reference whose axis this log has: the official one for batches; none where steps cannot be compared."""
    if dataset is None or log.error_name != "PER" or not len(log.per):
        return None
    if log.per.unit == "batches":
        return official(dataset)
    if log.per.unit != "epochs":
        return None
    last = float(log.per.steps[-1])
    alike = [r for r in references().values() if r.dataset == dataset and r.unit == "epochs"]
    return min(alike, key=lambda r: abs(float(r.grid[-1]) - last), default=None)


def compare(log: Log, dataset: str | None) -> tuple[str, ...]:
    """One sentence beside the official model at the last batch both have; none where steps cannot be compared."""
    per = log.per.finite
    if dataset is None or per.unit != "batches" or log.error_name != "PER":
        return ()
    curve = official(dataset)
    inside = np.flatnonzero(per.steps <= curve.grid[-1])
    if not len(inside) or per.steps[inside[-1]] <= 0:
        return ()
    step = float(per.steps[inside[-1]])
    usual = curve.at(step)
    return (
        f"at batch {int(step):,} the official {dataset} model had {usual:.3f} (mean of {curve.n_runs} runs),"
        f" this run had {per.values[inside[-1]]:.3f}",
    )
