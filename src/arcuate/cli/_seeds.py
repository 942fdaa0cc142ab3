"""`arcuate train --seeds`: one recipe several times over, each a full run folder, and what they say together."""

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arcuate.cli.console import counted, emit_json, percent, progress, say
from arcuate.cli.watch import TrainingDisplay
from arcuate.errors import UserError
from arcuate.evaluation.evaluate import evaluate
from arcuate.experiments.multi_seed import seed_settings, spread
from arcuate.experiments.recipe import load_recipe
from arcuate.experiments.train import train
from arcuate.files import read_json
from arcuate.run import Run, refuse_taken
from arcuate.training.start import check_same_recipe


@dataclass(frozen=True)
class Asked:
    """What was asked for on the command line."""

    recipe: str
    overrides: Sequence[str]
    data: Path
    run: Path
    resume: bool = False
    parent: str | None = None
    keep_optimizer: bool = False
    dry_run: bool = False


def train_run(asked: Asked) -> dict[str, Any]:
    display = TrainingDisplay()
    result = train(
        *(asked.recipe, asked.data, asked.run),
        overrides=asked.overrides,
        resume=asked.resume,
        parent=asked.parent,
        keep_optimizer=asked.keep_optimizer,
        dry_run=asked.dry_run,
        callbacks=[display],
        progress=display.report,
    )
    return {**result.to_dict(), "exit_code": 128 + result.signal if result.signal else 0}


def train_seeds_command(asked: Asked, n_seeds: int, as_json: bool) -> int:
    planned = plan(asked, n_seeds)
    refuse_early(asked, planned)
    told = dry(asked, planned) if asked.dry_run else train_all(asked, planned)
    if as_json:
        emit_json({k: v for k, v in told.items() if k != "exit_code"})
    return int(told["exit_code"])


def plan(asked: Asked, n_seeds: int) -> dict[int, Asked]:
    """What to train, by seed: the recipe's own and those after it, in RUN/seed-<seed>."""
    recipe = load_recipe(asked.recipe, asked.overrides)
    planned = {}
    for i in range(n_seeds):
        seed = recipe.train.seed + i
        overrides = [*asked.overrides, *seed_settings(recipe, i)]
        planned[seed] = replace(asked, overrides=overrides, run=asked.run / f"seed-{seed}")
    return planned


