"""Checkpoints on their own: which one is best, which one to rewind to, and which one cannot be trusted."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.files import append_jsonl, write_json
from arcuate.run import find_checkpoint
from arcuate.training.checkpoint import load_checkpoint, mend_best, point, seal
from arcuate.training.start import go_on, split_parent, start_from
from arcuate.training.state import Training
from support.training import recipe_of, training_of


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
    assert training.good == [0, 4, 8]  # the first one too, until something is learned


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


def change_state(folder: Path, change: Callable[[dict[str, Any]], Any], sealed: bool) -> None:
    """Change the state of a checkpoint as an accident would, or, sealed, as somebody who knows the format."""
    state = json.loads((folder / "state.json").read_text())
    if sealed:
        del state["checksum"]
    change(state)
    write_json(folder / "state.json", seal(state) if sealed else state)


def going_on(training: Training) -> tuple[int, list[str]]:
    """Resume this run: the step it goes on from, and what is said about it."""
    said: list[str] = []
    environment = {"data": {"hashes": "x"}}
    write_json(training.run.environment_file, environment)
    found = go_on(training, environment, said.append)
    assert found is not None
    return found.step, said


def test_a_changed_state_is_noticed(training: Training) -> None:
    save_at(training, 4, 1.0)
    folder = save_at(training, 8, 2.0)
    change_state(folder, lambda s: s.update(rate_scale=0.25), sealed=False)
    step, said = going_on(training)
    assert step == 4
    assert "checksum" in said[0] and "earlier" in said[0]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("no plateaus", lambda s: s.update(plateaus=[])),
        ("one plateau", lambda s: s.update(plateaus=s["plateaus"][:1])),
        ("plateau of text", lambda s: s.update(plateaus=["a", "b"])),
        ("best as a list", lambda s: s.update(best=[1, 2])),
        ("best of text", lambda s: s["best"].update(step="four")),
        ("step beyond numbers", lambda s: s.update(step=1e999)),
        ("step below zero", lambda s: s.update(step=-8)),
        ("step of another folder", lambda s: s.update(step=4)),
        ("huge position", lambda s: s.update(position=10**30)),
        ("position missing", lambda s: s.pop("position")),
        ("validations of three", lambda s: s.update(validations=[[1, 2, 3]])),
        ("tally of text", lambda s: s["tally"].update(loss="high")),
        ("tally as a number", lambda s: s.update(tally=3)),
        ("guard as null", lambda s: s.update(guard=None)),
        ("guard with more", lambda s: s["guard"].update(settings=1)),
        ("guard with less", lambda s: s["guard"].pop("losses")),
        ("guard of text", lambda s: s["guard"].update(losses=["a"])),
        ("guard count of text", lambda s: s["guard"].update(n_high="a")),
        ("good of text", lambda s: s.update(good=["x"])),
        ("averages as a list", lambda s: s.update(averages=[])),
        ("scaler as text", lambda s: s.update(scaler="x")),
        ("rows below zero", lambda s: s["files_at"].update(metrics=-1)),
        ("rows as null", lambda s: s.update(files_at=None)),
        ("no files", lambda s: s.update(files={})),
        ("a file elsewhere", lambda s: s["files"].update({"../../recipe.yaml": "0"})),
        ("one value more", lambda s: s.update(extra=1)),
    ],
)
def test_a_state_of_wrong_shape_counts_as_damaged(
    training: Training, name: str, change: Callable[[dict[str, Any]], Any]
) -> None:
    save_at(training, 4, 1.0)
    change_state(save_at(training, 8, 2.0), change, sealed=True)
    step, said = going_on(training)
    assert step == 4
    assert "using an earlier checkpoint" in said[0]


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, "9" * 5000, '{"a": 1}', "\x00", '{"step": NaN}'])
def test_a_state_that_is_none_counts_as_damaged(training: Training, text: str) -> None:
    save_at(training, 4, 1.0)
    (save_at(training, 8, 2.0) / "state.json").write_text(text)
    assert going_on(training)[0] == 4


def test_rows_that_were_lost_lead_to_an_earlier_checkpoint_or_a_refusal(training: Training) -> None:
    metrics = training.run.metrics_file
    save_at(training, 0, 0.0)
    append_jsonl(metrics, {"step": 4})
    save_at(training, 4, 1.0)
    append_jsonl(metrics, {"step": 8})
    save_at(training, 8, 2.0)
    first, second = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(first + second[:3])
    step, said = going_on(training)
    assert step == 4 and "lost rows" in said[0]
    shutil.rmtree(training.run.checkpoints / "step-00000000")  # the one that counts on no row
    metrics.write_bytes(b"#" * len(first))  # as long as it was, but no whole line
    with pytest.raises(UserError, match="whole and fits"):
        going_on(training)
    assert metrics.read_bytes() == b"#" * len(first)


def test_cutting_never_pads(training: Training) -> None:
    append_jsonl(training.run.metrics_file, {"step": 4})
    checkpoint = load_checkpoint(save_at(training, 4, 1.0))
    training.run.metrics_file.write_bytes(b"")
    with pytest.raises(UserError, match="lost rows"):
        training.cut_files(checkpoint)
    assert training.run.metrics_file.read_bytes() == b""


def test_another_optimizers_memory_is_refused(cohort_store: Path, tmp_path: Path, training: Training) -> None:
    for parameter in training.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    training.optimizer.step()
    folder = save_at(training, 4, 1.0)
    other = training_of(
        Store.open(cohort_store), recipe_of("optimizer={kind: sgd, momentum: 0.9}"), tmp_path / "other"
    )
    with pytest.raises(UserError, match="SGD"):
        start_from(other, folder, keep_optimizer=True)


@pytest.mark.parametrize(
    ("given", "path", "which"),
    [
        ("me@lab/r@best", "me@lab/r", "best"),
        ("me@lab/r", "me@lab/r", "best"),
        ("r@last", "r", "last"),
        ("r@", "r", "best"),
        ("r@step-00000004", "r", "step-00000004"),
        ("there@last", "there@last", "best"),
        ("@last", "@last", "best"),
        ("me@home/r", "me@home/r", "best"),
    ],
)
def test_a_parent_may_have_an_at_in_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, path: str, which: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("me@lab/r", "there@last"):
        Path(folder).mkdir(parents=True)
    assert split_parent(given) == (Path(path), which)


def test_a_link_that_leads_nowhere_is_not_offered(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/best").symlink_to("step-00000009")
    with pytest.raises(UserError, match="has no checkpoint 'best'; it has none yet"):
        find_checkpoint(tmp_path)
