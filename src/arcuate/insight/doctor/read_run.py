"""arcuate's own run folders: the plan is known, and the guard kept its incidents."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from arcuate.config import to_tree
from arcuate.errors import UserError
from arcuate.experiments.recipe import Recipe, load_recipe, official_ancestor, recipe_names, run_recipe
from arcuate.files import read_json
from arcuate.insight.doctor.assemble import assemble
from arcuate.insight.doctor.columns import Collector, flatten, line_blocks
from arcuate.insight.doctor.curve import Log
from arcuate.insight.doctor.read_tables import read_jsonl
from arcuate.run import Run
from arcuate.training.checks import coupling_warnings

MUTE_BLANK, MUTE_CLASSES = 0.98, 3  # an output with nearly only blanks, or with so few phonemes, says nothing


def read_run(run: Run) -> list[Log]:
    """The log of a run folder; several where something was written after it."""
    if not run.metrics_file.is_file():
        raise UserError(f"{run.path} has no metrics.jsonl yet: nothing has been trained there")
    collector, rows = Collector(), _Output()
    read_jsonl(line_blocks(run.metrics_file, "utf-8"), collector, rows.look)
    logs = assemble(collector, run.name) or [Log(name=run.name)]
    recipe, damage = _recipe(run)
    incidents = _incidents(run)
    return [
        _own(replace(log, notes=(*log.notes, *damage)), run, recipe, incidents, rows, len(logs) == 1)
        for log in logs
    ]


class _Output:
    """What the training rows say beside their numbers, as they pass by: a mute output, a loss that is null."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bool]] = []  # step, whether the output said nothing
        self.broken: list[int] = []  # steps whose row has no finite loss: arcuate writes null for it

    def look(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if "blank_share" in row or row.get("loss", 0) is None:
                self._take(row)

    def _take(self, row: dict[str, Any]) -> None:
        try:
            step = int(row["step"])
            if "loss" in row and row["loss"] is None:
                self.broken.append(step)
            mute = row["blank_share"] >= MUTE_BLANK or row["n_distinct"] <= MUTE_CLASSES
            self.seen.append((step, bool(mute)))
        except (ValueError, TypeError, KeyError, OverflowError):
            return  # a row that has no output to speak of

    def mute_since(self) -> int | None:
        """From where on every row was mute, if that is at least the last third."""
        silent = [mute for _, mute in self.seen]
        if len(silent) < 6 or not all(silent[-(len(silent) // 3) :]):
            return None
        spoke = [i for i, mute in enumerate(silent) if not mute]
        return self.seen[spoke[-1] + 1 if spoke else 0][0]


def _recipe(run: Run) -> tuple[Recipe | None, tuple[str, ...]]:
    """The recipe, or why there is none: damaged, or of another version; the curves can be judged without it."""
    try:
        return run_recipe(run), ()
    except UserError as error:
        return None, (f"judged without its recipe: {error}",)


def _incidents(run: Run) -> list[dict[str, Any]]:
    """The guard's rows; a line that cannot be read is passed over, for the curves are the evidence."""
    if not run.incidents_file.is_file():
        return []
    rows = []
    for lines in line_blocks(run.incidents_file, "utf-8"):
        for line in lines:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows


def _own(
    log: Log, run: Run, recipe: Recipe | None, incidents: Sequence[dict[str, Any]], rows: _Output, alone: bool
) -> Log:
    planned = recipe.train.steps if recipe else None
    dataset, because = _dataset(run)
    told = tuple(_sentence(row) for row in incidents[:5])
    more = (f"and {len(incidents) - 5:,} more incidents",) if len(incidents) > 5 else ()
    broken = [r for r in incidents if r.get("kind") == "non_finite"]
    given_up = [r["step"] for r in broken if r.get("action") != "skip"]
    skipped = [r["step"] for r in broken if r.get("action") == "skip"]
    return replace(
        log,
        own=True,
        settings=flatten_settings(recipe),
        coupling=tuple(_coupling(recipe)) if recipe else (),
        planned=planned,
        planned_because="recipe.yaml" if planned else "",
        dataset=dataset,
        dataset_because=because,
        incidents=(*told, *more) if alone else (),
        broken_steps=tuple(sorted({*given_up, *rows.broken})) if alone else (),
        skipped_steps=tuple(skipped) if alone else (),
        silent_since=rows.mute_since() if alone else None,
    )


def flatten_settings(recipe: Recipe | None) -> dict[str, Any]:
    return (
        {name.replace("/", "."): value for name, value in flatten(to_tree(recipe)).items()} if recipe else {}
    )


def _coupling(recipe: Recipe) -> list[str]:
    """Where a recipe that descends from an official one changed a part of what belongs together."""
    known = next((name for name in (recipe.name, recipe.extends) if name in recipe_names()), None)
    official = official_ancestor(known) if known else None
    return coupling_warnings(recipe, load_recipe(official), official) if official else []


def _sentence(row: dict[str, Any]) -> str:
    did = {
        "skip": "skipped the step",
        "rewind": "rewound",
        "reduce_lr": "lowered the rate",
        "cool": "lowered the rate",  # in runs of earlier versions
        "stop": "stopped the run",
    }
    action = did.get(str(row.get("action")), str(row.get("action") or "noted it"))
    return f"the guard {action} at step {row['step']:,}: {row.get('reason') or row.get('kind') or 'no reason given'}"


def _dataset(run: Run) -> tuple[str | None, str]:
    """The published data set, where a run's data have its layout and size; simulated data have no reference."""
    try:
        data = read_json(run.environment_file).get("data")
    except UserError:
        return None, ""
    if not isinstance(data, dict):
        return None, ""
    sessions = data.get("sessions")
    n_sessions = len(sessions) if isinstance(sessions, list) else 0
    for dataset, channels, least in (("b2t25", 512, 40), ("b2t24", 256, 24)):
        if data.get("layout") == dataset and data.get("n_channels") == channels and n_sessions >= least:
            return dataset, f"environment.json: {n_sessions} sessions of {channels} channels in its layout"
    return None, ""
