"""Checkpoints: folders written aside and renamed, with `last` and `best` as relative links."""

import os
import shutil
from pathlib import Path
from typing import Any

from arcuate.errors import UserError
from arcuate.models.files import save_model
from arcuate.models.model import Model
from arcuate.run import Run, write_json


def save_checkpoint(run: Run, step: int, model: Model, state: dict[str, Any]) -> Path:
    """Weights, the card that describes them, and what is known about them at this step."""
    folder = run.checkpoints / f"step-{step:08d}"
    if folder.exists():
        return folder
    aside = run.checkpoints / f".step-{step:08d}.part"
    shutil.rmtree(aside, ignore_errors=True)
    save_model(aside, model)
    write_json(aside / "state.json", {"step": step, **state})
    aside.rename(folder)
    return folder


def point(run: Run, name: str, folder: Path) -> None:
    """Make checkpoints/<name> a relative link to this folder, replacing the old one in one move."""
    aside = run.checkpoints / f".{name}.part"
    aside.unlink(missing_ok=True)
    aside.symlink_to(folder.name)
    os.replace(aside, run.checkpoints / name)


def prune(run: Run, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and those a link points to."""
    linked = {p.resolve() for p in (run.checkpoints / "best", run.checkpoints / "last") if p.is_symlink()}
    folders = sorted(p for p in run.checkpoints.glob("step-*") if p.is_dir())
    for folder in folders[:-keep]:
        if folder.resolve() not in linked:
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
