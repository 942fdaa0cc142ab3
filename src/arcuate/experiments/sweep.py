"""Hyperparameter sweeps: Optuna proposes settings, each proposal is trained, and validation PER is minimised.

Any number of workers share one sweep folder. A trial belongs to the worker that holds its lock; a trial whose worker
was killed is retried.
"""

import hashlib
import json
import platform
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any

from arcuate.config import Overrides, override_list
from arcuate.data.seeds import derive_seed
from arcuate.data.selection import select
from arcuate.data.store import Store
from arcuate.errors import UserError, without_password
from arcuate.evaluation.metrics import run_rate_name
from arcuate.experiments.recipe import Recipe, load_recipe
from arcuate.experiments.search_space import Choices, Dimension, read_space, to_override
from arcuate.experiments.subprocess_train import (
    check_new_folder,
    check_one_process,
    open_folder,
    train_arguments,
    train_in_subprocess,
)
from arcuate.files import fields_to_dict, to_frame
from arcuate.progress import logger, percent
from arcuate.run import Run, unfinished_reason
from arcuate.training.callbacks import Stop, handle_signals

try:
    import optuna
    from optuna import distributions
    from optuna.exceptions import UpdateFinishedTrialError
    from optuna.trial import FrozenTrial, TrialState

    from arcuate.experiments.storage import (
        INTERRUPTED,
        JOURNAL_FILE,
        REASON,
        StudyStorage,
        explain_unreachable,
        open_storage,
    )
except ImportError:
    raise UserError("sweeps need the package optuna: pip install 'arcuate[sweep]'") from None

_RETRY_OF, _FOLDER, _HOST, _PLAN = "retry_of", "folder", "host", "plan"  # user attributes of trials and of the study
_ERROR = "error"  # whether the training of a failed trial ended with an error, such as a full disk, and no result


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
    step: int | None = None  # of the latest validation
    host: str | None = None  # machine that trains it

    def check(self) -> None:
        """Raise ValueError if a value has the wrong type, as in a study that was not written by a sweep."""
        texts, numbers = (self.reason, self.host), (self.per, self.seconds, self.step)
        if not all(isinstance(value, str | None) for value in texts):
            raise ValueError(f"reason or host of trial {self.number} is not text")
        if not all(isinstance(value, int | float | None) for value in numbers):
            raise ValueError(f"error rate or step of trial {self.number} is not a number")

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
    n_trials: int | None = None  # planned

    @property
    def rate_name(self) -> str:
        """PER, or CER for runs on characters."""
        return run_rate_name(*(Run(Path(trial.run)) for trial in self.trials[:1]))

    def to_dict(self) -> dict[str, Any]:
        best = {} if self.best is None else self.best.to_dict()
        return {
            "out": str(self.out),
            "recipe": self.recipe,
            "n_trials": self.n_trials,
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
    storage: str | None = None,
    heartbeat_s: int = 30,
    stop: Stop | None = None,
) -> SweepResult:
    """Search for the settings with the lowest validation PER, until all workers together have done `n_trials` trials.

    `space` maps setting paths to ranges or choices, `{"schedule.peak_lr": {"low": 1e-3, "high": 1e-2, "log": True}}`,
    or is the path of such a YAML file. `out` receives a run folder per trial; calling again with the same arguments
    continues, and retries trials whose training ended with an error.
    `storage` is the URL of a database that keeps the study, `postgresql://…` or `sqlite:///…`; the study has the name
    of the folder `out`. A worker that sent no heartbeat for four times `heartbeat_s` counts as dead.
    """
    check_one_process("sweep")
    listed = override_list(overrides)
    dimensions = read_space(space, recipe, listed)
    plan = SweepPlan(
        str(recipe), tuple(listed), dimensions, Path(data), Path(out), n_trials, seed, storage, heartbeat_s
    )
    with explain_unreachable(storage):
        shared, study = open_study(plan)
        with shared.lock():
            _queue_again(study, lambda trial: trial.user_attrs.get(_ERROR) is True)
        with handle_signals(stop) as stop:
            while not stop.requested:
                with claim_trial(plan, shared, study) as trial:
                    if trial is None:
                        break
                    run_trial(plan, study, trial, stop)
        return summarise_study(plan.out, study, stop.signal)


# --- The study -------------------------------------------------------------------------------------------


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
    storage: str | None = None  # URL; None: a journal in the sweep folder
    heartbeat_s: int = 30

    def load_recipe(self, overrides: Sequence[str] = ()) -> Recipe:
        return load_recipe(self.recipe, [*self.overrides, *overrides])

    def trial_overrides(self, params: Mapping[str, Any]) -> list[str]:
        return [d.to_override(params[d.path]) for d in self.space if d.path in params]


