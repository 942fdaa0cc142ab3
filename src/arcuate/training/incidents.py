"""Incidents: carry out the verdicts of the guard (rewind, reduce_lr, stop), and keep the evidence."""

import math
from collections.abc import Sequence
from typing import Any

from arcuate.data.batching import Batch
from arcuate.errors import UserError
from arcuate.files import append_jsonl
from arcuate.models.io import save_tensors
from arcuate.run import Run
from arcuate.training.callbacks import Callback
from arcuate.training.checkpoint import link, load_checkpoint, remove_newer
from arcuate.training.distributed import Distributed
from arcuate.training.guard import Verdict
from arcuate.training.metrics import IntervalMetrics, StepMetrics
from arcuate.training.state import TrainingState

_MAX_SAVED_BATCHES = 20


def respond(
    state: TrainingState,
    verdict: Verdict,
    metrics: StepMetrics,
    batches: Sequence[Batch],
    callback: Callback,
    distributed: Distributed,
) -> None:
    """Carry out a verdict other than `keep`, and record it."""
    row: dict[str, Any] = {
        "step": state.step,
        "position": batches[0].position,
        "kind": verdict.kind,
        "action": verdict.action,
        "reason": verdict.reason,
        "metrics": metrics.to_dict(),
        "trials": [t.id for b in batches for t in b.trials],
    }
    if verdict.action == "reduce_lr":
        state.lr_scale *= state.recipe.guard.adaptive.factor
    if verdict.action == "rewind":
        row |= _rewind(state, distributed, to_start=verdict.kind == "stuck")
    if distributed.is_main:
        if state.recipe.guard.keep_batches and verdict.kind == "non_finite":
            row["batch"] = _save_batches(state.run, state.step, batches)
        append_jsonl(state.run.incidents_file, row)
        callback.on_incident(row)
    if verdict.action == "stop":
        key = "lr" if state.recipe.schedule.kind == "constant" else "peak_lr"
        raise UserError(
            f"training was stopped at step {state.step}: {verdict.reason}; lower the learning rate (schedule.{key}),"
            f" or set train.clip_norm; the evidence is in {state.run.incidents_file}"
        )


def check_finite(state: TrainingState, row: dict[str, Any], distributed: Distributed) -> None:
    """Without the guard: record non-finite metrics and stop, instead of continuing with broken weights."""
    broken = [name for name in ("loss", "grad_norm") if not math.isfinite(float(row[name]))]
    if broken:
        incident = {"step": row["step"], "kind": "non_finite", "values": broken}
        if distributed.is_main:
            append_jsonl(state.run.incidents_file, incident)
        raise UserError(
            f"{' and '.join(broken)} became NaN or infinite by step {row['step']} with the guard off; lower the"
            " learning rate, set train.clip_norm, or set guard.enabled=true; the last checkpoint is kept"
        )


def _rewind(state: TrainingState, distributed: Distributed, to_start: bool) -> dict[str, Any]:
    """Return to the last good checkpoint, or to the first, at a lower learning rate; the data position stays."""
    targets = state.rewind_targets
    if to_start:
        targets = targets[:1]
    elif state.rewound_to is not None and len(targets) > 1 and targets[-1] <= state.rewound_to:
        targets = targets[:-1]  # returning to this one did not help: go further back
    state.rewind_targets = targets
    target = load_checkpoint(state.run.checkpoints / f"step-{targets[-1] if targets else 0:08d}")
    state.restore_weights(target)
    if distributed.is_main:
        # In this order, a run that is killed between the two calls resumes at the target and repeats the rewind.
        link(state.run, "last", target.folder)
        remove_newer(state.run, target)
    state.rewound_to = target.step
    guard = state.recipe.guard
    state.lr_scale *= guard.stuck.lr_factor if to_start else guard.lr_factor
    state.guard.after_rewind(to_start)
    state.interval = IntervalMetrics()
    rows = state.remove_rewound_rows() if distributed.is_main else []
    distributed.barrier()
    return {"rewound_to": target.step, "lr_scale": state.lr_scale, "rows": rows}


def _save_batches(run: Run, step: int, batches: Sequence[Batch]) -> str | None:
    """Save bins and labels of a step to bad_steps/, up to a limit; return the file's path in the run folder."""
    folder = run.path / "bad_steps"
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:08d}-position-{batches[0].position:08d}.safetensors"
    is_full = len(list(folder.iterdir())) >= _MAX_SAVED_BATCHES
    if is_full and not path.exists():  # an existing file was written before a resume
        return None
    tensors = {
        f"{i}.{name}": getattr(batch, name).cpu().contiguous()
        for i, batch in enumerate(batches)
        for name in ("bins", "n_bins", "tokens", "n_tokens", "session")
    }
    save_tensors(tensors, path)
    return f"bad_steps/{path.name}"
