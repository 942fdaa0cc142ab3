"""Mixed precision: probed on the device, and not used if it does not run or is slower."""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from arcuate.errors import UserError
from arcuate.training.config import Precision

_MAX_RELATIVE_TIME = 0.9  # of fp32 for mixed precision on a CPU
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class PrecisionChoice:
    """The precision in use, and a note if it differs from the setting."""

    kind: str
    note: str | None = None


def choose_precision(settings: Precision, device: torch.device, previous: object = None) -> PrecisionChoice:
    """Choose the precision to train in; a resumed run keeps its `previous` one, because probes can vary."""
    if settings.kind == "fp32":
        return PrecisionChoice("fp32")
    if previous == "fp32":
        return PrecisionChoice("fp32", "training in fp32, as when this run started")
    if settings.kind == "fp16" and device.type != "cuda":
        raise UserError(
            f"train.precision.kind=fp16 needs a CUDA device, but the device is {device};"
            " set train.precision.kind=fp32, or runtime.device=cuda if there is one"
        )
    try:
        relative_time = _probe(settings.kind, device)
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        return PrecisionChoice("fp32", f"{settings.kind} does not run on {device} ({first}): training in fp32")
    # On an accelerator the small probe shows that mixed precision runs, not how fast it is.
    if device.type == "cpu" and relative_time > _MAX_RELATIVE_TIME and previous != settings.kind:
        how = f"{relative_time:.0f} times slower" if relative_time >= 1.5 else "no faster"
        return PrecisionChoice("fp32", f"{settings.kind} is {how} than fp32 on this CPU: training in fp32")
    return PrecisionChoice(settings.kind)


def _probe(kind: str, device: torch.device, size: int = 192) -> float:
    """Run a small GRU forward and backward in both precisions; return time in mixed precision / time in fp32."""
    layer = torch.nn.GRU(size, size).to(device)
    frames = torch.zeros(8, 16, size, device=device)
    clock = time.process_time if device.type == "cpu" else time.perf_counter  # CPU time: ignore other processes

    def seconds(precision: str) -> float:
        start = clock()
        with autocast(precision, device):
            loss = layer(frames)[0].float().sum()
        loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock() - start

    pairs = [(seconds("fp32"), seconds(kind)) for _ in range(3)]
    return min(mixed for _, mixed in pairs) / max(min(full for full, _ in pairs), 1e-9)


def autocast(kind: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the autocast context of a precision."""
    return nullcontext() if kind == "fp32" else torch.autocast(device.type, dtype=_DTYPES[kind])
