"""Whether runs really differ: groups of seeds, each against the first, with the number of questions accounted for."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.config import Change
from arcuate.errors import UserError
from arcuate.evaluation.significance import Arm, Contrast, difference, holm
from arcuate.experiments.recipe import Recipe, run_recipe
from arcuate.insight.ledger.entries import find_runs, looks_like_run
from arcuate.insight.ledger.parents import changes_between, same_but_seed
from arcuate.insight.ledger.scores import (
    ALPHA,
    Scores,
    best_step,
    compared_sentence,
    read_scores,
    refuse_unlike,
    selected_there,
    session_codes,
    side_by_side,
)
from arcuate.run import Run, open_run

Score = Callable[[Run], None]


@dataclass(frozen=True)
class Group:
    """Runs of one recipe that differ only in their seed."""

    name: str
    recipe: Recipe
    scores: tuple[Scores, ...]

    @property
    def arm(self) -> Arm:
        return side_by_side(self.scores)


@dataclass(frozen=True)
class Compared:
    """One group against the first."""

    before: Group
    after: Group
    contrast: Contrast
    p_adjusted: float
    changes: tuple[Change, ...]
    better: int  # sessions in which the second makes fewer errors
    worse: int

    @property
    def real(self) -> bool:
        return self.p_adjusted < ALPHA


@dataclass(frozen=True)
class Comparison:
    split: str
    groups: tuple[Group, ...]
    found: tuple[Compared, ...]
    notes: tuple[str, ...]


def runs_of(paths: Sequence[Path]) -> list[Run]:
    """Run folders as given; a folder that holds runs stands for all of them."""
    found: list[Run] = []
    for path in paths:
        inside = [path] if looks_like_run(path) or not path.is_dir() else find_runs(path)
        found += [open_run(p) for p in inside]
    unique = {run.path.resolve(): run for run in found}
    if len(unique) < len(found):
        raise UserError("a run is named twice; a comparison needs different runs")
    if len(found) < 2:
        raise UserError(
            f"{paths[0]} is a single run; name two runs at least, such as: arcuate compare runs/a runs/b"
        )
    return found


def score_missing(runs: Sequence[Run], split: str, label: str | None, score: Score) -> None:
    for run in runs:
        if not run.results_file(split, label).is_file():
            score(run)


def compare(runs: Sequence[Run], split: str, label: str | None = None, over: str = "trials") -> Comparison:
    """Every group against the first; refuses what was not scored on the same trials."""
    scores = [read_scores(run, split, label) for run in runs]
    refuse_unlike(scores)
    groups, notes = make_groups(scores)
    first, arms = groups[0], [group.arm for group in groups]
    codes, names = session_codes(scores[0])
    if over == "sessions" and len(names) < 2:
        raise UserError(f"the trials are all of one session, {names[0]}; leave out --over sessions")
    contrasts = [difference(arms[0], arm, groups=codes if over == "sessions" else None) for arm in arms[1:]]
    adjusted = holm([c.p for c in contrasts])
    found = []
    for group, arm, one, p in zip(groups[1:], arms[1:], contrasts, adjusted, strict=True):
        by_session = np.bincount(codes, weights=arm.errors.mean(0) - arms[0].errors.mean(0))
        changes = changes_between(first.recipe, group.recipe)
        found.append(
            Compared(first, group, one, p, changes, int((by_session < 0).sum()), int((by_session > 0).sum()))
        )
    return Comparison(split, groups, tuple(found), (*notes, *provenance_notes(scores)))


def make_groups(scores: Sequence[Scores]) -> tuple[tuple[Group, ...], tuple[str, ...]]:
    """Runs that differ only in their seed together; where all do, each for itself."""
    recipes = [run_recipe(s.run) for s in scores]
    starts = [s.run.environment().get("parent") for s in scores]
    members: list[list[int]] = []
    for i, recipe in enumerate(recipes):
        home = next(
            (m for m in members if starts[m[0]] == starts[i] and same_but_seed(recipes[m[0]], recipe)), None
        )
        if home is None:
            members.append([i])
        else:
            home.append(i)
    notes: tuple[str, ...] = ()
    if len(members) == 1:
        members = [[i] for i in range(len(scores))]
        notes = (
            "These runs differ in nothing but their seed: what differs between them is the luck of the seed.",
        )
    names = group_names([[scores[i].run for i in m] for m in members])
    groups = tuple(
        Group(name, recipes[m[0]], tuple(scores[i] for i in m))
        for name, m in zip(names, members, strict=True)
    )
    return groups, notes


def group_names(members: Sequence[Sequence[Run]]) -> list[str]:
    """The run's name; of several, the folder they share, or the first of them."""
    names = []
    for runs in members:
        folders = {run.path.resolve().parent for run in runs}
        alone = len(runs) == 1
        shared = runs[0].path.resolve().parent.name
        names.append(
            runs[0].name if alone else shared if len(folders) == 1 else f"{runs[0].name} (+{len(runs) - 1})"
        )
    if len(set(names)) < len(names):
        names = [
            str(Path(runs[0].path.resolve().parent.name) / name)
            for runs, name in zip(members, names, strict=True)
        ]
    if len(set(names)) < len(names):
        names = [str(runs[0].path) + ("" if len(runs) == 1 else f" (+{len(runs) - 1})") for runs in members]
    return names


