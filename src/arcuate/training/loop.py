"""The training loop, top to bottom: augment, forward, loss, backward, judge, step, log, validate, checkpoint."""

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from arcuate.data.alphabet import BLANK
from arcuate.data.augmentation import augment
from arcuate.data.batching import Batch
from arcuate.errors import UserError
from arcuate.files import append_jsonl
from arcuate.losses.combined import LOSS_NAMES, TOKEN_LOSSES, compute_losses, weighted_loss
from arcuate.losses.config import LossSettings
from arcuate.models.interfaces import ModelInputs, Outputs
from arcuate.models.model import Model
from arcuate.seeds import derive_seed
from arcuate.training.checkpoint import forget_newer, load_checkpoint, mend_bests, point
from arcuate.training.config import TrainingConfig
from arcuate.training.distributed import Encode, World, encode_for_training
from arcuate.training.guard import Verdict
from arcuate.training.incidents import keep_batch, record
from arcuate.training.metrics import IntervalMetrics, StepMetrics
from arcuate.training.optim import fill_absent_gradients, set_learning_rates
from arcuate.training.precision import autocast
from arcuate.training.signals import Stop
from arcuate.training.state import Training, memory_mb

Validate = Callable[[Model], dict[str, Any]]


class Watcher(Protocol):
    """Whoever shows progress: told of every step, row of metrics.jsonl and incident, and of stages that end."""

    def step(self, step: int) -> None: ...

    def row(self, row: dict[str, Any]) -> None: ...

    def incident(self, row: dict[str, Any]) -> None: ...

    def stage(self, row: dict[str, Any]) -> None: ...


def train(
    training: Training,
    batches: Iterator[Batch],
    validate: Validate | None,
    device: torch.device,
    watcher: Watcher,
    stop: Stop,
    wrap: Callable[[], Encode] | None = None,
    world: World | None = None,
) -> None:
    """Train until recipe.train.steps optimizer steps or all stages are done, or a signal or the guard says stop.

    `wrap` makes the function from bins to outputs, once for every stage, for what learns differs.
    """
    model, recipe, world = training.model, training.recipe, world or World()
    settings = recipe.train
    encode = wrap() if wrap else partial(encode_for_training, model)
    model.train()
    training.tally.started = time.perf_counter()
    if training.step == 0 and world.writes:
        training.save()
    leaving = False  # once any process was told to, all leave after the same step
    while not training.finished and not leaving:
        waiting = time.perf_counter()
        drawn = [next(batches).to(device) for _ in range(settings.accumulate)]
        waiting = time.perf_counter() - waiting
        rates = rates_now(training)

        numbers = backward(training, encode, drawn, device, world)
        verdict = training.guard.judge(numbers, rates.get("rest", max(rates.values())))
        if verdict.applies_update:
            training.scaler.step(training.optimizer)
            training.scaler.update()
            training.averages.update(model, training.step + 1)
        training.step += 1
        training.position += settings.accumulate
        skipped_by = None if verdict.applies_update else verdict.kind
        training.tally.add(numbers, sum(b.n_counted for b in drawn), waiting, skipped_by)
        leaving = world.any(stop.requested)

        if verdict.action != "keep":
            act(training, verdict, numbers, drawn, watcher, world)
        if verdict.action == "rewind":
            continue
        watcher.step(training.step)
        done = training.step == settings.steps or training.stage_is_over
        if training.step % settings.log_every == 0 or done:
            log(training, rates, device, watcher, world)
        validated = training.step % settings.validate_every == 0 or done
        improved = validated and validate_now(training, validate, watcher, world)
        if validated and training.stage_is_over:
            if training.tally.n_steps:  # over because nothing improved, which only this validation told
                log(training, rates, device, watcher, world)
            if world.writes:
                watcher.stage(training.stage_over())
            training.next_stage()
            encode = wrap() if wrap and not training.finished else encode
        scheduled = validated or training.step % settings.checkpoint_every == 0
        if scheduled or leaving:
            checkpoint(training, improved, scheduled, world)
    if leaving and not stop.requested:
        stop.requested, stop.signal = True, signal.SIGTERM  # another process received a signal


def rates_now(training: Training) -> dict[str, float]:
    """Rates of the schedule over the run, or over the stage it spans."""
    stage, step, n_steps = training.stage, training.step, training.recipe.train.steps
    scale = training.rate_scale
    if stage is not None:
        scale *= stage.lr_factor
        if stage.schedule == "restart" and stage.steps is not None:
            step, n_steps = step - training.progress.began, stage.steps
    return set_learning_rates(training.optimizer, training.recipe, step, scale, training.plateaus, n_steps)


