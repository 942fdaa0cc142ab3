"""`compare`: whether runs differ significantly. Groups of seeds are compared with the first group, Holm-adjusted."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.config import Change, value_text
from arcuate.errors import UserError
from arcuate.evaluation.significance import Arm, Contrast, difference, holm
from arcuate.experiments.recipe import Recipe, run_recipe
from arcuate.files import check_output, to_frame, write_text
from arcuate.hub import local_path
from arcuate.insight.charts import base, plots
from arcuate.insight.charts.formats import count, percent, split_name
from arcuate.insight.overlay import FOREST_LEGEND, any_simulated, overlaid_figures
from arcuate.insight.render import Figure, make_figure, render
from arcuate.insight.report.run_data import lookup
from arcuate.insight.runs import differ_only_in_seed, find_runs, is_run_folder, result_changes
from arcuate.insight.scores import (
    ALPHA,
    RunScores,
    best_checkpoint_step,
    check_same_trials,
    describe_difference,
    describe_method,
    read_scores,
    selected_on_scored_trials,
    session_codes,
    to_arm,
)
from arcuate.progress import Progress, logger
from arcuate.run import Run, open_run, unfinished_reason

_LAST = "last"
_SAMPLING_UNITS = ("trials", "sessions")


@dataclass(frozen=True)
class Group:
    """Runs of one recipe that differ only in their seed."""

    name: str
    recipe: Recipe
    scores: tuple[RunScores, ...]

    @cached_property
    def arm(self) -> Arm:
        return to_arm(self.scores)

    @property
    def rate_name(self) -> str:
        return self.scores[0].rate_name

    @property
    def seeds(self) -> list[int]:
        return [run_recipe(s.run).train.seed for s in self.scores]

    def to_dict(self) -> dict[str, Any]:
        runs = [
            {"path": str(s.run.path), "seed": seed, "per": float(rate), "step": s.step}
            for s, seed, rate in zip(self.scores, self.seeds, self.arm.rates, strict=True)
        ]
        return {"name": self.name, "per": self.arm.rate, "seed_sd": self.arm.seed_sd, "runs": runs}


@dataclass(frozen=True)
class GroupDifference:
    """One group compared with the reference group."""

    reference: Group
    group: Group
    contrast: Contrast
    p_adjusted: float
    n_comparisons: int
    changes: tuple[Change, ...]
    sessions_better: int  # sessions in which the group makes fewer errors
    sessions_worse: int

    @property
    def significant(self) -> bool:
        return self.p_adjusted < ALPHA

    @property
    def verdict(self) -> str:
        if not self.significant:
            return "no_evidence"
        return "better" if self.contrast.estimate < 0 else "worse"

    @property
    def sentence(self) -> str:
        names = self.group.name, self.reference.name
        return describe_difference(*names, self.contrast, self.p_adjusted, self.n_comparisons, self.group.rate_name)

    def to_dict(self) -> dict[str, Any]:
        c = self.contrast
        return {
            "a": self.reference.name,
            "b": self.group.name,
            "difference": c.estimate,
            "low": c.low,
            "high": c.high,
            "level": c.level,
            "p": c.p,
            "p_adjusted": self.p_adjusted,
            "significant": self.significant,
            "verdict": self.verdict,
            "sentence": self.sentence,
            "method": c.method,
            "over": c.over,
            "df": c.df,
            "runs_a": c.n_runs[0],
            "runs_b": c.n_runs[1],
            "sessions_better": self.sessions_better,
            "sessions_worse": self.sessions_worse,
            "changes": [asdict(change) for change in self.changes],
        }


@dataclass(frozen=True)
class Comparison:
    """Every group compared with the first."""

    split: str
    groups: tuple[Group, ...]
    differences: tuple[GroupDifference, ...]
    notes: tuple[str, ...]  # limits on the interpretation

    def __repr__(self) -> str:
        names = ", ".join(group.name for group in self.groups[1:])
        return f"Comparison({names} with {self.groups[0].name} on {self.n_trials:,} {self.split} trials)"

    @property
    def n_trials(self) -> int:
        return len(self.groups[0].scores[0].lengths)

    @property
    def rate_name(self) -> str:
        return self.groups[0].rate_name

    @property
    def method(self) -> str:
        return describe_method(self.differences[0].contrast, self.rate_name)

    def to_dict(self) -> dict[str, Any]:
        return {
            "split": self.split,
            "n_trials": self.n_trials,
            "reference": self.groups[0].name,
            "groups": [group.to_dict() for group in self.groups],
            "n_comparisons": len(self.differences),
            "comparisons": [found.to_dict() for found in self.differences],
            "notes": list(self.notes),
        }

    def plot(self) -> Any:
        """The differences with their intervals as an Altair chart."""
        return base.for_notebook(_forest_chart(self))

    def to_frame(self) -> Any:
        """One line per comparison as a pandas DataFrame."""
        return to_frame(found.to_dict() for found in self.differences)


def compare(
    *runs: Run | str | Path,
    split: str = "val",
    label: str | None = None,
    over: str = "trials",
    evaluate_missing: bool = True,
    html: str | Path | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare runs with the first one on the same trials; runs that differ only in their seed form a group.

    A folder that contains runs stands for all of them. `over` is the sampling unit, trials or sessions. Runs without
    results on `split` are evaluated first unless `evaluate_missing` is false. `html` is a page to write.
    """
    check_output(html, "<!doctype html", "compare.html")
    if over not in _SAMPLING_UNITS:
        raise UserError(f"unknown sampling unit {over!r} (--over); choose {' or '.join(_SAMPLING_UNITS)}")
    opened = _open_runs(runs)
    if label is None and _only_last_scored(opened, split):
        label = _LAST
        logger.info(f"comparing the last checkpoints (results {split}.{_LAST}), which all of these runs have")
    _check_complete(opened)
    for run in opened:
        if evaluate_missing and not run.results_file(split, label).is_file():
            _evaluate(run, split, label, progress)
    comparison = _compare_scores([read_scores(run, split, label) for run in opened], over)
    if html is not None:
        write_text(Path(html), comparison_page(comparison))
    return comparison


