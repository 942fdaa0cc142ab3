"""`Remedy`: the setting changes that a diagnosis suggests, as a recipe that extends that of the run.

`write_remedy` writes the recipe, `try_remedy` trains it beside the run and compares the two.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from arcuate.config import apply_overrides, override_list
from arcuate.doctor.causes import CERTAIN, STRONG, Cause, Change, describe_changes, leading_causes
from arcuate.errors import UserError
from arcuate.experiments.recipe import load_recipe
from arcuate.files import Result, check_writable, write_text
from arcuate.progress import Progress, logger
from arcuate.run import Run, check_run_folder, open_run

if TYPE_CHECKING:
    from arcuate.doctor.diagnose import Diagnosis
    from arcuate.insight.compare import Comparison

# Only one of these is changed at a time, because each of them alone corrects the size of the updates.
_STEP_SIZE = frozenset({"learning_rate", "eps", "clipping", "loss_reduction"})


@dataclass(frozen=True)
class SettingChange:
    """One change of a remedy: a setting with its new value, or with a factor if the log does not state its value."""

    key: str
    value: Any
    before: Any
    reason: str
    times: float | None = None


@dataclass(frozen=True)
class Remedy(Result):
    """Setting changes with a reason for each; `message` states why if there are none."""

    verdict: str
    changes: tuple[SettingChange, ...] = ()
    message: str = ""
    run: Path | None = None  # run folder whose recipe is extended
    recipe: str | None = None  # packaged recipe that is extended instead, for the log of another trainer

    def __bool__(self) -> bool:
        return bool(self.changes)

    @property
    def overrides(self) -> dict[str, Any]:
        """The changes to a value, as overrides of the run's recipe."""
        return {change.key: change.value for change in self.changes if change.times is None}

    @property
    def relative(self) -> str:
        """The changes by a factor, in words; empty for a run with a recipe."""
        return describe_changes(Change(c.key, times=c.times) for c in self.changes if c.times is not None)

    def to_yaml(self, parent: str) -> str:
        """A recipe that extends `parent` and states only the changes, after the reason for each."""
        tree: dict[str, Any] = {"extends": parent}
        apply_overrides(tree, self.overrides)
        source = self.run.name if self.run else "the log of another trainer"
        reasons: dict[str, list[str]] = {}
        for change in self.changes:
            reasons.setdefault(change.reason, []).append(change.key)
        comments = [f"# Remedy for {source}, diagnosed as {self.verdict}.", ""]
        comments[1:1] = [f"# {', '.join(keys)}: {reason}" for reason, keys in reasons.items()]
        return "\n".join(comments) + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)

    def train_command(self, recipe: str | Path, store: str | None, overrides: Sequence[str] = ()) -> str:
        """The command that trains the remedy into a folder that does not exist yet."""
        first = Path(f"{self.run}-remedy" if self.run else "runs/remedy")
        folder = next(p for i in range(1, 10_000) if not (p := _numbered(first, i)).exists())
        return shlex.join(
            ["arcuate", "train", str(recipe), "--data", store or "STORE", "--run", str(folder), *overrides]
        )

    def packaged_command(self, store: str | None) -> str | None:
        """The command that trains the remedy of another trainer's log on a packaged recipe, if there is one."""
        if self.recipe is None or self.relative:
            return None
        return self.train_command(self.recipe, store, override_list(self.overrides))


def _numbered(path: Path, number: int) -> Path:
    return path if number == 1 else path.with_name(f"{path.name}-{number}")


def make_remedy(diagnosis: "Diagnosis") -> Remedy:
    """The remedy of a diagnosis: its first cause, and all others with strong evidence in the recipe."""
    log = diagnosis.log
    run = log.run_path if log else None
    severe = [fault.sentence for fault in diagnosis.data_faults if fault.severe]
    chosen = _choose(diagnosis.causes)
    changes: dict[str, SettingChange] = {}
    for cause in chosen:
        reason = f"{cause.cause}: {cause.because}"
        settings = log.settings if log else {}
        added = {
            c.setting: SettingChange(c.setting, c.value, settings.get(c.setting), reason, c.times)
            for c in cause.changes
            if not _overlaps(c.setting, changes)
        }
        if run is None or _is_valid(run, {**changes, **added}):
            changes |= added
    message = ""
    if diagnosis.runs:
        message = "the file contains several runs; diagnose each of them separately"
    elif severe:
        message = f"the cause is in the data and cannot be fixed by a setting: {'; '.join(severe)}"
    elif not chosen and diagnosis.causes:
        first = diagnosis.causes[0]
        message = f"no setting change is suggested: {first.cause}; {first.change}"
    elif not changes:
        message = "no valid setting change is suggested" if chosen else "there is nothing to fix"
    recipe = f"{diagnosis.dataset}-gru" if diagnosis.dataset and run is None else None
    fits = recipe is not None and _is_valid(recipe, {k: c for k, c in changes.items() if c.times is None})
    return Remedy(diagnosis.primary, () if message else tuple(changes.values()), message, run, recipe if fits else None)


