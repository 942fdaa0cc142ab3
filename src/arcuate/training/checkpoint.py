"""Checkpoints: folders written aside, synced and renamed, with `last` and `best` as relative links.

A checkpoint is `model.safetensors` and `model.json` (the weights to use, and what they are), `training.safetensors`
(what else training needs to go on) and `state.json` (everything that is no tensor, and the checksums of all).
"""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from arcuate.errors import UserError
from arcuate.models.files import CARD, STATE, WEIGHTS, checksum, save_model, save_tensors
from arcuate.models.model import Model
from arcuate.run import Run, read_json, write_json
from arcuate.training.saved import Best, Saved, seal, unseal

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
            return load_file(self.folder / TENSORS)
        except SafetensorError as error:
            raise UserError(f"{self.folder / TENSORS} cannot be read ({error})") from None


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
    write_json(aside / STATE, seal({"step": step, **state, "files": files}))
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
        return unseal(read_json(folder / STATE), str(folder / STATE)).position
    except UserError:
        return None


def load_checkpoint(folder: Path) -> Checkpoint:
    """Refuses a checkpoint that is cut short or changed."""
    saved = unseal(read_json(folder / STATE), str(folder / STATE))
    if saved.files.keys() != {CARD, WEIGHTS, TENSORS}:
        raise UserError(f"{folder / STATE} does not name the files of a checkpoint")
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
    links = (run.checkpoints / "best", run.checkpoints / "last", *run.checkpoints.glob("stage-*"))
    kept = {p.readlink().name for p in links if p.is_symlink()}
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
    whole = [p for p in (path / "checkpoints").glob("*") if (p / "model.safetensors").is_file()]
    known = sorted(p.name for p in whole if not p.name.startswith("."))
    found = f"it has {', '.join(known)}" if known else "it has none yet"
    raise UserError(f"{path} has no checkpoint {which!r}; {found}")