def _open_runs(paths: Sequence[Run | str | Path]) -> list[Run]:
    found: list[Run] = []
    for path in paths:
        if isinstance(path, Run):
            found.append(path)
            continue
        folder = local_path(path)
        single = is_run_folder(folder) or not folder.is_dir()
        found += [open_run(p) for p in ([folder] if single else find_runs(folder))]
    if len({run.path.resolve() for run in found}) < len(found):
        raise UserError("a run is given twice; a comparison needs different runs")
    if len(found) < 2:
        given = found[0].path if found else "no run"
        raise UserError(f"{given} is a single run; give at least two, such as: arcuate compare runs/a runs/b")
    return found


def _check_complete(runs: Sequence[Run]) -> None:
    """Reject unfinished runs: their difference from a complete one says nothing about their settings."""
    unfinished = [f"{run.path} ({reason})" for run in runs if (reason := unfinished_reason(run))]
    if unfinished:
        raise UserError(
            f"a comparison needs complete runs, but training is unfinished in: {'; '.join(unfinished)}; wait for"
            " those that are training, resume the others with arcuate train RUN/recipe.yaml --run RUN --resume, or"
            " leave these runs out"
        )


def _only_last_scored(runs: Sequence[Run], split: str) -> bool:
    """Whether all runs have results of the last checkpoint, as the arms of an ablation, but not all of the best."""
    if all(run.results_file(split).is_file() for run in runs):
        return False
    return all(run.results_file(split, _LAST).is_file() for run in runs)


def _evaluate(run: Run, split: str, label: str | None, progress: Progress | None) -> None:
    if label is not None:
        raise UserError(
            f"{run.path} has no results {split}.{label}; create them with: arcuate evaluate {run.path}"
            f" --split {split} --label {label}"
        )
    from arcuate.evaluation.evaluate import evaluate  # imports torch

    logger.info(f"evaluating {run.path} on {split}")
    evaluate(run, split=split, progress=progress)


def _compare_scores(scores: Sequence[RunScores], over: str) -> Comparison:
    check_same_trials(scores)
    groups, notes = _make_groups(scores)
    reference = groups[0]
    codes, sessions = session_codes(scores[0])
    if over == "sessions" and len(sessions) < 2:
        raise UserError(f"all trials belong to one session, {sessions[0]}; omit --over sessions")
    sampling = codes if over == "sessions" else None
    contrasts = [difference(reference.arm, group.arm, groups=sampling) for group in groups[1:]]
    adjusted = holm([c.p for c in contrasts])
    differences = []
    for group, contrast, p in zip(groups[1:], contrasts, adjusted, strict=True):
        errors = group.arm.errors.mean(0) - reference.arm.errors.mean(0)
        by_session = np.bincount(codes, weights=errors)
        differences.append(
            GroupDifference(
                reference=reference,
                group=group,
                contrast=contrast,
                p_adjusted=p,
                n_comparisons=len(contrasts),
                changes=result_changes(reference.recipe, group.recipe),
                sessions_better=int((by_session < 0).sum()),
                sessions_worse=int((by_session > 0).sum()),
            )
        )
    return Comparison(scores[0].split, groups, tuple(differences), (*notes, *_provenance_notes(scores)))


def _make_groups(scores: Sequence[RunScores]) -> tuple[tuple[Group, ...], tuple[str, ...]]:
    """Group runs that differ only in their seed; if all runs do, each forms its own group."""
    recipes = [run_recipe(s.run) for s in scores]
    parents = [s.run.environment().get("parent") for s in scores]

    def belong_together(i: int, j: int) -> bool:
        return parents[i] == parents[j] and differ_only_in_seed(result_changes(recipes[i], recipes[j]))

    members: list[list[int]] = []
    for i in range(len(scores)):
        group = next((m for m in members if belong_together(m[0], i)), None)
        if group is None:
            members.append([i])
        else:
            group.append(i)
    notes: tuple[str, ...] = ()
    if len(members) == 1:
        members = [[i] for i in range(len(scores))]
        notes = ("These runs differ only in their seed, so their differences are variation between seeds.",)
    names = _group_names([[scores[i].run for i in m] for m in members])
    groups = tuple(
        Group(name, recipes[m[0]], tuple(scores[i] for i in m)) for name, m in zip(names, members, strict=True)
    )
    return groups, notes


