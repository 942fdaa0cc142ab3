"""The log of an arcuate run folder: its metrics with the recipe, the environment and the incidents of the guard."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.config import to_tree
from arcuate.data.alphabet import error_rate_name, recorded_classes
from arcuate.doctor.columns import flatten
from arcuate.doctor.formats import Head, read_json_lines
from arcuate.doctor.log_table import LogTable, Series, TrainingLog
from arcuate.errors import UserError
from arcuate.experiments.recipe import Recipe, load_recipe, recipe_names, run_recipe
from arcuate.files import read_json
from arcuate.run import Run, open_run
from arcuate.training.schedule import learning_rate

_BLANK_FRACTION, _FEW_CLASSES = 0.98, 3  # output with almost only blanks, or with at most this many phonemes
_MAX_INCIDENTS = 5
_RELEASES = (("b2t25", 512, 40), ("b2t24", 256, 24))  # channels, and sessions from which data are the release
_ACTIONS = {
    "skip": "skipped the step",
    "rewind": "rewound to a checkpoint",
    "reduce_lr": "reduced the learning rate",
    "stop": "stopped the run",
}
_Row = Mapping[str, Any]


def read_run(path: Path) -> tuple[TrainingLog, ...]:
    """The log of a run folder; several if another run was appended to its file."""
    run = open_run(path)
    if not run.metrics_file.is_file():
        raise UserError(f"{run.path} has no metrics.jsonl: training has not started")
    table = LogTable()
    rows = _read_rows(run.metrics_file, table)
    table.add_rows(rows)
    logs = table.logs(run.name) or [TrainingLog(name=run.name)]
    recipe, problems = None, list[str]()
    try:
        recipe = run_recipe(run)
    except UserError as error:  # damaged or from a different version; the curves can be judged without it
        problems = [f"judged without its recipe: {error}"]
    environment = _read_environment(run)
    found = [_with_recipe(replace(log, notes=(*log.notes, *problems)), run, recipe, environment) for log in logs]
    if len(found) == 1:
        incidents = _read_rows(run.incidents_file, LogTable()) if run.incidents_file.is_file() else []
        found = [
            _with_incidents(_with_outputs(found[0], rows), [r for r in incidents if isinstance(r.get("step"), int)])
        ]
    return tuple(found)


def _read_rows(path: Path, table: LogTable) -> list[dict[str, Any]]:
    """The rows of a file; unreadable lines are skipped."""
    return list(read_json_lines(Head(path, b"", "utf-8"), table))


def _read_environment(run: Run) -> dict[str, Any]:
    """environment.json; empty if it is missing or damaged."""
    try:
        return read_json(run.environment_file)
    except UserError:
        return {}


def _with_recipe(log: TrainingLog, run: Run, recipe: Recipe | None, environment: dict[str, Any]) -> TrainingLog:
    stated = environment.get("data")
    data: dict[str, Any] = stated if isinstance(stated, dict) else {}
    sessions = data["sessions"] if isinstance(data.get("sessions"), list) else []
    dataset = _published_dataset(data, len(sessions))
    log = replace(
        log,
        is_arcuate=True,
        error_name=error_rate_name(recorded_classes(environment)) if log.error_name == "PER" else log.error_name,
        run_path=run.path,
        store=data.get("path") if isinstance(data.get("path"), str) else None,
        n_parameters=_count(environment.get("n_parameters")),
        n_channels=_count(data.get("n_channels")),
        n_sessions=len(sessions) or None,
        dataset=dataset,
        dataset_because=f"environment.json lists {len(sessions)} sessions of {data.get('n_channels')} channels",
    )
    if recipe is None:
        return log
    parent = packaged_parent(recipe)
    return replace(
        log,
        settings=_flat_settings(recipe),
        scheduled_lr=_scheduled_lr(recipe, log.lr),
        parent=parent,
        parent_settings=_flat_settings(load_recipe(parent)) if parent else {},
        planned=recipe.train.steps,
        planned_because="recipe.yaml",
    )


def _published_dataset(data: Mapping[str, Any], n_sessions: int) -> str | None:
    """The published data set if the run's data have its layout and size; simulated data have no reference."""
    for dataset, n_channels, min_sessions in _RELEASES:
        if data.get("layout") == dataset and data.get("n_channels") == n_channels and n_sessions >= min_sessions:
            return dataset
    return None


