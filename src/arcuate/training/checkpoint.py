"""Checkpoints: folders written aside, synced and renamed, with `last` and `best` as relative links.

A checkpoint is `model.safetensors` and `model.json` (the weights to use, and what they are), `training.safetensors`
(what else training needs to go on) and `state.json` (everything that is no tensor, and the checksums of the rest).
"""

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from arcuate.errors import UserError
from arcuate.models.files import save_model, save_tensors
from arcuate.models.model import Model
from arcuate.run import Run, read_json, write_json

STATE, TENSORS = "state.json", "training.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are whole."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / TENSORS)


def save_checkpoint(
    run: Run, step: int, model: Model, tensors: dict[str, torch.Tensor], state: dict[str, Any]
) -> Path:
    """Whole or not at all; a checkpoint of this step that is already there (left by a rewind) is replaced."""
    folder = run.checkpoints / f"step-{step:08d}"
    aside = run.checkpoints / f".step-{step:08d}.part"
    shutil.rmtree(aside, ignore_errors=True)
    save_model(aside, model)
    save_tensors({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, aside / TENSORS)
    files = {p.name: checksum(p) for p in sorted(aside.iterdir())}
    write_json(aside / STATE, {"step": step, **state, "files": files})
    for path in (*aside.iterdir(), aside):
        sync(path)
    if folder.exists():
        make_room(run, folder, step)
    aside.rename(folder)
    sync(run.checkpoints)
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


def mend_best(run: Run, step: int | None, position: int | None) -> None:
    """Make `best` what the state says it is: a run killed between saving and linking comes back without the link."""
    for name in (f"best-{step:08d}", f"step-{step:08d}") if step is not None else ():
        folder = run.checkpoints / name
        if (folder / STATE).is_file() and read_json(folder / STATE).get("position") == position:
            point(run, "best", folder)
            return


def load_checkpoint(folder: Path) -> Checkpoint:
    """Refuses a checkpoint that is cut short or changed."""
    state = read_json(folder / STATE)
    files = state.get("files")
    if not isinstance(files, dict) or not isinstance(state.get("step"), int):
        raise UserError(f"{folder / STATE} is not the state of a checkpoint")
    for name, expected in files.items():
        path = folder / Path(name).name
        if not path.is_file() or checksum(path) != expected:
            raise UserError(f"{path} is damaged: its checksum is not the one it was saved with")
    return Checkpoint(folder, state)


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
    best = run.checkpoints / "best"
    kept = best.readlink().name if best.is_symlink() else ""
    for folder in run.checkpoints.glob("step-*"):
        if folder.name > target.folder.name and folder.name != kept:
            shutil.rmtree(folder)


def checksum(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=20)
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def point(run: Run, name: str, folder: Path) -> None:
    """Make checkpoints/<name> a relative link to this folder, replacing the old one in one move."""
    aside = run.checkpoints / f".{name}.part"
    aside.unlink(missing_ok=True)
    aside.symlink_to(folder.name)
    os.replace(aside, run.checkpoints / name)
    sync(run.checkpoints)


def prune(run: Run, keep: int, needed: set[str]) -> None:
    """Remove all but the newest `keep` checkpoints, those a link points to, and those named as needed."""
    kept = {p.readlink().name for p in (run.checkpoints / "best", run.checkpoints / "last") if p.is_symlink()}
    folders = sorted(p for p in run.checkpoints.glob("step-*") if p.is_dir())
    for folder in folders[:-keep]:
        if folder.name not in kept | needed:
            shutil.rmtree(folder)
    for folder in run.checkpoints.glob("best-*"):
        if folder.name not in kept:
            shutil.rmtree(folder)


def find_checkpoint(path: Path, which: str = "best") -> Path:
    """The model folder in a run (its best checkpoint, or another one by name), or the folder itself."""
    if (path / "model.safetensors").is_file():
        return path
    wanted = path / "checkpoints" / which
    if (wanted / "model.safetensors").is_file():
        return wanted.resolve()
    if not path.is_dir():
        raise UserError(f"there is no run or model folder {path}")
    known = sorted(p.name for p in (path / "checkpoints").glob("*") if not p.name.startswith("."))
    found = f"it has {', '.join(known)}" if known else "it has none yet"
    raise UserError(f"{path} has no checkpoint {which!r}; {found}")
