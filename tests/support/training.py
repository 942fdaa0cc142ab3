"""Helpers of the training tests."""

from pathlib import Path

from arcuate.data.batching import PlannedBatches, make_plan
from arcuate.data.selection import select
from arcuate.data.store import Store
from arcuate.experiments.recipe import Recipe, load_recipe
from arcuate.experiments.train import build_model
from arcuate.run import create_run
from arcuate.training.state import TrainingState

DETERMINISTIC = [
    "encoder.width=16",
    "encoder.dropout=0",
    "front_end.session_layer.dropout=0",
    "train.clip_norm=null",
]


def make_recipe(*overrides: str) -> Recipe:
    return load_recipe("tiny", [*DETERMINISTIC, *overrides])


def small_overrides(name: str) -> list[str]:
    """Overrides that shrink any packaged recipe to the small cohort, with stages of one step."""
    recipe = load_recipe(name)
    small = ["encoder.width=16", "data.release=null", "data.workers=0", "runtime.device=auto"]
    small += ["encoder.n_heads=2"] if recipe.encoder.kind == "transformer" else []
    small += ["data.batching.n_trials=2" if recipe.data.batching.kind == "sessions" else "data.batching.batch_size=4"]
    return small + [f"stages.{s.name}.{value}" for s in recipe.stages for value in ("epochs=null", "steps=1")]


def make_state(store: Store, recipe: Recipe, folder: Path, precision: str = "fp32") -> TrainingState:
    model = build_model(recipe, store, select(store, recipe.data, recipe.front_end.patch.count_frames))
    return TrainingState(model, recipe, create_run(folder, recipe, {}), precision)


def planned_batches(store: Store, recipe: Recipe, share: tuple[int, int] = (0, 1)) -> PlannedBatches:
    """The training sequence of a recipe, or the part of one process in it."""
    selection = select(store, recipe.data, recipe.front_end.patch.count_frames)
    plan = make_plan(selection.train, recipe.data.batching, recipe.data.seed)
    return PlannedBatches(store, selection.train, plan, selection.sessions, recipe.front_end.statistics_spec, share)
