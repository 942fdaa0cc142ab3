"""Checkpoints: folders written atomically and checked when read, with `last`, `best` and `stage-*` as relative links.

A checkpoint holds the model (config and weights), `training.safetensors` (optimizer, averages) and `state.json`:
everything about a run that changes and is not a tensor.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from torch import Tensor

from arcuate.errors import UserError, check_resources
from arcuate.files import atomic_folder, read_json, replace_link, to_json_value, write_json
from arcuate.models.io import (
    CONFIG_FILE,
    STATE_FILE,
    WEIGHTS_FILE,
    checksum,
    load_tensors,
    save_model,
    save_tensors,
)
from arcuate.models.model import Model
from arcuate.run import Run
from arcuate.training.config import DESCRIPTIVE_KEYS
from arcuate.training.curriculum import Count, Stage, StageProgress, stage_at
from arcuate.training.guard import GuardMemory
from arcuate.training.metrics import IntervalMetrics
from arcuate.training.schedule import PlateauState

_TENSORS_FILE = "training.safetensors"
# Between a run and its continuation. `data.workers` may differ too.
MAY_DIFFER = ("runtime", "track", *DESCRIPTIVE_KEYS)
_FOLDER_NAME = re.compile(r"(step|best)-\d{8,9}")


@dataclass
class Best:
    """The best validation so far: lowest PER, ties by loss, or lowest WER, ties by PER; else the latest step."""

    step: Count | None = None
    per: float | None = None
    loss: float | None = None
    position: Count | None = None  # in the data; distinguishes two passes over the same step, before and after a rewind
    wer: float | None = None

    def update(self, new: "Best", by: Literal["per", "wer"] = "per") -> bool:
        """Replace the best validation by a new one if that is better; return whether it was."""
        is_comparable = self.step is not None and (new.wer if by == "wer" else new.per) is not None
        if is_comparable and new._rank(by) >= self._rank(by):
            return False
        for part in fields(self):
            setattr(self, part.name, getattr(new, part.name))
        return True

    def _rank(self, by: str) -> tuple[float, float]:
        values = (self.wer, self.per) if by == "wer" else (self.per, self.loss)
        first, second = (float("inf") if value is None else value for value in values)
        return first, second


@dataclass
class FileSizes:
    """Sizes of metrics.jsonl, incidents.jsonl and predictions.jsonl in bytes."""

    metrics: Count
    incidents: Count
    predictions: Count


@dataclass
class Progress:
    """Everything that training changes, apart from tensors and the loss scaler.

    `step` counts optimizer steps, with or without an update, and goes back at a rewind. `position` counts batches and
    never goes back.
    """

    step: Count = 0
    position: Count = 0
    curriculum: StageProgress = field(default_factory=StageProgress)
    plateau: PlateauState = field(default_factory=PlateauState)
    best: Best = field(default_factory=Best)  # best validation of the current stage
    stage_bests: dict[str, Best] = field(default_factory=dict)  # best validation of each completed stage, by name
    validations: list[tuple[Count, float]] = field(default_factory=list)  # recent steps and PERs
    interval: IntervalMetrics = field(default_factory=IntervalMetrics)
    guard: GuardMemory = field(default_factory=GuardMemory)
    mixed_precision_on: bool = False


@dataclass(kw_only=True)
class SavedState(Progress):
    """Content of state.json."""

    n_averaged: Count  # sets of weights in the average
    scaler: dict[str, int | float]
    file_sizes: FileSizes
    recipe_hash: str | None  # hash of recipe.yaml when the run was started or resumed
    head: Literal["ctc", "both"]  # heads that were trained, with which the checkpoint is decoded by default
    files: dict[str, str]  # checksums of the other files


_STATE = TypeAdapter(SavedState)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are complete and unchanged."""

    folder: Path
    saved: SavedState

    @property
    def step(self) -> int:
        return self.saved.step

    def tensors(self) -> dict[str, Tensor]:
        path = self.folder / _TENSORS_FILE
        try:
            return load_tensors(path)
        except (SafetensorError, OSError, RuntimeError) as error:
            check_resources(error, path)
            raise UserError(f"{path} cannot be read ({error})") from None


