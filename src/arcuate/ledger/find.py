"""Run folders below a folder. Nothing is opened here, so a damaged one is found like any other."""

import os
from pathlib import Path

from arcuate.errors import UserError

MARKS = ("recipe.yaml", "metrics.jsonl", "environment.json")  # a run folder has at least two of them
MAX_DEPTH = 6


def find_runs(folder: Path) -> list[Path]:
    """The run folders in and below a folder, by name; those inside a run folder are its own business."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; name one that holds runs, such as: arcuate runs runs")
    found = sorted(below(folder, 0), key=str)
    if not found:
        raise UserError(
            f"{folder} holds no runs; train one with: arcuate train tiny --data STORE --run {folder}/first"
        )
    return found


def below(folder: Path, depth: int) -> list[Path]:
    if looks_like_run(folder):
        return [folder]
    if depth >= MAX_DEPTH:
        return []
    try:
        inside = sorted(Path(e.path) for e in os.scandir(folder) if e.is_dir(follow_symlinks=False))
    except OSError:
        return []
    return [run for child in inside for run in below(child, depth + 1)]


def looks_like_run(folder: Path) -> bool:
    """A folder of which so much is left that it was a run once; `recipe.yaml` alone could be anyone's."""
    return sum((folder / name).is_file() for name in MARKS) >= 2 or (
        (folder / "recipe.yaml").is_file() and (folder / "checkpoints").is_dir()
    )
