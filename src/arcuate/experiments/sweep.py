"""Hyperparameter sweeps: Optuna proposes settings, each proposal is trained, and validation PER is minimised.

Any number of workers share one study, which Optuna keeps in a database: an SQLite file in the sweep folder, or any
other. A trial whose worker sends no heartbeats any more is queued again, and continues in its run folder.
"""

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError

from arcuate.config import Overrides, Settings, known_paths, nearest, override_list, read_yaml, to_yaml_line
from arcuate.data.seeds import derive_seed
from arcuate.data.selection import select
from arcuate.data.store import Store
from arcuate.errors import UserError, without_password
from arcuate.evaluation.metrics import run_rate_name
from arcuate.experiments.recipe import Recipe, load_recipe
from arcuate.experiments.train_many import Job, Rows, check_one_process, open_folder, train_job
from arcuate.files import exclusive_lock, to_frame
from arcuate.progress import logger, percent
from arcuate.run import Run, unfinished_reason
from arcuate.training.callbacks import Stop, handle_signals
from arcuate.training.config import DESCRIPTIVE_KEYS

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

STUDY_FILE = "study.db"
_FOLDER, _REASON, _RETRY = "folder", "reason", "retry"  # user attributes of a trial
_INTERRUPTED = "interrupted"
_HEARTBEAT_S, _DEAD_S = 15, 60  # between heartbeats; without one for this long, a worker counts as dead
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
    step: int | None  # of the latest validation


@dataclass(frozen=True)
class SweepResult:
    """All trials of a sweep so far, those of other workers included."""

    out: Path
    recipe: str
    n_trials: int  # planned
    trials: tuple[SweepTrial, ...]
    best: SweepTrial | None  # among the complete trials
    command: tuple[str, ...] | None  # command that trains the best settings again
    signal: Signals | None  # signal that interrupted this worker

    @property
    def rate_name(self) -> str:
        """PER, or CER for runs on characters."""
        return run_rate_name(*(Run(Path(trial.run)) for trial in self.trials[:1]))

    @property
    def exit_code(self) -> int:
        return 128 + self.signal if self.signal else int(all(trial.state == "fail" for trial in self.trials))

    def to_dict(self) -> dict[str, Any]:
        best = {} if self.best is None else asdict(self.best)
        return {
            "out": str(self.out),
            "recipe": self.recipe,
            "n_trials": self.n_trials,
            "best_trial": best.get("number"),
            **{f"best_{key}": best.get(key) for key in ("per", "overrides", "run")},
            "command": list(self.command) if self.command else None,
            "trials": [asdict(trial) for trial in self.trials],
        }

    def to_frame(self) -> Any:
        """Pandas data frame with one row per trial."""
        return to_frame(asdict(trial) for trial in self.trials)


def sweep(
    recipe: str | Path,
    space: Mapping[str, Any] | str | Path,
    data: str | Path,
    out: str | Path,
    overrides: Overrides = (),
    trials: int = 20,
    seed: int = 0,
    storage: str | None = None,
    *,
    stop: Stop | None = None,
) -> SweepResult:
    """Search for the settings with the lowest validation PER.

    Calling again with the same arguments continues the sweep; several workers share it.

    Args:
        recipe: Recipe to vary: name, YAML file or run folder.
        space: YAML file or mapping of settings to a range or choices,
            `schedule.peak_lr: {low: 1.0e-3, high: 1.0e-2, log: true}`.
        data: Store prepared by `arcuate prepare`.
        out: Sweep folder; one run folder per trial.
        overrides: Settings `key=value` of every trial.
        trials: Number of trials over all workers.
        seed: Seed of the proposals.
        storage: Database URL of the study, such as `postgresql://USER@HOST/DATABASE`; by default an SQLite file in
            `out`.
    """
    try:
        from optuna.exceptions import StorageInternalError
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError:
        raise UserError("sweeps need the package optuna: pip install 'arcuate[many]'") from None
    check_one_process("sweep")
    fixed = tuple(override_list(overrides))
    plan = SweepPlan(str(recipe), fixed, read_space(space, recipe, fixed), Path(data), Path(out), trials, seed)
    try:
        with open_study(plan, storage) as study, handle_signals(stop) as stop:
            _queue_again(study)
            _optimize(plan, study, stop)
            return summarise(plan, study, stop.signal)
    except (SQLAlchemyError, StorageInternalError) as error:
        cause = error.__cause__ or error.__context__ if isinstance(error, StorageInternalError) else error
        reason = str(getattr(cause, "orig", None) or cause or error).strip().splitlines()[-1:]
        where = without_password(storage) if storage else plan.out / STUDY_FILE
        raise UserError(
            f"the study in {where} does not answer: {''.join(reason)}; once it does, the same command continues"
        ) from None


