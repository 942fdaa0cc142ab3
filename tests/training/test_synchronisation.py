"""A training step never waits for the device, except to read its metrics once."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

from arcuate.data.store import Store
from arcuate.experiments.recipe import load_recipe, recipe_names
from arcuate.training.environment import Distributed
from arcuate.training.modes import Modes
from arcuate.training.optim import typical_gradient
from arcuate.training.step import apply_update, compute_gradients, encode_for_training, finish_step
from support.devices import CountWaitingCopies, DeviceTensor, counted_reads, on_device
from support.training import make_state, planned_batches, small_overrides

MASKED = [
    "augment={white_noise_sd: 0.1, offset_sd: 0.1, random_cut: 3}",
    "augment.time_masks={n_masks: 2, max_bins: 5}",
    "augment.feature_masks={n_masks: 2, max_channels: 4}",
]
CASES = {
    **{name: [] for name in recipe_names() if not name.startswith("diary-")},
    "tiny all augmentation": MASKED,
    "tiny bidirectional": ["encoder.bidirectional=true"],
    "tiny rolling": ["front_end.normalise=rolling"],
}


@pytest.mark.parametrize("case", CASES)
def test_one_read_per_step(case: str, cohort_store: Path, tmp_path: Path) -> None:
    store = Store.open(cohort_store)
    name = case.split(" ")[0]
    recipe = load_recipe(name, [*small_overrides(name), *CASES[case]])
    state, planned = make_state(store, recipe, tmp_path / "run"), planned_batches(store, recipe)
    if state.model.mode is not None:
        state.modes = Modes({t.id: 0.5 for t in planned.trials})
    for stage in range(max(len(state.recipe.stages), 1)):
        batch = on_device(planned[stage])
        state.model.train()
        with counted_reads() as reads:
            encode = partial(encode_for_training, state.model)
            computed = compute_gradients(state, encode, [batch], torch.device("cpu"), Distributed())
            assert isinstance(computed.values, DeviceTensor)  # the step was computed from tensors on the device
            assert dict(reads) == {}
            computed.read()
            assert sum(reads.values()) == 1, reads
            apply_update(state, measure=True)
            finish_step(state)
            assert sum(reads.values()) == 1, reads
            again = compute_gradients(state, encode, [batch], torch.device("cpu"), Distributed())
            assert sum(reads.values()) == 1, reads
        assert again.read().update_ratio is not None  # the size of the update comes with the next metrics
        if state.stage is not None:
            state.start_next_stage()


@pytest.mark.parametrize("name", ["tiny-transformer", pytest.param("mode-ssm-small", marks=pytest.mark.thorough)])
def test_no_copy_to_the_device_waits(
    name: str, monkeypatch: pytest.MonkeyPatch, cohort_store: Path, tmp_path: Path
) -> None:
    """In the branches of an accelerator, which the meta device takes; it has no CTC, random generator and autocast."""
    made = torch.Generator

    class Generator(made):  # type: ignore[valid-type, misc]
        def __new__(cls, device: object = None) -> torch.Generator:
            return made.__new__(made)

    store, device = Store.open(cohort_store), torch.device("meta")
    recipe = load_recipe(name, [*small_overrides(name), *MASKED])
    state, planned = make_state(store, recipe, tmp_path / "run"), planned_batches(store, recipe)
    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)
    monkeypatch.setattr(torch, "autocast", lambda *arguments, **options: nullcontext())
    monkeypatch.setattr(torch.nn.functional, "ctc_loss", lambda log_probs, *rest, **options: log_probs.sum((0, 2)))
    state.model.to(device)
    state.modes = Modes({t.id: 0.5 for t in planned.trials})
    encode = partial(encode_for_training, state.model)
    for stage in range(max(len(recipe.stages), 1)):
        batch = planned[stage].to(device)
        compute_gradients(state, encode, [batch], device, Distributed())  # constants are copied once
        with CountWaitingCopies() as copies:
            compute_gradients(state, encode, [batch], device, Distributed())
        assert copies.n_copies and not copies.found, copies.found
        if state.stage is not None:
            state.start_next_stage()


def test_the_size_of_gradients_is_one_read(cohort_store: Path, tmp_path: Path) -> None:
    """It is computed in runs that are short for their updates; a fused optimizer counts its steps on the device."""
    store = Store.open(cohort_store)
    state = make_state(store, load_recipe("tiny", small_overrides("tiny")), tmp_path / "run")
    state.model.train()
    encode = partial(encode_for_training, state.model)
    for group in state.optimizer.param_groups:
        group["lr"] = 1e-3
    compute_gradients(state, encode, [planned_batches(store, state.recipe)[0]], torch.device("cpu"), Distributed())
    apply_update(state)
    expected = typical_gradient(state.optimizer)
    for values in state.optimizer.state.values():
        values.update({name: tensor.as_subclass(DeviceTensor) for name, tensor in values.items()})
    with counted_reads() as reads:
        assert typical_gradient(state.optimizer) == expected is not None
    assert sum(reads.values()) == 1, reads
