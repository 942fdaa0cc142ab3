"""`list_runs`: every run below a folder with verdict, best error rate and changes relative to a parent run."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from arcuate.config import Change
from arcuate.data.alphabet import error_rate_name, recorded_classes
from arcuate.errors import UserError, check_regular
from arcuate.evaluation.metrics import run_rate_name
from arcuate.experiments.recipe import Recipe, diff_recipes, load_recipe, recipe_names, run_recipe
from arcuate.experiments.targets import TargetOutcome, judge_target
from arcuate.files import finite_int, finite_number, read_json, to_frame
from arcuate.insight.report.run_data import lookup, training_seconds
from arcuate.progress import Progress, counted
from arcuate.run import RUN_FILES, WORDS_LABEL, Run, unfinished_reason

_MAX_DEPTH = 6
_BASELINE = "base"  # arm of an ablation with which the others are compared
_EXECUTION_SECTIONS = ("runtime", "track")  # how a run was executed; no influence on the result
_EXECUTION_SETTINGS = (
    *("data.workers", "train.log_every", "train.keep_checkpoints", "train.checkpoint_every", "optimizer.fused"),
    *("validate.lexicon", "validate.lm"),
)
SEED_SETTINGS = ("train.seed", "data.seed")

Diagnose = Callable[[Path], Any]  # `arcuate.doctor.diagnose`, passed in because the doctor is built on this package


@dataclass(frozen=True)
class LogSummary:
    """Length and error rates of a run according to its log."""

    steps: int | None = None
    best_per: float | None = None
    best_step: int | None = None
    last_per: float | None = None
    seconds: float | None = None
    best_wer: float | None = None  # lowest WER of any validation, with validate.lm
    validations: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)  # rows of the log


@dataclass(frozen=True)
class Verdict:
    """What a list of runs states of a diagnosis, without its curves."""

    primary: str
    secondary: tuple[str, ...] = ()
    since_step: int | None = None
    evidence: tuple[str, ...] = ()
    suggestion: str = ""


@dataclass(frozen=True)
class Parent:
    """The run or recipe that a run is compared with."""

    name: str
    # "weights" (--from), "base" (ablation baseline), "extends" (run of an ancestor of the
    # recipe), "run" (nearest earlier run), "recipe" (packaged)
    kind: str
    changes: tuple[Change, ...]
    entry: "RunEntry | None" = field(default=None, repr=False)


@dataclass(frozen=True)
class RunEntry:
    """A run folder as far as it can be read; `problems` lists what could not be read."""

    run: Run
    name: str  # relative to the listed folder
    recipe: Recipe | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    logged: LogSummary = LogSummary()
    diagnosis: Verdict | None = None
    results: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # split[.label] -> summary
    words: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # split -> summary of the decoding to words
    n_incidents: int = 0
    problems: tuple[str, ...] = ()
    parent: Parent | None = None
    unfinished: str | None = None  # why the training is not complete

    @property
    def verdict(self) -> str | None:
        """The verdict of the doctor; a finished calibration is too short to be judged by its curve."""
        verdict = self.diagnosis.primary if self.diagnosis else None
        is_calibrated = verdict == "too_short" and self.unfinished is None and self.run.calibration_file.is_file()
        return "calibrated" if is_calibrated else verdict

    @property
    def shown_verdict(self) -> str:
        """The verdict as text: `too short`; empty if there is none."""
        return (self.verdict or "").replace("_", " ")

    @property
    def rate_name(self) -> str:
        """PER, or CER for a run on characters."""
        return error_rate_name(recorded_classes(self.environment))

    @property
    def started(self) -> str:
        return str(self.environment.get("started") or "")

    @property
    def planned_steps(self) -> int | None:
        return self.recipe.train.steps if self.recipe else None

    @property
    def weights_from(self) -> str | None:
        """The run whose weights initialised this one (`--from`)."""
        parent = self.environment.get("parent")
        return str(parent) if parent else None

    @property
    def lineage(self) -> list[str]:
        """Names of the recipe and of those it extends, nearest first."""
        stated = self.environment.get("lineage")
        if isinstance(stated, list):
            return [str(name) for name in stated]
        recipe = self.recipe  # earlier versions recorded only the packaged ancestor
        return [name for name in (recipe.name, recipe.extends) if name] if recipe else []

    @property
    def ablation(self) -> Path | None:
        """The folder of the ablation that this run is part of: its runs are stored by arm and seed."""
        folder = self.run.path.resolve().parent.parent
        return folder if (folder / "experiment.json").is_file() else None

    @property
    def revision(self) -> str | None:
        """The code version used for training: the commit, or the release if no commit is recorded."""
        revision = self.environment.get("revision") or self.environment.get("arcuate")
        return str(revision)[:12] if revision else None

    @property
    def best_wer(self) -> tuple[float, str] | None:
        """WER of the decoded words and their split, else the lowest one in the log."""
        for split in ("val", "dev", "test"):
            if (wer := finite_number(self.words.get(split, {}).get("wer"))) is not None:
                return wer, split
        return None if self.logged.best_wer is None else (self.logged.best_wer, "log")

    @property
    def target(self) -> TargetOutcome | None:
        """Whether the run met the target that it states."""
        if self.recipe is None or not self.recipe.target.rates:
            return None
        rows = [*self.logged.validations, *self._decoded_rows]
        return judge_target(self.recipe.target, rows, self.unfinished is None, self.rate_name)

    @property
    def _decoded_rows(self) -> list[dict[str, Any]]:
        """Words that were decoded after training, as validation rows with the PER of the same checkpoint."""
        rows = []
        for split, summary in self.words.items():
            step = finite_int(summary.get("step"))
            if step is not None and split == self.environment.get("selected_on", "val"):
                pers = [row.get("per") for row in self.logged.validations if row.get("step") == step]
                rows.append({"step": step, "wer": summary.get("wer"), "per": pers[-1] if pers else None})
        return rows

    @property
    def data_hashes(self) -> Any:
        return lookup(self.environment, "data.hashes")

    def to_dict(self) -> dict[str, Any]:
        logged, diagnosis, recipe, parent = self.logged, self.diagnosis, self.recipe, self.parent
        return {
            "name": self.name,
            "path": str(self.run.path),
            "recipe": recipe.name if recipe else None,
            "seed": recipe.train.seed if recipe else None,
            "started": self.started or None,
            "verdict": self.verdict,
            "secondary": list(diagnosis.secondary) if diagnosis else [],
            "since_step": diagnosis.since_step if diagnosis else None,
            "steps": logged.steps,
            "planned_steps": self.planned_steps,
            "unfinished": self.unfinished,
            "best_per": logged.best_per,
            "best_step": logged.best_step,
            "last_per": logged.last_per,
            "best_wer": self.best_wer[0] if self.best_wer else None,
            "purpose": recipe.purpose if recipe else None,
            "target": None if (target := self.target) is None else target.to_dict(),
            "seconds": logged.seconds,
            "incidents": self.n_incidents,
            "parent": parent.name if parent else None,
            "parent_kind": parent.kind if parent else None,
            "changes": [asdict(change) for change in parent.changes] if parent else [],
            "results": {
                name: {key: summary.get(key) for key in ("per", "per_low", "per_high", "step", "n_trials")}
                for name, summary in self.results.items()
            },
            "words": {
                split: {
                    key: summary.get(key) for key in ("wer", "wer_low", "wer_high", "cer", "lm", "step", "n_trials")
                }
                for split, summary in self.words.items()
            },
            "problems": list(self.problems),
        }


@dataclass(frozen=True)
class RunList:
    """The runs of a folder in the order of their start."""

    folder: Path
    entries: tuple[RunEntry, ...]

    def __repr__(self) -> str:
        names = ", ".join(entry.name for entry in self.entries[:6]) + (", …" if len(self.entries) > 6 else "")
        return f"RunList('{self.folder}': {counted(len(self), 'run')}{': ' if names else ''}{names})"

    def __iter__(self) -> Iterator[RunEntry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def rate_name(self) -> str:
        """PER, or CER for runs on characters; "PER / CER" for both."""
        return run_rate_name(*(entry.run for entry in self.entries))

    def to_dicts(self) -> list[dict[str, Any]]:
        return [entry.to_dict() for entry in self.entries]

    def to_frame(self) -> Any:
        """One line per run as a pandas DataFrame."""
        return to_frame(self.to_dicts())


def list_runs(
    folder: str | Path = "runs", *, diagnose: Diagnose | None = None, progress: Progress | None = None
) -> RunList:
    """Read all runs in and below a folder; damaged ones are listed with their problems.

    The verdicts are those of `diagnose`; without it the runs have none.
    """
    folder = Path(folder)
    paths = find_runs(folder)
    entries = []
    for i, path in enumerate(paths):
        name = path.resolve().name if path == folder else str(path.relative_to(folder))
        entries.append(read_entry(path, name, diagnose))
        if progress:
            progress(i + 1, len(paths), "reading runs")
    entries.sort(key=lambda e: (not e.started, e.started, e.name))
    linked = [replace(entry, parent=find_parent(entry, entries[:i])) for i, entry in enumerate(entries)]
    return RunList(folder, tuple(linked))


def find_runs(folder: Path) -> list[Path]:
    """The run folders in and below a folder, sorted; run folders inside a run folder are not searched."""
    if not folder.is_dir():
        raise UserError(missing_folder(folder))
    found = sorted(_search(folder, 0), key=str)
    if not found:
        raise UserError(
            f"{folder} contains no runs; train one with: arcuate train tiny --data STORE --run {folder}/first"
        )
    return found


def missing_folder(folder: Path) -> str:
    first = f"train a first run into it: arcuate train tiny --data STORE --run {folder}/first"
    return f"no such folder: {folder}; give the folder that contains your runs, or {first}"


def _search(folder: Path, depth: int) -> list[Path]:
    if is_run_folder(folder):
        return [folder]
    if depth >= _MAX_DEPTH:
        return []
    try:
        children = sorted(Path(e.path) for e in os.scandir(folder) if _is_searched(e))
    except OSError:
        return []
    return [run for child in children for run in _search(child, depth + 1)]


def _is_searched(entry: os.DirEntry[str]) -> bool:
    """Hidden folders are not searched: those of a command in progress, such as .NAME.part, are not runs yet."""
    return entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")


def is_run_folder(folder: Path) -> bool:
    """Whether enough files are left to recognise a run; recipe.yaml alone is not sufficient."""
    if sum((folder / name).is_file() for name in RUN_FILES) >= 2:
        return True
    return (folder / "recipe.yaml").is_file() and (folder / "checkpoints").is_dir()


def read_entry(path: Path, name: str, diagnose: Diagnose | None = None) -> RunEntry:
    """Read what can be read of a run and record what cannot as problems."""
    run, problems = Run(path), []

    def attempt(read: Callable[[], Any], default: Any) -> Any:
        try:
            return read()
        except (UserError, OSError) as error:
            problems.append(str(error).splitlines()[0] if str(error) else type(error).__name__)
            return default

    recipe = attempt(lambda: run_recipe(run), None)
    environment = attempt(run.environment, {})
    rows = attempt(run.metrics, None)
    diagnosis = attempt(lambda: diagnose(run.path), None) if diagnose is not None and rows != [] else None
    if rows is None and diagnosis is not None and diagnosis.last_step is None:
        diagnosis = None  # nothing of the log is left
    if rows is not None:
        logged = _summarise_log(rows, environment.get("selected_on"))
    elif diagnosis is not None:  # the doctor skips damaged lines
        best = diagnosis.best_per, diagnosis.best_step
        logged = LogSummary(diagnosis.last_step, *best, diagnosis.last_per)
    else:
        logged = LogSummary()
    summaries = attempt(lambda: _read_summaries(run), {})
    return RunEntry(
        run=run,
        name=name,
        recipe=recipe,
        environment=environment,
        logged=logged,
        diagnosis=Verdict(
            diagnosis.primary, diagnosis.secondary, diagnosis.since_step, diagnosis.evidence, diagnosis.suggestion
        )
        if diagnosis
        else None,
        results={name: summary for name, summary in summaries.items() if name.partition(".")[2] != WORDS_LABEL},
        words={
            name.partition(".")[0]: summary
            for name, summary in summaries.items()
            if name.partition(".")[2] == WORDS_LABEL
        },
        n_incidents=attempt(lambda: _count_lines(run.incidents_file), 0),
        unfinished=attempt(lambda: unfinished_reason(run), None),
        problems=tuple(dict.fromkeys(problems)),
    )


def _summarise_log(rows: Sequence[Mapping[str, Any]], selected_on: Any) -> LogSummary:
    """Steps and error rates, on the split that selected the checkpoints if it is known."""
    steps = [step for r in rows if (step := finite_int(r.get("step"))) is not None]
    splits = {split for r in rows if isinstance(split := r.get("split"), str)} - {"train"}
    split = selected_on if isinstance(selected_on, str) and selected_on in splits else min(splits, default=None)
    rates = [
        (per, step)
        for r in rows
        if r.get("split") == split
        and (per := finite_number(r.get("per"))) is not None
        and (step := finite_int(r.get("step"))) is not None
    ]
    best_per, best_step = min(rates, default=(None, None))
    seconds = training_seconds(r for r in rows if r.get("split") == "train")
    validations = tuple(r for r in rows if r.get("split") == split and finite_int(r.get("step")) is not None)
    wers = [wer for r in validations if (wer := finite_number(r.get("wer"))) is not None]
    return LogSummary(
        max(steps, default=None),
        *(best_per, best_step, rates[-1][0] if rates else None, seconds),
        *(min(wers, default=None), validations if split is not None else ()),
    )


def _read_summaries(run: Run) -> dict[str, dict[str, Any]]:
    files = sorted((run.path / "results").glob("*.json"))
    return {f.name.removesuffix(".json"): read_json(f) for f in files if not f.name.startswith(".")}


def _count_lines(path: Path) -> int:
    if not path.exists():
        return 0
    try:
        check_regular(path)
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


# Parents: the run or recipe that a run is compared with.


def find_parent(entry: RunEntry, earlier: Sequence[RunEntry]) -> Parent | None:
    """The run that this one is compared with.

    In this order: the run that provided the weights; the baseline of the ablation; an earlier run of the same recipe,
    or of the nearest one that it extends; else the run or packaged recipe with the fewest changed settings, which is
    the most informative comparison. Of equally close candidates the latest is used, and a run is preferred to a
    recipe.
    """
    recipe = entry.recipe
    if recipe is None:
        return None

    def compared_with(other: RunEntry, kind: str) -> Parent:
        return Parent(other.name, kind, entry_changes(other, entry), other)

    by_path = {other.run.path.resolve(): other for other in earlier if other.recipe}
    if entry.weights_from:
        source = _find_source(entry.weights_from, entry.run, by_path)
        return compared_with(source, "weights") if source else Parent(entry.weights_from, "weights", ())
    path = entry.run.path.resolve()
    baseline = by_path.get(entry.ablation / _BASELINE / path.name) if entry.ablation else None
    if baseline and path.parent.name != _BASELINE:
        return compared_with(baseline, "base")
    similar = [
        other for other in earlier if other.recipe and not other.weights_from and other.data_hashes == entry.data_hashes
    ]
    for name in entry.lineage:
        kind = "run" if name == recipe.name else "extends"
        related = [compared_with(other, kind) for other in similar if other.recipe and other.recipe.name == name]
        if related:
            candidates = [*(_recipe_parents(recipe) if kind == "run" else ()), *related]
            return min(reversed(candidates), key=lambda p: len(p.changes))
    candidates = [*_recipe_parents(recipe), *(compared_with(other, "run") for other in similar)]
    return min(reversed(candidates), key=lambda p: len(p.changes), default=None)


def _find_source(weights_from: str, run: Run, by_path: Mapping[Path, RunEntry]) -> RunEntry | None:
    """The run that `--from` named, RUN or RUN@WHICH. Earlier versions recorded a relative path as it was given."""
    for base in (Path(), *run.path.resolve().parents):
        for name in (weights_from, weights_from.rpartition("@")[0]):
            if name and (found := by_path.get((base / name).resolve())):
                return found
    return None


def entry_changes(before: RunEntry, after: RunEntry) -> tuple[Change, ...]:
    """Changed settings that can affect a result; precisions that fell back to the same one do not count."""
    if before.recipe is None or after.recipe is None:
        return ()
    used = before.environment.get("precision"), after.environment.get("precision")
    same_precision = used[0] is not None and used[0] == used[1]
    return tuple(
        change
        for change in result_changes(before.recipe, after.recipe)
        if not (same_precision and change.path.startswith("train.precision"))
    )


def result_changes(before: Recipe, after: Recipe) -> tuple[Change, ...]:
    """Changed settings that can affect a result, without those of execution and logging and of disabled components."""
    return tuple(
        change
        for change in diff_recipes(before, after)
        if change.path.split(".")[0] not in _EXECUTION_SECTIONS
        and change.path not in _EXECUTION_SETTINGS
        and not _is_unused(change, before, after)
    )


# Settings below a path that do nothing while the condition holds.
_UNUSED_IF: Mapping[str, Callable[[Recipe], bool]] = {
    "ema": lambda recipe: recipe.ema.decay == 0,
    "guard": lambda recipe: not recipe.guard.enabled,
    "transducer": lambda recipe: not recipe.transducer.enabled,
    "mode": lambda recipe: not recipe.mode.enabled,
    "denoiser": lambda recipe: not recipe.denoiser.enabled,
    "augment.time_masks": lambda recipe: recipe.augment.time_masks.n_masks == 0,
    "augment.feature_masks": lambda recipe: recipe.augment.feature_masks.n_masks == 0,
}


def _is_unused(change: Change, before: Recipe, after: Recipe) -> bool:
    """Whether both values of a setting resolve to the same behaviour."""
    return any(
        (change.path == path or change.path.startswith(f"{path}.")) and is_unused(before) and is_unused(after)
        for path, is_unused in _UNUSED_IF.items()
    )


def differ_only_in_seed(changes: Sequence[Change]) -> bool:
    return all(change.path in SEED_SETTINGS for change in changes)


def _recipe_parents(recipe: Recipe) -> list[Parent]:
    name = next((n for n in (recipe.name, recipe.extends) if n in recipe_names()), None)
    if name is None:
        return []
    try:
        return [Parent(name, "recipe", result_changes(load_recipe(name), recipe))]
    except UserError:  # the packaged recipe is from a different version
        return []