# --- The space -------------------------------------------------------------------------------------------


class Range(Settings):
    low: float = Field(description="Lowest value.")
    high: float = Field(description="Highest value.")
    log: bool = Field(False, description="Sample uniformly in the logarithm.")
    step: float | None = Field(None, gt=0.0, description="Distance between values, starting at `low`.")


class Choices(Settings):
    choices: tuple[Any, ...] = Field(min_length=2, description="Values to choose from.")


def read_space(
    space: Mapping[str, Any] | str | Path, recipe: str | Path, overrides: Overrides = ()
) -> "dict[str, BaseDistribution]":
    """The distribution of each setting of a mapping or YAML file, validated against the recipe that it varies.

    Choices are given to Optuna as YAML text.
    """
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
        if path in DESCRIPTIVE_KEYS:
            raise UserError(f"{where}: {path} only describes a recipe; vary a setting")
        if path not in known:
            near = nearest(path, sorted(known))
            hint = f"; did you mean {near!r}?" if near else "; see: arcuate recipes settings"
            raise UserError(f"{where}: no setting {path!r}{hint}")
        for other in [p for p in tree if p != path] + fixed:
            if path == other or path.startswith(f"{other}."):
                raise UserError(f"{where}: {path} is varied, but {other} is also set; leave one of them out")
    return {path: _distribution(f"{where}: {path}", path, given, recipe, listed) for path, given in tree.items()}


def _distribution(where: str, path: str, given: Any, recipe: str | Path, overrides: list[str]) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    def problem(value: Any) -> str | None:
        try:
            load_recipe(recipe, [*overrides, to_override(path, value)])
        except UserError as error:
            return str(error)
        return None

    values = _read_values(where, given)
    if isinstance(values, Choices):
        tried: list[Any] = [to_yaml_line(choice) for choice in values.choices]
        if len(set(tried)) < len(tried):
            raise UserError(f"{where} lists a choice twice")
        found: BaseDistribution = CategoricalDistribution(tried)
    else:
        low, high, step = values.low, values.high, values.step
        inner = low + (step if step is not None else 0.37 * (high - low))
        numbers = [low, high, *([] if step is None else [step])]
        # A range of integers, unless the setting also accepts a value between two of them.
        whole = all(n == int(n) for n in numbers) and (step is not None or problem(inner) is not None)
        kind: Any = IntDistribution if whole else FloatDistribution
        number = int if whole else float
        options = {} if step is None else {"step": number(step)}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # steps that do not reach `high`
                found = kind(number(low), number(high), log=values.log, **options)
        except (ValueError, UserWarning) as error:
            raise UserError(f"{where}: {error}") from None
        tried = [number(low), number(high), *([] if whole else [inner])]
    for value in tried:
        if reason := problem(value):
            shown = value if isinstance(value, str) else to_yaml_line(value)
            raise UserError(f"{where} cannot be {shown}: {reason}")
    return found


def _read_values(where: str, given: Any) -> Range | Choices:
    if not isinstance(given, Mapping):
        raise UserError(f"{where} needs a range or choices, such as '{_EXAMPLE}'")
    kind = Choices if "choices" in given else Range
    try:
        return kind.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"{where}.{'.'.join(map(str, first['loc']))}: {first['msg']}; a range needs low and high (optionally log or"
            " step); otherwise give choices"
        ) from None


def to_override(path: str, value: Any) -> str:
    """`path=value` of a proposed value; choices are proposed as their text."""
    return f"{path}={value if isinstance(value, str) else to_yaml_line(value)}"


