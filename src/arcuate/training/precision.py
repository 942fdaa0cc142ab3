"""Mixed precision: found out by running it, and left alone where it is slower."""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from arcuate.errors import UserError
from arcuate.training.config import Precision

WORTH_IT = 0.9  # of the time that fp32 takes
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Choice:
    """What training will really use, and why it is not what was asked for."""

    kind: str
    note: str | None = None


def choose_precision(settings: Precision, device: torch.device, before: object = None) -> Choice:
    """Which precision to train in; a run that goes on keeps the one it had before, for a probe may change its mind."""
    if settings.kind == "fp32":
        return Choice("fp32")
    if before == "fp32":
        return Choice("fp32", "training in fp32, as this run began")
    if settings.kind == "fp16" and device.type != "cuda":
        raise UserError(
            f"train.precision.kind=fp16 needs a CUDA device and this is {device};"
            " set train.precision.kind=fp32, or runtime.device=cuda where there is one"
        )
    try:
        slower = probe(settings.kind, device)
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        return Choice("fp32", f"{settings.kind} does not run on {device} ({first}): training in fp32")
    # A device's small probe says that it runs, not how fast.
    if device.type == "cpu" and slower > WORTH_IT and before != settings.kind:
        how = f"{slower:.0f} times slower" if slower >= 1.5 else "no faster"
        return Choice("fp32", f"{settings.kind} is {how} than fp32 on this CPU: training in fp32")
    return Choice(settings.kind)


def probe(kind: str, device: torch.device, size: int = 192) -> float:
    """Run a small recurrent layer forward and backward both ways; how many times slower mixed precision is."""
    layer = torch.nn.GRU(size, size).to(device)
    frames = torch.zeros(8, 16, size, device=device)

    clock = time.process_time if device.type == "cpu" else time.perf_counter  # busy neighbours do not count

    def seconds(mixed: bool) -> float:
        start = clock()
        with autocast(kind if mixed else "fp32", device):
            loss = layer(frames)[0].float().sum()
        loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock() - start

    pairs = [(seconds(False), seconds(True)) for _ in range(3)]
    return min(mixed for _, mixed in pairs) / max(min(plain for plain, _ in pairs), 1e-9)


def autocast(kind: str, device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if kind == "fp32" else torch.autocast(device.type, dtype=DTYPES[kind])
