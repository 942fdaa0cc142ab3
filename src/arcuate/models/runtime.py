"""Choice of device and number of CPU threads; the threads are chosen by a short measurement."""

import os
import time
from dataclasses import dataclass

import torch

from arcuate.errors import UserError
from arcuate.models.config import RuntimeSettings


@dataclass(frozen=True)
class RuntimeChoice:
    device: torch.device
    threads: int
    reason: str  # why this number of threads


def configure_runtime(settings: RuntimeSettings, width: int = 256, batch_size: int = 16) -> RuntimeChoice:
    """Choose device and threads for a model of this width, and set the threads of torch."""
    device = choose_device(settings.device)
    threads, reason = _choose_threads(settings.threads, width, batch_size, device)
    torch.set_num_threads(threads)
    return RuntimeChoice(device, threads, reason)


def choose_device(name: str, setting: str = "runtime.device") -> torch.device:
    """The device of this name, if available; `setting` names the option in error messages."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"{setting}={name} is not a device; use {setting}=auto, cpu, cuda or mps") from None
    if not available.get(device.type, False):
        raise UserError(f"{setting}={name} is not available on this machine; use {setting}=auto or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"{setting}={name} does not exist; this machine has {torch.cuda.device_count()} CUDA devices,"
            " numbered from 0"
        )
    return device


def _choose_threads(requested: int | None, width: int, batch_size: int, device: torch.device) -> tuple[int, str]:
    if requested is not None:
        return requested, "runtime.threads"
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads(), "OMP_NUM_THREADS"
    if device.type != "cpu":
        return torch.get_num_threads(), f"the model runs on {device.type}"
    n_cores = count_cores()
    if n_cores == 1:
        return 1, "one core"
    return _probe_threads(n_cores, width, batch_size)


def count_cores() -> int:
    """Number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _probe_threads(n_cores: int, width: int, batch_size: int) -> tuple[int, str]:
    """Time recurrent steps of the model's size with 1, 2, 4, … threads, and choose the fewest within 10 % of the best.

    On shared cores many threads can be ten times slower than one, which only a measurement shows.
    """
    candidates = [n for n in (1, 2, 4, 8, 16, 32) if n <= min(n_cores, 32)]
    before = torch.get_num_threads()
    seconds: dict[int, float] = {}
    try:
        for n in candidates:
            torch.set_num_threads(n)
            seconds[n] = _time_steps(width, batch_size)
            if seconds[n] > 3 * min(seconds.values()):
                break
    finally:
        torch.set_num_threads(before)
    fastest = min(seconds.values())
    threads = min(n for n in seconds if seconds[n] <= 1.1 * fastest)
    measured = ", ".join(f"{n}: {1000 * s:.1f} ms" for n, s in seconds.items())
    return threads, f"fewest within 10 % of the fastest in a probe ({measured})"


def _time_steps(width: int, batch_size: int, n_steps: int = 20) -> float:
    """Seconds of the fastest of three runs of a recurrence of this size."""
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(batch_size, width, generator=generator)
    recurrent = torch.randn(width, 3 * width, generator=generator)
    frames = torch.randn(batch_size * n_steps, 2 * width, generator=generator)
    projection = torch.randn(2 * width, 3 * width, generator=generator)

    def run_once() -> float:
        start = time.perf_counter()
        gates = (frames @ projection).view(n_steps, batch_size, -1)
        for step in range(n_steps):
            state.copy_(torch.tanh((gates[step] + state @ recurrent)[:, :width]))
        return time.perf_counter() - start

    run_once()
    return min(run_once() for _ in range(3))
