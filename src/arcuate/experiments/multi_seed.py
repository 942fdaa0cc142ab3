"""One recipe trained with several seeds: a scored run folder per seed, and the spread of the error rates."""

import gc
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any

from arcuate.config import Overrides, override_list
from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.evaluation.evaluate import evaluate
from arcuate.evaluation.metrics import run_rate_name
from arcuate.experiments.recipe import Recipe, load_recipe
from arcuate.experiments.subprocess_train import check_one_process
from arcuate.experiments.train import TrainResult, train
from arcuate.files import read_json, to_frame
from arcuate.progress import Progress, counted, logger, percent
from arcuate.run import JOB_FOLDER, Run, RunLike, check_run_folder
from arcuate.training.callbacks import Callback, Stop
from arcuate.training.start import check_same_recipe


@dataclass(frozen=True)
class SeedRun:
    """The training of one seed: its result, or why it failed."""

    seed: int
    run: Run
    result: TrainResult | None = None
    error: str | None = None

    @property
    def is_complete(self) -> bool:
        return self.result is not None and not self.result.interrupted

    @property
    def best_per(self) -> float | None:
        return self.result.best_per if self.result is not None else None

    def to_dict(self) -> dict[str, Any]:
        values = {"seed": self.seed, "error": self.error, "run": str(self.run.path), "best_per": None}
        if self.result is not None:
            values |= self.result.to_dict()
            del values["recipe"], values["n_parameters"]
        return values


@dataclass(frozen=True)
class SeedsResult:
    """Several seeds of one recipe, with mean and spread of the best PER of those that are complete."""

    path: Path
    recipe: Recipe
    n_seeds: int
    seeds: tuple[SeedRun, ...]
    plan: TrainResult | None = None  # dry run of the first seed; None if trained
    signal: Signals | None = None  # signal that interrupted the series

    @property
    def complete(self) -> list[SeedRun]:
        return [seed for seed in self.seeds if seed.is_complete]

    @property
    def selected_on(self) -> str | None:
        return next((seed.result.selected_on for seed in self.complete if seed.result), None)

    @property
    def best_pers(self) -> list[float]:
        return [seed.best_per for seed in self.complete if seed.best_per is not None]

    @property
    def missing(self) -> dict[int, str]:
        """Seeds excluded from mean and spread, with the reason."""
        reasons = {s.seed: s.error or "interrupted" for s in self.seeds if not s.is_complete}
        planned = range(self.recipe.train.seed, self.recipe.train.seed + self.n_seeds)
        started = {s.seed for s in self.seeds}
        return {seed: reasons.get(seed, "not started") for seed in planned if seed in reasons or seed not in started}

    @property
    def mean_per(self) -> float | None:
        return statistics.fmean(self.best_pers) if self.best_pers else None

    @property
    def sd_per(self) -> float | None:
        return statistics.stdev(self.best_pers) if len(self.best_pers) > 1 else None

    def to_dict(self) -> dict[str, Any]:
        if self.plan is not None:
            planned = [{"seed": seed.seed, "run": str(seed.run.path)} for seed in self.seeds]
            return {**self.plan.to_dict(), "run": str(self.path), "n_seeds": self.n_seeds, "seeds": planned}
        return {
            "run": str(self.path),
            "recipe": self.recipe.name,
            "n_parameters": next((s.result.n_parameters for s in self.complete if s.result), None),
            "selected_on": self.selected_on,
            "n_finished": len(self.complete),
            "missing": {str(seed): reason for seed, reason in self.missing.items()},
            "mean_per": self.mean_per,
            "sd_per": self.sd_per,
            "low_per": min(self.best_pers, default=None),
            "high_per": max(self.best_pers, default=None),
            "seeds": [seed.to_dict() for seed in self.seeds],
            "n_seeds": self.n_seeds,
        }

    def to_frame(self) -> Any:
        """Pandas data frame with one row per seed."""
        return to_frame(seed.to_dict() for seed in self.seeds)


def seed_overrides(recipe: Recipe, i: int) -> list[str]:
    """Settings of repetition `i`. The data order also changes, unless its seed selects the `dev` trials."""
    overrides = [f"train.seed={recipe.train.seed + i}"]
    if recipe.data.dev_fraction == 0:
        overrides.append(f"data.seed={recipe.data.seed + i}")
    return overrides


