"""Hyperparameter sweeps: Optuna proposes settings, each proposal is trained, the lowest validation PER is the best.

Any number of workers share one sweep folder. A trial belongs to the worker that holds its lock; the settings of a trial
whose worker was killed are tried again.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any

from pydantic import Field, ValidationError, model_validator

from arcuate.config import Overrides, Settings, known_paths, nearest, override_list, read_yaml, to_yaml_line
from arcuate.data.selection import select
from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.experiments.recipe import Recipe, load_recipe
from arcuate.experiments.subprocess_train import check_new_folder, open_folder, train_arguments, train_in_subprocess
from arcuate.files import LockHeld, exclusive_lock, fields_to_dict, to_frame
from arcuate.progress import logger, percent
from arcuate.run import Run, unfinished_reason
from arcuate.seeds import derive_seed
from arcuate.training.callbacks import Stop, handle_signals
from arcuate.training.config import DESCRIPTIVE_KEYS

try:
    import optuna
    from optuna import distributions
    from optuna.storages import JournalStorage
    from optuna.trial import FrozenTrial, TrialState

    from arcuate.experiments.journal import Journal
except ImportError:
    raise UserError("sweeps need the package optuna: pip install -e '.[sweep]' -c constraints.txt") from None

_INTERRUPTED = "interrupted"
_EXAMPLE = "schedule.peak_lr: {low: 0.001, high: 0.01, log: true}"


@dataclass(frozen=True)
class SweepTrial:
    """One combination of settings and its outcome."""

    number: int
    state: str  # complete, pruned, fail or running
    per: float | None  # best validation PER; of an unfinished trial, the latest
    overrides: tuple[str, ...]
    reason: str | None
    run: str
    seconds: float | None

    def to_dict(self) -> dict[str, Any]:
        return fields_to_dict(self)


@dataclass(frozen=True)
class SweepResult:
    """All trials of a sweep so far, those of other workers included."""

    out: Path
    recipe: str
    trials: tuple[SweepTrial, ...]
    best: SweepTrial | None  # among the complete trials
    command: tuple[str, ...] | None  # command that trains the best settings again
    signal: Signals | None = None  # signal that interrupted this worker

    def to_dict(self) -> dict[str, Any]:
        best = {} if self.best is None else self.best.to_dict()
        return {
            "out": str(self.out),
            "recipe": self.recipe,
            "best_trial": best.get("number"),
            **{f"best_{key}": best.get(key) for key in ("per", "overrides", "run")},
            "command": list(self.command) if self.command else None,
            "trials": [trial.to_dict() for trial in self.trials],
        }

    def to_frame(self) -> Any:
        """Pandas data frame with one row per trial."""
        return to_frame(trial.to_dict() for trial in self.trials)


def sweep(
    recipe: str | Path,
    space: Mapping[str, Any] | str | Path,
    data: str | Path,
    out: str | Path,
    *,
    overrides: Overrides = (),
    n_trials: int = 20,
    seed: int = 0,
    stop: Stop | None = None,
) -> SweepResult:
    """Search for the settings with the lowest validation PER, until `n_trials` trials are done by all workers.

    `space` maps setting paths to ranges or choices, `{"schedule.peak_lr": {"low": 1e-3, "high": 1e-2, "log": True}}`,
    or is a YAML file that does. `out` receives a run folder per trial; calling again with the same arguments continues.
    """
    listed = override_list(overrides)
    dimensions = read_space(space, recipe, listed)
    plan = SweepPlan(str(recipe), tuple(listed), dimensions, Path(data), Path(out), n_trials, seed)
    study = open_study(plan)
    with handle_signals(stop) as stop:
        while not stop.requested:
            with claim_trial(plan, study) as trial:
                if trial is None:
                    break
                run_trial(plan, study, trial, stop)
    return summarise_study(plan, study, stop.signal)


# --- Search space: a range or choices per setting, validated by loading recipes with the end values ------


class Range(Settings):
    low: float = Field(description="Lowest value.")
    high: float = Field(description="Highest value.")
    log: bool = Field(False, description="Sample uniformly in the logarithm.")
    step: float | None = Field(None, gt=0.0, description="Distance between values, starting at `low`.")

    @model_validator(mode="after")
    def _check(self) -> "Range":
        if not self.low < self.high:
            raise ValueError(f"low {self.low:g} must be below high {self.high:g}")
        if self.log and self.low <= 0:
            raise ValueError(f"log needs a low above 0, got {self.low:g}")
        if self.log and self.step is not None:
            raise ValueError("log and step cannot be combined; leave one of them out")
        if self.step is not None:
            n_steps = (self.high - self.low) / self.step
            if abs(n_steps - round(n_steps)) > 1e-6 * n_steps:
                reached = self.low + int(n_steps) * self.step
                raise ValueError(f"steps of {self.step:g} do not reach high {self.high:g}; use high: {reached:g}")
        return self

    @property
    def _inner_value(self) -> float:
        """A value inside the range; an integer only if all its values are integers."""
        return self.low + (self.step if self.step is not None else 0.37 * (self.high - self.low))


class Choices(Settings):
    choices: tuple[Any, ...] = Field(min_length=2, description="Values to choose from.")

    @property
    def texts(self) -> list[str]:
        """Every choice as YAML on one line."""
        return [to_yaml_line(choice) for choice in self.choices]


@dataclass(frozen=True)
class Dimension:
    """One setting that a sweep varies."""

    path: str
    values: Range | Choices
    is_integer: bool = False  # of a range

    def to_override(self, value: Any) -> str:
        """`path=value` for the command line. A choice is given as its text."""
        return f"{self.path}={value if isinstance(self.values, Choices) else to_yaml_line(value)}"


def read_space(
    space: Mapping[str, Any] | str | Path, recipe: str | Path, overrides: Overrides = ()
) -> tuple[Dimension, ...]:
    """The dimensions of a mapping or YAML file, each validated against the recipe that it varies."""
    if isinstance(space, Mapping):
        tree, where = dict(space), "search space"
    else:
        tree, where = read_yaml(Path(space)), str(space)
        if not isinstance(tree, dict) or not tree or not all(isinstance(path, str) for path in tree):
            raise UserError(f"{space} should name the settings to vary, such as '{_EXAMPLE}'")
    listed = override_list(overrides)
    fixed = [o.partition("=")[0].strip() for o in listed]
    known = known_paths(Recipe)
    for path in tree:
        _check_path(where, path, known)
        for other in [p for p in tree if p != path] + fixed:
            if path == other or path.startswith(f"{other}."):
                raise UserError(f"{where}: {path} is varied, but {other} is also set; leave one of them out")
    return tuple(_read_dimension(where, path, values, recipe, listed) for path, values in tree.items())


def _check_path(where: str, path: str, known: set[str]) -> None:
    if path in DESCRIPTIVE_KEYS:
        raise UserError(f"{where}: {path} only describes a recipe; vary a setting")
    if path not in known:
        near = nearest(path, sorted(known))
        hint = f"; did you mean {near!r}?" if near else "; see: arcuate recipes show"
        raise UserError(f"{where}: no setting {path!r}{hint}")


def _read_dimension(where: str, path: str, given: Any, recipe: str | Path, overrides: list[str]) -> Dimension:
    if not isinstance(given, Mapping):
        raise UserError(f"{where}: {path} needs a range or choices, such as '{_EXAMPLE}'")
    kind = Choices if "choices" in given else Range
    try:
        values = kind.model_validate(dict(given))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise UserError(
            f"{where}: {path}{f'.{key}' if key else ''}: {problem['msg'].removeprefix('Value error, ')};"
            " a range needs low and high (optionally log or step); otherwise give choices"
        ) from None

    def find_problem(text: str) -> str | None:
        try:
            load_recipe(recipe, [*overrides, f"{path}={text}"])
        except UserError as error:
            return str(error)
        return None

    if isinstance(values, Choices):
        dimension, texts = Dimension(path, values), values.texts
        if len(set(texts)) < len(texts):
            raise UserError(f"{where}: {path} lists a choice twice")
    else:
        numbers = [values.low, values.high] + ([values.step] if values.step is not None else [])
        # A range of integers, unless the setting also accepts a value between two of them.
        is_integer = all(n == int(n) for n in numbers) and (
            values.step is not None or find_problem(to_yaml_line(values._inner_value)) is not None
        )
        dimension = Dimension(path, values, is_integer)
        ends = (values.low, values.high) if is_integer else (values.low, values.high, values._inner_value)
        texts = [to_yaml_line(int(v) if is_integer else v) for v in ends]
    for text in texts:
        if problem_text := find_problem(text):
            raise UserError(f"{where}: {path} cannot be {text}: {problem_text}")
    return dimension


# --- Trials ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SweepPlan:
    """Settings to vary, fixed settings, data and output folder of a sweep."""

    recipe: str
    overrides: tuple[str, ...]
    space: tuple[Dimension, ...]
    data: Path
    out: Path
    n_trials: int
    seed: int = 0

    def load_recipe(self, overrides: Sequence[str] = ()) -> Recipe:
        return load_recipe(self.recipe, [*self.overrides, *overrides])

    def run_folder(self, number: int) -> Path:
        return self.out / f"trial-{number:04d}"

    def lock_file(self, number: int) -> Path:
        return self.out / "locks" / f"trial-{number:04d}"

    def trial_overrides(self, params: Mapping[str, Any]) -> list[str]:
        return [d.to_override(params[d.path]) for d in self.space if d.path in params]


def open_study(plan: SweepPlan) -> optuna.Study:
    """Create or continue the study of a sweep folder; the folder of a different sweep is rejected."""
    recipe, store = plan.load_recipe(), Store.open(plan.data)
    if not select(store, recipe.data, recipe.front_end.patch.count_frames).validation:
        raise UserError(f"{plan.data} has no validation trials to compare settings on; set data.dev_fraction=0.1")
    if not (plan.out / "locks" / "study").exists():
        check_new_folder(plan.out, "a sweep")
    space = {d.path: {**d.values.model_dump(mode="json"), "whole": d.is_integer} for d in plan.space}
    hashes = hashlib.sha256(json.dumps(store.manifest.get("hashes"), sort_keys=True).encode()).hexdigest()
    with _study_lock(plan):
        open_folder(plan.out / "sweep.json", "a sweep", recipe, {"space": space, "data": hashes})
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        return optuna.create_study(
            storage=JournalStorage(Journal(plan.out / "study.journal", plan.out / "locks" / "journal")),
            study_name="sweep",
            direction="minimize",
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=recipe.train.steps // 4),
        )


def _study_lock(plan: SweepPlan) -> AbstractContextManager[None]:
    """Lock for decisions about the shared study, so that only one worker makes them at a time."""
    return exclusive_lock(plan.out / "locks" / "study", "the study is in use", wait=True)


@contextmanager
def claim_trial(plan: SweepPlan, study: optuna.Study) -> Iterator[optuna.Trial | None]:
    """Reserve a new trial for this worker while the context lasts; None if there are enough trials."""
    trial = None
    with ExitStack() as held:
        with _study_lock(plan):
            _fail_abandoned(plan, study)
            trials = study.get_trials(deepcopy=False)
            if sum(_is_counted(t) for t in trials) < plan.n_trials:
                seed = derive_seed(plan.seed, "sweep", len(trials)) % 2**32
                study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
                trial = study.ask({d.path: to_distribution(d) for d in plan.space})
                trial.set_user_attr("reason", _INTERRUPTED)  # overwritten when the trial ends in any other way
                held.enter_context(exclusive_lock(plan.lock_file(trial.number), f"trial {trial.number} is in use"))
        yield trial


def _fail_abandoned(plan: SweepPlan, study: optuna.Study) -> None:
    """Fail trials whose worker was killed, and queue their settings again."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        with suppress(LockHeld), exclusive_lock(plan.lock_file(trial.number), "in use"):
            _requeue(study, trial.number, trial.params)


