"""Choice of device and number of CPU threads. A rule chooses the threads, since rounding depends on their number."""

import os
import warnings
from dataclasses import dataclass

import torch

from arcuate.errors import UserError
from arcuate.models.config import RuntimeSettings
from arcuate.progress import counted, logger

_OPERATIONS_PER_THREAD = 4e6  # of one recurrent step; a thread with fewer costs more than it saves
_MAX_THREADS = 32


@dataclass(frozen=True)
class RuntimeChoice:
    device: torch.device
    threads: int
    reason: str  # why this number of threads

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
    n_cores, useful = count_cores(), int(6 * batch_size * width**2 / _OPERATIONS_PER_THREAD)
    if useful < n_cores:
        return RuntimeChoice(device, max(1, min(useful, _MAX_THREADS)), "size of the model")
    return RuntimeChoice(device, min(n_cores, _MAX_THREADS), "all cores" if n_cores > 1 else "one core")


def count_cores() -> int:
    """Number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