def provenance_notes(scores: Sequence[Scores]) -> tuple[str, ...]:
    """What a reader should know before believing a number."""
    notes = []
    split = scores[0].split
    if any(selected_there(s.run, {"split": split, **s.summary}) for s in scores):
        notes.append(
            f"Checkpoints were selected on {split}, the trials they are scored on, so every rate leans to the low side."
        )
    searches = sorted({str(s.summary.get("search")) for s in scores})
    if len(searches) > 1:
        notes.append(f"They were decoded differently ({', '.join(searches)}), which may be all that differs.")
    trained = {str(training_hash(s.run)) for s in scores}
    if len(trained) > 1:
        notes.append("They were trained on different training data.")
    codes = sorted({str(code)[:12] for s in scores if (code := s.run.environment().get("revision"))})
    if len(codes) > 1:
        notes.append(
            f"They were trained with different code ({', '.join(codes)}), which may be part of the difference."
        )
    for s in scores:
        best = best_step(s.run)
        if best is not None and s.step is not None and s.step != best and s.summary.get("label") != "last":
            notes.append(
                f"{s.run.path} was scored at step {s.step}, but its best checkpoint is of step {best}."
            )
    return tuple(notes)


def training_hash(run: Run) -> Any:
    data = run.environment().get("data")
    hashes = data.get("hashes") if isinstance(data, dict) else None
    return hashes.get("train") if isinstance(hashes, dict) else None


def to_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "split": comparison.split,
        "n_trials": len(comparison.groups[0].scores[0].lengths),
        "reference": comparison.groups[0].name,
        "groups": [group_json(group) for group in comparison.groups],
        "n_comparisons": len(comparison.found),
        "comparisons": [compared_json(c, len(comparison.found)) for c in comparison.found],
        "notes": list(comparison.notes),
    }


def group_json(group: Group) -> dict[str, Any]:
    arm = group.arm
    return {
        "name": group.name,
        "per": arm.rate,
        "seed_sd": arm.seed_sd,
        "runs": [
            {
                "path": str(s.run.path),
                "seed": run_recipe(s.run).train.seed,
                "per": float(rate),
                "step": s.step,
            }
            for s, rate in zip(group.scores, arm.rates, strict=True)
        ],
    }


def compared_json(found: Compared, n_asked: int) -> dict[str, Any]:
    c = found.contrast
    return {
        "a": found.before.name,
        "b": found.after.name,
        "difference": c.estimate,
        "low": c.low,
        "high": c.high,
        "level": c.level,
        "p": c.p,
        "p_adjusted": found.p_adjusted,
        "real": found.real,
        "verdict": ("better" if c.estimate < 0 else "worse") if found.real else "no_evidence",
        "sentence": compared_sentence(found.after.name, found.before.name, c, found.p_adjusted, n_asked),
        "method": c.method,
        "over": c.over,
        "df": c.df,
        "runs_a": c.n_runs[0],
        "runs_b": c.n_runs[1],
        "sessions_better": found.better,
        "sessions_worse": found.worse,
        "changes": [asdict(change) for change in found.changes],
    }
