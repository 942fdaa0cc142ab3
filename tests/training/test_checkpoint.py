"""Checkpoints: the best one, rewind targets, and damaged ones."""

import errno
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from arcuate.config import to_yaml
from arcuate.data.store import Store
from arcuate.errors import UserError
from arcuate.files import append_jsonl, write_json, write_text
from arcuate.run import split_parent
from arcuate.training.checkpoint import Best, add_checksum, link, load_checkpoint, repair_best_links
from arcuate.training.environment import Distributed
from arcuate.training.start import Start, resume, start_from, start_run
from arcuate.training.state import TrainingState
from support.training import make_recipe, make_state


@pytest.fixture
def state(cohort_store: Path, tmp_path: Path) -> TrainingState:
    return make_state(Store.open(cohort_store), make_recipe(), tmp_path / "run")


def save_at(state: TrainingState, step: int, value: float, per: float | None = None, scheduled: bool = True) -> Path:
    """Save a checkpoint of this step with all weights equal to `value`, linked as `best` if its PER is the lowest."""
    state.progress.step, state.progress.position = step, state.progress.position + 1
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.fill_(value)
    improved = per is not None and state.progress.best.update(Best(step, per, None, state.progress.position))
    folder = state.run.checkpoints / state.save(scheduled)
    if improved:
        link(state.run, "best", folder)
    return folder


def value_in(state: TrainingState, which: str) -> float:
    weights = load_file(state.run.checkpoints / which / "model.safetensors")
    return float(weights["head.bias"].flatten()[0])


def test_a_step_repeated_after_a_rewind_keeps_the_best_weights(state: TrainingState) -> None:
    """The weights of the repeated step are not those that were validated as the best."""
    save_at(state, 0, 0.0)
    save_at(state, 4, 1.0, per=0.5)
    save_at(state, 4, 2.0, per=0.6)
    assert (value_in(state, "best"), value_in(state, "last")) == (1.0, 2.0)
    save_at(state, 8, 3.0, per=0.7)
    assert value_in(state, "best") == 1.0
    save_at(state, 12, 4.0, per=0.1)
    assert value_in(state, "best") == 4.0
    save_at(state, 16, 5.0)
    assert not list(state.run.checkpoints.glob("best-*"))  # the former best is pruned


def test_unscheduled_checkpoint_is_not_a_rewind_target(state: TrainingState) -> None:
    save_at(state, 0, 0.0)
    save_at(state, 4, 1.0)
    save_at(state, 6, 1.5, scheduled=False)
    assert state.guard.memory.targets == [0, 4]
    assert state.run.checkpoints.joinpath("last").readlink().name == "step-00000006"
    save_at(state, 8, 2.0)
    assert state.guard.memory.targets == [0, 4, 8]  # the first one too, until something is learnt


def test_missing_or_outdated_best_link_is_repaired(state: TrainingState) -> None:
    save_at(state, 4, 1.0, per=0.5)
    save_at(state, 8, 2.0, per=0.4)
    best = state.run.checkpoints / "best"
    link(state.run, "best", state.run.checkpoints / "step-00000004")  # as before the last validation
    repair_best_links(state.run, state.progress.best, {})
    assert value_in(state, "best") == 2.0
    best.unlink()
    repair_best_links(state.run, state.progress.best, {})
    assert value_in(state, "best") == 2.0


def change_state(folder: Path, change: Callable[[dict[str, Any]], Any], valid_checksum: bool) -> None:
    """Change the state of a checkpoint, with or without updating its checksum."""
    state = json.loads((folder / "state.json").read_text())
    if valid_checksum:
        del state["checksum"]
    change(state)
    write_json(folder / "state.json", add_checksum(state) if valid_checksum else state)


def resumed_step(state: TrainingState) -> int:
    environment = {"data": {"hashes": "x"}}
    write_json(state.run.environment_file, environment)
    checkpoint = resume(state, environment)
    assert checkpoint is not None
    return checkpoint.step


