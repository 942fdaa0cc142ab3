"""The list of runs as plain values, for `arcuate runs --json` and whoever draws it."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from arcuate.ledger.entries import Entry
from arcuate.ledger.parents import Parent, parents


def listing(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    return [row(entry, parent) for entry, parent in zip(entries, parents(entries), strict=True)]


def row(entry: Entry, parent: Parent | None) -> dict[str, Any]:
    logged, diagnosis, recipe = entry.logged, entry.diagnosis, entry.recipe
    return {
        "name": entry.name,
        "path": str(entry.run.path),
        "recipe": recipe.name if recipe else None,
        "seed": recipe.train.seed if recipe else None,
        "started": entry.started or None,
        "verdict": entry.verdict,
        "secondary": list(diagnosis.secondary) if diagnosis else [],
        "since_step": diagnosis.since_step if diagnosis else None,
        "steps": logged.steps,
        "planned_steps": entry.planned_steps,
        "best_per": logged.best_per,
        "best_step": logged.best_step,
        "last_per": logged.last_per,
        "seconds": logged.seconds,
        "incidents": entry.n_incidents,
        "parent": parent.name if parent else None,
        "parent_kind": parent.kind if parent else None,
        "changes": [asdict(c) for c in parent.changes] if parent else [],
        "results": {
            name: {key: summary.get(key) for key in ("per", "per_low", "per_high", "step", "n_trials")}
            for name, summary in entry.results.items()
        },
        "problems": list(entry.problems),
    }
