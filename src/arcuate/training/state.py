"""Everything about a training run that changes, and how it goes into a checkpoint and comes back."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from arcuate.errors import UserError
from arcuate.files import read_jsonl, sync, write_jsonl
from arcuate.losses.config import LossSettings
from arcuate.models.model import Model
from arcuate.run import Run
from arcuate.training.averaging import Averages
from arcuate.training.checkpoint import Best, Checkpoint, check_like, point, prune, save_checkpoint
from arcuate.training.config import TrainingConfig
from arcuate.training.curriculum import Stage, StageProgress, stage_at, stage_loss
from arcuate.training.guard import Guard
from arcuate.training.metrics import IntervalMetrics
from arcuate.training.modes import Modes
from arcuate.training.optim import (
    make_optimizer,
    optimizer_tensors,
    restore_optimizer,
    set_trainable,
    transfer_state,
)
from arcuate.training.schedule import PlateauState, update_plateau

MOVING_STEPS = 200


class Training:
    """The mutable side of a run: weights, optimizer, averages, guard, and where in the data it stands.

    `step` counts optimizer steps that were kept or skipped; `position` counts batches drawn and never goes back.
    """

    def __init__(self, model: Model, recipe: TrainingConfig, run: Run, mixed: str) -> None:
        self.model, self.recipe, self.run = model, recipe, run
        self.progress = StageProgress()
        set_trainable(model, self.stage)
        self.optimizer = make_optimizer(model, recipe.optimizer)
        self.averages = Averages(model, recipe.ema, recipe.swa)
        self.guard = Guard(recipe.guard)
        self.scaler = torch.amp.GradScaler("cuda", enabled=mixed == "fp16")
        self.mixed = mixed  # the precision to use once it is on
        self.mixed_on = recipe.train.precision.below_per is None
        self.step = 0
        self.position = 0
        self.rate_scale = 1.0
        self.plateaus = (PlateauState(), PlateauState())
        self.best = Best()  # since the last stage began
        self.bests: dict[str, Best] = {}  # of the stages before
        self.validations: list[tuple[int, float]] = []
        self.tally = IntervalMetrics()
        self.good: list[int] = []  # steps of checkpoints to come back to
        self.rewound_to: int | None = None
        self.modes: Modes | None = None  # of training trials, where the model has a head for them

    @property
    def stage(self) -> Stage | None:
        return stage_at(self.recipe.stages, self.progress.index)

    @property
    def loss(self) -> LossSettings:
        """The losses as they count now."""
        return stage_loss(self.recipe.loss, self.stage)

    @property
    def finished(self) -> bool:
        over = bool(self.recipe.stages) and self.progress.index >= len(self.recipe.stages)
        return over or self.step >= self.recipe.train.steps

    @property
    def stage_is_over(self) -> bool:
        return self.stage is not None and self.progress.is_over(self.stage, self.step)

    def stage_over(self) -> dict[str, Any]:
        """What there is to say of a stage at its end, and when the run will end now."""
        assert self.stage is not None
        later = self.recipe.stages[self.progress.index + 1 :]
        return {
            "step": self.step,
            "stage": self.stage.name,
            "next": later[0].name if later and self.step < self.recipe.train.steps else None,
            "without_gain": self.progress.n_bad if self.progress.is_out_of_patience(self.stage) else None,
            "best_per": self.best.per,
            "ends_at": min(self.step + sum(s.steps or 0 for s in later), self.recipe.train.steps),
        }

    def next_stage(self) -> None:
        """Other losses and other learners: the optimizer keeps what it knows of weights that go on learning.

        The best checkpoint is sought anew, for those before lack what this stage trains; they keep a link of their
        own. The guard's levels, the schedule and the checkpoints to rewind to begin anew; a rate that the guard
        lowered stays low.
        """
        assert self.stage is not None
        self.bests[self.stage.name] = self.best
        self.progress = StageProgress(self.progress.index + 1, self.step)
        if self.progress.index >= len(self.recipe.stages):
            return
        self.best, self.good, self.rewound_to = Best(), [], None
        self.guard.start_stage()
        if self.stage.schedule == "restart":
            self.plateaus = (PlateauState(), PlateauState())
        set_trainable(self.model, self.stage)
        old, self.optimizer = self.optimizer, make_optimizer(self.model, self.recipe.optimizer)
        transfer_state(old, self.optimizer)

    @property
    def precision(self) -> str:
        return self.mixed if self.mixed_on else "fp32"

    def take_validation(self, per: float | None) -> float | None:
        """Let schedules and precision know of a validation; returns the moving average of PER."""
        recipe = self.recipe
        session = recipe.session_schedule or recipe.schedule
        self.plateaus = (
            update_plateau(recipe.schedule, self.plateaus[0], per),
            update_plateau(session, self.plateaus[1], per),
        )
        if self.stage is not None:
            self.progress = self.progress.after_validation(self.stage, per)
        if per is None:
            return None
        below = recipe.train.precision.below_per
        self.mixed_on = self.mixed_on or (below is not None and per < below)
        recent = [(s, p) for s, p in self.validations if s > self.step - MOVING_STEPS]
        self.validations = [*recent, (self.step, per)]
        return sum(p for _, p in self.validations) / len(self.validations)

    def save(self, scheduled: bool = True) -> str:
        """Write a checkpoint of this moment and make it the last one.

        One that a signal asked for is no place to rewind to: an uninterrupted run has none there.
        """
        if scheduled and self.guard.is_healthy:
            self.good = self.worth_returning_to()
        for file in (self.run.metrics_file, self.run.incidents_file):
            sync(file)  # the checkpoint counts on these rows
        state = self.to_json()
        tensors = optimizer_tensors(self.optimizer) | self.averages.tensors()
        if self.averages.current:  # then model.safetensors holds the average, and the weights go here
            tensors |= {f"weights.{n}": p.detach() for n, p in self.model.named_parameters()}
        with self.averages.shown(self.model):
            folder = save_checkpoint(self.run, self.step, self.model, tensors, state)
        point(self.run, "last", folder)
        prune(self.run, self.recipe.train.keep_checkpoints, {f"step-{s:08d}" for s in self.good})
        return folder.name

    def worth_returning_to(self) -> list[int]:
        """The two newest good checkpoints, this one included; and the first, until the model has learned something."""
        earlier = [s for s in self.good if s < self.step]
        first = [] if self.guard.has_learnt else earlier[:-1][:1]
        return [*first, *earlier[-1:], self.step]

    def to_json(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "rate_scale": self.rate_scale,
            "plateaus": [asdict(p) for p in self.plateaus],
            "best": asdict(self.best),
            "validations": self.validations,
            "tally": self.tally.to_dict(),
            "guard": self.guard.to_dict(),
            "good": self.good,
            "rewound_to": self.rewound_to,
            "averages": self.averages.counts(),
            "mixed_on": self.mixed_on,
            "progress": asdict(self.progress),
            "bests": {name: asdict(best) for name, best in self.bests.items()},
            "scaler": self.scaler.state_dict(),
            "files_at": {
                "metrics": self.run.metrics_file.stat().st_size,
                "incidents": self.run.incidents_file.stat().st_size,
            },
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Everything as it was when this checkpoint was written."""
        saved = checkpoint.saved
        self.progress, self.bests = saved.progress, saved.bests
        self.restore_weights(checkpoint)
        with fitting(checkpoint):
            check_like(Guard(self.recipe.guard).to_dict(), saved.guard, "guard")
        self.guard.restore(saved.guard)
        self.position, self.rate_scale, self.plateaus = saved.position, saved.rate_scale, saved.plateaus
        self.best, self.validations, self.tally = saved.best, saved.validations, saved.tally
        self.good, self.rewound_to, self.mixed_on = saved.good, saved.rewound_to, saved.mixed_on

    def restore_weights(self, checkpoint: Checkpoint) -> None:
        """Step, weights, optimizer and averages of a checkpoint; not the place in the data, nor the guard."""
        from arcuate.models.io import load_model

        tensors, saved = checkpoint.tensors(), checkpoint.saved
        own = {n.removeprefix("weights."): t for n, t in tensors.items() if n.startswith("weights.")}
        with fitting(checkpoint):
            whole = load_model(checkpoint.folder).state_dict()
            self.model.load_state_dict(whole | own)
            self.averages.restore(tensors, saved.averages.n_ema, saved.averages.n_mean)
            set_trainable(self.model, self.stage)
            self.optimizer = make_optimizer(self.model, self.recipe.optimizer)
            restore_optimizer(self.optimizer, tensors)
            if saved.scaler:
                self.scaler.load_state_dict(saved.scaler)
        self.step = saved.step

    def refuse_lost_rows(self, checkpoint: Checkpoint) -> None:
        """Rows written before the checkpoint must still be there, for nobody writes them again."""
        for path, size in self._sizes_at(checkpoint):
            if not path.is_file() or path.stat().st_size < size or not ends_line(path, size):
                raise UserError(f"{path} has lost rows that {checkpoint.folder.name} counts on")

    def cut_files(self, checkpoint: Checkpoint) -> None:
        """Rows written after the checkpoint will be written again."""
        self.refuse_lost_rows(checkpoint)
        for path, size in self._sizes_at(checkpoint):
            os.truncate(path, size)

    def _sizes_at(self, checkpoint: Checkpoint) -> list[tuple[Path, int]]:
        at = checkpoint.saved.files_at
        return [(self.run.metrics_file, at.metrics), (self.run.incidents_file, at.incidents)]

    def take_back_rows(self) -> list[dict[str, Any]]:
        """Remove from metrics.jsonl the rows of steps that a rewind undoes, and return them."""
        rows = read_jsonl(self.run.metrics_file)
        write_jsonl(self.run.metrics_file, (r for r in rows if r["step"] <= self.step))
        return [r for r in rows if r["step"] > self.step]


@contextmanager
def fitting(checkpoint: Checkpoint) -> Iterator[None]:
    """A checkpoint may be whole and yet hold what another model or optimizer left."""
    try:
        yield
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"{checkpoint.folder} does not fit this recipe and data ({first})") from None


def ends_line(path: Path, size: int) -> bool:
    """Whether the first `size` bytes of a file are whole lines."""
    if size == 0:
        return True
    with path.open("rb") as file:
        file.seek(size - 1)
        return file.read(1) == b"\n"


def memory_mb(device: torch.device) -> float:
    """Peak memory: of the device, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