def backward(
    training: Training, encode: Encode, drawn: Sequence[Batch], device: torch.device, world: World
) -> StepMetrics:
    """Gradients of the mean loss per trial over all batches drawn, clipped; and what the step looked like."""
    recipe, model, weights = training.recipe, training.model, training.loss
    n_trials = sum(b.n_trials for b in drawn)  # over all processes
    training.optimizer.zero_grad(set_to_none=True)
    # loss, blank frames, frames, tokens read, tokens said, trials, losses by head
    seen = torch.zeros(6 + len(LOSS_NAMES), device=device)
    heard = torch.zeros(len(model.config.classes), device=device)
    for batch in drawn:
        torch.manual_seed(derive_seed(recipe.train.seed, "dropout", batch.position, world.rank))
        with autocast(training.precision, device):
            outputs = forward_augmented(model, encode, batch, recipe, weights)
        wanted = training.modes.wanted([t.id for t in batch.trials], device) if training.modes else None
        by_head = compute_losses(outputs, batch.tokens, batch.n_tokens, weights, wanted)
        losses = weighted_loss(by_head, weights)
        loss = losses[: batch.n_counted].sum() + 0.0 * losses.sum()
        training.scaler.scale(loss * (world.size / n_trials)).backward()
        with torch.no_grad():
            seen += summarise_outputs(outputs, batch, loss, by_head, heard)
    if world.size > 1:
        seen, heard = world.sum(seen), world.sum(heard)
    if recipe.optimizer.absent_sessions == "decay":
        fill_absent_gradients(training.optimizer)
    training.scaler.unscale_(training.optimizer)
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.train.clip_norm or float("inf"))
    heard[BLANK] = 0
    read = torch.stack(
        [*seen, grad_norm.to(device), (heard > 0).sum()]
    ).tolist()  # the one look at the device
    loss_sum, blank, frames, tokens_read, tokens_said, _, *sums, norm, distinct = read
    means = {head: total / n_trials for head, total in zip(LOSS_NAMES, sums, strict=True) if head in by_head}
    return StepMetrics(
        loss=loss_sum / n_trials,
        grad_norm=norm,
        normalised_loss=normalised_loss(
            means, weights, tokens_said / n_trials, frames / n_trials, len(heard)
        ),
        blank_share=blank / max(frames, 1),
        n_distinct=int(distinct),
        length_ratio=tokens_read / max(tokens_said, 1),
        losses=means,
    )


def normalised_loss(
    losses: dict[str, float], settings: LossSettings, n_tokens: float, n_frames: float, n_classes: int
) -> float | None:
    """LossSettings per token of the first head that counts, over that of a blind guess; numbers are means over trials.

    Where no head reads tokens, nothing is known of that.
    """
    head = next((head for head in TOKEN_LOSSES if head in losses), None)
    if head is None:
        return None
    match getattr(settings, head).reduction:
        case "mean_per_token":
            per_token = losses[head]
        case "half_mean_frames":
            per_token = losses[head] * n_frames / 2 / max(n_tokens, 1)
        case _:
            per_token = losses[head] / max(n_tokens, 1)
    return per_token / math.log(n_classes)


def forward_augmented(
    model: Model, encode: Encode, batch: Batch, recipe: TrainingConfig, weights: LossSettings
) -> Outputs:
    """Augmentation acts on normalised bins, so that its strengths mean the same on every data set."""
    clean = model.normalise(batch.bins, batch.statistics)
    ids = [t.id for t in batch.trials]
    bins, n_bins = augment(clean, batch.n_bins, ids, recipe.augment, recipe.train.seed, batch.position)
    clean = clean[:, clean.shape[1] - bins.shape[1] :]  # cut as the others were
    inputs = ModelInputs(
        bins,
        n_bins,
        batch.session,
        tokens=batch.tokens if weights.rnnt.weight > 0 else None,
        clean=clean if model.mode is not None or model.denoiser is not None else None,
        layers=weights.intermediate.active_layers,
    )
    return encode(inputs, weights.denoise.weight > 0)


def summarise_outputs(
    outputs: Outputs,
    batch: Batch,
    loss: torch.Tensor,
    by_head: dict[str, torch.Tensor],
    heard: torch.Tensor,
) -> torch.Tensor:
    """Sums over one batch for the guard; `heard` counts the frames of each class."""
    best = outputs.log_probs["ctc"].argmax(-1)  # (B, F)
    true = torch.arange(best.shape[1], device=best.device) < outputs.n_frames[:, None]
    heard += torch.bincount(best[true], minlength=len(heard))
    new = torch.ones_like(true)
    new[:, 1:] = best[:, 1:] != best[:, :-1]
    blank = best == BLANK
    sums = [
        loss.detach(),
        (blank & true).sum(),
        true.sum(),
        (new & ~blank & true).sum(),
        batch.n_tokens.sum(),
    ]
    heads = [by_head[h][: batch.n_counted].sum() if h in by_head else loss.new_zeros(()) for h in LOSS_NAMES]
    return torch.stack([*(s.float() for s in sums), loss.new_tensor(float(batch.n_counted)), *heads])