def test_changed_state_is_detected(state: TrainingState, messages: list[str]) -> None:
    save_at(state, 4, 1.0)
    folder = save_at(state, 8, 2.0)
    change_state(folder, lambda s: s["guard"].update(lr_scale=0.25), valid_checksum=False)
    assert resumed_step(state) == 4
    assert "checksum" in messages[0] and "earlier" in messages[0]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("no plateau", lambda s: s.update(plateau=[])),
        ("plateau of text", lambda s: s.update(plateau=["a", "b"])),
        ("best as a list", lambda s: s.update(best=[1, 2])),
        ("best of text", lambda s: s["best"].update(step="four")),
        ("step beyond numbers", lambda s: s.update(step=1e999)),
        ("step below zero", lambda s: s.update(step=-8)),
        ("step of another folder", lambda s: s.update(step=4)),
        ("huge position", lambda s: s.update(position=10**30)),
        ("position missing", lambda s: s.pop("position")),
        ("validations of three", lambda s: s.update(validations=[[1, 2, 3]])),
        ("interval of text", lambda s: s["interval"].update(loss="high")),
        ("interval as a number", lambda s: s.update(interval=3)),
        ("guard as null", lambda s: s.update(guard=None)),
        ("guard with more", lambda s: s["guard"].update(settings=1)),
        ("guard with less", lambda s: s["guard"].pop("losses")),
        ("guard of text", lambda s: s["guard"].update(losses=["a"])),
        ("guard count of text", lambda s: s["guard"].update(n_high="a")),
        ("rewind targets of text", lambda s: s["guard"].update(targets=["x"])),
        ("an average count as a list", lambda s: s.update(n_averaged=[])),
        ("scaler as text", lambda s: s.update(scaler="x")),
        ("rows below zero", lambda s: s["file_sizes"].update(metrics=-1)),
        ("rows as null", lambda s: s.update(file_sizes=None)),
        ("no files", lambda s: s.update(files={})),
        ("a file elsewhere", lambda s: s["files"].update({"../../recipe.yaml": "0"})),
        ("one value more", lambda s: s.update(extra=1)),
    ],
)
def test_malformed_state_counts_as_damaged(
    state: TrainingState, messages: list[str], name: str, change: Callable[[dict[str, Any]], Any]
) -> None:
    save_at(state, 4, 1.0)
    change_state(save_at(state, 8, 2.0), change, valid_checksum=True)
    assert resumed_step(state) == 4
    assert "using an earlier checkpoint" in messages[0]


def test_lost_rows_lead_to_an_earlier_checkpoint_or_an_error(state: TrainingState, messages: list[str]) -> None:
    metrics = state.run.metrics_file
    save_at(state, 0, 0.0)
    append_jsonl(metrics, {"step": 4})
    save_at(state, 4, 1.0)
    append_jsonl(metrics, {"step": 8})
    save_at(state, 8, 2.0)
    first, second = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(first + second[:3])
    assert resumed_step(state) == 4
    assert "lacks rows" in messages[0]
    shutil.rmtree(state.run.checkpoints / "step-00000000")  # the one that needs no row
    metrics.write_bytes(b"#" * len(first))  # the same size, but not a complete line
    with pytest.raises(UserError, match="complete and consistent"):
        resumed_step(state)
    assert metrics.read_bytes() == b"#" * len(first)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA error: an illegal memory access")]
)
def test_an_error_of_the_device_does_not_lead_to_an_earlier_checkpoint(
    state: TrainingState, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    """Another program may use the memory of the GPU: the checkpoint itself is usable."""
    save_at(state, 0, 0.0)
    save_at(state, 4, 1.0)

    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("arcuate.training.state.restore_optimizer", fail)
    with pytest.raises(type(error), match="CUDA"):
        resumed_step(state)


def test_state_of_another_optimizer_is_rejected(cohort_store: Path, tmp_path: Path, state: TrainingState) -> None:
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizer.step()
    folder = save_at(state, 4, 1.0)
    other = make_state(
        Store.open(cohort_store), make_recipe("encoder.depth=3", "train.keep_optimizer=true"), tmp_path / "other"
    )
    with pytest.raises(UserError, match="does not match"):
        start_from(other, folder)


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
def test_parent_path_may_contain_an_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, path: str, which: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("me@lab/r", "there@last"):
        Path(folder).mkdir(parents=True)
    assert split_parent(given) == (Path(path), which)


def edited(state: TrainingState, *overrides: str) -> TrainingState:
    """The state of the same run, its recipe.yaml edited to these settings."""
    recipe = make_recipe(*overrides)
    write_text(state.run.recipe_file, to_yaml(recipe))
    return TrainingState(state.model, recipe, state.run, "fp32")


def test_an_edited_recipe_is_not_resumed(state: TrainingState) -> None:
    environment = {"data": {"hashes": "x"}}
    start_run(state, Start(resume=True), environment, Distributed())
    save_at(state, 4, 1.0)
    changed = edited(state, "schedule.peak_lr=0.5")
    with pytest.raises(UserError, match=r"recipe\.yaml was edited after step-00000004"):
        resume(changed, environment)
    restored = edited(state, "notes=seen again", "data.workers=1", "runtime.threads=1")
    start_run(restored, Start(resume=True), environment, Distributed())
    assert restored.progress.step == 4
    save_at(restored, 8, 1.0)
    assert load_checkpoint(state.run.checkpoints / "last").saved.recipe_hash == state.recipe_hash


@pytest.mark.parametrize("name", ["state.json", "model.safetensors", "training.safetensors"])
def test_too_many_open_files_never_select_an_earlier_checkpoint(
    state: TrainingState, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_at(state, 4, 1.0)
    save_at(state, 8, 1.0)
    plain = io.open

    def refuse(file: Any, *arguments: Any, **options: Any) -> Any:
        if str(file).endswith(f"step-00000008/{name}"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(file))
        return plain(file, *arguments, **options)

    monkeypatch.setattr(io, "open", refuse)  # used by pathlib
    with pytest.raises(UserError, match="too many files are open"):
        resumed_step(state)
