"""How a run starts: from scratch, from the weights of another run, or exactly where it stopped."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arcuate.config import Change, diff
from arcuate.errors import OutOfResources, UserError, check_resources
from arcuate.models.config import ModelConfig
from arcuate.models.io import load_model
from arcuate.progress import logger
from arcuate.run import Run, create_run, find_checkpoint, is_untouched, split_parent
from arcuate.training.checkpoint import (
    MAY_DIFFER,
    Checkpoint,
    hash_recipe,
    link,
    load_checkpoint,
    remove_partial_files,
    repair_best_links,
    resumable_checkpoints,
)
from arcuate.training.config import DESCRIPTIVE_KEYS, TrainingConfig, read_config
from arcuate.training.environment import Distributed
from arcuate.training.optim import restore_optimizer
from arcuate.training.state import TrainingState, explain_mismatch


@dataclass(frozen=True)
class Start:
    """How to start: resume the run if it has a checkpoint, else from the weights of a parent, or from scratch."""

    resume: bool = False
    parent: Path | None = None  # checkpoint folder


def start_run(state: TrainingState, start: Start, environment: dict[str, Any], distributed: Distributed) -> None:
    """Bring state and run folder to the point at which training starts.

    Every process reads first; nothing is written before all of them have succeeded.
    """
    resumed: Checkpoint | None = None
    with distributed.raise_together():
        if start.resume:
            resumed = resume(state, environment, distributed)
        if resumed is None and start.parent is not None:
            start_from(state, start.parent)
    if start.resume:
        _check_same_step(state.run, resumed, distributed)
    with distributed.raise_together():
        if distributed.is_main:
            _prepare_run(state, resumed, start, environment)


def _check_same_step(run: Run, resumed: Checkpoint | None, distributed: Distributed) -> None:
    """Require on every process that all of them found the same checkpoint."""
    step = -1 if resumed is None else resumed.step
    first, last = -distributed.max(-step), distributed.max(step)
    if first != last:
        earlier = "no checkpoint" if first < 0 else f"step {first:.0f}"
        raise UserError(
            f"the processes found different checkpoints in {run.path} (one {earlier}, another step {last:.0f}); make"
            " sure that all machines see the same files there, and resume again"
        )


def _prepare_run(state: TrainingState, resumed: Checkpoint | None, start: Start, environment: dict[str, Any]) -> None:
    """Write the run folder, or bring that of a resumed run to its checkpoint."""
    run = state.run
    if resumed is not None:
        repair_best_links(run, state.progress.best, state.progress.stage_bests)
        if not state.is_finished:
            state.truncate_rows(resumed)
            link(run, "last", resumed.folder)
            remove_partial_files(run)
    elif start.resume and run.recipe_file.is_file() and not is_untouched(run):
        run.metrics_file.write_text("")
        run.incidents_file.write_text("")
        run.predictions_file.write_text("")
    else:
        create_run(run.path, state.recipe, environment, start.resume)
        remove_partial_files(run)
    state.recipe_hash = hash_recipe(run.recipe_tree())


def resume(
    state: TrainingState, environment: dict[str, Any], distributed: Distributed | None = None
) -> Checkpoint | None:
    """Restore the latest usable checkpoint; None if the run has none yet."""
    run = state.run
    if not run.path.is_dir() or not run.recipe_file.is_file() or is_untouched(run):
        return None
    check_not_calibrated(run)
    check_same_recipe(run, state.recipe)
    check_same_data(run, environment)
    is_main = distributed is None or distributed.is_main
    problems = []
    own_hash = hash_recipe(run.recipe_tree())
    for folder in resumable_checkpoints(run):
        try:
            checkpoint = load_checkpoint(folder)
            is_edited = checkpoint.saved.recipe_hash not in (None, own_hash)
            if not is_edited:
                state.check_rows(checkpoint)
                state.restore(checkpoint)
        except OutOfResources:  # not caused by the checkpoint; falling back to an earlier one would lose steps
            raise
        except (UserError, OSError) as error:
            check_resources(error, folder)
            problems.append(str(error))
            continue
        if is_edited:
            raise UserError(
                f"{run.recipe_file} was edited after {folder.name} was saved, so the run would continue with other"
                f" settings; undo the edit, or start a new run with: arcuate train RECIPE --from {run.path}"
            )
        for problem in problems if is_main else ():
            logger.warning(f"{problem}; using an earlier checkpoint")
        if is_main and not state.is_finished:
            logger.info(f"resuming after step {state.progress.step}")
        return checkpoint
    if problems:
        raise UserError(
            f"{run.path} cannot be resumed: none of its checkpoints is complete and consistent with metrics.jsonl"
            f" ({problems[0]}); start a new run"
        )
    return None


def check_same_recipe(run: Run, recipe: TrainingConfig) -> None:
    """Require that a run is resumed with its own recipe."""
    changed = [
        c
        for c in diff(read_config(run), recipe, ignore=DESCRIPTIVE_KEYS)
        if c.path.split(".")[0] not in MAY_DIFFER and c.path != "data.workers" and not _are_same_stages(c)
    ]
    if changed:
        listed = ", ".join(f"{c.path} {c.before} → {c.after}" for c in changed[:3])
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise UserError(
            f"{run.path} was trained with a different recipe ({listed}{more}); resume it with the recipe"
            f" {run.recipe_file}, or start a new run with --from {run.path}"
        )


def _are_same_stages(change: Change) -> bool:
    """Whether stages differ only in `requires`, which has no effect on the stages that are part of a run."""
    if change.path != "stages":
        return False
    before, after = ([{**stage, "requires": None} for stage in stages] for stages in (change.before, change.after))
    return before == after


def check_not_calibrated(run: Run) -> None:
    """Reject a calibrated run: calibration uses a different mix of trials and freezes layers."""
    if run.environment_file.is_file() and run.environment().get("calibration"):
        raise UserError(f"{run.path} is a calibrated run and cannot be resumed; start a new run with --from {run.path}")


def check_same_data(run: Run, environment: dict[str, Any]) -> None:
    """Require that a run is resumed on its own data."""
    if run.data().get("hashes") != environment["data"].get("hashes"):
        raise UserError(
            f"{run.path} was trained on different data (content hashes differ); resume it with the same data"
        )


def find_parent(parent: str | None, resumed: Run | None) -> Path | None:
    """Return the checkpoint folder that RUN, RUN@best or RUN@last names; None if `resumed` has its own checkpoints."""
    if parent is None or (resumed is not None and any(resumable_checkpoints(resumed))):
        return None
    return find_checkpoint(*split_parent(parent))


def start_from(state: TrainingState, parent: Path) -> None:
    """Load the weights of another run; step, data position and schedule start at 0."""
    loaded = load_model(parent)
    if loaded.config != state.model.config:
        raise UserError(
            f"the model in {parent} does not match this recipe and data:"
            f" {_describe_mismatch(loaded.config, state.model.config)}"
        )
    state.model.load_state_dict(loaded.state_dict())
    state.average.start(state.model)
    if state.recipe.train.keep_optimizer:
        checkpoint = load_checkpoint(parent)
        with explain_mismatch(checkpoint):
            restore_optimizer(state.optimizer, checkpoint.tensors())


def _describe_mismatch(parent: ModelConfig, own: ModelConfig) -> str:
    """Return the first difference between two model configs, and the remedy."""
    if parent.n_channels != own.n_channels:
        return f"it has {parent.n_channels} channels and the data {own.n_channels}; use data with the same channels"
    if parent.sessions != own.sessions:
        names = sorted(set(parent.sessions) ^ set(own.sessions))
        listed = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
        return (
            f"its sessions differ ({listed or 'in their order'}); train on the same sessions (data.sessions), or add a"
            " session with arcuate calibrate"
        )
    part = "classes" if parent.classes != own.classes else "settings"
    return f"its {part} differ; start from the parent's own recipe (recipe.yaml in its run folder)"