def train_seeds(
    recipe: Recipe | str | Path,
    data: Store | str | Path,
    run: RunLike,
    n_seeds: int,
    *,
    overrides: Overrides = (),
    resume: bool = False,
    parent: RunLike | None = None,
    keep_optimizer: bool = False,
    dry_run: bool = False,
    only: int | None = None,
    callbacks: Sequence[Callback] = (),
    stop: Stop | None = None,
    progress: Progress | None = None,
) -> SeedsResult:
    """Train `n_seeds` seeds one after another into RUN/seed-K and score each, so that they can be combined.

    Seeds count up from `train.seed`. A seed that fails is reported and the others continue; an interruption ends the
    series, and `resume` continues it. `only` trains one of them, counted from 0: the task of an array job. The other
    arguments are those of `train`.
    """
    folder, base = Path(run), load_recipe(recipe, overrides)
    if only is not None and not 0 <= only < n_seeds:
        raise UserError(f"--only {only}: expected a number from 0 to {n_seeds - 1}, one less than --seeds")
    listed = override_list(overrides)
    planned = {base.train.seed + i: [*listed, *seed_overrides(base, i)] for i in range(n_seeds)}
    recipes = {seed: load_recipe(recipe, changed) for seed, changed in planned.items()}
    _check_folder(folder, recipes, resume or only is not None, dry_run)
    options: dict[str, Any] = {"resume": resume, "parent": parent, "keep_optimizer": keep_optimizer}
    if dry_run:
        first = next(iter(planned))
        plan = train(recipe, data, _seed_folder(folder, first), overrides=planned[first], dry_run=True, **options)
        seeds = tuple(SeedRun(seed, Run(_seed_folder(folder, seed))) for seed in planned)
        return SeedsResult(folder, base, n_seeds, seeds, plan)
    options |= {"callbacks": callbacks, "stop": stop, "progress": progress}
    done: list[SeedRun] = []
    signal: Signals | None = None
    for n, (seed, changed) in enumerate(planned.items(), start=1):
        if only is not None and n != only + 1:
            continue
        path = _seed_folder(folder, seed)
        logger.info(f"seed {seed} ({n} of {n_seeds}): {path}")
        try:
            result = train(recipe, data, path, overrides=changed, **options)
            if result.best_per is not None and not (result.interrupted or result.signal):
                _score(result.run, data, result.selected_on)
        except UserError as error:
            logger.error(str(error))
            done.append(SeedRun(seed, Run(path), error=str(error)))
            continue
        done.append(SeedRun(seed, result.run, result))
        if result.interrupted or result.signal is not None:
            signal = result.signal
            store = data.path if isinstance(data, Store) else data
            name = recipe.name if isinstance(recipe, Recipe) else recipe
            command = f"arcuate train {name} --seeds {n_seeds} --data {store} --run {folder} --resume"
            logger.info(f"continue with: {' '.join([command, *listed])}")
            break
        gc.collect()  # frees the model before the next one is built
    summary = SeedsResult(folder, base, n_seeds, tuple(done), signal=signal)
    if only is None:
        _log_summary(summary)
    return summary


def _seed_folder(folder: Path, seed: int) -> Path:
    return folder / f"seed-{seed}"


def _check_folder(folder: Path, recipes: dict[int, Recipe], resume: bool, dry_run: bool) -> None:
    """Check before the first seed is trained for anything that would stop a later one."""
    check_one_process("train --seeds")
    if dry_run:
        return
    if Run(folder).recipe_file.exists():
        raise UserError(
            f"{folder} is a run folder, but --seeds writes run folders into {folder}/seed-K; choose another --run"
        )
    if not resume:
        check_run_folder(folder)
        return
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    if other := [name for name in names if not name.startswith(("seed-", ".")) and name != JOB_FOLDER]:
        raise UserError(f"{folder} contains {other[0]}, which --seeds did not write; choose another --run")
    for seed, recipe in recipes.items():
        run = Run(_seed_folder(folder, seed))
        check_run_folder(run.path, resume=True)
        if run.recipe_file.is_file():
            check_same_recipe(run, recipe)


def _score(run: Run, data: Store | str | Path, split: str) -> None:
    """Write results and frame scores of the best checkpoint, unless they are up to date."""
    results, scores = run.results_file(split, None, "json"), run.results_file(split, None, "scores.npz")
    best = run.checkpoints / "best"
    exist = results.is_file() and scores.is_file() and best.is_symlink()
    if exist and read_json(results).get("checkpoint") == best.readlink().name:
        return
    evaluate(run, split=split, data=data.path if isinstance(data, Store) else data, scores=scores)


def _log_summary(summary: SeedsResult) -> None:
    n_complete = len(summary.complete)
    if summary.missing:
        listed = "; ".join(f"{seed} ({reason})" for seed, reason in summary.missing.items())
        logger.warning(
            f"{n_complete} of {counted(summary.n_seeds, 'seed')} complete; mean and spread do not include {listed}"
        )
    if summary.mean_per is None:
        return
    spread = ""
    if summary.sd_per is not None:
        low, high = min(summary.best_pers), max(summary.best_pers)
        spread = f" ± {100 * summary.sd_per:.1f} (SD; {percent(low)} to {percent(high)})"
    split, name = summary.selected_on, run_rate_name(summary.complete[0].run)
    logger.info(f"{counted(n_complete, 'seed')}: best {split} {name} {percent(summary.mean_per)}{spread}")
    if n_complete > 1 and not summary.missing:
        logger.info(f"next: arcuate combine {summary.path}/seed-* --method geometric --split {split}")
