"""One recipe trained with several seeds: a scored run folder per seed, and the spread of the error rates."""

import os
import shlex
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any

from arcuate.config import Overrides, override_list
from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.evaluation.evaluate import evaluate
from arcuate.evaluation.metrics import run_rate_name
from arcuate.experiments.recipe import Recipe, load_recipe
from arcuate.experiments.train_many import Job, check_one_process, missing_training, train_jobs
from arcuate.files import read_json, to_frame
from arcuate.progress import Progress, counted, logger, percent
from arcuate.run import Run, RunLike, check_run_folder
from arcuate.training.callbacks import Stop, handle_signals
from arcuate.training.start import check_same_recipe

if TYPE_CHECKING:
    from arcuate.experiments.train import TrainResult


@dataclass(frozen=True)
class SeedRun:
    """The training of one seed, read from its run folder."""

    seed: int
    run: Run
    error: str | None = None  # why its training failed

    @property
    def missing(self) -> str | None:
        """Why it is excluded from mean and spread; None if it is trained to its end."""
        return self.error or missing_training(self.run)

    @property
    def best(self) -> dict[str, Any]:
        """The best validation: `step`, `per`, `wer`."""
        file = self.run.checkpoints / "last" / "state.json"
        best = read_json(file).get("best") if file.is_file() else None
        return best if isinstance(best, dict) else {}

    def to_dict(self) -> dict[str, Any]:
        best = {f"best_{key}": self.best.get(key) for key in ("per", "wer", "step")}
        return {"seed": self.seed, "run": str(self.run.path), "error": self.missing, **best}


@dataclass(frozen=True)
class SeedsResult:
    """Several seeds of one recipe, with mean and spread of the best PER of those that are complete."""

    path: Path
    recipe: Recipe
    seeds: tuple[SeedRun, ...]
    plan: "TrainResult | None" = None  # dry run of the first seed; None if trained
    signal: Signals | None = None  # signal that interrupted the series
    failed: Mapping[Path, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        return 128 + self.signal if self.signal else 2 if self.failed else 0

    @property
    def complete(self) -> list[SeedRun]:
        return [seed for seed in self.seeds if seed.missing is None]

    @property
    def selected_on(self) -> str | None:
        return next((seed.run.environment().get("selected_on") for seed in self.complete), None)

    @property
    def best_pers(self) -> list[float]:
        return [seed.best["per"] for seed in self.complete if seed.best.get("per") is not None]

    @property
    def missing(self) -> dict[int, str]:
        """Seeds excluded from mean and spread, with the reason."""
        return {seed.seed: reason for seed in self.seeds if (reason := seed.missing)}

    @property
    def mean_per(self) -> float | None:
        return statistics.fmean(self.best_pers) if self.best_pers else None

    @property
    def sd_per(self) -> float | None:
        return statistics.stdev(self.best_pers) if len(self.best_pers) > 1 else None

    def to_dict(self) -> dict[str, Any]:
        seeds = [seed.to_dict() for seed in self.seeds]
        if self.plan is not None:
            return {**self.plan.to_dict(), "run": str(self.path), "n_seeds": len(seeds), "seeds": seeds}
        return {
            "run": str(self.path),
            "recipe": self.recipe.name,
            "selected_on": self.selected_on,
            "n_seeds": len(seeds),
            "n_finished": len(self.complete),
            "missing": {str(seed): reason for seed, reason in self.missing.items()},
            "mean_per": self.mean_per,
            "sd_per": self.sd_per,
            "low_per": min(self.best_pers, default=None),
            "high_per": max(self.best_pers, default=None),
            "seeds": seeds,
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


def plan_seeds(
    recipe: Recipe | str | Path,
    data: Store | str | Path,
    run: RunLike,
    n_seeds: int,
    overrides: Overrides,
    from_: RunLike | None,
) -> dict[int, Job]:
    """The training of every seed, counted up from `train.seed`, into RUN/seed-K."""
    if isinstance(recipe, Recipe) or (isinstance(data, Store) and type(data) is not Store):
        raise UserError("seeds are trained in processes of their own: name recipe and store by their paths")
    base, listed = load_recipe(recipe, overrides), override_list(overrides)
    store = data.path if isinstance(data, Store) else Path(data)
    parent = None if from_ is None else os.fspath(from_)
    jobs: dict[int, Job] = {}
    for i in range(n_seeds):
        seed = base.train.seed + i
        settings = (*listed, *seed_overrides(base, i))
        jobs[seed] = Job(Run(Path(run) / f"seed-{seed}"), str(recipe), store, settings, base.train.steps, parent)
    return jobs


def train_seeds(
    jobs: Mapping[int, Job], folder: Path, resume: bool, stop: Stop | None = None, progress: Progress | None = None
) -> SeedsResult:
    """Train the seeds one after another and score each, so that they can be combined.

    A seed that fails is reported and the others continue; an interruption ends the series, and `resume` continues it.
    """
    _check_folder(folder, jobs, resume)
    first = next(iter(jobs.values()))

    def score(run: Run) -> None:
        _score(run, first.data)

    with handle_signals(stop) as stop:
        failed = train_jobs(list(jobs.values()), stop, score=score, progress=progress)
    seeds = tuple(SeedRun(seed, job.run, failed.get(job.run.path)) for seed, job in jobs.items())
    summary = SeedsResult(folder, load_recipe(first.recipe, first.overrides), seeds, None, stop.signal, failed)
    if stop.requested:
        n_own = len(seed_overrides(summary.recipe, 0))
        again = ["--seeds", str(len(jobs)), "--data", str(first.data), "--run", str(folder), "--resume"]
        words = ["arcuate", "train", first.recipe, *again, *first.overrides[:-n_own]]
        logger.info(f"continue with: {shlex.join(words)}")
    _log_summary(summary)
    return summary


def _check_folder(folder: Path, jobs: Mapping[int, Job], resume: bool) -> None:
    """Check before the first seed is trained for anything that would stop a later one."""
    check_one_process("train --seeds")
    if Run(folder).recipe_file.exists():
        raise UserError(
            f"{folder} is a run folder, but --seeds writes run folders into {folder}/seed-K; choose another --run"
        )
    if not resume:
        check_run_folder(folder)
        return
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    if other := [name for name in names if not name.startswith(("seed-", "."))]:
        raise UserError(f"{folder} contains {other[0]}, which --seeds did not write; choose another --run")
    for job in jobs.values():
        check_run_folder(job.run.path, resume=True)
        if job.run.recipe_file.is_file():
            check_same_recipe(job.run, load_recipe(job.recipe, job.overrides))


def _score(run: Run, data: Path) -> None:
    """Write results and frame scores of the best checkpoint, unless they are up to date."""
    split = str(run.environment().get("selected_on", "val"))
    results, scores = run.results_file(split, None, "json"), run.results_file(split, None, "scores.npz")
    best = run.checkpoints / "best"
    exist = results.is_file() and scores.is_file() and best.is_symlink()
    is_scored = exist and read_json(results).get("checkpoint") == best.readlink().name
    if not is_scored and SeedRun(0, run).best.get("per") is not None:
        evaluate(run, split=split, data=data, scores=scores)


def _log_summary(summary: SeedsResult) -> None:
    n_complete = len(summary.complete)
    if summary.missing:
        listed = "; ".join(f"{seed} ({reason})" for seed, reason in summary.missing.items())
        of_all = f"{n_complete} of {counted(len(summary.seeds), 'seed')}"
        logger.warning(f"{of_all} complete; mean and spread do not include {listed}")
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
