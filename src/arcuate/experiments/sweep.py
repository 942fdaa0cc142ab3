"""Hyperparameter sweeps: Optuna proposes settings, a training tries them, the best validation PER wins.

Any number of workers share one sweep folder. A trial belongs to the worker that holds its lock; the settings of a trial
whose worker died are tried again.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import Signals
from typing import Any

from arcuate.config import Overrides, override_list, to_tree
from arcuate.data.selection import select
from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.experiments.recipe import Recipe, load_recipe
from arcuate.experiments.search_space import Choices, Dimension, read_space
from arcuate.experiments.subprocess_train import train_arguments, train_in_subprocess
from arcuate.files import LockHeld, exclusive_lock, read_json, to_frame, write_json
from arcuate.progress import logger, percent
from arcuate.run import Run
from arcuate.seeds import derive_seed
from arcuate.training.config import DESCRIPTIVE_KEYS
from arcuate.training.interrupts import Stop, handle_signals

try:
    import optuna
    from optuna import distributions
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import FrozenTrial, TrialState
except ImportError:
    raise UserError("sweeps need the package optuna: pip install -e '.[sweep]' -c constraints.txt") from None

_INTERRUPTED = "interrupted"
_FREE = (*DESCRIPTIVE_KEYS, "runtime", "track")  # may differ between workers, and when a sweep is continued


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
        return {**asdict(self), "overrides": list(self.overrides)}


@dataclass(frozen=True)
class SweepResult:
    """All trials of a sweep so far, those of other workers included."""

    out: Path
    recipe: str
    trials: tuple[SweepTrial, ...]
    best: SweepTrial | None  # of the complete ones
    command: tuple[str, ...] | None  # that trains the best settings again
    signal: Signals | None = None  # that interrupted this worker

    def to_dict(self) -> dict[str, Any]:
        best = self.best
        return {
            "out": str(self.out),
            "recipe": self.recipe,
            "best_trial": best.number if best else None,
            "best_per": best.per if best else None,
            "best_overrides": list(best.overrides) if best else None,
            "best_run": best.run if best else None,
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
    """Create or continue the study of a sweep folder; the folder of another sweep is rejected."""
    recipe, store = plan.load_recipe(), Store.open(plan.data)
    if not select(store, recipe.data, recipe.front_end.patch.count_frames).validation:
        raise UserError(f"{plan.data} has no validation trials to compare settings on; set data.dev_fraction=0.1")
    is_sweep = (plan.out / "locks" / "study").exists()
    if not is_sweep and plan.out.exists() and (not plan.out.is_dir() or any(plan.out.iterdir())):
        raise UserError(f"{plan.out} exists and is not a sweep folder; choose another --out")
    identity = {
        "recipe": {key: value for key, value in to_tree(recipe).items() if key not in _FREE},
        "space": {dimension.path: dimension.to_dict() for dimension in plan.space},
        "data": hashlib.sha256(json.dumps(store.manifest.get("hashes"), sort_keys=True).encode()).hexdigest(),
    }
    file = plan.out / "sweep.json"
    with _study_lock(plan):
        if file.exists():
            old, new = read_json(file), json.loads(json.dumps(identity))
            if changed := [key for key in identity if old.get(key) != new[key]]:
                raise UserError(f"{plan.out} is a sweep with another {' and '.join(changed)}; choose another --out")
        else:
            write_json(file, identity)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        return optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(plan.out / "study.journal"))),
            study_name="sweep",
            direction="minimize",
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=recipe.train.steps // 4),
        )


@contextmanager
def _study_lock(plan: SweepPlan) -> Iterator[None]:
    """Serialise the decisions that workers take together."""
    with exclusive_lock(plan.out / "locks" / "study", "the study is in use", wait=True):
        yield


@contextmanager
def claim_trial(plan: SweepPlan, study: optuna.Study) -> Iterator[optuna.Trial | None]:
    """Reserve a new trial for this worker while the context lasts; None if there are enough trials."""
    with ExitStack() as held:
        yield _reserve(plan, study, held)


def _reserve(plan: SweepPlan, study: optuna.Study, held: ExitStack) -> optuna.Trial | None:
    with _study_lock(plan):
        _fail_abandoned(plan, study)
        trials = study.get_trials(deepcopy=False)
        if sum(_counts(t) for t in trials) >= plan.n_trials:
            return None
        seed = derive_seed(plan.seed, "sweep", len(trials)) % 2**32
        study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        trial = study.ask({d.path: to_distribution(d) for d in plan.space})
        trial.set_user_attr("reason", _INTERRUPTED)  # overwritten when it ends otherwise
        held.enter_context(exclusive_lock(plan.lock_file(trial.number), f"trial {trial.number} is in use"))
        return trial


def _fail_abandoned(plan: SweepPlan, study: optuna.Study) -> None:
    """Fail trials whose worker died, and queue their settings again."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        with suppress(LockHeld), exclusive_lock(plan.lock_file(trial.number), "in use"):
            _requeue(study, trial.number, trial.params)


def _requeue(study: optuna.Study, number: int, params: dict[str, Any]) -> None:
    """Queue the settings of an interrupted trial again, because it has not measured them."""
    study.tell(number, state=TrialState.FAIL)
    study.enqueue_trial(params)


def _counts(trial: FrozenTrial) -> bool:
    """Whether a trial counts towards `n_trials`: interrupted and queued ones do not."""
    if trial.state == TrialState.FAIL:
        return trial.user_attrs.get("reason") != _INTERRUPTED
    return trial.state != TrialState.WAITING


def to_distribution(dimension: Dimension) -> distributions.BaseDistribution:
    values = dimension.values
    if isinstance(values, Choices):
        return distributions.CategoricalDistribution(dimension.choice_texts())
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

    outcome = train_in_subprocess(
        *(plan.recipe, plan.data, run, [*plan.overrides, *overrides]),
        stop=stop,
        on_metrics=report,
        should_stop=prune,
    )
    if stop.requested:
        _requeue(study, trial.number, trial.params)
        logger.info(f"{name}: {_INTERRUPTED}")
    elif pruned:
        trial.set_user_attr("reason", f"worse than the median at step {reported}")
        study.tell(trial, state=TrialState.PRUNED)
        logger.info(f"{name}: pruned at step {reported}, worse than the median")
    elif outcome.result is not None and outcome.result["best_per"] is not None:
        trial.set_user_attr("reason", None)
        study.tell(trial, float(outcome.result["best_per"]))
        logger.info(f"{name}: PER {percent(outcome.result['best_per'])}")
    else:
        reason = outcome.failure or "no validation"
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
