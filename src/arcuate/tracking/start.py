"""Which trackers a recipe asks for, and whether they can be had."""

from arcuate.environment import installed
from arcuate.errors import UserError
from arcuate.recipe import Recipe
from arcuate.run import Run
from arcuate.tracking.settings import Track
from arcuate.tracking.watchers import Backend, Say, Tracker


def wanted(track: Track) -> dict[str, str]:
    """The packages to track with, and the setting that asks for each."""
    found = {}
    if track.tensorboard.enabled:
        found["tensorboard"] = "track.tensorboard.enabled"
    if track.wandb.enabled and track.wandb.mode != "disabled":
        found["wandb"] = "track.wandb.enabled"
    return found


def check_trackers(track: Track) -> None:
    """Refuse a tracker that is not installed, before anything is written."""
    for package, setting in wanted(track).items():
        if installed(package) is None:
            raise UserError(
                f"{setting}=true needs the package {package}: pip install -e '.[track]' -c constraints.txt,"
                " or set it to false"
            )


def trackers(recipe: Recipe, run: Run, step: int, say: Say) -> list[Tracker]:
    """A watcher for each tracker of the recipe; it starts when it is entered, at the step training starts from."""

    def tensorboard() -> Backend:
        from arcuate.tracking.tensorboard import EventFiles

        return EventFiles(run, recipe, step)

    def wandb() -> Backend:
        from arcuate.tracking.wandb import TrackedRun

        return TrackedRun(run, recipe, say)

    known = {"tensorboard": ("TensorBoard", tensorboard), "wandb": ("Weights & Biases", wandb)}
    return [
        Tracker(known[package][0], package, known[package][1], recipe.track.samples, say)
        for package in wanted(recipe.track)
    ]