# --- The study -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SweepPlan:
    """Settings to vary, fixed settings, data and output folder of a sweep."""

    recipe: str
    overrides: tuple[str, ...]
    space: "Mapping[str, BaseDistribution]"
    data: Path
    out: Path
    n_trials: int
    seed: int = 0

    def job(self, trial: "FrozenTrial | optuna.Trial") -> Job:
        """The training of a trial; one that is queued again continues in its folder."""
        folder = trial.user_attrs.get(_FOLDER, f"trial-{trial.number:04d}")
        varied = (to_override(path, value) for path, value in trial.params.items())
        return Job(Run(self.out / folder), self.recipe, self.data, (*self.overrides, *varied))


@contextmanager
def open_study(plan: SweepPlan, storage: str | None = None) -> "Iterator[optuna.Study]":
    """Create or continue the study of a sweep; the folder of a different sweep is rejected."""
    import optuna
    from optuna.exceptions import ExperimentalWarning

    recipe, store = load_recipe(plan.recipe, plan.overrides), Store.open(plan.data)
    if not select(store, recipe.data, recipe.front_end.patch.count_frames).validation:
        raise UserError(f"{plan.data} has no validation trials to compare settings on; set data.dev_fraction=0.1")
    space = {path: json.loads(optuna.distributions.distribution_to_json(d)) for path, d in plan.space.items()}
    identity = open_folder(plan.out / "sweep.json", "a sweep", recipe, {"space": space, "data": store.hashes})
    # A database keeps many studies, and workers on machines without a common file system find theirs by its name.
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # of heartbeats
        with exclusive_lock(plan.out / ".study.lock", "the study is in use", wait=True):  # one creates the tables
            database = _connect(storage or f"sqlite:///{plan.out.resolve() / STUDY_FILE}")
            study = optuna.create_study(
                storage=database,
                study_name=f"{plan.out.resolve().name}-{digest}",
                direction="minimize",
                load_if_exists=True,
                pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=recipe.train.steps // 4),
            )
        try:
            yield study
        finally:
            database.remove_session()
            database.engine.dispose()


def _connect(url: str) -> "optuna.storages.RDBStorage":
    from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
    from sqlalchemy.exc import ArgumentError, NoSuchModuleError

    scheme, separator, rest = url.partition("://")
    driver = "postgresql+psycopg" if scheme in ("postgres", "postgresql") else scheme
    options: dict[str, Any] = {"pool_pre_ping": True}
    if driver == "sqlite":
        options["connect_args"] = {"timeout": 60}  # seconds to wait for another writer
    try:
        return RDBStorage(
            f"{driver}{separator}{rest}",
            engine_kwargs=options,
            heartbeat_interval=_HEARTBEAT_S,
            grace_period=_DEAD_S,
            heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(),
        )
    except (ArgumentError, NoSuchModuleError, ImportError, ValueError):
        raise UserError(
            f"--storage {without_password(url)}: expected the URL of a database whose driver is installed, such as"
            " postgresql://USER@HOST/DATABASE or sqlite:///FILE"
        ) from None


# --- Trials ----------------------------------------------------------------------------------------------


class _NoResult(Exception):
    """Ends a trial that failed or was interrupted."""


def _optimize(plan: SweepPlan, study: "optuna.Study", stop: Stop) -> None:
    """Train trials until all workers together have done or started enough of them."""
    from optuna.storages import fail_stale_trials

    def is_enough() -> bool:
        fail_stale_trials(study)
        started = [t for t in _latest(study).values() if t.state.name != "WAITING"]
        return stop.requested or len(started) >= plan.n_trials

    def objective(trial: "optuna.Trial") -> float:
        return _run_trial(plan, trial, stop)

    if not is_enough():
        study.optimize(objective, catch=_NoResult, callbacks=[lambda s, _: s.stop() if is_enough() else None])


def _latest(study: "optuna.Study") -> "dict[Any, FrozenTrial]":
    """The latest trial of each run folder; not those whose worker was killed before they had one."""
    trials = study.get_trials(deepcopy=False)
    return {t.user_attrs.get(_FOLDER, t.number): t for t in trials if _FOLDER in t.user_attrs or t.state.name != "FAIL"}


