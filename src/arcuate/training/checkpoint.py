"""What `state.json` of a checkpoint holds: everything about a run that changes and is no tensor, checked when read."""

import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, ValidationError, field_validator
from safetensors import SafetensorError
from safetensors.torch import load_file

from arcuate.config import Settings
from arcuate.errors import UserError
from arcuate.files import atomic_folder, read_json, replace_link, to_json_value, write_json
from arcuate.models.io import (
    CONFIG_FILE,
    STATE_FILE,
    WEIGHTS_FILE,
    checksum,
    current_tensor_name,
    save_model,
    save_tensors,
)
from arcuate.models.model import Model
from arcuate.run import Run
from arcuate.training.curriculum import StageProgress
from arcuate.training.guard import migrate_state
from arcuate.training.metrics import IntervalMetrics
from arcuate.training.schedule import PlateauState

Count = Annotated[int, Field(ge=0, lt=2**53)]


@dataclass
class Best:
    """The best validation so far: by actual error rate, ties by loss; without validation the newest wins."""

    step: Count | None = None
    per: float | None = None
    loss: float | None = None
    position: Count | None = (
        None  # in the data; tells apart two passes over a step, before and after a rewind
    )

    def improve(self, step: int, per: float | None, loss: float | None, position: int | None = None) -> bool:
        inf = float("inf")
        new = (inf if per is None else per, inf if loss is None else loss)
        old = (inf if self.per is None else self.per, inf if self.loss is None else self.loss)
        if self.step is not None and per is not None and new >= old:
            return False
        self.step, self.per, self.loss, self.position = step, per, loss, position
        return True


class Averaged(Settings):
    n_ema: Count
    n_mean: Count


class FilesAt(Settings):
    """How long the run's files of rows were, in bytes."""

    metrics: Count
    incidents: Count


class Saved(Settings):
    step: Count
    position: Count
    rate_scale: float = Field(ge=0.0)
    plateaus: tuple[PlateauState, PlateauState]
    best: Best
    validations: list[tuple[Count, float]]
    tally: IntervalMetrics
    guard: dict[str, Any]
    good: list[Count] = Field(max_length=3)
    rewound_to: Count | None
    averages: Averaged
    mixed_on: bool
    progress: StageProgress = StageProgress()
    bests: dict[str, Best] = Field(default_factory=dict)  # of stages that are over, by name
    scaler: dict[str, int | float]
    files_at: FilesAt
    files: dict[str, str]

    @field_validator("guard", mode="before")
    @classmethod
    def _migrate_guard(cls, given: Any) -> Any:
        return migrate_state(given) if isinstance(given, dict) else given


def seal(state: dict[str, Any]) -> dict[str, Any]:
    """The state with its own checksum in it."""
    plain = to_json_value(state)
    return {**plain, "checksum": digest(plain)}


def unseal(state: dict[str, Any], where: str) -> Saved:
    """Nothing in the file is trusted before its checksum and every type and range in it are right."""
    content = {k: v for k, v in state.items() if k != "checksum"}
    try:
        if digest(content) != state.get("checksum"):
            raise UserError(f"{where} is damaged: its checksum is not the one it was saved with")
        return Saved.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"]))
        raise UserError(f"{where} is not the state of a checkpoint ({path}: {first['msg']})") from None
    except RecursionError:
        raise UserError(f"{where} is not the state of a checkpoint") from None


def digest(content: dict[str, Any]) -> str:
    """Of the values, not of the layout: JSON gives numbers back as they were."""
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


def check_like(known: dict[str, Any], given: dict[str, Any], what: str) -> None:
    """Refuse values of other names or kinds than those that stand there now."""
    if known.keys() != given.keys():
        raise ValueError(f"{what} holds other values")
    for name, value in given.items():
        if not is_like(known[name], value):
            raise ValueError(f"{what}.{name} is no value of its kind")


def is_like(known: Any, given: Any) -> bool:
    if isinstance(known, bool):
        return isinstance(given, bool)
    if isinstance(known, list):
        return isinstance(given, list) and all(is_number(v) for v in given)
    if known is None:
        return given is None or is_number(given)
    return is_number(given)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# Checkpoints: folders written aside, synced and renamed, with `last` and `best` as relative links.

