"""Checkpoints on their own: which one is best, which one to rewind to, and which one cannot be trusted."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from arcuate.store import Store
from arcuate.training.checkpoint import mend_best, point
from arcuate.training.state import Training
from test_training import recipe_of, training_of


@pytest.fixture
def training(cohort_store: Path, tmp_path: Path) -> Training:
    return training_of(Store.open(cohort_store), recipe_of(), tmp_path / "run")


def save_at(
    training: Training, step: int, value: float, per: float | None = None, scheduled: bool = True
) -> Path:
    """A checkpoint of this step whose weights are all this value, and `best` if this PER is the best so far."""
    training.step, training.position = step, training.position + 1
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.fill_(value)
    improved = per is not None and training.best.improve(step, per, None, training.position)
    folder = training.run.checkpoints / training.save(scheduled)
    if improved:
        point(training.run, "best", folder)
    return folder


def value_in(training: Training, which: str) -> float:
    weights = load_file(training.run.checkpoints / which / "model.safetensors")
    return float(weights["head.bias"].flatten()[0])


def test_a_step_reached_again_leaves_the_best_weights_alone(training: Training) -> None:
    """After a rewind the same step comes again, with other weights that were not validated as the best."""
    save_at(training, 0, 0.0)
    save_at(training, 4, 1.0, per=0.5)
    save_at(training, 4, 2.0, per=0.6)
    assert (value_in(training, "best"), value_in(training, "last")) == (1.0, 2.0)
    save_at(training, 8, 3.0, per=0.7)
    assert value_in(training, "best") == 1.0
    save_at(training, 12, 4.0, per=0.1)
    assert value_in(training, "best") == 4.0
    save_at(training, 16, 5.0)
    assert not list(training.run.checkpoints.glob("best-*"))  # nothing that is no longer the best stays


def test_a_checkpoint_that_a_signal_asked_for_is_nothing_to_rewind_to(training: Training) -> None:
    save_at(training, 0, 0.0)
    save_at(training, 4, 1.0)
    save_at(training, 6, 1.5, scheduled=False)
    assert training.good == [0, 4]
    assert training.run.checkpoints.joinpath("last").readlink().name == "step-00000006"
    save_at(training, 8, 2.0)
    assert training.good == [4, 8]


def test_best_is_linked_again_where_a_run_was_killed_before_it_was(training: Training) -> None:
    save_at(training, 4, 1.0, per=0.5)
    save_at(training, 8, 2.0, per=0.4)
    best = training.run.checkpoints / "best"
    point(training.run, "best", training.run.checkpoints / "step-00000004")  # as before the last validation
    mend_best(training.run, training.best.step, training.best.position)
    assert value_in(training, "best") == 2.0
    best.unlink()
    mend_best(training.run, training.best.step, training.best.position)
    assert value_in(training, "best") == 2.0


@pytest.mark.parametrize(("per", "expected"), [(0.4, 2.0), (0.6, 1.0)])
def test_of_two_checkpoints_of_a_step_the_one_that_was_validated_is_linked(
    training: Training, per: float, expected: float
) -> None:
    save_at(training, 4, 1.0, per=0.5)
    save_at(training, 4, 2.0, per=per)  # makes room: best-00000004 holds 1.0 until it is pruned
    (training.run.checkpoints / "best").unlink()
    mend_best(training.run, training.best.step, training.best.position)
    assert value_in(training, "best") == expected
