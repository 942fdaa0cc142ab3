"""Ablations: train a recipe with each factor changed alone, and with all factors but one changed, over several seeds.

Every cell (arm × seed) is an ordinary run folder, so an interrupted ablation continues where it stopped, and several
workers can share one. Which factor caused a difference is judged in `arcuate.insight.ablation`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any, Literal

from arcuate.config import Overrides, override_list, to_yaml_line
from arcuate.data.selection import select
from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.evaluation.evaluate import evaluate
from arcuate.experiments.recipe import Recipe, diff_recipes, load_recipe
from arcuate.experiments.seeds import seed_overrides
from arcuate.experiments.train_many import Job, check_one_process, missing_training, open_folder, train_jobs
from arcuate.files import read_json
from arcuate.progress import Progress
from arcuate.run import Run
from arcuate.training.callbacks import Stop, handle_signals
from arcuate.training.config import DESCRIPTIVE_KEYS

BASE, ALL, BUT = "base", "all", "all-but-"  # names of arms
_EXAMPLE = "eps:optimizer.eps=1e-8 or aug:augment.white_noise_sd=0.25,augment.offset_sd=0.05"
_NAMED = re.compile(r"([A-Za-z][A-Za-z0-9_-]{0,39}):(?=[^=]*=)(.*)", re.DOTALL)
_NEXT_SETTING = re.compile(r",\s*(?=[A-Za-z_][\w.]*=)")  # a comma inside {a: 1, b: 2} is not followed by key=
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")
_SEEDS = ("train.seed", "data.seed")
_TRIALS = ("data.sessions", "data.max_sessions", "data.release", "data.dev_fraction")
_MAX_FACTORS = 12


@dataclass(frozen=True)
class Factor:
    """One change to a recipe: one or more settings that belong together."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Arm:
    """The baseline recipe with some of the factors changed."""

    name: str
    changed: frozenset[str]

    def overrides(self, factors: Sequence[Factor]) -> list[str]:
        return [o for f in factors if f.name in self.changed for o in f.overrides]


@dataclass(frozen=True)
class Experiment:
    """Baseline, factors, data and output folder of an ablation."""

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
        """Label of the results files; those of the best checkpoint have none, as with `arcuate evaluate`."""
        return None if self.checkpoint == "best" else self.checkpoint

    def load(self, arm: Arm) -> Recipe:
        return load_recipe(self.recipe, [*self.overrides, *arm.overrides(self.factors)])


@dataclass(frozen=True, kw_only=True)
class Cell(Job):
    """One run of an ablation: an arm with a seed."""

    arm: Arm
    seed: int


@dataclass(frozen=True)
class AblationRuns:
    """The runs of an ablation: trained, or planned by a dry run."""

    experiment: Experiment
    failed: Mapping[Path, str] = field(default_factory=dict)  # run folder -> reason
    signal: Signals | None = None  # signal that interrupted the training

    @property
    def n_steps(self) -> int:
        return sum(cell.n_steps for cell in cells(self.experiment))

    def to_dict(self) -> dict[str, Any]:
        """The plan, as `arcuate ablate --dry-run --json` prints it."""
        runs = overview(self.experiment)
        return {"dry_run": True, "out": str(self.experiment.out), "n_steps": self.n_steps, "runs": runs}


def ablate(
    recipe: str | Path,
    factors: Mapping[str, Overrides] | Sequence[str],
    data: str | Path,
    out: str | Path,
    overrides: Overrides = (),
    seeds: int = 3,
    checkpoint: Literal["last", "best"] = "last",
    dry_run: bool = False,
    *,
    stop: Stop | None = None,
    progress: Progress | None = None,
) -> AblationRuns:
    """Find which change caused a difference: train each factor alone, and all factors but one, over several seeds.

    Calling again with the same arguments continues. `arcuate.insight.ablation.judge_ablation` judges the result.

    Args:
        recipe: Baseline: name, YAML file or run folder.
        factors: `name:key=value[,key=value]` for each factor; `key=value` without a name applies to every arm. In
            Python also a mapping of names to overrides.
        data: Store prepared by `arcuate prepare`.
        out: Experiment folder; one run folder per arm and seed.
        overrides: Settings `key=value` of every arm.
        seeds: Runs per arm.
        checkpoint: Checkpoint to score: `last` (late divergence shows in the score) or `best`.
        dry_run: List the runs; write nothing.
    """
    check_one_process("ablate")
    common = override_list(overrides)
    if isinstance(factors, Mapping):
        parsed = tuple(Factor(name, tuple(override_list(changed))) for name, changed in factors.items())
    else:
        parsed, listed = parse_factors(factors)
        common = [*common, *listed]
    experiment = Experiment(str(recipe), tuple(common), parsed, Path(data), Path(out), seeds, checkpoint=checkpoint)
    _check_experiment(experiment)
    if dry_run:
        return AblationRuns(experiment)
    open_experiment(experiment)
    planned = {cell.run: cell for cell in cells(experiment)}
    with handle_signals(stop) as stop:
        jobs = list(planned.values())
        failed = train_jobs(jobs, stop, score=lambda run: _score(experiment, planned[run]), progress=progress)
    return AblationRuns(experiment, failed, stop.signal)


