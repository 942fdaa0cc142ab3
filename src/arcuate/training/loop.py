"""The training loop, top to bottom: augment, forward, loss, backward, guard, step, log, validate, checkpoint.

The guard only returns verdicts (skip, rewind, reduce_lr, stop); they are carried out here, and recorded with the
evidence in incidents.jsonl.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from arcuate.data.batching import Batch, prefetch
from arcuate.errors import UserError
from arcuate.files import append_jsonl
from arcuate.models.model import Model
from arcuate.training.callbacks import Callback, Stop
from arcuate.training.checkpoint import Best, link, load_checkpoint, remove_newer, repair_best_links
from arcuate.training.environment import Distributed
from arcuate.training.guard import KEEP, Verdict
from arcuate.training.metrics import IntervalMetrics, StepMetrics, Validation
from arcuate.training.optim import set_eps, set_learning_rates
from arcuate.training.schedule import learning_rate
from arcuate.training.state import TrainingState, memory_mb
from arcuate.training.step import (
    DeviceMetrics,
    Encode,
    apply_update,
    compute_gradients,
    encode_for_training,
    finish_step,
    measure_loss,
    read_metrics,
)

Validate = Callable[[Model], Validation]

_OVERFLOW = Verdict("skip", "overflow")  # counted in the next row; not an incident, and not counted towards a rewind


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
    state.distributed = distributed = distributed or Distributed()
    loop = _Loop(state, device, callback, distributed)
    settings, progress = state.recipe.train, state.progress
    make_encode = make_encode or (lambda: partial(encode_for_training, state.model))
    encode = make_encode()
    state.model.train()
    if progress.step == 0:
        loop.save(scheduled=True)
    on_device = prefetch(batches, device)
    stopping = False  # if stop is requested on any process, all of them stop after the same step
    while not state.is_finished and not stopping:
        drawn = loop.draw(on_device)
        learning_rates = _set_learning_rates(state)
        computed = compute_gradients(state, encode, drawn, device, distributed)  # augment, forward, loss, backward
        metrics, verdict = loop.judge(computed, learning_rates)
        loop.update(metrics, verdict)
        loop.add(computed if metrics is None else metrics, sum(b.n_trials for b in drawn), verdict)
        stopping = distributed.any(stop.requested)
        if loop.respond(verdict, metrics, drawn):
            continue  # rewound
        callback.on_step(progress.step)
        is_last = progress.step == settings.steps or state.stage_is_over
        if is_last or progress.step % settings.log_every == 0:
            loop.log(learning_rates)
        validated = is_last or progress.step % settings.validate_every == 0
        improved = validated and loop.validate(validate)
        if state.stage_is_over:
            loop.end_stage(metrics, drawn, learning_rates)
            encode = encode if state.is_finished else make_encode()
        scheduled = validated or progress.step % settings.checkpoint_every == 0
        if scheduled or stopping:
            loop.checkpoint(improved, scheduled)
    if stopping:
        stop.request_here()


def _set_learning_rates(state: TrainingState) -> dict[str, float]:
    """Set and return the learning rates of the next update."""
    guard = state.guard.memory
    if guard.eps is not None:
        set_eps(state.optimizer, guard.eps)
    step = state.progress.step if guard.search.lr_step is None else guard.search.lr_step
    lr = guard.lr_scale * _scheduled_lr(state, step)
    return set_learning_rates(state.optimizer, lr, state.recipe.optimizer.session_lr_factor)


def _scheduled_lr(state: TrainingState, step: int) -> float:
    """Return the scheduled learning rate at a step, without the guard's scale.

    The schedule spans the run, or the stage that restarts it.
    """
    stage, n_steps, factor = state.stage, state.recipe.train.steps, 1.0
    if stage is not None:
        factor = stage.lr_factor
        if stage.schedule == "restart" and stage.steps is not None:
            step, n_steps = step - state.progress.curriculum.began, stage.steps
    return factor * learning_rate(state.recipe.schedule, step, n_steps, state.progress.plateau)


@dataclass(eq=False)
class _Loop:
    """Work between steps: logging, validation, checkpoints, and the response to the guard's verdicts."""

    state: TrainingState
    device: torch.device
    callback: Callback
    distributed: Distributed
    unread: list[tuple[DeviceMetrics, int]] = field(default_factory=list)  # metrics, trials
    started: float = field(default_factory=time.perf_counter)  # of the steps in the next row
    waiting_s: float = 0.0  # for data, in these steps

    def draw(self, batches: Iterator[Batch]) -> list[Batch]:
        """The batches of the next step."""
        loading = time.perf_counter()
        drawn = [next(batches) for _ in range(self.state.recipe.train.accumulate)]
        self.waiting_s += time.perf_counter() - loading
        return drawn

    def judge(self, computed: DeviceMetrics, learning_rates: dict[str, float]) -> tuple[StepMetrics | None, Verdict]:
        """Metrics of the step and the guard's verdict; None if nothing depends on them before the next row is written.

        An overflow of scaled fp16 gradients is handled by the loss scaler.
        """
        state = self.state
        if not state.guard.settings.enabled and not state.scaler.is_enabled():
            return None, KEEP
        metrics = computed.read()
        state.record_update_ratio(metrics.update_ratio)
        if metrics.overflowed:
            return metrics, _OVERFLOW
        lr = learning_rates.get("rest", max(learning_rates.values()))
        return metrics, state.guard.judge(metrics, lr, state.n_left)

    def update(self, metrics: StepMetrics | None, verdict: Verdict) -> None:
        """Apply the update unless the verdict or the loss scaler forbids it, and count the step."""
        settings, progress = self.state.recipe.train, self.state.progress
        if verdict.applies_update and (metrics is None or metrics.may_update):
            # The update ratio is measured one step before a row is written; both are then read in one synchronisation.
            apply_update(self.state, measure=(progress.step + 2) % settings.log_every == 0)
        finish_step(self.state)
        progress.step += 1
        progress.position += settings.accumulate

    def add(self, metrics: StepMetrics | DeviceMetrics, n_trials: int, verdict: Verdict) -> None:
        """Add a step to the next row; metrics on the device are read when the row or a checkpoint is written."""
        if isinstance(metrics, DeviceMetrics):
            self.unread.append((metrics, n_trials))
        else:
            skipped_by = None if verdict.applies_update else verdict.kind
            self.state.progress.interval.add(metrics, n_trials, skipped_by)

    def _read_metrics(self) -> None:
        """Add all steps whose metrics are still on the device."""
        steps = read_metrics([step for step, _ in self.unread])
        for metrics, (_, n_trials) in zip(steps, self.unread, strict=True):
            self.state.record_update_ratio(metrics.update_ratio)
            self.state.progress.interval.add(metrics, n_trials, None)
        self.unread.clear()

    def log(self, learning_rates: dict[str, float]) -> None:
        """Write the means since the last training row."""
        self._read_metrics()
        progress = self.state.progress
        n_steps = max(1, progress.interval.n_steps)
        cost = {
            "seconds_per_step": (time.perf_counter() - self.started) / n_steps,
            "waiting_for_data_s": self.waiting_s / n_steps,
            "memory_mb": self.distributed.max(memory_mb(self.device)),
        }
        row = progress.interval.to_row(progress.step, learning_rates, cost)
        self._start_interval()
        self._write_row(row)
        if not self.state.recipe.guard.enabled:
            self._check_finite(row)

    def _start_interval(self) -> None:
        self.state.progress.interval = IntervalMetrics()
        self.started, self.waiting_s = time.perf_counter(), 0.0

    def validate(self, validate: Validate | None) -> bool:
        """Validate the weights that would be saved; return whether they are the best so far."""
        state = self.state
        row: dict[str, Any] = {}
        if validate is not None:
            with state.average.applied(state.model):
                validation = validate(state.model)
            row = {"step": state.progress.step, **validation.row}
            row["per_moving_average_200_steps"] = state.record_validation(row["per"], row.get("wer"))
            if self.distributed.is_main:
                append_jsonl(
                    state.run.predictions_file, *({"step": state.progress.step, **p} for p in validation.predictions)
                )
            self._write_row(row)
        self.started = time.perf_counter()
        progress = state.progress
        found = Best(progress.step, row.get("per"), row.get("loss"), progress.position, row.get("wer"))
        return progress.best.update(found, state.recipe.train.select_by)

    def checkpoint(self, improved: bool, scheduled: bool) -> None:
        state = self.state
        self._read_metrics()
        state.read_update_ratio()
        name = self.save(scheduled)
        if name is not None:
            if improved:
                link(state.run, "best", state.run.checkpoints / name)
            progress = state.progress
            if progress.curriculum.began == progress.step:  # a stage has ended: link its best checkpoint
                repair_best_links(state.run, progress.best, progress.stage_bests)
        self.distributed.barrier()

    def save(self, scheduled: bool) -> str | None:
        """Write a checkpoint on rank 0 and return its name there; other ranks only record it as a rewind target."""
        if self.distributed.is_main:
            return self.state.save(scheduled)
        self.state.record_checkpoint(scheduled)
        return None

    def respond(self, verdict: Verdict, metrics: StepMetrics | None, batches: Sequence[Batch]) -> bool:
        """Carry out a verdict other than `keep`, and record it; return whether the run was rewound."""
        state = self.state
        if metrics is None or verdict.action == "keep" or verdict is _OVERFLOW:
            return False
        row: dict[str, Any] = {
            "step": state.progress.step,
            "position": batches[0].position,
            "kind": verdict.kind,
            "action": verdict.action,
            "reason": verdict.reason,
            "metrics": metrics.to_dict(),
            "trials": [t.id for b in batches for t in b.all_trials],
        }
        if verdict.kind != "search" and (bad_bins := _find_bad_bins(batches)):
            row["bad_bins"] = bad_bins
        if verdict.action == "reduce_lr":
            state.guard.memory.lr_scale *= verdict.lr_factor
            row["lr_scale"] = state.guard.memory.lr_scale
        if verdict.action == "rewind":
            row |= self._rewind(verdict)
        if self.distributed.is_main:
            append_jsonl(state.run.incidents_file, row)
            self.callback.on_incident(row)
        if verdict.action == "stop":
            remedy = {
                "lower": "lower the learning rate (schedule.peak_lr), or set train.clip_norm",
                "raise": "raise the learning rate (schedule.peak_lr), or lower optimizer.eps"
                f" ({state.recipe.optimizer.eps:g})",
            }[verdict.remedy]
            raise UserError(
                f"training was stopped at step {state.progress.step}: {verdict.reason}; {remedy}; the evidence is in"
                f" {state.run.incidents_file}"
            )
        return verdict.action == "rewind"

    def end_stage(
        self, metrics: StepMetrics | None, batches: Sequence[Batch], learning_rates: dict[str, float]
    ) -> None:
        """Start the next stage, from healthy weights."""
        if self.state.progress.interval.n_steps or self.unread:  # this validation ended the stage early
            self.log(learning_rates)
        if metrics is not None and (problem := self._find_failure(metrics, batches)) is not None:
            self._restore_healthy(problem)
        if self.distributed.is_main:
            self.callback.on_stage_end(self.state.stage_summary())
        self.state.start_next_stage()

    def _find_failure(self, metrics: StepMetrics, batches: Sequence[Batch]) -> str | None:
        """Return why the weights at the end of a stage are broken; None if they are not.

        Steps are judged by the loss before their update, so no step shows the effect of the last update of a stage. The
        loss of the last batch is therefore computed again.
        """
        guard = self.state.guard
        if not guard.settings.enabled:
            return None
        if guard.is_failing:
            n_failing = max(guard.memory.n_high, guard.memory.n_skipped)
            return f"the last {n_failing} steps of the stage had a high or non-finite loss"
        after = measure_loss(self.state, batches, self.device, self.distributed)
        if not guard.is_explosion(metrics.loss, after):
            return None
        return f"the last batch of the stage has a loss of {after:.3g} after the last update, {metrics.loss:.3g} before"

    def _restore_healthy(self, problem: str) -> None:
        """At the end of a stage whose weights are broken: continue from the last healthy weights of the stage."""
        state, targets = self.state, self.state.guard.memory.targets
        if not targets or targets[-1] >= state.progress.step:
            return
        step, target = state.progress.step, load_checkpoint(state.run.checkpoints / f"step-{targets[-1]:08d}")
        state.restore_weights(target)
        self.distributed.barrier()  # rank 0 may remove this checkpoint when it writes the next one
        state.progress.step = step  # the stage is over
        row = {
            "step": step,
            "position": state.progress.position,
            "kind": "stage_end",
            "action": "restore",
            "reason": f"{problem}: continuing from the weights of step {target.step}",
        }
        if self.distributed.is_main:
            append_jsonl(state.run.incidents_file, row)
            self.callback.on_incident(row)

    def _rewind(self, verdict: Verdict) -> dict[str, Any]:
        """Return to a checkpoint, with another learning rate. The position in the data is kept."""
        state = self.state
        step, began = state.progress.step, state.progress.curriculum.began
        gradient = state.typical_gradient() if verdict.kind == "stuck" else None
        schedule, eps = partial(_scheduled_lr, state), state.recipe.optimizer.eps
        rewind = state.guard.plan_rewind(verdict, step, (began, step + state.n_left), schedule, eps, gradient)
        target = load_checkpoint(state.run.checkpoints / f"step-{rewind.to:08d}")
        state.restore_weights(target)
        if self.distributed.is_main:
            # In this order, a run that is killed between the two calls resumes at the target and repeats the rewind.
            link(state.run, "last", target.folder)
            remove_newer(state.run, target)
        self._start_interval()
        rows = state.remove_rewound_rows() if self.distributed.is_main else []
        self.distributed.barrier()
        changed = {"lr_scale": rewind.lr_scale} | ({} if rewind.eps is None else {"eps": rewind.eps})
        return {"rewound_to": rewind.to, **changed, "rows": rows}

    def _check_finite(self, row: dict[str, Any]) -> None:
        """Without the guard: record non-finite metrics and stop, instead of continuing with broken weights."""
        values = {name: row[name] for name in ("loss", "grad_norm")}  # None if the loss scaler skipped every step
        broken = [name for name, value in values.items() if value is not None and not math.isfinite(value)]
        if not broken:
            return
        if self.distributed.is_main:
            incident = {"step": row["step"], "kind": "non_finite", "values": broken}
            append_jsonl(self.state.run.incidents_file, incident)
        raise UserError(
            f"{' and '.join(broken)} became NaN or infinite by step {row['step']} with the guard off; lower the"
            " learning rate, set train.clip_norm, or set guard.enabled=true; the last checkpoint is kept"
        )

    def _write_row(self, row: dict[str, Any]) -> None:
        state = self.state
        if state.batches_per_epoch:
            row["epoch"] = round(state.progress.position / state.batches_per_epoch, 4)
        if state.stage is not None:
            index = min(state.progress.curriculum.index, len(state.recipe.stages) - 1)
            row |= {"stage": state.stage.name, "stage_index": index}
        if self.distributed.is_main:
            append_jsonl(state.run.metrics_file, row)
            self.callback.on_metrics(row)


def _find_bad_bins(batches: Sequence[Batch]) -> list[str]:
    """List trials with non-finite bins (treated as 0 by the model) or constant bins, as in a session without signal."""
    found = []
    for batch in batches:
        for trial, bins in list(zip(batch.trials, batch.bins, strict=False))[: batch.n_counted]:
            recorded = bins[: trial.n_bins]
            if n_bad := int((~recorded.isfinite()).sum()):
                found.append(f"trial {trial.id}: {n_bad} values are not finite")
            elif len(recorded) and bool((recorded == recorded[0]).all()):
                found.append(f"trial {trial.id}: all bins are the same")
    return found