TENSORS = "training.safetensors"
NAMED = re.compile(r"(step|best)-\d{8,9}")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are whole."""

    folder: Path
    saved: Saved

    @property
    def step(self) -> int:
        return self.saved.step

    def tensors(self) -> dict[str, torch.Tensor]:
        try:
            return {current_tensor_name(name): t for name, t in load_file(self.folder / TENSORS).items()}
        except SafetensorError as error:
            raise UserError(f"{self.folder / TENSORS} cannot be read ({error})") from None


def save_checkpoint(
    run: Run, step: int, model: Model, tensors: dict[str, torch.Tensor], state: dict[str, Any]
) -> Path:
    """Whole or not at all; a checkpoint of this step that is already there (left by a rewind) is replaced."""
    folder = run.checkpoints / f"step-{step:08d}"
    with atomic_folder(folder) as temporary:
        save_model(temporary, model)
        save_tensors({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, temporary / TENSORS)
        files = {p.name: checksum(p) for p in sorted(temporary.iterdir())}
        write_json(temporary / STATE_FILE, seal({"step": step, **state, "files": files}))
        if folder.exists():
            make_room(run, folder, step)
    return folder


def make_room(run: Run, folder: Path, step: int) -> None:
    """A step reached again after a rewind: the weights that earned the best validation keep a place of their own."""
    best, kept = run.checkpoints / "best", run.checkpoints / f"best-{step:08d}"
    if best.is_symlink() and best.readlink().name == folder.name:
        shutil.rmtree(kept, ignore_errors=True)
        folder.rename(kept)
        point(run, "best", kept)
    else:
        shutil.rmtree(folder)


def mend_best(run: Run, step: int | None, position: int | None, link: str = "best") -> None:
    """Make `best` what the state says it is: a run killed between saving and linking comes back without the link."""
    for name in (f"best-{step:08d}", f"step-{step:08d}") if step is not None else ():
        if position is not None and position_of(run.checkpoints / name) == position:
            point(run, link, run.checkpoints / name)
            return


def mend_bests(run: Run, best: Best, bests: dict[str, Best]) -> None:
    """The links to the best checkpoint, and to the best one of every stage that is over."""
    for name, earlier in bests.items():
        mend_best(run, earlier.step, earlier.position, f"stage-{name}")
    if best.step is None and bests:  # nothing validated since: the best of the stage before
        best = list(bests.values())[-1]
    mend_best(run, best.step, best.position)


def position_of(folder: Path) -> int | None:
    """Where in the data a checkpoint was made; None where there is none that can be read."""
    try:
        return unseal(read_json(folder / STATE_FILE), str(folder / STATE_FILE)).position
    except UserError:
        return None


def load_checkpoint(folder: Path) -> Checkpoint:
    """Refuses a checkpoint that is cut short or changed."""
    saved = unseal(read_json(folder / STATE_FILE), str(folder / STATE_FILE))
    if saved.files.keys() != {CONFIG_FILE, WEIGHTS_FILE, TENSORS}:
        raise UserError(f"{folder / STATE_FILE} does not name the files of a checkpoint")
    if NAMED.fullmatch(folder.name) and int(folder.name[5:]) != saved.step:
        raise UserError(f"{folder} holds the checkpoint of step {saved.step}, which is not its name")
    for name, expected in saved.files.items():
        path = folder / name
        if not path.is_file() or checksum(path) != expected:
            raise UserError(f"{path} is damaged: its checksum is not the one it was saved with")
    return Checkpoint(folder, saved)


def candidates(run: Run) -> list[Path]:
    """The last checkpoint and those before it, newest first."""
    last = run.checkpoints / "last"
    end = last.readlink().name if last.is_symlink() else "step-~"  # any name is smaller
    return sorted((p for p in run.checkpoints.glob("step-*") if p.name <= end), reverse=True)


def sweep_up(run: Run) -> None:
    """Remove what a killed process had half written."""
    for path in (*run.path.glob(".*.part"), *run.checkpoints.glob(".*.part")):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def forget_newer(run: Run, target: Checkpoint) -> None:
    """Remove the checkpoints of steps that a rewind undoes; the best one stays, for it was validated."""
    links = (run.checkpoints / "best", *run.checkpoints.glob("stage-*"))
    kept = {link.readlink().name for link in links if link.is_symlink()}
    for folder in run.checkpoints.glob("step-*"):
        if folder.name > target.folder.name and folder.name not in kept:
            shutil.rmtree(folder)


def point(run: Run, name: str, folder: Path) -> None:
    """Make checkpoints/<name> a relative link to this folder, replacing the old one in one move."""
    replace_link(run.checkpoints / name, folder.name)


def prune(run: Run, keep: int, needed: set[str]) -> None:
    """Remove all but the newest `keep` checkpoints, those a link points to, and those named as needed."""
    links = (run.checkpoints / "best", run.checkpoints / "last", *run.checkpoints.glob("stage-*"))
    kept = {p.readlink().name for p in links if p.is_symlink()}
    folders = sorted(p for p in run.checkpoints.glob("step-*") if p.is_dir())
    for folder in folders[:-keep]:
        if folder.name not in kept | needed:
            shutil.rmtree(folder)
    for folder in run.checkpoints.glob("best-*"):
        if folder.name not in kept:
            shutil.rmtree(folder)