def log(
    training: Training, rates: dict[str, float], device: torch.device, watcher: Watcher, world: World
) -> None:
    row = training.tally.to_row(training.step, rates, memory_mb(device))
    training.tally = IntervalMetrics()
    write(training, watcher, row, world)
    if not training.recipe.guard.enabled:
        refuse_nonfinite(training, row, world)


def validate_now(training: Training, validate: Validate | None, watcher: Watcher, world: World) -> bool:
    """Validate with the weights that would be kept; whether they are the best so far."""
    row: dict[str, Any] = {}
    if validate is not None:
        with training.averages.shown(training.model):
            row = {"step": training.step, **validate(training.model)}
        moving = training.take_validation(row["per"])
        row["per_moving_average_200_steps"] = moving
        write(training, watcher, row, world)
    training.tally.started = time.perf_counter()
    return training.best.improve(training.step, row.get("per"), row.get("loss"), training.position)


def checkpoint(training: Training, improved: bool, scheduled: bool, world: World) -> None:
    if world.writes:
        name = training.save(scheduled)
        if improved:
            point(training.run, "best", training.run.checkpoints / name)
        if training.progress.began == training.step:  # a stage is over, and its best keeps a name
            mend_bests(training.run, training.best, training.bests)
    world.wait()


def act(
    training: Training,
    verdict: Verdict,
    numbers: StepMetrics,
    drawn: Sequence[Batch],
    watcher: Watcher,
    world: World,
) -> None:
    """Do what the guard says, and keep the evidence."""
    row = record(training, verdict, numbers, drawn)
    if verdict.action == "reduce_lr":
        training.rate_scale *= training.recipe.guard.adaptive.factor
    if verdict.action == "rewind":
        row |= rewind(training, world, to_start=verdict.kind == "stuck")
    if world.writes:
        if training.recipe.guard.keep_batches and verdict.kind == "non_finite":
            row["batch"] = keep_batch(training.run, training.step, drawn)
        append_jsonl(training.run.incidents_file, row)
        watcher.incident(row)
    if verdict.action == "stop":
        rate_key = (
            "schedule.lr" if "lr" in type(training.recipe.schedule).model_fields else "schedule.peak_lr"
        )
        raise UserError(
            f"training was stopped at step {training.step}: {verdict.reason}; lower the learning rate ({rate_key}),"
            f" or set train.clip_norm; the evidence is in {training.run.incidents_file}"
        )


def rewind(training: Training, world: World, to_start: bool = False) -> dict[str, Any]:
    """Back to the last good checkpoint, or to the first, with a cooler rate; the data go on where they are."""
    targets = training.good
    if to_start:
        training.good = targets = targets[:1]
    elif (
        training.rewound_to is not None
        and targets
        and targets[-1] <= training.rewound_to
        and len(targets) > 1
    ):
        training.good = targets = targets[:-1]  # coming back here did not help: go further back
    target = load_checkpoint(training.run.checkpoints / f"step-{targets[-1] if targets else 0:08d}")
    training.restore_weights(target)
    if (
        world.writes
    ):  # in this order, so that a run killed in between comes back to the target and does the same
        point(training.run, "last", target.folder)
        forget_newer(training.run, target)
    training.rewound_to = target.step
    training.rate_scale *= (
        training.recipe.guard.stuck.lr_factor if to_start else training.recipe.guard.lr_factor
    )
    training.guard.after_rewind(to_start)
    training.tally = IntervalMetrics()
    rows = training.take_back_rows() if world.writes else []
    world.wait()
    return {"rewound_to": target.step, "rate_scale": training.rate_scale, "rows": rows}


def write(training: Training, watcher: Watcher, row: dict[str, Any], world: World) -> None:
    if training.stage is not None:
        place = min(training.progress.index, len(training.recipe.stages) - 1)
        row |= {"stage": training.stage.name, "stage_index": place}
    if world.writes:
        append_jsonl(training.run.metrics_file, row)
        watcher.row(row)


def refuse_nonfinite(training: Training, row: dict[str, Any], world: World) -> None:
    """Without the guard, stop with the evidence kept rather than go on with weights that are no numbers."""
    broken = [k for k in ("loss", "grad_norm") if not abs(float(row[k])) < float("inf")]
    if broken:
        incident = {"step": row["step"], "kind": "non_finite", "values": broken}
        if world.writes:
            append_jsonl(training.run.incidents_file, incident)
        raise UserError(
            f"{' and '.join(broken)} became NaN or infinite by step {row['step']} with the guard off; lower the"
            " learning rate, set train.clip_norm, or set guard.enabled=true; the last checkpoint is kept"
        )
