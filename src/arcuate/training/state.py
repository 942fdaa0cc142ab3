"""The mutable state of a training run, and how it is saved to a checkpoint and restored."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal

import torch

from arcuate.errors import UserError
from arcuate.files import read_jsonl, sync, write_jsonl
from arcuate.losses.config import LossSettings
from arcuate.models.io import load_model
from arcuate.models.model import Model
from arcuate.progress import peak_memory_bytes
from arcuate.run import Run
from arcuate.training.checkpoint import Best, Checkpoint, Progress, link, prune_checkpoints, save_checkpoint
from arcuate.training.config import TrainingConfig
from arcuate.training.curriculum import Stage, StageProgress, stage_at, stage_loss, transducer_was_trained
from arcuate.training.environment import Distributed
from arcuate.training.guard import Guard
from arcuate.training.modes import Modes
from arcuate.training.optim import (
    WeightAverage,
    make_optimizer,
    optimizer_tensors,
    restore_optimizer,
    set_trainable,
    transfer_state,
    typical_gradient,
)
from arcuate.training.schedule import PlateauState, update_plateau

_MOVING_AVERAGE_STEPS = 200


class TrainingState:
    """Everything that changes during training: tensors, and `progress`, which state.json holds."""

    def __init__(self, model: Model, recipe: TrainingConfig, run: Run, mixed_precision: str) -> None:
        self.model, self.recipe, self.run = model, recipe, run
        self.progress = Progress(mixed_precision_on=recipe.train.precision.below_per is None)
        set_trainable(model, self.stage)
        self.optimizer = make_optimizer(model, recipe.optimizer)
        self.average = WeightAverage(model, recipe.ema.decay)
        self.guard = Guard(recipe.guard, self.progress.guard)
        device = next(model.parameters()).device
        self._fp16_scaler = torch.amp.GradScaler(device.type, enabled=mixed_precision == "fp16")
        self._no_scaler = torch.amp.GradScaler(device.type, enabled=False)
        self.mixed_precision = mixed_precision  # used once `progress.mixed_precision_on`
        self.unread_update_ratio: torch.Tensor | None = None  # measured, and still on the device
        self.distributed = Distributed()  # set by the training loop
        self.recipe_hash: str | None = None  # hash of recipe.yaml when the run was started or resumed
        self.modes: Modes | None = None  # modes of the training trials if the model has a mode head
        self.batches_per_epoch: int | None = None  # for the epoch in the rows; set by the caller who knows the data

    @property
    def stage(self) -> Stage | None:
        return stage_at(self.recipe.stages, self.progress.curriculum.index)

    @property
    def loss(self) -> LossSettings:
        """Loss settings with the weights of the current stage."""
        return stage_loss(self.recipe.loss, self.stage)

    @property
    def decodes_words_by_both_heads(self) -> bool:
        """Whether validations decode words with the transducer too: as soon as it has been trained."""
        recipe = self.recipe
        trained = transducer_was_trained(recipe.loss, recipe.stages, self.progress.curriculum.index + 1)
        return recipe.transducer.enabled and trained

    @property
    def precision(self) -> str:
        return self.mixed_precision if self.progress.mixed_precision_on else "fp32"

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """The loss scaler of fp16; disabled in other precisions and before mixed precision starts."""
        return self._fp16_scaler if self.precision == "fp16" else self._no_scaler

    def set_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Replace the loss scaler of fp16."""
        self._fp16_scaler = scaler

    @property
    def is_finished(self) -> bool:
        stages_done = bool(self.recipe.stages) and self.progress.curriculum.index >= len(self.recipe.stages)
        return stages_done or self.progress.step >= self.recipe.train.steps

    @property
    def n_left(self) -> int:
        """Number of steps to the end of the run, or of the stage."""
        end = self.recipe.train.steps
        if self.stage is not None and self.stage.steps is not None:
            end = min(end, self.progress.curriculum.began + self.stage.steps)
        return end - self.progress.step

    @property
    def stage_is_over(self) -> bool:
        return self.stage is not None and self.progress.curriculum.is_over(self.stage, self.progress.step)

    def record_validation(self, per: float | None, wer: float | None = None) -> float | None:
        """Update schedules, stage and precision after a validation; return the moving average of PER.

        Plateaus and patience follow the error rate that selects the checkpoint, so that a run is not slowed down or
        ended while the rate it is selected by still falls.
        """
        recipe = self.recipe
        rate = wer if recipe.train.select_by == "wer" else per
        self.progress.plateau = update_plateau(recipe.schedule, self.progress.plateau, rate)
        if self.stage is not None:
            self.progress.curriculum = self.progress.curriculum.after_validation(self.stage, rate)
        if per is None:
            return None
        below = recipe.train.precision.below_per
        self.progress.mixed_precision_on = self.progress.mixed_precision_on or (below is not None and per < below)
        recent = [(s, p) for s, p in self.progress.validations if s > self.progress.step - _MOVING_AVERAGE_STEPS]
        self.progress.validations = [*recent, (self.progress.step, per)]
        return sum(p for _, p in self.progress.validations) / len(self.progress.validations)

    def record_update_ratio(self, ratio: float | None) -> None:
        """Pass a measured norm of the update / norm of the weights to the next row and to the guard."""
        if ratio is not None and math.isfinite(ratio):
            self.progress.interval.update_ratio = ratio
            self.guard.record_update_ratio(ratio)
            if self.guard.total_change_is_small:  # computed only then, because it reads all weights
                gradient = self.typical_gradient()
                self.guard.memory.eps_limits = gradient is not None and 0 < gradient < (
                    self.guard.memory.eps or self.recipe.optimizer.eps
                )

    def read_update_ratio(self) -> None:
        """Transfer a measured ratio that the next step would read, before a checkpoint or a rewind."""
        if self.unread_update_ratio is not None:
            self.record_update_ratio(self.distributed.from_main(float(self.unread_update_ratio)))
            self.unread_update_ratio = None

    def typical_gradient(self) -> float | None:
        """Median root mean square gradient of the weights (`optim.typical_gradient`) on rank 0."""
        gradient = typical_gradient(self.optimizer)
        return None if gradient is None else self.distributed.from_main(gradient)

    def stage_summary(self) -> dict[str, Any]:
        """Return the outcome of the stage that has just ended, and the step at which the run will end."""
        assert self.stage is not None
        later = self.recipe.stages[self.progress.curriculum.index + 1 :]
        return {
            "step": self.progress.step,
            "stage": self.stage.name,
            "next": later[0].name if later and self.progress.step < self.recipe.train.steps else None,
            "without_improvement": self.progress.curriculum.n_bad
            if self.progress.curriculum.is_out_of_patience(self.stage)
            else None,
            "best_per": self.progress.best.per,
            "ends_at": min(self.progress.step + sum(s.steps or 0 for s in later), self.recipe.train.steps),
        }

    def start_next_stage(self) -> None:
        """Switch to the losses and trained components of the next stage.

        The optimizer keeps the state of parameters that stay trainable, and learning-rate reductions of the guard
        stay. Everything that depends on the losses starts again: the guard's statistics, the schedule, the rewind
        targets and the best checkpoint. Earlier checkpoints lack what this stage trains; the best of each completed
        stage keeps a link of its own.
        """
        assert self.stage is not None
        self.progress.stage_bests[self.stage.name] = self.progress.best
        self.progress.curriculum = StageProgress(self.progress.curriculum.index + 1, self.progress.step)
        if self.progress.curriculum.index >= len(self.recipe.stages):
            return
        self.progress.best, self.guard.memory.targets, self.guard.memory.rewound_to = Best(), [], None
        self.guard.start_stage()
        if self.stage.schedule == "restart":
            self.progress.plateau = PlateauState()
        set_trainable(self.model, self.stage)
        old, self.optimizer = self.optimizer, make_optimizer(self.model, self.recipe.optimizer)
        transfer_state(old, self.optimizer)

    def record_checkpoint(self, scheduled: bool = True) -> None:
        """Tell the guard of a checkpoint; on every process.

        One that was not scheduled (a signal arrived) is not a target of rewinds: an uninterrupted run does not have it.
        """
        if scheduled:
            self.guard.checkpoint_saved(self.progress.step)

    def save(self, scheduled: bool = True) -> str:
        """Record and write a checkpoint, link it as `last`, and return its name."""
        self.record_checkpoint(scheduled)
        for file in self._row_files.values():
            sync(file)  # the checkpoint relies on these rows
        saved = self._to_dict()
        tensors = optimizer_tensors(self.optimizer) | self.average.tensors()
        if self.average.weights:  # model.safetensors holds the average, and the weights themselves go here
            tensors |= {f"weights.{n}": p.detach().clone() for n, p in self.model.named_parameters()}
        with self.average.applied(self.model):
            folder = save_checkpoint(self.run, self.model, tensors, saved)
        link(self.run, "last", folder)
        needed = {f"step-{step:08d}" for step in self.guard.memory.targets}
        prune_checkpoints(self.run, self.recipe.train.keep_checkpoints, needed)
        return folder.name

    def _to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self.progress),
            "n_averaged": self.average.n,
            "scaler": self._fp16_scaler.state_dict(),
            "recipe_hash": self.recipe_hash,
            "head": self._trained_head,
            "file_sizes": {name: file.stat().st_size for name, file in self._row_files.items()},
        }

    @property
    def _trained_head(self) -> Literal["ctc", "both"]:
        """The heads whose losses have had a weight so far, with which decoding uses a checkpoint by default."""
        recipe, stage = self.recipe, self.progress.curriculum
        started = stage.index + (self.progress.step > stage.began)
        trained = transducer_was_trained(recipe.loss, recipe.stages, started)
        return "both" if recipe.transducer.enabled and trained else "ctc"

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore the complete state of a checkpoint."""
        self.progress = Progress(**{field.name: getattr(checkpoint.saved, field.name) for field in fields(Progress)})
        self.guard = Guard(self.recipe.guard, self.progress.guard)
        self.restore_weights(checkpoint)

    def restore_weights(self, checkpoint: Checkpoint) -> None:
        """Restore step, weights, optimizer and averages, but neither the data position nor the guard."""
        tensors, saved = checkpoint.tensors(), checkpoint.saved
        own = {n.removeprefix("weights."): t for n, t in tensors.items() if n.startswith("weights.")}
        with explain_mismatch(checkpoint):
            self.model.load_state_dict(load_model(checkpoint.folder).state_dict() | own)
            self.average.restore(tensors, saved.n_averaged)
            set_trainable(self.model, self.stage)
            self.optimizer = make_optimizer(self.model, self.recipe.optimizer)
            restore_optimizer(self.optimizer, tensors)
            if saved.scaler:
                self._fp16_scaler.load_state_dict(saved.scaler)
        self.progress.step, self.unread_update_ratio = saved.step, None

    def check_rows(self, checkpoint: Checkpoint) -> None:
        """Require all rows written before the checkpoint, because they will not be written again."""
        for path, size in self._sizes_at(checkpoint):
            if not path.is_file() or path.stat().st_size < size or not _ends_line(path, size):
                raise UserError(f"{path} lacks rows written before {checkpoint.folder.name}")

    def truncate_rows(self, checkpoint: Checkpoint) -> None:
        """Remove the rows written after the checkpoint, because they will be written again."""
        self.check_rows(checkpoint)
        self.run.predictions_file.touch()
        for path, size in self._sizes_at(checkpoint):
            os.truncate(path, size)

    def _sizes_at(self, checkpoint: Checkpoint) -> list[tuple[Path, int]]:
        return [(file, getattr(checkpoint.saved.file_sizes, name)) for name, file in self._row_files.items()]

    @property
    def _row_files(self) -> dict[str, Path]:
        """Files that grow during training; a checkpoint records their sizes."""
        run = self.run
        return {"metrics": run.metrics_file, "incidents": run.incidents_file, "predictions": run.predictions_file}

    def remove_rewound_rows(self) -> list[dict[str, Any]]:
        """Remove the rows of rewound steps from predictions.jsonl and metrics.jsonl; return those of metrics.jsonl."""
        removed: list[dict[str, Any]] = []
        for file in (self.run.predictions_file, self.run.metrics_file):
            rows = read_jsonl(file)
            write_jsonl(file, (row for row in rows if row["step"] <= self.progress.step))
            removed = [row for row in rows if row["step"] > self.progress.step]
        return removed


_DEVICE_ERRORS = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))


@contextmanager
def explain_mismatch(checkpoint: Checkpoint) -> Iterator[None]:
    """Turn errors from restoring a checkpoint of a different model or optimizer into a `UserError`."""
    try:
        yield
    except _DEVICE_ERRORS:  # not caused by the checkpoint; falling back to an earlier one would lose steps
        raise
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        if "CUDA error" in str(error):  # torch before 2.8, or within another error
            raise
        first = str(error).splitlines()[0]
        raise UserError(f"{checkpoint.folder} does not match this recipe and data ({first})") from None


def memory_mb(device: torch.device) -> float:
    """Return the peak memory of the device, or of the process on a CPU, in 10^6 bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return peak_memory_bytes() / 1e6


def _ends_line(path: Path, size: int) -> bool:
    """Return whether the first `size` bytes of a file are complete lines."""
    if size == 0:
        return True
    with path.open("rb") as file:
        file.seek(size - 1)
        return file.read(1) == b"\n"