def refuse_early(asked: Asked, planned: dict[int, Asked]) -> None:
    """What would stop the third seed is told before the first is trained."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            "--seeds trains one run after the other in one process; start it without torchrun, or start each"
            " seed by itself with train.seed=K --run RUN/seed-K"
        )
    for wanted in planned.values():
        load_recipe(wanted.recipe, wanted.overrides)
    if asked.dry_run:
        return
    if Run(asked.run).recipe_file.exists():
        raise UserError(
            f"{asked.run} is a run folder, and --seeds writes run folders into {asked.run}/seed-K;"
            " choose another --run"
        )
    if not asked.resume:
        refuse_taken(asked.run)
        return
    if asked.run.is_dir():
        refuse_strangers(asked.run)
    for wanted in planned.values():
        refuse_taken(wanted.run, resume=True)
        if Run(wanted.run).recipe_file.is_file():
            check_same_recipe(Run(wanted.run), load_recipe(wanted.recipe, wanted.overrides))


def refuse_strangers(folder: Path) -> None:
    strange = sorted(
        p.name for p in folder.iterdir() if not p.name.startswith("seed-") and not p.name.startswith(".")
    )
    if strange:
        raise UserError(
            f"{folder} holds {strange[0]}, which --seeds did not write; choose another --run for the seeds"
        )


def dry(asked: Asked, planned: dict[int, Asked]) -> dict[str, Any]:
    first, *_ = planned.values()
    told = train_run(first)
    runs = [{"seed": seed, "run": str(wanted.run)} for seed, wanted in planned.items()]
    say(f"{counted(len(planned), 'seed')}: {runs[0]['run']} … {runs[-1]['run']}")
    return {**told, "run": str(asked.run), "n_seeds": len(planned), "seeds": runs, "exit_code": 0}


def train_all(asked: Asked, planned: dict[int, Asked]) -> dict[str, Any]:
    """Seed after seed; one that fails is told and does not keep the others from training."""
    rows: list[dict[str, Any]] = []
    exit_code = 0
    for n, (seed, wanted) in enumerate(planned.items(), start=1):
        say(f"seed {seed} ({n} of {len(planned)}): {wanted.run}")
        row = train_one(wanted)
        rows.append({"seed": seed, **row})
        gc.collect()  # the model before this one
        exit_code = int(row["exit_code"])
        if exit_code > 128:  # a signal: whoever asked wants no other seed either
            say(f"the seeds go on with: {again(asked, len(planned))}")
            break
    if exit_code <= 128:
        exit_code = max(int(row["exit_code"]) for row in rows)
    summary = summarise(asked, rows)
    tell(asked, summary, len(planned))
    return {**summary, "n_seeds": len(planned), "exit_code": exit_code}


def train_one(asked: Asked) -> dict[str, Any]:
    """Train one seed and score it, so that seeds can be combined as they are."""
    try:
        told = train_run(asked)
        told = {"error": None, "exit_code": 0, **told}
        if told["exit_code"] == 0 and told["best_per"] is not None:
            score(asked, str(told["selected_on"]))
    except UserError as error:
        say(f"error: {error}")
        return {"run": str(asked.run), "best_per": None, "error": str(error), "exit_code": 2}
    return told


def score(asked: Asked, split: str) -> None:
    """Results and frame scores of the best checkpoint, unless they are there."""
    run = Run(asked.run)
    results, scores = run.results_file(split, None, "json"), run.results_file(split, None, "scores.npz")
    best = run.checkpoints / "best"
    there = results.is_file() and scores.is_file() and best.is_symlink()
    if there and read_json(results).get("checkpoint") == best.readlink().name:
        return
    with progress("scoring trials") as report:
        evaluate(run, split=split, data=asked.data, scores=scores, progress=report)


def summarise(asked: Asked, rows: list[dict[str, Any]]) -> dict[str, Any]:
    seeds = [
        {k: v for k, v in row.items() if k not in ("exit_code", "recipe", "n_parameters")} for row in rows
    ]
    done = [row for row in rows if row["exit_code"] == 0]
    known = done[0] if done else {}
    return {
        "run": str(asked.run),
        "recipe": load_recipe(asked.recipe, asked.overrides).name,
        "n_parameters": known.get("n_parameters"),
        "selected_on": known.get("selected_on"),
        "n_finished": len(done),
        **spread([row["best_per"] for row in done if row["best_per"] is not None]),
        "seeds": seeds,
    }


def tell(asked: Asked, summary: dict[str, Any], n_planned: int) -> None:
    """The result for a person, on stderr as all that training says."""
    n_done = summary["n_finished"]
    if n_done < n_planned:
        say(f"{n_done} of {counted(n_planned, 'seed')} came to their end")
    if summary["mean_per"] is None:
        return
    sd, low, high = summary["sd_per"], summary["low_per"], summary["high_per"]
    around = "" if sd is None else f" ± {100 * sd:.1f} (SD; {percent(low)} to {percent(high)})"
    said = f"best {summary['selected_on']} PER {percent(summary['mean_per'])}{around}"
    say(f"{counted(n_done, 'seed')}: {said}")
    if n_done > 1:
        split = summary["selected_on"]
        say(f"next: arcuate combine {asked.run}/seed-* --method geometric --split {split}")


def again(asked: Asked, n_seeds: int) -> str:
    settings = "".join(f" {override}" for override in asked.overrides)
    return f"arcuate train {asked.recipe} --seeds {n_seeds} --data {asked.data} --run {asked.run} --resume{settings}"