def _requeue(study: optuna.Study, number: int, params: dict[str, Any]) -> None:
    """Queue the settings of an interrupted trial again, because they have no result yet."""
    study.tell(number, state=TrialState.FAIL)
    study.enqueue_trial(params)


def _is_counted(trial: FrozenTrial) -> bool:
    """Whether a trial counts towards `n_trials`; interrupted and queued trials do not."""
    if trial.state == TrialState.FAIL:
        return trial.user_attrs.get("reason") != _INTERRUPTED
    return trial.state != TrialState.WAITING


def to_distribution(dimension: Dimension) -> distributions.BaseDistribution:
    values = dimension.values
    if isinstance(values, Choices):
        return distributions.CategoricalDistribution(values.texts)
    if dimension.is_integer:
        low, high, step = int(values.low), int(values.high), int(values.step or 1)
        return distributions.IntDistribution(low, high, log=values.log, step=step)
    return distributions.FloatDistribution(values.low, values.high, log=values.log, step=values.step)


def run_trial(plan: SweepPlan, study: optuna.Study, trial: optuna.Trial, stop: Stop) -> None:
    """Train one trial until it completes, fails, or is pruned for being worse than the median."""
    overrides = plan.trial_overrides(trial.params)
    run, n_steps = Run(plan.run_folder(trial.number)), plan.load_recipe(overrides).train.steps
    name, reported, pruned = f"trial {trial.number}", 0, False
    logger.info(f"{name}: {' '.join(overrides)}")

    def report(rows: list[dict[str, Any]]) -> None:
        nonlocal reported
        for row in rows:
            if row["split"] != "train" and row["per"] is not None and row["step"] > reported:
                reported = row["step"]
                trial.report(row["per"], reported)

    def prune() -> bool:
        nonlocal pruned
        pruned = 0 < reported < n_steps and trial.should_prune()
        return pruned

    settings = [*plan.overrides, *overrides]
    outcome = train_in_subprocess(
        plan.recipe, plan.data, run, settings, stop=stop, on_metrics=report, should_stop=prune
    )
    if stop.requested:
        _requeue(study, trial.number, trial.params)
        logger.info(f"{name}: {_INTERRUPTED}")
    elif pruned:
        trial.set_user_attr("reason", f"worse than the median at step {reported}")
        study.tell(trial, state=TrialState.PRUNED)
        logger.info(f"{name}: pruned at step {reported}, worse than the median")
    elif outcome.result is not None and outcome.result["best_per"] is not None and unfinished_reason(run) is None:
        trial.set_user_attr("reason", None)
        study.tell(trial, float(outcome.result["best_per"]))
        logger.info(f"{name}: PER {percent(outcome.result['best_per'])}")
    else:
        reason = outcome.failure or unfinished_reason(run) or "no validation"
        trial.set_user_attr("reason", reason)
        study.tell(trial, state=TrialState.FAIL)
        logger.info(f"{name}: failed: {reason}")


