"""The training loop, top to bottom: augment, forward, loss, backward, step, log, validate, checkpoint."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from arcuate.augment.steps import augment
from arcuate.batches.batch import Batch
from arcuate.errors import UserError
from arcuate.losses.ctc import ctc_loss
from arcuate.models.model import Model
from arcuate.models.outputs import Outputs
from arcuate.recipe import Recipe
from arcuate.run import Run, append_line
from arcuate.seeds import derive
from arcuate.tokens import BLANK
from arcuate.training.checkpoint import point, prune, save_checkpoint
from arcuate.training.optimizer import fill_absent, make_optimizer, set_rates
from arcuate.training.tally import Tally


class Watcher(Protocol):
    """Whoever shows progress: told of every step and of every row written to metrics.jsonl."""

    def step(self, step: int) -> None: ...

    def row(self, row: dict[str, Any]) -> None: ...


@dataclass
class Best:
    """The best validation so far: by actual error rate, ties by loss; without validation the newest wins."""

    step: int | None = None
    per: float | None = None
    loss: float | None = None

    def improve(self, step: int, per: float | None, loss: float | None) -> bool:
        inf = float("inf")
        new = (inf if per is None else per, inf if loss is None else loss)
        old = (inf if self.per is None else self.per, inf if self.loss is None else self.loss)
        if self.step is not None and per is not None and new >= old:
            return False
        self.step, self.per, self.loss = step, per, loss
        return True


def train(
    model: Model,
    batches: Iterator[Batch],
    validate: Callable[[Model], dict[str, Any]] | None,
    recipe: Recipe,
    run: Run,
    device: torch.device,
    watcher: Watcher,
) -> Best:
    """Train for recipe.train.steps optimizer steps, leaving metrics and checkpoints in the run folder."""
    settings = recipe.train
    optimizer = make_optimizer(model, recipe.optimizer)
    forward = (
        torch.compile(model.encode) if recipe.runtime.compile and device.type == "cuda" else model.encode
    )
    best, tally = Best(), Tally()
    model.train()
    for step in range(1, settings.steps + 1):
        waiting = time.perf_counter()
        batch = next(batches).to(device)
        waiting = time.perf_counter() - waiting
        torch.manual_seed(derive(settings.seed, "dropout", batch.position))
        rates = set_rates(optimizer, recipe, step - 1)

        with precision(settings.precision, device):
            outputs = forward_augmented(model, forward, batch, recipe)
            loss = batch_loss(outputs, batch, recipe)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if recipe.optimizer.absent_sessions == "decay":
            fill_absent(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm or float("inf"))
        optimizer.step()

        tally.add(loss, grad_norm, blank_share(outputs), len(batch.trials), waiting)
        watcher.step(step)
        if step % settings.log_every == 0 or step == settings.steps:
            row = tally.row(step, rates)
            write(run, watcher, row)
            refuse_nonfinite(run, row)
            tally = Tally()
        validated = False
        if step % settings.validate_every == 0 or step == settings.steps:
            validated = True
            row = validation_row(step, validate(model) if validate else {})
            if validate:
                write(run, watcher, row)
            if best.improve(step, row.get("per"), row.get("loss")):
                point(run, "best", save_checkpoint(run, step, model, row))
            tally.started = time.perf_counter()
        if validated or step % settings.checkpoint_every == 0:
            state = {"best_step": best.step, "best_per": best.per}
            point(run, "last", save_checkpoint(run, step, model, state))
            prune(run, settings.keep_checkpoints)
    return best


def forward_augmented(model: Model, encode: Callable[..., Outputs], batch: Batch, recipe: Recipe) -> Outputs:
    """Augmentation acts on normalised bins, so that its strengths mean the same on every data set."""
    bins = model.normalise(batch.bins, batch.statistics)
    ids = [t.id for t in batch.trials]
    bins, n_bins = augment(bins, batch.n_bins, ids, recipe.augment, recipe.train.seed, batch.position)
    return encode(bins, n_bins, batch.session)


def batch_loss(outputs: Outputs, batch: Batch, recipe: Recipe) -> torch.Tensor:
    log_probs = outputs.log_probs["ctc"].float()
    return ctc_loss(log_probs, outputs.n_frames, batch.tokens, batch.n_tokens, recipe.loss.ctc).mean()


@torch.no_grad()
def blank_share(outputs: Outputs) -> torch.Tensor:
    """Share of true frames on which blank is the most probable class."""
    blank = outputs.log_probs["ctc"].argmax(-1) == BLANK  # (B, F)
    true = torch.arange(blank.shape[1], device=blank.device) < outputs.n_frames[:, None]
    return (blank & true).sum() / true.sum()


def validation_row(step: int, summary: dict[str, Any]) -> dict[str, Any]:
    return {"step": step, **summary}


def write(run: Run, watcher: Watcher, row: dict[str, Any]) -> None:
    append_line(run.metrics_file, row)
    watcher.row(row)


def refuse_nonfinite(run: Run, row: dict[str, Any]) -> None:
    """Stop with the evidence kept, rather than go on with weights that are no numbers."""
    broken = [k for k in ("loss", "grad_norm") if not abs(float(row[k])) < float("inf")]
    if broken:
        append_line(run.incidents_file, {"step": row["step"], "kind": "non_finite", "values": broken})
        raise UserError(
            f"{' and '.join(broken)} became NaN or infinite by step {row['step']}; lower the learning rate,"
            " set train.clip_norm, or set loss.ctc.zero_infinity=true; the last good checkpoint is kept"
        )


def precision(name: str, device: torch.device) -> AbstractContextManager[Any]:
    if name == "bf16" and device.type == "cuda":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return nullcontext()
