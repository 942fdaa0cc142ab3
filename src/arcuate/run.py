"""The run folder: the only interface between training and the programs that read its results."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arcuate.config import Settings, read_yaml, to_yaml
from arcuate.errors import UserError
from arcuate.files import exclusive_lock, read_json, read_jsonl, similar_folder, write_json, write_text
from arcuate.hub import is_hub_name, local_path

RUN_FILES = ("recipe.yaml", "environment.json", "metrics.jsonl")  # files that identify a run folder
_INITIAL_FILES = {  # content of a run folder before the first step
    *(*RUN_FILES, "incidents.jsonl", "predictions.jsonl", "modes.jsonl", ".lock"),
    *("checkpoints", "results", "tensorboard", "wandb"),
}
BUSY = "another process is training into"  # start of the message
WORDS_LABEL = "words"  # label of results/<split>.words.jsonl and .json, the latest decoding to words

RunLike = str | os.PathLike[str]  # a path, a `Run`, or a result that has one, such as that of `train`


class _PathInRun:
    """A file or folder of a run, as an attribute of `Run`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "Run", owner: type["Run"]) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class Run:
    """A run folder and the paths in it."""

    path: Path

    recipe_file = _PathInRun("recipe.yaml")
    environment_file = _PathInRun("environment.json")
    metrics_file = _PathInRun("metrics.jsonl")
    incidents_file = _PathInRun("incidents.jsonl")
    predictions_file = _PathInRun("predictions.jsonl")  # a few trials of every validation
    modes_file = _PathInRun("modes.jsonl")
    lock_file = _PathInRun(".lock")
    checkpoints = _PathInRun("checkpoints")
    calibration_file = _PathInRun("calibration.json")  # the calibration curve of a calibrated run
    report_file = _PathInRun("report.html")
    card_file = _PathInRun("MODEL_CARD.md")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        object.__setattr__(self, "path", Path(path))

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def results_file(self, split: str, label: str | None = None, ending: str = "jsonl") -> Path:
        """Results by trial (`jsonl`), their summary (`json`) or example trials for the report (`npz`)."""
        middle = f".{label}" if label else ""
        return self.path / "results" / f"{split}{middle}.{ending}"

    def measurement_file(self, kind: str, split: str) -> Path:
        """The latest measurement of a kind such as `floor` or `robustness` on a split."""
        return self.path / "results" / kind / f"{split}.json"

    def recipe_tree(self) -> dict[str, Any]:
        """recipe.yaml as plain values."""
        tree = read_yaml(self.recipe_file)
        if not isinstance(tree, dict):
            raise UserError(f"{self.recipe_file} is not a recipe")
        return tree

    def environment(self) -> dict[str, Any]:
        return read_json(self.environment_file)

    def data(self) -> dict[str, Any]:
        """Training data: path, channels, sessions and content hashes of the store."""
        data = self.environment().get("data", {})
        if not isinstance(data, dict):
            raise UserError(f"{self.environment_file} is damaged: its entry `data` must be a JSON object")
        return data

    def store_path(self) -> Path:
        """The store that the run was trained on; `UserError` if it is not recorded, as in a downloaded model."""
        path = self.data().get("path")
        if not isinstance(path, str) or not path:
            raise UserError(f"{self.path} does not record where its store is; give one with --data STORE")
        return Path(path)

    def metrics(self) -> list[dict[str, Any]]:
        """All rows of metrics.jsonl; an incomplete last line is ignored."""
        return read_jsonl(self.metrics_file, growing=True) if self.metrics_file.exists() else []


def open_run(run: RunLike) -> Run:
    """An existing run folder, the model folder that `arcuate import` made, or a model on the hub (hf:ORG/NAME)."""
    path = local_path(run)
    if path.suffix == ".arcx" and path.is_file():
        raise UserError(f"{path} is an exported model, and this needs a run folder; name the run that was exported")
    if not path.is_dir():
        near = similar_folder(path, "recipe.yaml")
        remedy = f"did you mean {near}?" if near else f"train one with: arcuate train tiny --data STORE --run {path}"
        raise UserError(f"no run folder {path}; {remedy}")
    if not any((path / name).is_file() for name in ("recipe.yaml", "model.json")):
        inside = sorted(p.parent for p in path.glob("seed-*/recipe.yaml"))
        seeds = f"; it contains runs of several seeds, give one of them, such as {inside[0]}" if inside else ""
        raise UserError(f"{path} is not a run folder: it has no recipe.yaml{seeds}")
    return Run(path)


def find_checkpoint(run: RunLike, which: str = "best") -> Path:
    """The model folder in a run (its best checkpoint, or another one by name), or the folder itself."""
    path = local_path(run)
    if (path / "model.safetensors").is_file():
        if which != "best":
            raise UserError(f"{path} is a single model and has no checkpoint {which!r}; name a training run")
        return path
    named = path / "checkpoints" / which
    if Path(which).name == which and (named / "model.safetensors").is_file():  # not a path to another run
        return named.resolve()
    if not path.is_dir():
        raise UserError(f"no run or model folder {path}")
    complete = [p for p in (path / "checkpoints").glob("*") if (p / "model.safetensors").is_file()]
    known = sorted(p.name for p in complete if not p.name.startswith("."))
    found = f"it has {', '.join(known)}" if known else "it has none yet"
    raise UserError(f"{path} has no checkpoint {which!r}; {found}")


