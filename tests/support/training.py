"""Helpers of the training tests."""

from pathlib import Path

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


def make_state(store: Store, recipe: Recipe, folder: Path) -> TrainingState:
    model = build_model(recipe, store, select(store, recipe.data, recipe.front_end.patch.count_frames))
    return TrainingState(model, recipe, create_run(folder, recipe, {}), "fp32")