def save_checkpoint(run: Run, model: Model, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """Write the checkpoint of a step atomically; one left by a rewind is replaced."""
    step = state["step"]
    folder = run.checkpoints / f"step-{step:08d}"
    with atomic_folder(folder) as temporary:
        save_model(temporary, model)
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_tensors(plain, temporary / _TENSORS_FILE)
        files = {p.name: checksum(p) for p in sorted(temporary.iterdir())}
        write_json(temporary / STATE_FILE, add_checksum({**state, "files": files}))
        if folder.exists():
            _make_room(run, folder, step)
    return folder


def checkpoint_stage(folder: Path, stages: Sequence[Stage]) -> Stage | None:
    """Return the stage that trained a checkpoint; None without stages. Without a state, the last one.

    The checkpoint at the end of a stage is written after the next stage has started.
    """
    if not stages or not (folder / STATE_FILE).is_file():
        return stages[-1] if stages else None
    saved = _read_state(folder)
    stage = saved.curriculum
    ended = stage.index > 0 and stage.began == saved.step
    return stage_at(stages, stage.index - ended)


def load_checkpoint(folder: Path) -> Checkpoint:
    """Load a checkpoint; `UserError` if it is incomplete or was changed."""
    saved = _read_state(folder)
    if saved.files.keys() != {CONFIG_FILE, WEIGHTS_FILE, _TENSORS_FILE}:
        raise UserError(f"{folder / STATE_FILE} does not list the files of a checkpoint")
    if _FOLDER_NAME.fullmatch(folder.name) and int(folder.name[5:]) != saved.step:
        raise UserError(f"{folder} contains the checkpoint of step {saved.step}, which does not match its name")
    for name, expected in saved.files.items():
        path = folder / name
        if not path.is_file() or checksum(path) != expected:
            raise UserError(f"{path} is damaged: its checksum differs from the saved one")
    return Checkpoint(folder, saved)


def add_checksum(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with its own checksum in it."""
    plain = to_json_value(state)
    return {**plain, "checksum": _digest(plain)}


def _read_state(folder: Path) -> SavedState:
    """Read state.json; nothing in it is used before its checksum and every type and range are verified."""
    path = folder / STATE_FILE
    state = read_json(path)
    content = {name: value for name, value in state.items() if name != "checksum"}
    try:
        if _digest(content) != state.get("checksum"):
            raise UserError(f"{path} is damaged: its checksum differs from the saved one")
        saved = _STATE.validate_python(content)
        if _STATE.dump_python(saved, mode="json") != content:  # a value is missing, unknown or of another type
            raise UserError(f"{path} is not the state of a checkpoint of this version")
        return saved
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path} is not the state of a checkpoint ({where}: {first['msg']})") from None
    except RecursionError:
        raise UserError(f"{path} is not the state of a checkpoint") from None


def _digest(content: Mapping[str, Any]) -> str:
    """Return a checksum of the values, independent of the layout of the file."""
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


def hash_recipe(tree: Mapping[str, Any]) -> str:
    """Return a checksum of the settings in recipe.yaml that must stay the same when a run is resumed."""
    kept = {name: value for name, value in tree.items() if name not in MAY_DIFFER}
    if isinstance(kept.get("data"), Mapping):
        kept["data"] = {name: value for name, value in kept["data"].items() if name != "workers"}
    return _digest(kept)


def link(run: Run, name: str, folder: Path) -> None:
    """Make checkpoints/<name> a relative link to this folder, replacing an older link atomically."""
    replace_link(run.checkpoints / name, folder.name)


def repair_best_links(run: Run, best: Best, stage_bests: Mapping[str, Best]) -> None:
    """Link the best checkpoint, and the best one of every completed stage.

    A run that was killed between saving and linking is resumed without the links.
    """
    for name, stage_best in stage_bests.items():
        _link_best(run, stage_best, f"stage-{name}")
    if best.step is None and stage_bests:  # no validation in this stage yet: the best of the stage before
        best = list(stage_bests.values())[-1]
    _link_best(run, best, "best")


def _link_best(run: Run, best: Best, name: str) -> None:
    if best.step is None or best.position is None:
        return
    for folder in (run.checkpoints / f"{kind}-{best.step:08d}" for kind in ("best", "step")):
        if _position_of(folder) == best.position:
            link(run, name, folder)
            return


def _position_of(folder: Path) -> int | None:
    """Return the data position of a checkpoint; None if there is none or it cannot be read."""
    try:
        return _read_state(folder).position
    except UserError:
        return None


def _make_room(run: Run, folder: Path, step: int) -> None:
    """Remove the checkpoint of a step reached again after a rewind; the best one is moved instead."""
    best, kept = run.checkpoints / "best", run.checkpoints / f"best-{step:08d}"
    if best.is_symlink() and best.readlink().name == folder.name:
        shutil.rmtree(kept, ignore_errors=True)
        folder.rename(kept)
        link(run, "best", kept)
    else:
        shutil.rmtree(folder)


def resumable_checkpoints(run: Run) -> list[Path]:
    """Return the last checkpoint and those before it, latest first."""
    last = run.checkpoints / "last"
    end = last.readlink().name if last.is_symlink() else "step-~"  # sorts after every step
    return sorted((p for p in run.checkpoints.glob("step-*") if p.name <= end), reverse=True)


def remove_partial_files(run: Run) -> None:
    """Remove temporary files and folders of a killed process."""
    for path in (*run.path.glob(".*.part"), *run.checkpoints.glob(".*.part")):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove_newer(run: Run, target: Checkpoint) -> None:
    """Remove the checkpoints of rewound steps, except the best ones, which were validated."""
    kept = _linked(run, ["best"])
    for folder in run.checkpoints.glob("step-*"):
        if folder.name > target.folder.name and folder.name not in kept:
            shutil.rmtree(folder)


def prune_checkpoints(run: Run, keep: int, needed: set[str]) -> None:
    """Remove all but the latest `keep` checkpoints, the linked ones and the needed ones."""
    kept = _linked(run, ["best", "last"])
    folders = sorted(p for p in run.checkpoints.glob("step-*") if p.is_dir())
    for folder in folders[:-keep]:
        if folder.name not in kept | needed:
            shutil.rmtree(folder)
    for folder in run.checkpoints.glob("best-*"):
        if folder.name not in kept:
            shutil.rmtree(folder)


def _linked(run: Run, names: Iterable[str]) -> set[str]:
    """Return the names of the folders that these links and those of completed stages point to."""
    links = (*(run.checkpoints / name for name in names), *run.checkpoints.glob("stage-*"))
    return {path.readlink().name for path in links if path.is_symlink()}
