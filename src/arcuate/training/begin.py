"""Where training begins: anew, from another run's weights, or exactly where it stopped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from arcuate.errors import UserError
from arcuate.models.files import load_model
from arcuate.recipe import Recipe
from arcuate.recipe_diff import diff
from arcuate.run import Run
from arcuate.training.checkpoint import find_checkpoint, load_checkpoint, mend_best, newest_good, point
from arcuate.training.optimizer import restore_optimizer
from arcuate.training.state import Training
from arcuate.training.world import World

FREE = ("runtime", "track", "name", "summary", "notes")  # may differ between a run and its continuation


def go_on(
    run: Run,
    recipe: Recipe,
    environment: dict[str, Any],
    training_of: Callable[[Run], Training],
    world: World,
    say: Callable[[str], None],
) -> Training | None:
    """The state of a run at its newest good checkpoint; None where there is nothing to go on from."""
    if not run.recipe_file.is_file():
        if run.path.is_dir() and any(run.path.iterdir()):
            raise UserError(
                f"{run.path} is not a run folder, so there is nothing to resume; choose another --run"
            )
        return None
    refuse_other_recipe(run, recipe)
    refuse_other_data(run, environment)
    found, problems = newest_good(run)
    if world.writes:
        for problem in problems:
            say(f"{problem}; using an earlier checkpoint")
    if found is None:
        if problems:
            raise UserError(f"no checkpoint of {run.path} is whole, so it cannot be resumed; start a new run")
        if world.writes:
            run.metrics_file.write_text("")
            run.incidents_file.write_text("")
        return None
    training = training_of(run)
    training.restore(found)
    if world.writes:
        mend_best(run, training.best.step)
    if world.writes and training.step < recipe.train.steps:
        training.cut_files(found)
        point(run, "last", found.folder)
        say(f"going on after step {training.step}")
    world.wait()
    return training


def refuse_other_recipe(run: Run, recipe: Recipe) -> None:
    changed = [
        c for c in diff(run.recipe(), recipe) if c.path.split(".")[0] not in FREE and c.path != "data.workers"
    ]
    if changed:
        shown = ", ".join(f"{c.path} {c.before} → {c.after}" for c in changed[:3])
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise UserError(
            f"{run.path} was trained with another recipe ({shown}{more}); resume it with the recipe"
            f" {run.recipe_file}, or start a new run with --from {run.path}"
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
    path, _, which = parent.partition("@")
    return find_checkpoint(Path(path), which or "best")


def start_from(training: Training, parent: Path, keep_optimizer: bool) -> None:
    """Another run's weights as the starting point of this one; step, data and schedule start at 0."""
    loaded = load_model(parent)
    if loaded.card != training.model.card:
        theirs, ours = loaded.card, training.model.card
        what = next(
            n
            for n in ("n_channels", "sessions", "classes", "settings")
            if getattr(theirs, n) != getattr(ours, n)
        )
        raise UserError(f"the model in {parent} does not fit this recipe and data: its {what} differ")
    training.model.load_state_dict(loaded.state_dict())
    if keep_optimizer:
        tensors = load_checkpoint(parent).tensors()
        memory = {n: t for n, t in tensors.items() if n.startswith("optimizer.")}
        restore_optimizer(training.optimizer, memory)