def open_study(plan: SweepPlan) -> tuple[StudyStorage, optuna.Study]:
    """Create or continue the study of a sweep; the folder or the study of a different sweep is rejected."""
    recipe, store = plan.load_recipe(), Store.open(plan.data)
    if not select(store, recipe.data, recipe.front_end.patch.count_frames).validation:
        raise UserError(f"{plan.data} has no validation trials to compare settings on; set data.dev_fraction=0.1")
    if not _is_started(plan.out):
        try:
            check_new_folder(plan.out, "a sweep")
        except UserError:
            if not _is_started(plan.out):  # another worker may have started it meanwhile
                raise
    space = {d.path: {**d.values.model_dump(mode="json"), "whole": d.is_integer} for d in plan.space}
    hashes = hashlib.sha256(json.dumps(store.hashes, sort_keys=True).encode()).hexdigest()
    varied: dict[str, Any] = {"space": space, "data": hashes}
    if plan.storage is not None:
        varied["storage"] = without_password(plan.storage)
    shared = _open_storage(plan.storage, plan.out, plan.heartbeat_s, create=True)
    with shared.lock():
        identity = open_folder(plan.out / "sweep.json", "a sweep", recipe, varied)
        study = optuna.create_study(
            storage=shared.storage,
            study_name=_study_name(plan.storage, plan.out),
            direction="minimize",
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=recipe.train.steps // 4),
        )
        _check_identity(plan, study, identity)
        planned = {"recipe": plan.recipe, "overrides": list(plan.overrides), "data": str(plan.data)}
        study.set_user_attr(_PLAN, {**planned, "n_trials": plan.n_trials})
    return shared, study


def _is_started(out: Path) -> bool:
    """Whether a worker has created the sweep folder, or is creating it: locks first, then the journal."""
    if (out / "sweep.json").exists() or (out / "locks" / "study").exists():
        return True
    names = {path.name for path in out.iterdir() if not path.name.startswith(".")} if out.is_dir() else set()
    return "locks" in names and all(name.startswith(JOURNAL_FILE) for name in names - {"locks"})


def _open_storage(url: str | None, out: Path, heartbeat_s: int, create: bool) -> StudyStorage:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if url is None and not create and not (out / JOURNAL_FILE).is_file():
        raise UserError(
            f"{out} has no {JOURNAL_FILE}; give a sweep folder, or --storage URL if the study is in a database"
        )
    if url is None and create:
        (out / "locks").mkdir(parents=True, exist_ok=True)
    return open_storage(url, out, _study_name(url, out), heartbeat_s, create)


def _study_name(storage: str | None, out: Path) -> str:
    """A database keeps many studies, so each has the name of its sweep folder."""
    return "sweep" if storage is None else out.resolve().name


def _check_identity(plan: SweepPlan, study: optuna.Study, identity: Mapping[str, Any]) -> None:
    """Reject the study of a different sweep, which a database may keep under the same name."""
    own = {key: value for key, value in identity.items() if key != "storage"}
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
    if plan.storage is not None and study.user_attrs.get("identity", digest) != digest:
        raise UserError(
            f"the study {study.study_name!r} in {without_password(plan.storage)} belongs to a different sweep (recipe,"
            " space or data differ); give --out another name"
        )
    study.set_user_attr("identity", digest)


# --- Trials ----------------------------------------------------------------------------------------------


@contextmanager
def claim_trial(plan: SweepPlan, shared: StudyStorage, study: optuna.Study) -> Iterator[optuna.Trial | None]:
    """Reserve a new trial for this worker within the context; None if there are enough trials."""
    trial = None
    with ExitStack() as held:
        with shared.lock():
            shared.fail_abandoned(study)
            _queue_again(study, _is_interrupted)
            trials = study.get_trials(deepcopy=False)
            if _count_tried(trials) < plan.n_trials:
                seed = derive_seed(plan.seed, "sweep", len(trials)) % 2**32
                study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
                with warnings.catch_warnings():  # `claim` sends the heartbeats that Optuna sends in `optimize` only
                    warnings.filterwarnings("ignore", message="Heartbeat of storage")
                    trial = study.ask({d.path: to_distribution(d) for d in plan.space})
                held.enter_context(shared.claim(trial.number, trial._trial_id))
                trial.set_user_attr(_HOST, platform.node())
                trial.set_user_attr(_FOLDER, trial_folder(trial))
                trial.set_user_attr(REASON, INTERRUPTED)  # overwritten when the trial ends in any other way
        yield trial


