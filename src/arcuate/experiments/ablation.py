"""The factors of an ablation as given on the command line, and the arms that isolate each of them."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from arcuate.config import to_tree
from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.experiments.multi_seed import seed_settings
from arcuate.experiments.recipe import Recipe, diff_recipes, load_recipe
from arcuate.experiments.sweep import as_text
from arcuate.files import LockHeld, exclusive_lock, read_json, write_json
from arcuate.progress import Progress
from arcuate.run import Run
from arcuate.training.config import DESCRIPTIVE_KEYS
from arcuate.training.interrupts import Stop

EXAMPLE = "eps:optimizer.eps=1e-8 or aug:augment.white_noise_sd=0.25,augment.offset_sd=0.05"
NAMED = re.compile(r"([A-Za-z][A-Za-z0-9_-]{0,39}):(?=[^=]*=)(.*)", re.DOTALL)
BASE, ALL, BUT = "base", "all", "all-but-"
SEEDS = ("train.seed", "data.seed")
TRIALS = ("data.sessions", "data.max_sessions", "data.n_sessions", "data.channels", "data.dev_fraction")
MAX_FACTORS = 12


@dataclass(frozen=True)
class Factor:
    """One change to a recipe, made of one or more settings that belong together."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Arm:
    """A recipe of the experiment: the baseline with some of the factors changed."""

    name: str
    changed: frozenset[str]

    def overrides(self, factors: Sequence[Factor]) -> list[str]:
        return [o for f in factors if f.name in self.changed for o in f.overrides]


@dataclass(frozen=True)
class Question:
    """A factor in one direction: what changes between two arms that differ in it alone."""

    factor: str
    direction: str  # "alone": from the baseline; "with the others": from the recipe with all changed
    before: str
    after: str


def read_factors(arguments: Sequence[str]) -> tuple[tuple[Factor, ...], tuple[str, ...]]:
    """Factors (`name:key=value,…`) and overrides that hold for every arm (`key=value`)."""
    factors: list[Factor] = []
    overrides: list[str] = []
    for argument in arguments:
        named = NAMED.fullmatch(argument)
        if named:
            factors.append(Factor(named[1], split_settings(named[2], argument)))
        elif "=" in argument:
            overrides.append(argument)
        else:
            raise UserError(f"{argument!r} is no factor; write it as name:key=value, such as {EXAMPLE}")
    refuse_names([f.name for f in factors])
    return tuple(factors), tuple(overrides)


def refuse_names(names: Sequence[str]) -> None:
    if not names:
        raise UserError(f"name at least one factor to vary, such as {EXAMPLE}")
    if len(names) > MAX_FACTORS:
        raise UserError(f"{len(names)} factors are too many for one experiment; at most {MAX_FACTORS}")
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"the factor {name!r} is named twice; put its settings together with a comma")
        if name in (BASE, ALL) or name.startswith(BUT):
            raise UserError(f"{name!r} is the name of an arm; give the factor another")


