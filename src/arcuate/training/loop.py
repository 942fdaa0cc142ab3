"""The training loop, top to bottom: augment, forward, loss, backward, guard, step, log, validate, checkpoint."""

import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from arcuate.data.batching import Batch
from arcuate.files import append_jsonl
from arcuate.models.model import Model
from arcuate.training.callbacks import Callback
from arcuate.training.checkpoint import link, repair_best_links
from arcuate.training.distributed import Distributed
from arcuate.training.incidents import check_finite, respond
from arcuate.training.interrupts import Stop
from arcuate.training.metrics import IntervalMetrics
from arcuate.training.optim import set_learning_rates
from arcuate.training.state import TrainingState, memory_mb
from arcuate.training.step import Encode, apply_update, compute_gradients, encode_for_training

Validate = Callable[[Model], dict[str, Any]]


def train(
    state: TrainingState,
    batches: Iterator[Batch],
    validate: Validate | None,
    device: torch.device,
    callback: Callback,
    stop: Stop,
    make_encode: Callable[[], Encode] | None = None,
    distributed: Distributed | None = None,
) -> None:
    """Train until train.steps or the last stage is complete, `stop` is requested, or the guard stops.

    `make_encode` makes the function from bins to outputs. It is called once per stage, because the trained components
    differ.
    """
    distributed = distributed or Distributed()
    settings = state.recipe.train
    encode = make_encode() if make_encode else partial(encode_for_training, state.model)
    state.model.train()
    state.interval.started = time.perf_counter()
    if state.step == 0 and distributed.is_main:
        state.save()
    stopping = False  # if stop is requested on any process, all of them stop after the same step
    while not state.is_finished and not stopping:
        loading = time.perf_counter()
        drawn = [next(batches).to(device) for _ in range(settings.accumulate)]
        waiting_s = time.perf_counter() - loading

        learning_rates = _set_learning_rates(state)
        # Augment, forward, loss, backward.
        metrics = compute_gradients(state, encode, drawn, device, distributed)
        lr = learning_rates.get("rest", max(learning_rates.values()))
        verdict = state.guard.judge(metrics, lr)
        if verdict.applies_update:
            apply_update(state)
        state.step += 1
        state.position += settings.accumulate
        skipped_by = None if verdict.applies_update else verdict.kind
        state.interval.add(metrics, sum(b.n_counted for b in drawn), waiting_s, skipped_by)
        stopping = distributed.any(stop.requested)

        if verdict.action != "keep":
            respond(state, verdict, metrics, drawn, callback, distributed)
        if verdict.action == "rewind":
            continue
        callback.on_step(state.step)
        is_last = state.step == settings.steps or state.stage_is_over
        if state.step % settings.log_every == 0 or is_last:
            _log(state, learning_rates, device, callback, distributed)
        validated = state.step % settings.validate_every == 0 or is_last
        improved = validated and _validate(state, validate, callback, distributed)
        if validated and state.stage_is_over:
            if state.interval.n_steps:  # this validation ended the stage early
                _log(state, learning_rates, device, callback, distributed)
            if distributed.is_main:
                callback.on_stage_end(state.stage_summary())
            state.start_next_stage()
            encode = make_encode() if make_encode and not state.is_finished else encode
        scheduled = validated or state.step % settings.checkpoint_every == 0
        if scheduled or stopping:
            _checkpoint(state, improved, scheduled, distributed)
    if stopping and not stop.requested:
        stop.requested, stop.signal = True, signal.SIGTERM  # another process received a signal


def _set_learning_rates(state: TrainingState) -> dict[str, float]:
    """Set and return the learning rates of the next update; the schedule spans the run, or the stage it restarts in."""
    stage, step, n_steps = state.stage, state.step, state.recipe.train.steps
    scale = state.lr_scale
    if stage is not None:
        scale *= stage.lr_factor
        if stage.schedule == "restart" and stage.steps is not None:
            step, n_steps = step - state.progress.began, stage.steps
    return set_learning_rates(state.optimizer, state.recipe, step, scale, state.plateaus, n_steps)


def _log(
    state: TrainingState,
    learning_rates: dict[str, float],
    device: torch.device,
    callback: Callback,
    distributed: Distributed,
) -> None:
    """Write the means since the last training row."""
    row = state.interval.to_row(state.step, learning_rates, memory_mb(device))
    state.interval = IntervalMetrics()
    _write_row(state, row, callback, distributed)
    if not state.recipe.guard.enabled:
        check_finite(state, row, distributed)


def _validate(state: TrainingState, validate: Validate | None, callback: Callback, distributed: Distributed) -> bool:
    """Validate the weights that would be saved; return whether they are the best so far."""
    row: dict[str, Any] = {}
    if validate is not None:
        with state.averages.applied(state.model):
            row = {"step": state.step, **validate(state.model)}
        row["per_moving_average_200_steps"] = state.record_validation(row["per"])
        _write_row(state, row, callback, distributed)
    state.interval.started = time.perf_counter()
    return state.best.update(state.step, row.get("per"), row.get("loss"), state.position)


def _checkpoint(state: TrainingState, improved: bool, scheduled: bool, distributed: Distributed) -> None:
    if distributed.is_main:
        name = state.save(scheduled)
        if improved:
            link(state.run, "best", state.run.checkpoints / name)
        if state.progress.began == state.step:  # a stage has ended: link its best checkpoint
            repair_best_links(state.run, state.best, state.stage_bests)
    distributed.barrier()


def _write_row(state: TrainingState, row: dict[str, Any], callback: Callback, distributed: Distributed) -> None:
    if state.stage is not None:
        index = min(state.progress.index, len(state.recipe.stages) - 1)
        row |= {"stage": state.stage.name, "stage_index": index}
    if distributed.is_main:
        append_jsonl(state.run.metrics_file, row)
        callback.on_metrics(row)
