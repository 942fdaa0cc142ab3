"""Run folders below a folder. Nothing is opened here, so a damaged one is found like any other."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arcuate.errors import UserError
from arcuate.experiments.recipe import Recipe, run_recipe
from arcuate.files import read_json
from arcuate.insight.doctor import Diagnosis, diagnose
from arcuate.progress import Progress
from arcuate.run import Run

MARKS = ("recipe.yaml", "metrics.jsonl", "environment.json")  # a run folder has at least two of them
MAX_DEPTH = 6


def find_runs(folder: Path) -> list[Path]:
    """The run folders in and below a folder, by name; those inside a run folder are its own business."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; name one that holds runs, such as: arcuate runs runs")
    found = sorted(below(folder, 0), key=str)
    if not found:
        raise UserError(
            f"{folder} holds no runs; train one with: arcuate train tiny --data STORE --run {folder}/first"
        )
    return found


def below(folder: Path, depth: int) -> list[Path]:
    if looks_like_run(folder):
        return [folder]
    if depth >= MAX_DEPTH:
        return []
    try:
        inside = sorted(Path(e.path) for e in os.scandir(folder) if e.is_dir(follow_symlinks=False))
    except OSError:
        return []
    return [run for child in inside for run in below(child, depth + 1)]


def looks_like_run(folder: Path) -> bool:
    """A folder of which so much is left that it was a run once; `recipe.yaml` alone could be anyone's."""
    return sum((folder / name).is_file() for name in MARKS) >= 2 or (
        (folder / "recipe.yaml").is_file() and (folder / "checkpoints").is_dir()
    )


# One line of the ledger: what a run was, how it went, what it scored. Read from its folder, never typed in.


@dataclass(frozen=True)
class Logged:
    """What the log of a run says of its length and its error rate."""

    steps: int | None = None
    best_per: float | None = None
    best_step: int | None = None
    last_per: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Entry:
    """A run folder as far as it can be read; `problems` says what could not be."""

    run: Run
    name: str  # within the folder that was listed
    recipe: Recipe | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    logged: Logged = Logged()
    diagnosis: Diagnosis | None = None
    results: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # split[.label] -> summary
    n_incidents: int = 0
    problems: tuple[str, ...] = ()

    @property
    def verdict(self) -> str | None:
        return self.diagnosis.primary if self.diagnosis else None

    @property
    def started(self) -> str:
        return str(self.environment.get("started") or "")

    @property
    def planned_steps(self) -> int | None:
        return self.recipe.train.steps if self.recipe else None

    @property
    def weights_from(self) -> str | None:
        """The run whose weights this one began with (`--from`)."""
        parent = self.environment.get("parent")
        return str(parent) if parent else None

    @property
    def ablation(self) -> Path | None:
        """The folder of the ablation that this run is a part of: runs lie in it by arm and seed."""
        home = self.run.path.resolve().parent.parent
        return home if (home / "experiment.json").is_file() else None

    @property
    def revision(self) -> str | None:
        """Which code it was trained with: the commit, or the release where there is none."""
        told = self.environment.get("revision") or self.environment.get("arcuate")
        return str(told)[:12] if told else None

    @property
    def stopped_early(self) -> bool:
        done, planned = self.logged.steps, self.planned_steps
        return done is not None and planned is not None and done < planned

    @property
    def data_hashes(self) -> Any:
        data = self.environment.get("data")
        return data.get("hashes") if isinstance(data, Mapping) else None


def read_entries(folder: Path, report: Progress | None = None) -> list[Entry]:
    """All runs in and below a folder in the order they were started."""
    paths = find_runs(folder)
    entries = []
    for i, path in enumerate(paths):
        entries.append(read_entry(path, display_name(path, folder)))
        if report:
            report(i + 1, len(paths), "reading runs")
    return sorted(entries, key=lambda e: (not e.started, e.started, e.name))


def display_name(path: Path, folder: Path) -> str:
    inside = path.relative_to(folder)
    return str(inside) if inside.parts else path.resolve().name


def read_entry(path: Path, name: str) -> Entry:
    """Whatever can be read of a run; what cannot is a problem of the entry, never the end of the list."""
    run, problems = Run(path), []

    def attempt(read: Callable[[], Any], instead: Any) -> Any:
        try:
            return read()
        except (UserError, OSError) as error:
            problems.append(str(error).splitlines()[0] if str(error) else type(error).__name__)
            return instead

    recipe = attempt(lambda: run_recipe(run), None)
    environment = attempt(run.environment, {})
    rows = attempt(run.metrics, None)
    planned = recipe.train.steps if recipe else None
    diagnosis = attempt(lambda: diagnose(run.path, planned_steps=planned), None) if rows != [] else None
    if rows is None and diagnosis is not None and diagnosis.last_step is None:
        diagnosis = None  # nothing of the log is left to judge
    return Entry(
        run=run,
        name=name,
        recipe=recipe,
        environment=environment,
        logged=from_diagnosis(diagnosis) if rows is None else read_log(rows, environment.get("selected_on")),
        diagnosis=diagnosis,
        results=attempt(lambda: read_results(run), {}),
        n_incidents=attempt(lambda: count_lines(run.incidents_file), 0),
        problems=tuple(dict.fromkeys(problems)),
    )


def from_diagnosis(diagnosis: Diagnosis | None) -> Logged:
    """What the doctor could read of a log that has damaged lines."""
    if diagnosis is None:
        return Logged()
    return Logged(diagnosis.last_step, diagnosis.best_per, diagnosis.best_step, diagnosis.last_per)


def read_log(rows: Sequence[Mapping[str, Any]], selected_on: Any) -> Logged:
    """Steps and error rates; the split that checkpoints were selected on counts where it is known."""
    steps = [int(r["step"]) for r in rows if is_number(r.get("step"))]
    splits = {r.get("split") for r in rows} - {"train", None}
    split = selected_on if selected_on in splits else min(splits, key=str, default=None)
    rates = [
        (int(r["step"]), float(r["per"]))
        for r in rows
        if r.get("split") == split and is_number(r.get("per")) and is_number(r.get("step"))
    ]
    best = min(rates, key=lambda at: (at[1], at[0]), default=(None, None))
    return Logged(
        steps=max(steps, default=None),
        best_per=best[1],
        best_step=best[0],
        last_per=rates[-1][1] if rates else None,
        seconds=training_seconds(rows),
    )


def training_seconds(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Logged seconds per step, times the steps each row stands for."""
    spent, before = 0.0, 0
    for row in rows:
        cost = row.get("cost")
        each = cost.get("seconds_per_step") if isinstance(cost, Mapping) else None
        if row.get("split") == "train" and is_number(each) and is_number(row.get("step")):
            spent += float(each or 0.0) * max(int(row["step"]) - before, 0)
            before = int(row["step"])
    return spent or None


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15


def read_results(run: Run) -> dict[str, dict[str, Any]]:
    """Summaries of every evaluation in the folder."""
    files = sorted((run.path / "results").glob("*.json"))
    return {f.name.removesuffix(".json"): read_json(f) for f in files if not f.name.startswith(".")}


def count_lines(path: Path) -> int:
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())