# --- Factors and arms ------------------------------------------------------------------------------------


def parse_factors(arguments: Sequence[str]) -> tuple[tuple[Factor, ...], tuple[str, ...]]:
    """Factors (`name:key=value,…`) and overrides for every arm (`key=value`) among command-line arguments."""
    factors: list[Factor] = []
    overrides: list[str] = []
    for argument in arguments:
        if named := _NAMED.fullmatch(argument):
            factors.append(Factor(named[1], tuple(_NEXT_SETTING.split(named[2]))))
        elif "=" in argument:
            overrides.append(argument)
        else:
            raise UserError(f"{argument!r} is not a factor; write it as name:key=value, such as {_EXAMPLE}")
    _check_names([f.name for f in factors])
    return tuple(factors), tuple(overrides)


def _check_names(names: Sequence[str]) -> None:
    if not 1 <= len(names) <= _MAX_FACTORS:
        raise UserError(f"an ablation needs 1 to {_MAX_FACTORS} factors, such as {_EXAMPLE}; got {len(names)}")
    for name in names:
        if not _NAME.fullmatch(name):
            raise UserError(f"the factor name {name!r} must be letters, digits, - and _, starting with a letter")
        if names.count(name) > 1:
            raise UserError(f"the factor {name!r} is given twice; put its settings together with a comma")
        if name in (BASE, ALL) or name.startswith(BUT):
            raise UserError(f"{name!r} is the name of an arm; choose another name for the factor")


def arms(factors: Sequence[Factor]) -> tuple[Arm, ...]:
    """The baseline, each factor changed alone, all but one changed, and all changed; each combination once."""
    everything = frozenset(f.name for f in factors)
    named = {BASE: frozenset[str]()}
    named |= {f.name: frozenset([f.name]) for f in factors}
    named |= {f"{BUT}{f.name}": everything - {f.name} for f in factors}
    named |= {ALL: everything}
    first: dict[frozenset[str], Arm] = {}
    for name, changed in named.items():
        first.setdefault(changed, Arm(name, changed))
    return tuple(first.values())


def arm_pairs(factors: Sequence[Factor]) -> dict[str, tuple[tuple[str, str], ...]]:
    """The arms, before and after, that isolate each factor: alone, and, of several, with all others changed."""
    by_set = {arm.changed: arm.name for arm in arms(factors)}
    every = frozenset(factor.name for factor in factors)
    sides = {name: dict.fromkeys([frozenset[str](), every - {name}]) for name in (factor.name for factor in factors)}
    return {
        name: tuple((by_set[before], by_set[before | {name}]) for before in others) for name, others in sides.items()
    }


# --- Checks ----------------------------------------------------------------------------------------------


def _check_experiment(experiment: Experiment) -> None:
    """Check before training for errors that would otherwise appear after hours."""
    _check_names([factor.name for factor in experiment.factors])
    base = check_factors(experiment.recipe, experiment.overrides, experiment.factors)
    if not select(Store.open(experiment.data), base.data, base.front_end.patch.count_frames).validation:
        raise UserError(f"{experiment.data} has no validation trials to score; set data.dev_fraction=0.1")


