"""Choice of device and number of CPU threads; the threads are chosen by a short measurement."""

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from arcuate.errors import UserError
from arcuate.models.config import RuntimeSettings
from arcuate.progress import counted, logger

_SMALL_MODEL = 4e6  # operations of one recurrent step, below which threads cost more than they save
_MIN_GAIN = 0.9  # more threads are used only if they take less than this fraction of the time


@dataclass(frozen=True)
class RuntimeChoice:
    device: torch.device
    threads: int
    reason: str  # why this number of threads
    measured: bool = False  # by a probe, which the first training steps may correct

    def __str__(self) -> str:
        return f"{self.device}, {counted(self.threads, 'thread')}: {self.reason}"


def configure_runtime(
    settings: RuntimeSettings, width: int = 256, batch_size: int = 16, announce: bool = True
) -> RuntimeChoice:
    """Choose device and threads for a model of this width, set the threads of torch, and log the choice."""
    device = choose_device(settings.device)
    choice = _choose_threads(settings.threads, width, batch_size, device)
    torch.set_num_threads(choice.threads)
    configure_cuda(settings, device)
    if announce:
        logger.info(str(choice))
    return choice


def available_runtime(trained: RuntimeSettings) -> RuntimeSettings:
    """The settings of a run for this machine, which may lack the device that the run was trained on."""
    try:
        choose_device(trained.device)
    except UserError:
        return trained.model_copy(update={"device": "auto"})
    return trained


def configure_cuda(runtime: RuntimeSettings, device: torch.device) -> None:
    """Apply the settings that only concern CUDA. TF32 has two switches: matrix products, and cuDNN (GRU, LSTM)."""
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = runtime.cudnn_benchmark
        torch.backends.cudnn.allow_tf32 = runtime.tf32
        torch.set_float32_matmul_precision("high" if runtime.tf32 else "highest")
        # On an H100 torch prefers cuDNN's attention if the position bias is not trained. Its gradients are NaN for some
        # lengths if a trial has padding (pytorch/pytorch#196678, from torch 2.11 on).
        torch.backends.cuda.enable_cudnn_sdp(False)
        # In training with dropout the layers of a GRU are called one by one, and torch copies their weights each time.
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")


def choose_device(name: str, setting: str = "runtime.device") -> torch.device:
    """The device of this name, if available; `setting` names the option in error messages."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    available = {"cpu": True, "cuda": torch.cuda.is_available()}
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"{setting}={name} is not a device; use {setting}=auto, cpu or cuda") from None
    if device.type == "mps":
        raise UserError(
            f"{setting}=mps is not supported: Metal has no float64, which normalisation and speaking modes need, and"
            f" torch has no CTC loss for it; use {setting}=cpu"
        )
    if not available.get(device.type, False):
        raise UserError(f"{setting}={name} is not available on this machine; use {setting}=auto or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"{setting}={name} does not exist; this machine has {torch.cuda.device_count()} CUDA devices,"
            " numbered from 0"
        )
    return device


def _choose_threads(requested: int | None, width: int, batch_size: int, device: torch.device) -> RuntimeChoice:
    if requested is not None:
        return RuntimeChoice(device, requested, "runtime.threads")
    if "OMP_NUM_THREADS" in os.environ:
        return RuntimeChoice(device, torch.get_num_threads(), "OMP_NUM_THREADS")
    if device.type != "cpu":
        return RuntimeChoice(device, torch.get_num_threads(), f"the model runs on {device.type}")
    n_cores = count_cores()
    if n_cores == 1:
        return RuntimeChoice(device, 1, "one core")
    if 6 * batch_size * width**2 < _SMALL_MODEL:
        return RuntimeChoice(device, 1, "small model")
    candidates = [n for n in (1, 2, 4, 8, 16, 32) if n <= n_cores]
    seconds = time_threads(_recurrence(width, batch_size), candidates, n_runs=7)
    return RuntimeChoice(device, fewest_threads(seconds), f"probe ({describe_times(seconds)})", measured=True)


def count_cores() -> int:
    """Number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def time_threads(run: Callable[[], object], candidates: Sequence[int], n_runs: int) -> dict[int, float]:
    """Seconds of `run` by number of threads, estimated from CPU time: median over alternating runs, after a warm-up.

    The CPU time of a process does not contain the time in which other processes had the core, unlike the wall clock,
    which on shared machines differs tenfold between repetitions. Waiting threads spin for a while, so a thread count
    that causes waiting also costs more CPU time.
    """
    before = torch.get_num_threads()
    times: dict[int, list[float]] = {n: [] for n in candidates}
    try:
        for repetition in range(n_runs + 1):
            for n in candidates:
                torch.set_num_threads(n)
                start = time.process_time()
                run()
                if repetition:  # the first one is the warm-up
                    times[n].append((time.process_time() - start) / n)
    finally:
        torch.set_num_threads(before)
    return {n: median(seconds) for n, seconds in times.items()}


def fewest_threads(seconds: Mapping[int, float]) -> int:
    """The smallest number of threads that no larger number beats clearly."""
    chosen = min(seconds)
    for n in sorted(seconds):
        if seconds[n] < _MIN_GAIN * seconds[chosen]:
            chosen = n
    return chosen


def describe_times(seconds: Mapping[int, float]) -> str:
    return ", ".join(f"{counted(n, 'thread')} {1000 * s:.1f} ms" for n, s in seconds.items())


def _recurrence(width: int, batch_size: int, n_steps: int = 20) -> Callable[[], object]:
    """A recurrence of this size."""
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(batch_size, width, generator=generator)
    recurrent = torch.randn(width, 3 * width, generator=generator)
    frames = torch.randn(batch_size * n_steps, 2 * width, generator=generator)
    projection = torch.randn(2 * width, 3 * width, generator=generator)

    def run() -> None:
        gates = (frames @ projection).view(n_steps, batch_size, -1)
        for step in range(n_steps):
            state.copy_(torch.tanh((gates[step] + state @ recurrent)[:, :width]))

    return run
