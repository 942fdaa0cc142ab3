"""Every recipe takes a step in every precision, in each of its stages, with gradients close to those of fp32."""

from functools import partial
from pathlib import Path

import pytest
import torch

from arcuate.data.store import Store
from arcuate.experiments.recipe import load_recipe, recipe_names
from arcuate.training.environment import Distributed
from arcuate.training.modes import Modes
from arcuate.training.step import compute_gradients, encode_for_training
from support.training import make_state, planned_batches, small_overrides

CPU = torch.device("cpu")
QUICK = ("tiny", "tiny-transformer", "mode-ssm-small")  # one of each architecture
NAMES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough)
    for name in recipe_names()
    if name.startswith(("b2t25", "mode-ssm", "tiny"))
]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", NAMES)
def test_every_stage_steps_in_mixed_precision(name: str, precision: str, cohort_store: Path, tmp_path: Path) -> None:
    store, recipe = Store.open(cohort_store), load_recipe(name, small_overrides(name))
    states = [make_state(store, recipe, tmp_path / kind, kind) for kind in ("fp32", precision)]
    planned = planned_batches(store, recipe)
    for stage in range(max(len(recipe.stages), 1)):
        metrics = []
        for state in states:
            if state.model.mode is not None:
                state.modes = Modes({t.id: 0.5 for t in planned.trials})
            state.progress.mixed_precision_on = True
            state.model.train()
            encode = partial(encode_for_training, state.model)
            metrics.append(compute_gradients(state, encode, [planned[stage]], CPU, Distributed()).read())
            state.scaler.update() if state.scaler.is_enabled() else None
            if state.stage is not None:
                state.start_next_stage()
        full, mixed = metrics
        assert mixed.loss == pytest.approx(full.loss, rel=0.05)
        assert mixed.overflowed or mixed.grad_norm == pytest.approx(full.grad_norm, rel=0.2)