def _queue_again(study: "optuna.Study") -> None:
    """Queue the trials that have no result: interrupted, or ended by an error such as a full disk."""
    for trial in _latest(study).values():
        if trial.state.name == "FAIL" and trial.user_attrs.get(_RETRY):
            study.enqueue_trial(trial.params, user_attrs={_FOLDER: trial.user_attrs[_FOLDER]})


def _suggest(trial: "optuna.Trial", path: str, distribution: "BaseDistribution") -> None:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    match distribution:
        case CategoricalDistribution(choices=choices):
            trial.suggest_categorical(path, choices)
        case IntDistribution(low=low, high=high, step=step, log=log):
            trial.suggest_int(path, low, high, step=step, log=log)
        case FloatDistribution(low=low, high=high, step=step, log=log):
            trial.suggest_float(path, low, high, step=step, log=log)


def _run_trial(plan: SweepPlan, trial: "optuna.Trial", stop: Stop) -> float:
    """Train one trial and return its PER; it is pruned if it is worse than the median."""
    import optuna

    # Depends on nothing but seed and number, so that workers do not repeat each other.
    seed = derive_seed(plan.seed, "sweep", trial.number) % 2**32
    trial.study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    for path, distribution in plan.space.items():
        _suggest(trial, path, distribution)
    job = plan.job(trial)
    trial.set_user_attr(_FOLDER, job.run.path.name)
    logger.info(f"trial {trial.number}: {' '.join(job.overrides[len(plan.overrides) :])}")
    reported, pruned = 0, False

    def report(rows: Rows) -> None:
        nonlocal reported, pruned
        for row in rows:
            if row["split"] != "train" and row["per"] is not None and row["step"] > reported:
                reported = row["step"]
                trial.report(row["per"], reported)
                pruned = trial.should_prune() and unfinished_reason(job.run) is not None

    def end(reason: str, retry: bool = False) -> None:
        trial.set_user_attr(_REASON, reason)
        trial.set_user_attr(_RETRY, retry)
        logger.info(f"trial {trial.number}: {reason}")

    outcome = train_job(job, stop, report, lambda: pruned)
    if stop.requested:
        end(_INTERRUPTED, retry=True)
        raise _NoResult
    if pruned:
        end(f"worse than the median at step {reported}")
        raise optuna.TrialPruned
    reason = outcome.failure or unfinished_reason(job.run)
    if reason or outcome.result is None or outcome.result["best_per"] is None:
        end(reason or "no validation", retry=outcome.failure is not None)
        raise _NoResult
    per = float(outcome.result["best_per"])
    logger.info(f"trial {trial.number}: {run_rate_name(job.run)} {percent(per)}")
    return per


# --- Results ---------------------------------------------------------------------------------------------


def summarise(plan: SweepPlan, study: "optuna.Study", signal: Signals | None = None) -> SweepResult:
    """The latest trial of each run folder, and the best of the complete ones."""
    found = {t.number: t for t in _latest(study).values() if t.state.name != "WAITING"}
    trials = tuple(_summarise_trial(plan, found[number]) for number in sorted(found))
    complete = [t for t in trials if t.state == "complete" and t.per is not None]
    best = min(complete, key=lambda t: (t.per, t.number), default=None)
    command = None if best is None else ("arcuate", *plan.job(found[best.number]).words("runs/best"))
    return SweepResult(plan.out, plan.recipe, plan.n_trials, trials, best, command, signal)


def _summarise_trial(plan: SweepPlan, trial: "FrozenTrial") -> SweepTrial:
    reported = trial.intermediate_values
    latest = reported[max(reported)] if reported else None
    return SweepTrial(
        number=trial.number,
        state=trial.state.name.lower(),
        per=trial.value if trial.value is not None else latest,
        overrides=tuple(to_override(path, value) for path, value in trial.params.items()),
        reason=trial.user_attrs.get(_REASON) if trial.state.is_finished() else None,
        run=str(plan.job(trial).run.path),
        seconds=trial.duration.total_seconds() if trial.duration else None,
        step=max(reported, default=None),
    )
