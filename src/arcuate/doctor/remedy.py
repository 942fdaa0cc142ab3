"""`Remedy`: the setting changes that a diagnosis suggests, as a recipe that extends that of the run.

`write_remedy` writes the recipe, `try_remedy` trains it beside the run and compares the two.
"""

import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arcuate.config import override_list, to_yaml_line
from arcuate.doctor.causes import CERTAIN, STRONG, Cause, Change, describe_changes, leading_causes
from arcuate.errors import UserError
from arcuate.experiments.recipe import load_recipe
from arcuate.files import check_writable, fields_to_dict, write_text
from arcuate.progress import Progress, logger
from arcuate.run import Run, check_run_folder, open_run

if TYPE_CHECKING:
    from arcuate.doctor.diagnose import Diagnosis
    from arcuate.insight.comparison import Comparison

_WIDTH = 100  # line width of comments in the recipe
# Only one of these is changed at a time, because each of them alone corrects the size of the updates.
_STEP_SIZE = frozenset({"learning_rate", "eps", "clipping", "loss_reduction", "coupling"})
_NO_RECIPE = (
    "the log of another trainer has no recipe to extend; a remedy can be written only for an arcuate run folder"
)


@dataclass(frozen=True)
class SettingChange:
    """One change of a remedy: a setting with its new value, or with a factor if the log does not state its value."""

    key: str
    value: Any
    before: Any
    reason: str
    times: float | None = None


@dataclass(frozen=True)
class Remedy:
    """Setting changes with a reason for each; `message` states why if there are none."""

    verdict: str
    changes: tuple[SettingChange, ...] = ()
    message: str = ""
    run: Path | None = None  # run folder whose recipe is extended

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

    def to_dict(self) -> dict[str, Any]:
        return {**fields_to_dict(self, "changes"), "changes": [fields_to_dict(change) for change in self.changes]}

    def to_yaml(self, parent: str) -> str:
        """A recipe that extends the recipe file `parent` and states only the changes, each with its reason."""
        head = [f"Remedy for {self.run.name if self.run else 'a run'}, diagnosed as {self.verdict}."]
        lines = [*_comment(head[0], ""), f"extends: {to_yaml_line(parent)}"]
        reasons = {change.key: change.reason for change in self.changes}
        return "\n".join([*lines, *_yaml_lines(_nest(self.overrides), reasons, "", set())]) + "\n"


def make_remedy(diagnosis: "Diagnosis") -> Remedy:
    """The remedy of a diagnosis: its first cause, and all others with strong evidence in the recipe."""
    run = diagnosis.log.run_path if diagnosis.log else None
    if diagnosis.runs:
        return Remedy(diagnosis.primary, message="the file contains several runs; diagnose each of them separately")
    if severe := [fault for fault in diagnosis.data_faults if fault.severe]:
        faults = "; ".join(fault.sentence for fault in severe)
        message = f"the cause is in the data and cannot be fixed by a setting: {faults}"
        return Remedy(diagnosis.primary, message=message, run=run)
    chosen = _choose(diagnosis.causes)
    if not chosen:
        first = diagnosis.causes[0] if diagnosis.causes else None
        message = (
            f"no setting change is suggested: {first.cause}; {first.change}" if first else "there is nothing to fix"
        )
        return Remedy(diagnosis.primary, message=message, run=run)
    settings = diagnosis.log.settings if diagnosis.log else {}
    changes: dict[str, SettingChange] = {}
    for cause in chosen:
        reason = f"{cause.cause}: {cause.because}"
        added = {
            c.setting: SettingChange(c.setting, c.value, settings.get(c.setting), reason, c.times)
            for c in cause.changes
            if not _overlaps(c.setting, changes)
        }
        if run is None or _is_valid(run, {**changes, **added}):
            changes |= added
    message = "" if changes else "no valid setting change is suggested"
    return Remedy(diagnosis.primary, tuple(changes.values()), message, run)


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


def _is_valid(run: Path, changes: Mapping[str, SettingChange]) -> bool:
    try:
        load_recipe(run, {key: change.value for key, change in changes.items()})
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
    if remedy.run is None:
        raise UserError(_NO_RECIPE)
    recipe_file = Run(remedy.run).recipe_file.resolve()
    write_text(out, remedy.to_yaml(os.path.relpath(recipe_file, out.resolve().parent)))
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


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, leaf = path.split(".")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[leaf] = value
    return tree


def _yaml_lines(tree: Mapping[str, Any], reasons: Mapping[str, str], path: str, stated: set[str]) -> list[str]:
    """The nested settings with the reason above each; a reason that several settings share is stated once."""
    indent = "  " * path.count(".")
    lines = []
    for key, value in tree.items():
        full = f"{path}{key}"
        if full not in reasons:
            lines += [f"{indent}{key}:", *_yaml_lines(value, reasons, f"{full}.", stated)]
            continue
        if reasons[full] not in stated:
            stated.add(reasons[full])
            lines += _comment(reasons[full], indent)
        lines.append(f"{indent}{key}: {to_yaml_line(value)}")
    return lines


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


# --- Training the remedy beside the run ----------------------------------------------------------------------


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
        return {
            "run": str(self.run.path),
            "outcome": self.outcome,
            "sentence": self.sentence,
            "comparison": self.comparison.to_dict(),
        }


def try_remedy(
    remedy: Remedy, *, out: str | Path | None = None, data: str | Path | None = None, progress: Progress | None = None
) -> TriedRemedy:
    """Train the remedy with the budget of its run and compare both on the validation trials.

    `out` is the new run folder, by default RUN-remedy beside the run; it must not exist or be empty.
    Changes to the length of the run are left out, because both runs get the same number of steps.
    """
    from arcuate.experiments.train_many import Job, train_job
    from arcuate.insight.comparison import compare
    from arcuate.training.callbacks import handle_signals

    if remedy.run is None:
        raise UserError(_NO_RECIPE)
    run = open_run(remedy.run)
    overrides = {key: v for key, v in remedy.overrides.items() if key not in ("train.steps", "train.validate_every")}
    if not overrides:
        reason = remedy.message or "it only changes the length of the run, and both runs get the same number of steps"
        raise UserError(f"no remedy to try: {reason}")
    store = Path(data) if data is not None else run.store_path()
    tried = Run(Path(out) if out is not None else run.path.with_name(f"{run.name}-remedy"))
    check_run_folder(tried.path, can_resume=False)
    recipe = load_recipe(run.path, overrides)
    steps = recipe.train.steps

    def report(rows: list[dict[str, Any]]) -> None:
        if progress and rows:
            progress(int(rows[-1].get("step", 0)), steps, "training the remedy")

    with handle_signals() as stop:
        trained = train_job(Job(tried, str(run.path), store, tuple(override_list(overrides))), stop, report)
    if trained.failure is not None:
        raise UserError(f"the remedy could not be trained: {trained.failure}")
    return TriedRemedy(remedy, tried, compare(run, tried, progress=progress))