def summarise_study(plan: SweepPlan, study: optuna.Study, signal: Signals | None = None) -> SweepResult:
    """All trials so far, and the best of the complete ones."""
    frozen = [t for t in study.get_trials(deepcopy=False) if t.state != TrialState.WAITING]
    trials = tuple(_summarise_trial(plan, t) for t in frozen)
    complete = [t for t in trials if t.state == "complete" and t.per is not None]
    best = min(complete, key=lambda t: (t.per, t.number), default=None)
    command = None
    if best is not None:
        overrides = [*plan.overrides, *best.overrides]
        command = ("arcuate", *train_arguments(plan.recipe, plan.data, "runs/best", overrides))
    return SweepResult(plan.out, plan.recipe, trials, best, command, signal)


def _summarise_trial(plan: SweepPlan, trial: FrozenTrial) -> SweepTrial:
    reported = trial.intermediate_values
    latest = reported[max(reported)] if reported else None
    return SweepTrial(
        number=trial.number,
        state=trial.state.name.lower(),
        per=trial.value if trial.value is not None else latest,
        overrides=tuple(plan.trial_overrides(trial.params)),
        reason=trial.user_attrs.get("reason") if trial.state.is_finished() else None,
        run=str(plan.run_folder(trial.number)),
        seconds=trial.duration.total_seconds() if trial.duration else None,
    )