def split_settings(text: str, argument: str) -> tuple[str, ...]:
    """`a.b=1,c={x: 1, y: 2}` at its commas, but not at those within brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign in "{[":
            depth += 1
        elif sign in "}]":
            depth -= 1
        if sign == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += sign
    if not all("=" in part for part in parts):
        raise UserError(f"factor {argument!r}: each part must be key=value, such as {EXAMPLE}")
    return tuple(part.strip() for part in parts)


def arms(factors: Sequence[Factor]) -> tuple[Arm, ...]:
    """The baseline, each factor changed alone, all changed with one put back, and all changed; each set once."""
    names = [f.name for f in factors]
    everything = frozenset(names)
    listed = [Arm(BASE, frozenset())]
    listed += [Arm(name, frozenset([name])) for name in names]
    listed += [Arm(f"{BUT}{name}", everything - {name}) for name in names]
    listed.append(Arm(ALL, everything))
    first: dict[frozenset[str], Arm] = {}
    for arm in listed:
        first.setdefault(arm.changed, arm)
    return tuple(first.values())


def questions(factors: Sequence[Factor]) -> tuple[Question, ...]:
    """What each factor does alone, and what it does once the others are changed too."""
    by_set = {arm.changed: arm.name for arm in arms(factors)}
    everything = frozenset(f.name for f in factors)
    asked: dict[tuple[str, str], Question] = {}
    for factor in factors:
        one = frozenset([factor.name])
        pairs = {"alone": (frozenset(), one), "with the others": (everything - one, everything)}
        for direction, (before, after) in pairs.items():
            question = Question(factor.name, direction, by_set[before], by_set[after])
            asked.setdefault((question.before, question.after), question)
    return tuple(asked.values())


def check_factors(recipe: str, overrides: Sequence[str], factors: Sequence[Factor]) -> Recipe:
    """The baseline; refuses factors that change nothing, the same as another, or what must stay the same."""
    base = load_recipe(recipe, overrides)
    owner: dict[str, str] = {}
    for factor in factors:
        changed = diff_recipes(base, load_recipe(recipe, [*overrides, *factor.overrides]))
        about = [o for o in factor.overrides if o.partition("=")[0].strip() in DESCRIPTIVE_KEYS]
        if about or not changed:
            raise UserError(
                f"the factor {factor.name} changes nothing: {', '.join(factor.overrides)} is what {recipe} has already"
            )
        for override in factor.overrides:
            refuse_setting(factor, override.partition("=")[0].strip(), owner)
    load_recipe(recipe, [*overrides, *(o for f in factors for o in f.overrides)])
    return base


def refuse_setting(factor: Factor, path: str, owner: dict[str, str]) -> None:
    if path in SEEDS:
        raise UserError(f"the factor {factor.name} sets {path}, which is varied by --seeds already")
    if path == "data" or path in TRIALS:
        raise UserError(
            f"the factor {factor.name} sets {path}: the arms would be scored on different trials, which cannot be"
            " compared; vary another setting"
        )
    for other, name in owner.items():
        if name != factor.name and (
            path == other or path.startswith(f"{other}.") or other.startswith(f"{path}.")
        ):
            raise UserError(f"the factors {name} and {factor.name} both set {path}; keep it in one of them")
    owner[path] = factor.name


# Training the arms of an ablation: every cell (arm × seed) is an ordinary run folder.

POLL_S = 0.25
PATIENCE_S = 120.0  # for a training that was asked to stop: it finishes its step and saves
PROGRAM = (sys.executable, "-m", "arcuate")
FREE = (*DESCRIPTIVE_KEYS, "runtime", "track")  # may differ when an experiment is gone on with
Say = Callable[[str], None]
Score = Callable[[Run], None]


@dataclass(frozen=True)
class Experiment:
    """What is varied, on what, how often, and how it is judged."""

    recipe: str
    overrides: tuple[str, ...]
    factors: tuple[Factor, ...]
    data: Path
    out: Path
    n_seeds: int
    split: str = "val"
    checkpoint: str = "last"

    @property
    def arms(self) -> tuple[Arm, ...]:
        return arms(self.factors)

    @property
    def label(self) -> str | None:
        """Results of the best checkpoint have no label, as `arcuate evaluate` writes them."""
        return None if self.checkpoint == "best" else self.checkpoint

    def load(self, arm: Arm) -> Recipe:
        return load_recipe(self.recipe, [*self.overrides, *arm.overrides(self.factors)])


@dataclass(frozen=True)
class Cell:
    """One run: an arm with a seed."""

    arm: Arm
    seed: int
    path: Path
    overrides: tuple[str, ...]
    n_steps: int

    @property
    def run(self) -> Run:
        return Run(self.path)

    @property
    def log_file(self) -> Path:
        return self.path.with_name(f"{self.path.name}.log")

    @property
    def lock_file(self) -> Path:
        return self.path.with_name(f".{self.path.name}.lock")


def cells(experiment: Experiment) -> list[Cell]:
    """All runs, seed by seed, so that an interrupted experiment has whole comparisons."""
    planned = []
    for i in range(experiment.n_seeds):
        for arm in experiment.arms:
            recipe = experiment.load(arm)
            seed = recipe.train.seed + i
            folder = experiment.out / arm.name / f"seed-{seed}"
            planned.append(Cell(arm, seed, folder, seeded(experiment, arm, recipe, i), recipe.train.steps))
    return planned


def seeded(experiment: Experiment, arm: Arm, recipe: Recipe, i: int) -> tuple[str, ...]:
    """The settings of one run."""
    seeds = seed_settings(recipe, i)
    changed = ", ".join(sorted(arm.changed)) or "nothing"
    note = f"Ablation of {recipe.name}, arm {arm.name}: {changed} changed against the baseline; seed {i + 1}."
    notes = f"notes={as_text(note)}"
    return (*experiment.overrides, *arm.overrides(experiment.factors), *seeds, notes)


def open_experiment(experiment: Experiment) -> None:
    """Begin the experiment folder or go on with it; refuses the folder of another experiment."""
    facts = {
        "recipe": {k: v for k, v in to_tree(experiment.load(experiment.arms[0])).items() if k not in FREE},
        "factors": {f.name: list(f.overrides) for f in experiment.factors},
        "data": Store.open(experiment.data).manifest.get("hashes"),
    }
    file = experiment.out / "experiment.json"
    if file.exists():
        old, new = read_json(file), json.loads(json.dumps(facts))
        changed = [key for key in facts if old.get(key) != new[key]]
        if changed:
            raise UserError(
                f"{experiment.out} is an ablation with other {' and '.join(changed)}; choose another --out"
            )
        return
    if experiment.out.exists() and (not experiment.out.is_dir() or any(experiment.out.iterdir())):
        raise UserError(f"{experiment.out} exists already and holds no ablation; choose another --out")
    write_json(file, facts)


def finished(cell: Cell) -> bool:
    """Whether the run has trained all its steps."""
    state = cell.run.checkpoints / "last" / "state.json"
    return state.is_file() and read_json(state).get("step") == cell.n_steps


def scored(experiment: Experiment, cell: Cell) -> bool:
    return cell.run.results_file(experiment.split, experiment.label).is_file()


@contextmanager
def claim(cell: Cell) -> Iterator[bool]:
    """Whether this cell is ours as long as the context lasts."""
    with ExitStack() as stack:
        try:
            stack.enter_context(exclusive_lock(cell.lock_file, f"{cell.path} is in use"))
        except LockHeld:
            yield False
            return
        yield True


def work(experiment: Experiment, score: Score, stop: Stop, say: Say, report: Progress) -> dict[Path, str]:
    """Train and score what is left; returns the runs that failed, with the reason."""
    planned = cells(experiment)
    n_steps = sum(c.n_steps for c in planned)
    failed: dict[Path, str] = {}
    done = 0
    for cell in planned:
        if stop.signal is not None:
            break
        with claim(cell) as ours:
            if ours:
                name = f"{cell.arm.name}, seed {cell.seed}"
                reason = train_cell(experiment, cell, stop, partial(shown, report, done, n_steps, name))
                if stop.signal is not None:
                    break
                if reason is not None:
                    failed[cell.path] = reason
                    say(f"{name}: {reason}")
                if (cell.run.checkpoints / "last").exists() and not scored(experiment, cell):
                    score(cell.run)
        done += cell.n_steps
        report(done, n_steps, "training")
    return failed


def shown(report: Progress, before: int, n_steps: int, name: str, step: int) -> None:
    report(before + step, n_steps, name)


def train_cell(experiment: Experiment, cell: Cell, stop: Stop, step: Callable[[int], None]) -> str | None:
    """Train one run to its end; the reason where it did not get there."""
    if finished(cell):
        return None
    discard_results(cell)
    command = [
        "train",
        experiment.recipe,
        "--data",
        str(experiment.data),
        "--run",
        str(cell.path),
        "--resume",
    ]
    with cell.log_file.open("ab") as log:
        process = subprocess.Popen(
            [*PROGRAM, *command, *cell.overrides], stdout=subprocess.DEVNULL, stderr=log
        )
    try:
        follow(cell, process, stop, step)
        if process.poll() is None:
            process.terminate()
        process.wait(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return None if process.returncode == 0 else why(process.returncode, cell.log_file)


def discard_results(cell: Cell) -> None:
    """Scores of a run that goes on are those of another checkpoint."""
    for file in (cell.path / "results").glob("*.json*"):
        file.unlink()


def follow(cell: Cell, process: subprocess.Popen[bytes], stop: Stop, step: Callable[[int], None]) -> None:
    size = -1
    while process.poll() is None and stop.signal is None:
        file = cell.run.metrics_file
        if file.exists() and file.stat().st_size != size:
            size = file.stat().st_size
            step(max((row["step"] for row in cell.run.metrics()), default=0))
        time.sleep(POLL_S)


def why(code: int, log: Path) -> str:
    if code < 0:
        return f"killed by signal {-code}"
    lines = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else f"exit code {code}"


def overview(experiment: Experiment) -> list[dict[str, Any]]:
    """Every run of the experiment and how far it is."""
    return [
        {
            "arm": cell.arm.name,
            "seed": cell.seed,
            "run": str(cell.path),
            "overrides": [o for o in cell.overrides if not o.startswith("notes=")],
            "state": "scored" if scored(experiment, cell) else "trained" if finished(cell) else "missing",
        }
        for cell in cells(experiment)
    ]
