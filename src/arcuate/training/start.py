"""Where training begins: anew, from another run's weights, or exactly where it stopped."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arcuate.config import diff
from arcuate.errors import UserError
from arcuate.models.config import ModelConfig
from arcuate.models.io import load_model
from arcuate.run import Run, create_run, find_checkpoint, is_untouched
from arcuate.training.checkpoint import (
    Checkpoint,
    candidates,
    load_checkpoint,
    mend_bests,
    point,
    sweep_up,
)
from arcuate.training.config import DESCRIPTIVE_KEYS, TrainingConfig, read_config
from arcuate.training.distributed import World
from arcuate.training.optim import restore_optimizer
from arcuate.training.state import Training, fitting

FREE = ("runtime", "track", "name", "summary", "notes")  # may differ between a run and its continuation
Say = Callable[[str], None]


@dataclass(frozen=True)
class Start:
    """What was asked for: go on with the run, or begin with the weights of another one, or neither."""

    resume: bool = False
    parent: Path | None = None
    keep_optimizer: bool = False


def begin(training: Training, start: Start, environment: dict[str, Any], world: World, say: Say) -> None:
    """Bring training to where it begins. Every process reads first; nothing is written before all have agreed."""
    found: Checkpoint | None = None
    say = say if world.writes else lambda line: None
    with world.agreeing():
        if start.resume:
            found = go_on(training, environment, say)
        elif start.parent is not None:
            start_from(training, start.parent, start.keep_optimizer)
    with world.agreeing():
        if world.writes:
            write_start(training, found, start.resume, environment)


def write_start(
    training: Training, found: Checkpoint | None, resume: bool, environment: dict[str, Any]
) -> None:
    """The run folder as it has to be when the first step is taken."""
    run = training.run
    if found is not None:
        mend_bests(run, training.best, training.bests)
        if not training.finished:
            training.cut_files(found)
            point(run, "last", found.folder)
            sweep_up(run)
    elif resume and run.recipe_file.is_file() and not is_untouched(run):
        run.metrics_file.write_text("")
        run.incidents_file.write_text("")
    else:
        create_run(run.path, training.recipe, environment, resume)
        sweep_up(run)


def go_on(training: Training, environment: dict[str, Any], say: Say) -> Checkpoint | None:
    """Restore the newest checkpoint that can be; None where there is nothing to go on from."""
    run = training.run
    if not run.path.is_dir() or not run.recipe_file.is_file() or is_untouched(run):
        return None
    refuse_calibrated(run)
    refuse_other_recipe(run, training.recipe)
    refuse_other_data(run, environment)
    problems = []
    for folder in candidates(run):
        try:
            checkpoint = load_checkpoint(folder)
            training.refuse_lost_rows(checkpoint)
            training.restore(checkpoint)
        except (UserError, OSError) as error:
            problems.append(str(error))
            continue
        for problem in problems:
            say(f"{problem}; using an earlier checkpoint")
        if not training.finished:
            say(f"going on after step {training.step}")
        return checkpoint
    if problems:
        raise UserError(
            f"no checkpoint of {run.path} is whole and fits its metrics.jsonl, so it cannot be resumed"
            f" ({problems[0]}); start a new run"
        )
    return None


def refuse_other_recipe(run: Run, recipe: TrainingConfig) -> None:
    changed = [
        c
        for c in diff(read_config(run), recipe, ignore=DESCRIPTIVE_KEYS)
        if c.path.split(".")[0] not in FREE and c.path != "data.workers"
    ]
    if changed:
        shown = ", ".join(f"{c.path} {c.before} → {c.after}" for c in changed[:3])
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise UserError(
            f"{run.path} was trained with another recipe ({shown}{more}); resume it with the recipe"
            f" {run.recipe_file}, or start a new run with --from {run.path}"
        )


def refuse_calibrated(run: Run) -> None:
    """Calibration learns from another mix of trials and holds layers still: ordinary training cannot go on with it."""
    if run.environment_file.is_file() and run.environment().get("calibration"):
        raise UserError(
            f"{run.path} was made by arcuate calibrate and has come to its end; train on in a new run with"
            f" --from {run.path}"
        )


def refuse_other_data(run: Run, environment: dict[str, Any]) -> None:
    if run.data().get("hashes") != environment["data"].get("hashes"):
        raise UserError(
            f"{run.path} was trained on other data (the content hashes differ); resume it with the same"
        )


def check_parent(parent: str | None, resume: bool, keep_optimizer: bool) -> Path | None:
    """The checkpoint folder that RUN, RUN@best or RUN@last names."""
    if parent is None:
        if keep_optimizer:
            raise UserError("--keep-optimizer belongs to --from; name the run to take the optimizer from")
        return None
    if resume:
        raise UserError(
            "--resume goes on with a run, --from starts a new one from another: choose one of them"
        )
    return find_checkpoint(*split_parent(parent))


def split_parent(parent: str) -> tuple[Path, str]:
    """RUN@WHICH as its parts. A folder's own name may hold an @, so a folder that is there is taken whole."""
    path, _, which = parent.rpartition("@")
    if Path(parent).is_dir() or not (path and re.fullmatch(r"|best|last|step-\d+", which)):
        return Path(parent), "best"
    return Path(path), which or "best"


def misfit(what: str, theirs: ModelConfig, ours: ModelConfig) -> str:
    """What differs, and what to do about it."""
    if what == "sessions":
        names = sorted(set(theirs.sessions) ^ set(ours.sessions))
        listed = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
        differ = f"its sessions differ ({listed or 'in their order'})"
        return f"{differ}; train on the same sessions (data.sessions), or add a day with arcuate calibrate"
    if what == "n_channels":
        return f"it has {theirs.n_channels} channels and the data {ours.n_channels}; take data with the same channels"
    return f"its {what} differ; start from the parent's own recipe (recipe.yaml in its run folder)"


def start_from(training: Training, parent: Path, keep_optimizer: bool) -> None:
    """Another run's weights as the starting point of this one; step, data and schedule start at 0."""
    loaded = load_model(parent)
    if loaded.config != training.model.config:
        theirs, ours = loaded.config, training.model.config
        what = next(
            n
            for n in ("n_channels", "sessions", "classes", "settings")
            if getattr(theirs, n) != getattr(ours, n)
        )
        raise UserError(
            f"the model in {parent} does not fit this recipe and data: {misfit(what, theirs, ours)}"
        )
    training.model.load_state_dict(loaded.state_dict())
    if keep_optimizer:
        checkpoint = load_checkpoint(parent)
        with fitting(checkpoint):
            restore_optimizer(training.optimizer, checkpoint.tensors())