def _queue_again(study: optuna.Study, lacks_result: Callable[[FrozenTrial], bool]) -> None:
    """Queue the settings of failed trials without a result again: interrupted, or ended by an error.

    What is missing is derived from the study, so nothing is lost if a worker is killed here, at any point. A retry
    continues in the folder of the failed trial.
    """
    trials = study.get_trials(deepcopy=False)
    retried = _retried(trials)
    for trial in trials:
        if trial.state != TrialState.FAIL or not lacks_result(trial) or trial.number in retried:
            continue
        # Earlier versions queued without naming the trial.
        later = (t for t in trials[trial.number + 1 :] if _RETRY_OF not in t.user_attrs)
        if not trial.params or any(t.system_attrs.get("fixed_params") == trial.params for t in later):
            continue
        folder = trial.user_attrs.get(_FOLDER)
        study.enqueue_trial(trial.params, user_attrs={_RETRY_OF: trial.number, **({_FOLDER: folder} if folder else {})})


def _is_interrupted(trial: FrozenTrial) -> bool:
    return bool(trial.user_attrs.get(REASON) == INTERRUPTED)


def _retried(trials: Iterable[FrozenTrial]) -> set[Any]:
    return {t.user_attrs.get(_RETRY_OF) for t in trials}


def _count_tried(trials: Sequence[FrozenTrial]) -> int:
    """Number of trials that count towards `n_trials`: not those that are queued, interrupted or tried again."""
    retried = _retried(trials)
    repeated = [t.state == TrialState.FAIL and (_is_interrupted(t) or t.number in retried) for t in trials]
    return sum(t.state != TrialState.WAITING and not again for t, again in zip(trials, repeated, strict=True))


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
    run, n_steps = Run(plan.out / trial_folder(trial)), plan.load_recipe(overrides).train.steps
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
    try:
        outcome = train_in_subprocess(
            plan.recipe, plan.data, run, settings, stop=stop, on_metrics=report, should_stop=prune, resume=True
        )
        if stop.requested:
            study.tell(trial, state=TrialState.FAIL)  # the next worker queues it again
            logger.info(f"{name}: {INTERRUPTED}")
        elif pruned:
            trial.set_user_attr(REASON, f"worse than the median at step {reported}")
            study.tell(trial, state=TrialState.PRUNED)
            logger.info(f"{name}: pruned at step {reported}, worse than the median")
        elif outcome.result is not None and outcome.result["best_per"] is not None and unfinished_reason(run) is None:
            trial.set_user_attr(REASON, None)
            study.tell(trial, float(outcome.result["best_per"]))
            logger.info(f"{name}: {run_rate_name(run)} {percent(outcome.result['best_per'])}")
        else:
            reason = outcome.failure or unfinished_reason(run) or "no validation"
            trial.set_user_attr(REASON, reason)
            trial.set_user_attr(_ERROR, outcome.failure is not None)
            study.tell(trial, state=TrialState.FAIL)
            logger.info(f"{name}: failed: {reason}")
    except UpdateFinishedTrialError:
        logger.warning(f"{name}: this worker sent no heartbeats for a while, so another worker took over its settings")


def trial_folder(trial: optuna.Trial | FrozenTrial) -> str:
    """Name of the run folder of a trial; a retry of an interrupted trial continues in its folder."""
    folder = str(trial.user_attrs.get(_FOLDER))
    return folder if re.fullmatch(r"trial-\d{4,}", folder) else f"trial-{trial.number:04d}"


# --- Results ---------------------------------------------------------------------------------------------


def summarise_study(out: Path, study: optuna.Study, signal: Signals | None = None) -> SweepResult:
    """All trials so far, and the best of the complete ones."""
    frozen = [t for t in study.get_trials(deepcopy=False) if t.state != TrialState.WAITING]
    trials = tuple(_summarise_trial(out, t) for t in frozen)
    complete = [t for t in trials if t.state == "complete" and t.per is not None]
    best = min(complete, key=lambda t: (t.per, t.number), default=None)
    plan, command = study.user_attrs.get(_PLAN, {}), None  # sweeps of earlier versions did not store it
    if best is not None and plan:
        overrides = [*plan["overrides"], *best.overrides]
        command = ("arcuate", *train_arguments(plan["recipe"], Path(plan["data"]), "runs/best", overrides))
    return SweepResult(out, plan.get("recipe", ""), trials, best, command, signal, plan.get("n_trials"))


def _summarise_trial(out: Path, trial: FrozenTrial) -> SweepTrial:
    reported = trial.intermediate_values
    latest = reported[max(reported)] if reported else None
    return SweepTrial(
        number=trial.number,
        state=trial.state.name.lower(),
        per=trial.value if trial.value is not None else latest,
        overrides=tuple(to_override(path, value) for path, value in trial.params.items()),
        reason=trial.user_attrs.get(REASON) if trial.state.is_finished() else None,
        run=str(out / trial_folder(trial)),
        seconds=trial.duration.total_seconds() if trial.duration else None,
        step=max(reported, default=None),
        host=trial.user_attrs.get(_HOST),
    )
