"""Hyperparameter sweeps: Optuna proposes settings, `arcuate train` tries them, validation PER is the judge.

A sweep folder can be served by several workers, each the same command. What they share goes through Optuna's journal
file; a trial belongs to a worker as long as that holds its lock file, and the system frees the lock of whoever dies.
"""

import fcntl
import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from arcuate.batches.select import select
from arcuate.errors import UserError
from arcuate.recipe import Recipe, load_recipe, to_tree
from arcuate.recipe_diff import ABOUT
from arcuate.run import Run, read_json, write_json
from arcuate.search_space import Choices, Dimension
from arcuate.seeds import derive
from arcuate.store import Store
from arcuate.training.signals import Stop

POLL_S = 0.25
PATIENCE_S = 120.0  # for a training that was asked to stop: it finishes its step and saves
INTERRUPTED = "interrupted"
FREE = (*ABOUT, "runtime", "track")  # may differ between workers, and when a sweep is gone on with
PROGRAM = (sys.executable, "-m", "arcuate")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Sweep:
    """What to vary, on what, and where it goes."""

    recipe: str
    overrides: tuple[str, ...]
    space: tuple[Dimension, ...]
    data: Path
    out: Path
    n_trials: int
    seed: int = 0

    def load(self, overrides: tuple[str, ...] = ()) -> Recipe:
        return load_recipe(self.recipe, [*self.overrides, *overrides])

    def run_folder(self, number: int) -> Path:
        return self.out / f"trial-{number:04d}"

    def log_file(self, number: int) -> Path:
        """What the training of a trial said."""
        return self.out / f"trial-{number:04d}.log"

    def lock_file(self, number: int) -> Path:
        return self.out / "locks" / f"trial-{number:04d}"

    def command(self, overrides: list[str], run: str) -> list[str]:
        """The training of these settings, without the name of the program."""
        return ["train", self.recipe, "--data", str(self.data), "--run", run, *self.overrides, *overrides]


def open_study(sweep: Sweep) -> optuna.Study:
    """The study in the sweep folder, begun or gone on with; refuses the folder of another sweep."""
    recipe, store = sweep.load(), Store.open(sweep.data)
    if not select(store, recipe.data, recipe.front_end.patch).validation:
        raise UserError(f"{sweep.data} has no validation trials to judge by; set data.dev_fraction=0.1")
    facts_file = sweep.out / "sweep.json"
    if not (sweep.out / "locks" / "study").exists() and sweep.out.exists():
        refuse_if_used(sweep.out)
    facts = {
        "recipe": {key: value for key, value in to_tree(recipe).items() if key not in FREE},
        "space": {dimension.path: dimension.to_json() for dimension in sweep.space},
        "data": hashlib.sha256(json.dumps(store.manifest.get("hashes"), sort_keys=True).encode()).hexdigest(),
    }
    with study_lock(sweep):
        if facts_file.exists():
            old, new = read_json(facts_file), json.loads(json.dumps(facts))
            changed = [key for key in facts if old.get(key) != new[key]]
            if changed:
                raise UserError(
                    f"{sweep.out} is a sweep with another {' and '.join(changed)}; choose another --out"
                )
        else:
            write_json(facts_file, facts)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        journal = JournalFileBackend(str(sweep.out / "study.journal"))
        return optuna.create_study(
            storage=JournalStorage(journal),
            study_name="sweep",
            direction="minimize",
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=recipe.train.steps // 4),
        )


def refuse_if_used(folder: Path) -> None:
    if not folder.is_dir() or any(folder.iterdir()):
        raise UserError(f"{folder} exists already and holds no sweep; choose another --out")


@contextmanager
def study_lock(sweep: Sweep) -> Iterator[None]:
    """One worker at a time, for what has to be decided together."""
    (sweep.out / "locks").mkdir(parents=True, exist_ok=True)
    with (sweep.out / "locks" / "study").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def claim(sweep: Sweep, study: optuna.Study) -> Iterator[optuna.Trial | None]:
    """A trial that is this worker's own as long as the context lasts; None where there are enough of them."""
    with study_lock(sweep):
        fail_left_running(sweep, study)
        trials = study.get_trials(deepcopy=False)
        if sum(counts(t) for t in trials) >= sweep.n_trials:
            yield None
            return
        seed = derive(sweep.seed, "sweep", len(trials)) % 2**32
        study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        trial = study.ask({d.path: distribution(d) for d in sweep.space})
        trial.set_user_attr("reason", INTERRUPTED)  # until it has ended in another way
        held = sweep.lock_file(trial.number).open("a")
        fcntl.flock(held, fcntl.LOCK_EX)
    with held:
        yield trial