def _choose(causes: Sequence[Cause]) -> list[Cause]:
    """The first cause if it can be treated by settings, and others with strong evidence."""
    if not causes or leading_causes(causes) or (causes[0].score >= CERTAIN and not causes[0].changes):
        return []  # a fault outside the recipe, or one that has to be found by a test first
    chosen = [causes[0]] if causes[0].changes else []
    for cause in causes[1:]:
        combined = cause.factor in _STEP_SIZE and any(earlier.factor in _STEP_SIZE for earlier in chosen)
        if cause.score >= STRONG and cause.changes and not combined:
            chosen.append(cause)
    return chosen


def _overlaps(key: str, changes: Mapping[str, Any]) -> bool:
    """Whether a change of the same setting, of a group that contains it, or of one of its parts was already chosen."""
    return any(key == k or key.startswith(f"{k}.") or k.startswith(f"{key}.") for k in changes)


def _is_valid(recipe: str | Path, changes: Mapping[str, SettingChange]) -> bool:
    try:
        load_recipe(recipe, {key: change.value for key, change in changes.items()})
    except UserError as error:
        logger.debug("remedy rejected: %s", error)
        return False
    return True


def write_remedy(remedy: Remedy, out: str | Path) -> Path:
    """Write the recipe of a remedy to a new file."""
    out = Path(out)
    check_remedy_file(out)
    if not remedy:
        raise UserError(f"no remedy to write: {remedy.message}")
    if remedy.run is not None:
        parent = os.path.relpath(Run(remedy.run).recipe_file.resolve(), out.resolve().parent)
    elif remedy.recipe is None:
        raise UserError(
            "the log of another trainer has no recipe to extend, and none of a packaged one fits; --dataset states the"
            " release of its data, or diagnose an arcuate run folder"
        )
    elif remedy.relative:
        raise UserError(f"the log does not state the settings to change, so no recipe can: {remedy.relative}")
    else:
        parent = remedy.recipe
    write_text(out, remedy.to_yaml(parent))
    load_recipe(out)  # check that the written recipe is valid
    return out


def check_remedy_file(out: str | Path | None) -> None:
    """Reject a file that exists or cannot be written."""
    if out is None:
        return
    out = Path(out)
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} exists and is not overwritten; choose a new file for the remedy")
    check_writable(out)


@dataclass(frozen=True)
class TriedRemedy:
    """A remedy that was trained beside its run with the same data, seed and number of steps."""

    remedy: Remedy
    run: Run  # trained with the remedy
    comparison: "Comparison"

    @property
    def outcome(self) -> str:
        """better, worse or no_evidence."""
        return self.comparison.differences[0].verdict

    @property
    def sentence(self) -> str:
        return self.comparison.differences[0].sentence

    def to_dict(self) -> dict[str, Any]:
        told = {"run": str(self.run.path), "outcome": self.outcome, "sentence": self.sentence}
        return {**told, "comparison": self.comparison.to_dict()}


def try_remedy(
    remedy: Remedy, *, out: str | Path | None = None, data: str | Path | None = None, progress: Progress | None = None
) -> TriedRemedy:
    """Train the remedy with the budget of its run and compare both on the validation trials.

    `out` is the new run folder, by default RUN-remedy beside the run; it must not exist or be empty.
    Changes to the length of the run are left out, because both runs get the same number of steps.
    """
    from arcuate.experiments.train_many import Job, train_job
    from arcuate.insight.compare import compare
    from arcuate.training.callbacks import handle_signals

    if remedy.run is None:
        raise UserError("a remedy can be tried only beside an arcuate run folder, which names its data and budget")
    run = open_run(remedy.run)
    overrides = {key: v for key, v in remedy.overrides.items() if key not in ("train.steps", "train.validate_every")}
    if not overrides:
        reason = remedy.message or "it only changes the length of the run, and both runs get the same number of steps"
        raise UserError(f"no remedy to try: {reason}")
    store = Path(data) if data is not None else run.store_path()
    tried = Run(Path(out) if out is not None else run.path.with_name(f"{run.name}-remedy"))
    check_run_folder(tried.path, can_resume=False)
    steps = load_recipe(run.path, overrides).train.steps

    def report(rows: list[dict[str, Any]]) -> None:
        if progress and rows:
            progress(int(rows[-1].get("step", 0)), steps, "training the remedy")

    with handle_signals() as stop:
        trained = train_job(Job(tried, str(run.path), store, tuple(override_list(overrides))), stop, report)
    if trained.failure is not None:
        raise UserError(f"the remedy could not be trained: {trained.failure}")
    return TriedRemedy(remedy, tried, compare(run, tried, progress=progress))
