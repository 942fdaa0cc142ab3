"""Evidence: what went wrong, when, with which numbers and which trials."""

from collections.abc import Sequence
from typing import Any

from arcuate.data.batching import Batch
from arcuate.models.io import save_tensors
from arcuate.run import Run
from arcuate.training.guard import Verdict
from arcuate.training.metrics import StepMetrics
from arcuate.training.state import Training

MAX_KEPT = 20


def record(
    training: Training, verdict: Verdict, numbers: StepMetrics, drawn: Sequence[Batch]
) -> dict[str, Any]:
    """One line of incidents.jsonl; numbers that are not finite are written as text, for null would hide them."""
    return {
        "step": training.step,
        "position": drawn[0].position,
        "kind": verdict.kind,
        "action": verdict.action,
        "reason": verdict.reason,
        "numbers": numbers.to_dict(),
        "trials": [t.id for b in drawn for t in b.trials],
    }


def keep_batch(run: Run, step: int, drawn: Sequence[Batch]) -> str | None:
    """The bins and labels of an offending step, for whoever wants to look; at most a few are kept."""
    folder = run.path / "bad_steps"
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:08d}-position-{drawn[0].position:08d}.safetensors"
    if (
        len(list(folder.iterdir())) >= MAX_KEPT and not path.exists()
    ):  # there already: written before a resume
        return None
    tensors = {
        f"{i}.{name}": getattr(batch, name).cpu().contiguous()
        for i, batch in enumerate(drawn)
        for name in ("bins", "n_bins", "tokens", "n_tokens", "session")
    }
    save_tensors(tensors, path)
    return f"bad_steps/{path.name}"