def _flat_settings(recipe: Recipe) -> dict[str, Any]:
    """Settings by dotted path, with the lists that the checks of the recipe use."""
    tree = to_tree(recipe)
    flat = {name.replace("/", "."): value for name, value in flatten(tree).items()}
    return flat | {"optimizer.betas": list(recipe.optimizer.betas), "stages": tree["stages"]}


def _scheduled_lr(recipe: Recipe, logged: Series) -> Series:
    """The learning rates of the schedule at the logged steps; none if it depends on validations or stages."""
    if recipe.stages or recipe.schedule.kind == "plateau":
        return Series()
    steps = recipe.train.steps
    values = [learning_rate(recipe.schedule, max(0, int(step) - 1), steps) for step in logged.steps.tolist()]
    return Series(logged.steps, np.array(values), logged.unit)


def packaged_parent(recipe: Recipe) -> str | None:
    """The packaged recipe that a recipe is, or is derived from."""
    return next((name for name in (recipe.name, recipe.extends) if name in recipe_names()), None)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _with_outputs(log: TrainingLog, rows: Sequence[_Row]) -> TrainingLog:
    """What only the rows of arcuate state: blank output, null losses and the size of updates."""
    rows = [row for row in rows if isinstance(row.get("step"), int)]

    def series(name: str) -> Series:
        points = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), float)]
        steps, values = np.array(points, dtype=float).reshape(-1, 2).T
        return Series(steps, values, log.train_loss.unit)

    shares = [r for r in rows if all(isinstance(r.get(k), (int, float)) for k in ("blank_share", "n_distinct"))]
    blank = [r["blank_share"] >= _BLANK_FRACTION or r["n_distinct"] <= _FEW_CLASSES for r in shares]
    last_output = max((i for i, is_blank in enumerate(blank) if not is_blank), default=-1)
    is_blank = len(blank) >= 6 and last_output < len(blank) - len(blank) // 3
    return replace(
        log,
        blank_since=shares[last_output + 1]["step"] if is_blank else None,
        update_ratio=series("update_ratio"),
        grad_norm_max=series("grad_norm_max"),
        n_trials_seen=sum(r["n_trials"] for r in rows if r.get("split") == "train" and _count(r.get("n_trials")))
        or None,
        non_finite_steps=tuple(row["step"] for row in rows if row.get("loss", 0) is None),
    )


def _with_incidents(log: TrainingLog, incidents: Sequence[_Row]) -> TrainingLog:
    shown = [row for row in incidents if row.get("kind") != "search"]  # trials belong to the rewind before them
    sentences = [_describe_incident(row) for row in shown[:_MAX_INCIDENTS]]
    if len(shown) > _MAX_INCIDENTS:
        sentences.append(f"and {len(shown) - _MAX_INCIDENTS:,} more incidents")
    non_finite = [row for row in incidents if row.get("kind") == "non_finite"]
    given_up = [row["step"] for row in non_finite if row.get("action") != "skip"]
    scales = [s for row in incidents if isinstance(s := row.get("lr_scale"), float)]
    eps = [e for row in incidents if isinstance(e := row.get("eps"), float)]
    return replace(
        log,
        incidents=tuple(sentences),
        non_finite_steps=tuple(sorted({*given_up, *log.non_finite_steps})),
        skipped_steps=tuple(row["step"] for row in non_finite if row.get("action") == "skip"),
        lr_scale=scales[-1] if scales and scales[-1] > 0 else 1.0,
        guard_eps=eps[-1] if eps and 0 < eps[-1] < 1 else None,
        n_rewinds=sum(row.get("action") == "rewind" for row in shown),
    )


def _describe_incident(row: _Row) -> str:
    action = _ACTIONS.get(str(row.get("action")), str(row.get("action") or "recorded an incident"))
    reason = row.get("reason") or row.get("kind") or "no reason recorded"
    return f"the guard {action} at step {row['step']:,}: {reason}"
