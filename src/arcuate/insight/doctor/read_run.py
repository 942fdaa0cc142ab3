"""Arcuate run folders: metrics, recipe and the incidents of the guard."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from arcuate.config import to_tree
from arcuate.errors import UserError
from arcuate.experiments.recipe import Recipe, load_recipe, official_ancestor, recipe_names, run_recipe
from arcuate.files import read_json
from arcuate.insight.doctor.assemble import assemble_logs
from arcuate.insight.doctor.columns import Collector
from arcuate.insight.doctor.metadata import flatten
from arcuate.insight.doctor.read_tables import read_jsonl
from arcuate.insight.doctor.text_files import line_blocks
from arcuate.insight.doctor.training_log import TrainingLog
from arcuate.run import Run
from arcuate.training.checks import coupling_warnings

_BLANK_SHARE, _FEW_CLASSES = 0.98, 3  # output with almost only blanks, or with at most this many phonemes
_MAX_INCIDENTS = 5
_ACTIONS = {
    "skip": "skipped the step",
    "rewind": "rewound to a checkpoint",
    "reduce_lr": "reduced the learning rate",
    "cool": "reduced the learning rate",  # name used by earlier versions
    "stop": "stopped the run",
}


def read_run(run: Run) -> list[TrainingLog]:
    """The log of a run folder; several if another run was appended to its file."""
    if not run.metrics_file.is_file():
        raise UserError(f"{run.path} has no metrics.jsonl: training has not started")
    collector, output = Collector(), _OutputMonitor()
    read_jsonl(line_blocks(run.metrics_file, "utf-8"), collector, output.add_rows)
    logs = assemble_logs(collector, run.name) or [TrainingLog(name=run.name)]
    recipe, problems = None, []
    try:
        recipe = run_recipe(run)
    except UserError as error:  # damaged or of another version; the curves can be judged without it
        problems.append(f"judged without its recipe: {error}")
    logs = [_with_recipe(replace(log, notes=(*log.notes, *problems)), run, recipe) for log in logs]
    return [_with_incidents(logs[0], _read_incidents(run), output)] if len(logs) == 1 else logs


class _OutputMonitor:
    """Scans the training rows for blank output and for null losses."""

    def __init__(self) -> None:
        self.blank: list[tuple[int, bool]] = []  # step, whether the output was almost only blanks
        self.non_finite: list[int] = []  # steps whose row has a null loss, as arcuate writes a non-finite one

    def add_rows(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if "blank_share" in row or row.get("loss", 0) is None:
                self._add_row(row)

    def _add_row(self, row: dict[str, Any]) -> None:
        try:
            step = int(row["step"])
            if "loss" in row and row["loss"] is None:
                self.non_finite.append(step)
            blank = row["blank_share"] >= _BLANK_SHARE or row["n_distinct"] <= _FEW_CLASSES
            self.blank.append((step, bool(blank)))
        except (ValueError, TypeError, KeyError, OverflowError):
            return  # a row without output statistics

    def blank_since(self) -> int | None:
        """The step from which on every output was blank, if that covers at least the last third."""
        blank = [is_blank for _, is_blank in self.blank]
        if len(blank) < 6 or not all(blank[-(len(blank) // 3) :]):
            return None
        others = [i for i, is_blank in enumerate(blank) if not is_blank]
        return self.blank[others[-1] + 1 if others else 0][0]


def _read_incidents(run: Run) -> list[dict[str, Any]]:
    """The incidents of the guard; unreadable lines are skipped."""
    if not run.incidents_file.is_file():
        return []
    incidents = []
    for lines in line_blocks(run.incidents_file, "utf-8"):
        for line in lines:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                incidents.append(row)
    return incidents


def _with_recipe(log: TrainingLog, run: Run, recipe: Recipe | None) -> TrainingLog:
    planned = recipe.train.steps if recipe else None
    dataset, because = _published_dataset(run)
    return replace(
        log,
        is_arcuate=True,
        settings={name.replace("/", "."): v for name, v in flatten(to_tree(recipe)).items()} if recipe else {},
        coupling_warnings=tuple(_coupling_warnings(recipe)) if recipe else (),
        planned=planned,
        planned_because="recipe.yaml" if planned else "",
        dataset=dataset,
        dataset_because=because,
    )


def _with_incidents(log: TrainingLog, incidents: Sequence[dict[str, Any]], output: _OutputMonitor) -> TrainingLog:
    sentences = [_describe_incident(row) for row in incidents[:_MAX_INCIDENTS]]
    if len(incidents) > _MAX_INCIDENTS:
        sentences.append(f"and {len(incidents) - _MAX_INCIDENTS:,} more incidents")
    non_finite = [row for row in incidents if row.get("kind") == "non_finite"]
    given_up = [row["step"] for row in non_finite if row.get("action") != "skip"]
    return replace(
        log,
        incidents=tuple(sentences),
        non_finite_steps=tuple(sorted({*given_up, *output.non_finite})),
        skipped_steps=tuple(row["step"] for row in non_finite if row.get("action") == "skip"),
        blank_since=output.blank_since(),
    )


def _coupling_warnings(recipe: Recipe) -> list[str]:
    """Warnings for a recipe derived from an official one that changes learning rate, eps or reduction alone."""
    known = next((name for name in (recipe.name, recipe.extends) if name in recipe_names()), None)
    official = official_ancestor(known) if known else None
    return coupling_warnings(recipe, load_recipe(official), official) if official else []


def _describe_incident(row: dict[str, Any]) -> str:
    action = _ACTIONS.get(str(row.get("action")), str(row.get("action") or "recorded an incident"))
    reason = row.get("reason") or row.get("kind") or "no reason recorded"
    return f"the guard {action} at step {row['step']:,}: {reason}"


def _published_dataset(run: Run) -> tuple[str | None, str]:
    """The published data set if the run's data have its layout and size; simulated data have no reference."""
    try:
        data = read_json(run.environment_file).get("data")
    except UserError:
        return None, ""
    if not isinstance(data, dict):
        return None, ""
    sessions = data.get("sessions")
    n_sessions = len(sessions) if isinstance(sessions, list) else 0
    for dataset, n_channels, min_sessions in (("b2t25", 512, 40), ("b2t24", 256, 24)):
        layout = data.get("layout") == dataset and data.get("n_channels") == n_channels
        if layout and n_sessions >= min_sessions:
            return dataset, f"environment.json lists {n_sessions} sessions of {n_channels} channels"
    return None, ""