def split_parent(parent: str) -> tuple[Path, str]:
    """Split RUN@WHICH. The name of a folder may contain an @, so an existing folder is not split."""
    path, _, which = parent.rpartition("@")
    if Path(parent).is_dir() or not (path and re.fullmatch(r"|best|last|step-\d+|stage-[\w.-]+", which)):
        return Path(parent), "best"
    return Path(path), which or "best"


def absolute_parent(parent: str) -> str:
    """RUN@WHICH with an absolute path, as environment.json records it."""
    path, which = split_parent(parent)
    return f"{path if is_hub_name(path) else path.resolve()}@{which}"


def create_run(path: Path, recipe: Settings, environment: Mapping[str, Any], resume: bool = False) -> Run:
    """Create a run folder. The recipe is written last: a folder that has one is complete."""
    check_run_folder(path, resume)
    run = Run(path)
    (path / "results").mkdir(parents=True, exist_ok=True)
    run.checkpoints.mkdir(exist_ok=True)
    run.metrics_file.touch()
    run.incidents_file.touch()
    run.predictions_file.touch()
    write_json(run.environment_file, environment)
    write_text(run.recipe_file, to_yaml(recipe))
    return run


@contextmanager
def lock_run(run: Run) -> Iterator[None]:
    """Hold the lock of a run folder, so that one process writes it. The lock file of an empty folder is removed."""
    is_new = not run.path.exists()
    busy = f"{BUSY} {run.path}; wait for it to end, or choose another --run"
    with exclusive_lock(run.lock_file, busy):
        try:
            yield
        finally:
            if [p.name for p in run.path.iterdir()] == [run.lock_file.name]:
                run.lock_file.unlink()
                if is_new:
                    run.path.rmdir()


def check_run_folder(path: Path, resume: bool = False, can_resume: bool = True) -> None:
    """Check that a folder is new, empty or, with `resume`, a run. `can_resume`: mention --resume in the message."""
    check_local(path, "--run")
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; choose another --run")
    run, found = Run(path), {p.name for p in path.iterdir()} - {".lock"}
    if not found or (resume and (run.recipe_file.is_file() or is_untouched(run))):
        return
    if resume:
        raise UserError(f"{path} is not a run folder, so there is nothing to resume; choose another --run")
    raise UserError(
        f"{path} exists and is not empty; choose another --run"
        + (", or add --resume to continue it" if can_resume else "")
    )


def check_local(path: Path, option: str) -> None:
    """Reject an output folder that nobody may write to, or that later commands would take for a model on the hub."""
    if is_hub_name(path):
        raise UserError(f"{option} {path}: names with hf: are models on the hub, which are only read; choose a folder")
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if not os.access(existing, os.W_OK):
        raise UserError(f"{option} {path}: {existing} is not writable; choose another folder or change its permissions")


def unfinished_reason(run: Run) -> str | None:
    """Why the training of a run is not complete, such as "reached step 150 of 600"; None if it is.

    An imported model has no training and is complete. Without checkpoints, it is derived from the log.
    """
    if not run.recipe_file.is_file():
        return None
    recipe = run.recipe_tree()
    train, stages = recipe.get("train"), recipe.get("stages")
    planned = train.get("steps") if isinstance(train, dict) else None
    if not isinstance(planned, int):
        return None
    step, n_stages_done = _trained_steps(run)
    if step >= planned or (isinstance(stages, list) and stages and n_stages_done >= len(stages)):
        return None
    incidents = read_jsonl(run.incidents_file, growing=True) if run.incidents_file.exists() else []
    last = incidents[-1] if incidents else {}
    if last.get("action") == "stop" and isinstance(last.get("step"), int) and last["step"] >= step:
        return f"stopped by the guard at step {last['step']:,} of {planned:,}"
    return f"reached step {step:,} of {planned:,}"


def _trained_steps(run: Run) -> tuple[int, int]:
    """Steps of the last checkpoint and completed stages of the curriculum."""
    state_file = run.checkpoints / "last" / "state.json"
    if not state_file.is_file():
        steps = [row.get("step") for row in run.metrics()]
        return max((step for step in steps if isinstance(step, int)), default=0), 0
    state = read_json(state_file)
    step, progress = state.get("step"), state.get("curriculum")
    index = progress.get("index") if isinstance(progress, dict) else None
    return step if isinstance(step, int) else 0, index if isinstance(index, int) else 0


def is_untouched(run: Run) -> bool:
    """Whether nothing was trained here: the run was killed before its first checkpoint."""
    unknown = {p.name for p in run.path.iterdir() if p.suffix != ".part"} - _INITIAL_FILES
    rows = [f for f in (run.metrics_file, run.incidents_file) if f.exists() and f.stat().st_size]
    trained = rows or any(run.checkpoints.glob("[!.]*")) or any((run.path / "results").glob("*"))
    # `create_run` writes the recipe last.
    made_elsewhere = run.recipe_file.exists() and not run.environment_file.exists()
    return not (trained or unknown or made_elsewhere)
