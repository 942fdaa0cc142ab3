"""The settings a sweep varies: ranges and choices by path, checked by parsing recipes at their ends."""

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from pydantic import Field, ValidationError, model_validator

from arcuate.config import Settings, known_paths, nearest, to_tree
from arcuate.data.selection import select
from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.experiments.recipe import Recipe, load_recipe
from arcuate.files import LockHeld, exclusive_lock, read_json, write_json
from arcuate.run import Run
from arcuate.seeds import derive_seed
from arcuate.training.config import DESCRIPTIVE_KEYS
from arcuate.training.interrupts import Stop

EXAMPLE = "schedule.peak_lr: {low: 0.001, high: 0.01, log: true}"


class Range(Settings):
    low: float
    high: float
    log: bool = Field(False, description="drawn evenly by ratio instead of by difference")
    step: float | None = Field(None, gt=0.0, description="only low, low + step, low + 2 step …")

    @model_validator(mode="after")
    def _can_be_drawn_from(self) -> "Range":
        if not self.low < self.high:
            raise ValueError(f"low {self.low:g} must lie below high {self.high:g}")
        if self.log and self.low <= 0:
            raise ValueError(f"log needs a low above 0, not {self.low:g}")
        if self.log and self.step is not None:
            raise ValueError("log and step do not go together; leave one of them out")
        if self.step is not None:
            n_steps = (self.high - self.low) / self.step
            if abs(n_steps - round(n_steps)) > 1e-6 * n_steps:
                reached = self.low + int(n_steps) * self.step
                raise ValueError(f"steps of {self.step:g} miss high {self.high:g}; use high: {reached:g}")
        return self

    @property
    def between(self) -> float:
        """A value inside the range that is whole only where all of them are."""
        return self.low + (self.step if self.step is not None else 0.37 * (self.high - self.low))


class Choices(Settings):
    choices: tuple[Any, ...] = Field(min_length=2)


@dataclass(frozen=True)
class Dimension:
    """One setting to vary."""

    path: str
    values: Range | Choices
    whole: bool = False  # the range has whole numbers only

    def override(self, value: Any) -> str:
        """As it is given to `arcuate train`; of choices, `value` is the text already."""
        return f"{self.path}={value if isinstance(self.values, Choices) else as_text(value)}"

    def texts(self) -> list[str]:
        """Every choice as YAML on one line."""
        return [as_text(choice) for choice in self.values.choices] if isinstance(self.values, Choices) else []

    def to_json(self) -> dict[str, Any]:
        return {**self.values.model_dump(mode="json"), "whole": self.whole}


def as_text(value: Any) -> str:
    """A value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=float("inf"))
    return text.removesuffix("...\n").strip()


def read_space(file: Path, recipe: str, overrides: Sequence[str] = ()) -> tuple[Dimension, ...]:
    """The dimensions a space file names, each checked against the recipe it will vary."""
    tree = read_mapping(file)
    fixed = [o.partition("=")[0].strip() for o in overrides]
    known = known_paths(Recipe)
    for path in tree:
        refuse_path(file, path, known)
        for other in [p for p in tree if p != path] + fixed:
            if path == other or path.startswith(f"{other}."):
                raise UserError(
                    f"{file}: {path} is varied, but {other} is set as well; leave one of them out"
                )
    return tuple(read_dimension(file, path, values, recipe, overrides) for path, values in tree.items())


def read_mapping(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the search space {file} cannot be read: {error}") from None
    except (yaml.YAMLError, RecursionError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{file} is no valid YAML: {first}") from None
    if not isinstance(tree, dict) or not tree or not all(isinstance(path, str) for path in tree):
        raise UserError(f"{file} should name the settings to vary, such as '{EXAMPLE}'")
    return tree


def refuse_path(file: Path, path: str, known: set[str]) -> None:
    if path in DESCRIPTIVE_KEYS:
        raise UserError(f"{file}: {path} only describes a recipe; vary a setting")
    if path not in known:
        near = nearest(path, sorted(known))
        hint = f"; did you mean {near!r}?" if near else "; see: arcuate recipes show"
        raise UserError(f"{file}: there is no setting {path!r}{hint}")


def read_dimension(file: Path, path: str, given: Any, recipe: str, overrides: Sequence[str]) -> Dimension:
    if not isinstance(given, Mapping):
        raise UserError(f"{file}: {path} needs a range or choices, such as '{EXAMPLE}'")
    kind = Choices if "choices" in given else Range
    try:
        values = kind.model_validate(dict(given))
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise UserError(
            f"{file}: {path}{f'.{place}' if place else ''}: {problem['msg'].removeprefix('Value error, ')};"
            " a range has low, high, log and step, a choice has choices"
        ) from None

    def refusal(text: str) -> str | None:
        try:
            load_recipe(recipe, [*overrides, f"{path}={text}"])
        except UserError as error:
            return str(error)
        return None

    if isinstance(values, Choices):
        dimension = Dimension(path, values)
        tried = dimension.texts()
        if len(set(tried)) < len(tried):
            raise UserError(f"{file}: {path} has a choice twice")
    else:
        numbers = [values.low, values.high] + ([values.step] if values.step is not None else [])
        may_be_whole = all(n == int(n) for n in numbers)
        whole = may_be_whole and (values.step is not None or refusal(as_text(values.between)) is not None)
        dimension = Dimension(path, values, whole)
        ends = (values.low, values.high) if whole else (values.low, values.high, values.between)
        tried = [as_text(int(v) if whole else v) for v in ends]
    for text in tried:
        if reason := refusal(text):
            raise UserError(f"{file}: {path} cannot be {text}: {reason}")
    return dimension


# Hyperparameter sweeps: Optuna proposes settings, `arcuate train` tries them, validation PER is the judge.

POLL_S = 0.25
PATIENCE_S = 120.0  # for a training that was asked to stop: it finishes its step and saves
INTERRUPTED = "interrupted"
FREE = (*DESCRIPTIVE_KEYS, "runtime", "track")  # may differ between workers, and when a sweep is gone on with
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
    if not select(store, recipe.data, recipe.front_end.patch.count_frames).validation:
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
    with exclusive_lock(sweep.out / "locks" / "study", "", wait=True):
        yield


@contextmanager
def claim(sweep: Sweep, study: optuna.Study) -> Iterator[optuna.Trial | None]:
    """Reserve the next trial for this worker while the context lasts; None if there are enough trials."""
    with ExitStack() as held:
        yield reserve(sweep, study, held)


def reserve(sweep: Sweep, study: optuna.Study, held: ExitStack) -> optuna.Trial | None:
    with study_lock(sweep):
        fail_left_running(sweep, study)
        trials = study.get_trials(deepcopy=False)
        if sum(counts(t) for t in trials) >= sweep.n_trials:
            return None
        seed = derive_seed(sweep.seed, "sweep", len(trials)) % 2**32
        study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        trial = study.ask({d.path: distribution(d) for d in sweep.space})
        trial.set_user_attr("reason", INTERRUPTED)  # until it has ended in another way
        held.enter_context(exclusive_lock(sweep.lock_file(trial.number), f"trial {trial.number} is in use"))
        return trial


def fail_left_running(sweep: Sweep, study: optuna.Study) -> None:
    """Trials whose worker is gone have failed; their settings are put in line to be tried again."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        with suppress(LockHeld), exclusive_lock(sweep.lock_file(trial.number), "in use"):
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