def fail_left_running(sweep: Sweep, study: optuna.Study) -> None:
    """Trials whose worker is gone have failed; their settings are put in line to be tried again."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        with sweep.lock_file(trial.number).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
        give_back(study, trial.number, trial.params)


def give_back(study: optuna.Study, number: int, params: dict[str, Any]) -> None:
    """An interrupted trial says nothing about its settings, so they are put in line again."""
    study.tell(number, state=TrialState.FAIL)
    study.enqueue_trial(params)


def counts(trial: FrozenTrial) -> bool:
    """Whether a trial is one of those asked for: not what was interrupted, nor what waits to be tried."""
    if trial.state == TrialState.FAIL:
        return trial.user_attrs.get("reason") != INTERRUPTED
    return trial.state != TrialState.WAITING


def distribution(dimension: Dimension) -> BaseDistribution:
    values = dimension.values
    if isinstance(values, Choices):
        return CategoricalDistribution(dimension.texts())
    if dimension.whole:
        return IntDistribution(int(values.low), int(values.high), log=values.log, step=int(values.step or 1))
    return FloatDistribution(values.low, values.high, log=values.log, step=values.step)


def overrides_of(sweep: Sweep, params: dict[str, Any]) -> list[str]:
    return [d.override(params[d.path]) for d in sweep.space if d.path in params]


def work(sweep: Sweep, study: optuna.Study, stop: Stop, say: Say) -> None:
    """Try settings until there are enough trials or a signal says stop."""
    while stop.signal is None:
        with claim(sweep, study) as trial:
            if trial is None:
                return
            try_settings(sweep, study, trial, stop, say)


def try_settings(sweep: Sweep, study: optuna.Study, trial: optuna.Trial, stop: Stop, say: Say) -> None:
    """Train one trial to its end, to where it is hopeless, or to where it fails."""
    overrides = overrides_of(sweep, trial.params)
    name, command = f"trial {trial.number}", sweep.command(overrides, str(sweep.run_folder(trial.number)))
    say(f"{name}: {' '.join(overrides)}")
    with sweep.log_file(trial.number).open("wb") as log:
        process = subprocess.Popen([*PROGRAM, *command, "--json"], stdout=subprocess.PIPE, stderr=log)
    try:
        pruned_at = follow(sweep, trial, process, stop)
        if process.poll() is None:
            process.terminate()
        told, _ = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        told = b""
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    if stop.signal is not None:
        give_back(study, trial.number, trial.params)
        say(f"{name}: {INTERRUPTED}")
    elif pruned_at is not None:
        trial.set_user_attr("reason", f"worse than the median at step {pruned_at}")
        study.tell(trial, state=TrialState.PRUNED)
        say(f"{name}: stopped at step {pruned_at}, worse than the median")
    elif (per := best_per(process.returncode, told)) is not None:
        trial.set_user_attr("reason", None)
        study.tell(trial, per)
        say(f"{name}: PER {100 * per:.1f} %")
    else:
        reason = why_failed(process.returncode, sweep.log_file(trial.number))
        trial.set_user_attr("reason", reason)
        study.tell(trial, state=TrialState.FAIL)
        say(f"{name}: failed: {reason}")


def follow(sweep: Sweep, trial: optuna.Trial, process: subprocess.Popen[bytes], stop: Stop) -> int | None:
    """Report validations as they come, until training ends or should; the step at which it became hopeless."""
    run = Run(sweep.run_folder(trial.number))
    n_steps = sweep.load(tuple(overrides_of(sweep, trial.params))).train.steps
    size, reported = 0, 0
    while True:
        ended = process.poll() is not None or stop.signal is not None
        if run.metrics_file.exists() and run.metrics_file.stat().st_size != size:
            size = run.metrics_file.stat().st_size
            for row in run.metrics():
                if row["split"] != "train" and row["per"] is not None and row["step"] > reported:
                    reported = row["step"]
                    trial.report(row["per"], reported)
        if ended:
            return None
        if 0 < reported < n_steps and trial.should_prune():
            return reported
        time.sleep(POLL_S)


def best_per(code: int, told: bytes) -> float | None:
    """The result of a training that ended well."""
    if code != 0:
        return None
    per = json.loads(told).get("best_per")
    return None if per is None else float(per)


def why_failed(code: int, log: Path) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else f"exit code {code}"


def summarise(sweep: Sweep, study: optuna.Study) -> dict[str, Any]:
    """All trials so far, and the best of those that came to their end."""
    trials = [t for t in study.get_trials(deepcopy=False) if t.state != TrialState.WAITING]
    whole = [t for t in trials if t.state == TrialState.COMPLETE and t.value is not None]
    best = min(whole, key=lambda t: (t.value, t.number), default=None)
    overrides = overrides_of(sweep, best.params) if best else None
    return {
        "out": str(sweep.out),
        "recipe": sweep.recipe,
        "best_trial": best.number if best else None,
        "best_per": best.value if best else None,
        "best_overrides": overrides,
        "best_run": str(sweep.run_folder(best.number)) if best else None,
        "command": ["arcuate", *sweep.command(overrides, "runs/best")] if overrides else None,
        "trials": [summarise_trial(sweep, t) for t in trials],
    }


def summarise_trial(sweep: Sweep, trial: FrozenTrial) -> dict[str, Any]:
    seen = trial.intermediate_values
    ended = trial.state.is_finished()
    return {
        "number": trial.number,
        "state": trial.state.name.lower(),
        "per": trial.value if trial.value is not None else (seen[max(seen)] if seen else None),
        "overrides": overrides_of(sweep, trial.params),
        "reason": trial.user_attrs.get("reason") if ended else None,
        "run": str(sweep.run_folder(trial.number)),
        "seconds": trial.duration.total_seconds() if trial.duration else None,
    }