def _group_names(members: Sequence[Sequence[Run]]) -> list[str]:
    """The name of the run; for several, their common folder if it holds no other group, else the first of them."""
    folders = [{run.path.resolve().parent for run in runs} for runs in members]
    suffixes = ["" if len(runs) == 1 else f" (+{len(runs) - 1})" for runs in members]
    parents = [runs[0].path.resolve().parent.name for runs in members]
    names = []
    for i, (runs, suffix, parent) in enumerate(zip(members, suffixes, parents, strict=True)):
        others = set().union(*folders[:i], *folders[i + 1 :])
        own_folder = len(folders[i]) == 1 and folders[i].isdisjoint(others)
        names.append(parent if len(runs) > 1 and own_folder else f"{runs[0].name}{suffix}")
    if len(set(names)) < len(names):
        names = [str(Path(parent) / name) for parent, name in zip(parents, names, strict=True)]
    if len(set(names)) < len(names):
        names = [f"{runs[0].path}{suffix}" for runs, suffix in zip(members, suffixes, strict=True)]
    return names


def _provenance_notes(scores: Sequence[RunScores]) -> tuple[str, ...]:
    """Limits on the interpretation of the numbers."""
    notes = []
    split = scores[0].split
    if any(selected_on_scored_trials(s.run, {"split": split, **s.summary}) for s in scores):
        notes.append(
            f"Checkpoints were selected on {split}, the trials they are scored on, so all error rates are"
            " optimistically biased."
        )
    searches = sorted({_describe_search(s.summary) for s in scores})
    if len(searches) > 1:
        notes.append(
            f"The runs were decoded with different searches ({', '.join(searches)}), which may explain the difference."
        )
    if len({str(lookup(s.run.environment(), "data.hashes.train")) for s in scores}) > 1:
        notes.append("The runs were trained on different data.")
    revisions = sorted({str(r)[:12] for s in scores if (r := s.run.environment().get("revision"))})
    if len(revisions) > 1:
        notes.append(
            f"The runs were trained with different code ({', '.join(revisions)}), which may contribute to the"
            " difference."
        )
    for s in scores:
        best = best_checkpoint_step(s.run)
        if best is not None and s.step is not None and s.step != best and s.summary.get("label") != _LAST:
            notes.append(f"{s.run.path} was scored at step {s.step}, but its best checkpoint is step {best}.")
    return tuple(notes)


def _describe_search(summary: Mapping[str, Any]) -> str:
    """How the trials were decoded; equal texts are comparable."""
    head, beam = summary.get("head"), summary.get("beam")
    text = str(summary.get("search")) + (f" of size {beam}" if beam is not None else "")
    return text + (f" with the {head} head" if head not in (None, "ctc") else "")


# The comparison page: differences, overlaid learning curves and changed settings.


def comparison_page(comparison: Comparison) -> str:
    curves = [(g.name, s.run.metrics()) for g in comparison.groups for s in g.scores]
    return render(
        "comparison.html",
        heading=" · ".join(group.name for group in comparison.groups),
        kind="comparison",
        simulated=any_simulated(s.run for group in comparison.groups for s in group.scores),
        comparison=comparison,
        scored_on=f"Scored on the same {comparison.n_trials:,} {split_name(comparison.split)} trials.",
        forest=_forest_figure(comparison),
        curves=overlaid_figures(curves, comparison.rate_name),
        changes=[
            (d.reference.name, d.group.name, [(c.path, value_text(c.before), value_text(c.after)) for c in d.changes])
            for d in comparison.differences
        ],
        runs=[
            (str(scores.run.path), group.name, seed, count(scores.step), percent(float(rate)))
            for group in comparison.groups
            for scores, seed, rate in zip(group.scores, group.seeds, group.arm.rates, strict=True)
        ],
    )


def _forest_chart(comparison: Comparison) -> base.Chart:
    reference = comparison.groups[0].name
    rows = [(d.group.name, d.contrast, d.significant) for d in comparison.differences]
    name = comparison.rate_name
    label = f"Differences in {name} from {reference}"
    return plots.forest_chart(rows, title=f"Difference from {reference}", label=label, rate_name=name)


def _forest_figure(comparison: Comparison) -> Figure:
    reference, n = comparison.groups[0].name, len(comparison.differences)
    corrected = f" after Holm correction for {n} comparisons" if n > 1 else ""
    level = f"{100 * comparison.differences[0].contrast.level:.0f}\u202f%"
    caption = (
        f"Difference from {reference} in percentage points of {comparison.rate_name}, with {level} intervals. Filled"
        f" markers: significant{corrected}. {comparison.method}"
    )
    return make_figure(_forest_chart(comparison), caption=caption, legend=FOREST_LEGEND, full=True)