def check_factors(recipe: str, overrides: Sequence[str], factors: Sequence[Factor]) -> Recipe:
    """Check that factors set different settings and do not change the scored trials; return the baseline recipe."""
    base = load_recipe(recipe, overrides)
    factor_of: dict[str, str] = {}
    for factor in factors:
        changed = diff_recipes(base, load_recipe(recipe, [*overrides, *factor.overrides]))
        paths = [override.partition("=")[0].strip() for override in factor.overrides]
        if not changed or any(path in DESCRIPTIVE_KEYS for path in paths):
            raise UserError(
                f"the factor {factor.name} changes nothing: {recipe} already has {', '.join(factor.overrides)}"
            )
        for path in paths:
            _check_setting(factor, path, factor_of)
    load_recipe(recipe, [*overrides, *(o for f in factors for o in f.overrides)])
    return base


def _check_setting(factor: Factor, path: str, factor_of: dict[str, str]) -> None:
    if path in _SEEDS:
        raise UserError(f"the factor {factor.name} sets {path}, which --seeds varies; leave it out")
    if path == "data" or path in _TRIALS:
        raise UserError(
            f"the factor {factor.name} sets {path}: the arms would be scored on different trials and could not be"
            " compared; vary another setting"
        )
    for other, name in factor_of.items():
        overlap = path == other or path.startswith(f"{other}.") or other.startswith(f"{path}.")
        if name != factor.name and overlap:
            raise UserError(f"the factors {name} and {factor.name} both set {path}; keep it in one of them")
    factor_of[path] = factor.name


# --- Training the cells ----------------------------------------------------------------------------------


def cells(experiment: Experiment) -> list[Cell]:
    """All runs, seed by seed, so that an interrupted ablation has complete comparisons."""
    planned = []
    for i in range(experiment.n_seeds):
        for arm in experiment.arms:
            recipe = experiment.load(arm)
            seed = recipe.train.seed + i
            changed = ", ".join(sorted(arm.changed)) or "nothing"
            note = f"Ablation of {recipe.name}, arm {arm.name}: {changed} changed from the baseline; seed {i + 1}."
            settings = (*experiment.overrides, *arm.overrides(experiment.factors), *seed_overrides(recipe, i))
            run, notes = Run(experiment.out / arm.name / f"seed-{seed}"), f"notes={to_yaml_line(note)}"
            given = (run, experiment.recipe, experiment.data, (*settings, notes), recipe.train.steps)
            planned.append(Cell(*given, arm=arm, seed=seed))
    return planned


def open_experiment(experiment: Experiment) -> None:
    """Create or continue the folder of an ablation; the folder of a different ablation is rejected."""
    factors = {f.name: list(f.overrides) for f in experiment.factors}
    varied = {"factors": factors, "data": Store.open(experiment.data).hashes}
    open_folder(experiment.out / "experiment.json", "an ablation", experiment.load(experiment.arms[0]), varied)


def is_scored(experiment: Experiment, cell: Cell) -> bool:
    """Whether a cell is complete and its results are those of the checkpoint that is scored now."""
    rows, summary = (cell.run.results_file(experiment.split, experiment.label, ending) for ending in ("jsonl", "json"))
    if not rows.is_file() or not summary.is_file() or not cell.is_trained:
        return False
    link, scored = cell.run.checkpoints / experiment.checkpoint, read_json(summary).get("checkpoint")
    return scored is None or not link.is_symlink() or link.readlink().name == scored


def missing_reason(experiment: Experiment, cell: Cell) -> str | None:
    """Reason why a cell is excluded from the effects; None if it is included."""
    if is_scored(experiment, cell):
        return None
    return missing_training(cell.run) or "not scored yet"


def _score(experiment: Experiment, cell: Cell) -> None:
    if not is_scored(experiment, cell):
        scored = f"{cell.run.path}@{experiment.checkpoint}"
        evaluate(scored, split=experiment.split, data=experiment.data, label=experiment.label)


def overview(experiment: Experiment) -> list[dict[str, Any]]:
    """Every run of an ablation and its state."""
    return [
        {
            "arm": cell.arm.name,
            "seed": cell.seed,
            "run": str(cell.run.path),
            "overrides": [o for o in cell.overrides if not o.startswith("notes=")],
            "state": "scored" if is_scored(experiment, cell) else "trained" if cell.is_trained else "missing",
        }
        for cell in cells(experiment)
    ]
