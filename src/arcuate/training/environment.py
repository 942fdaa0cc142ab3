"""Environment of a run: versions and platform, mixed precision of the device, and distributed processes."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from arcuate.errors import UserError
from arcuate.training.config import Precision

# --- versions, platform, command and code revision: what repeating a run needs -----------------------------------

_PACKAGES = ("torch", "numpy", "scipy", "h5py", "pydantic", "safetensors", "rapidfuzz")


def _program_name(path: str) -> str:
    """Name of the program; `python -m arcuate` is the command `arcuate`."""
    name = Path(path).name
    return "arcuate" if name == "__main__.py" and Path(path).parent.name == "arcuate" else name


def describe_environment(**facts: Any) -> dict[str, Any]:
    """Return the content of environment.json, with the given facts added."""
    return {
        "arcuate": installed_version("arcuate"),
        "python": platform.python_version(),
        **{name: installed_version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "command": [_program_name(sys.argv[0]), *sys.argv[1:]],
        "revision": _git_revision(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
    }


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """Return the git commit of the code, if it runs from a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


# --- mixed precision ---------------------------------------------------------------------------------------------

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class PrecisionChoice:
    """The precision in use, and a note if it differs from the setting."""

    kind: str
    note: str | None = None


def choose_precision(settings: Precision, device: torch.device, previous: object = None) -> PrecisionChoice:
    """Choose the precision to train in; a resumed run keeps its `previous` one.

    On a CPU that is fp32: torch computes bf16 10 to 30 times slower there, except on the newest ones. GPUs before
    Ampere have no bf16, all have fp16.
    """
    if settings.kind == "fp32":
        return PrecisionChoice("fp32")
    if previous == "fp32":
        return PrecisionChoice("fp32", "training in fp32, as when this run started")
    if settings.kind == "fp16" and device.type != "cuda":
        raise UserError(
            f"train.precision.kind=fp16 needs a CUDA device, but the device is {device};"
            " set train.precision.kind=fp32, or runtime.device=cuda if there is one"
        )
    if previous == "fp16" and settings.kind == "bf16":
        return PrecisionChoice("fp16", "training in fp16, as when this run started")
    if device.type == "cpu":
        return PrecisionChoice("fp32", f"{settings.kind} is slow on CPUs: training in fp32")
    if settings.kind == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return PrecisionChoice("fp16", f"torch only emulates bf16 on {device}, which is slow: training in fp16")
    return PrecisionChoice(settings.kind)


def autocast(kind: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the autocast context of a precision."""
    return nullcontext() if kind == "fp32" else torch.autocast(device.type, dtype=_DTYPES[kind])


# --- data-parallel training in several processes -----------------------------------------------------------------


@dataclass(frozen=True)
class Distributed:
    """This process among those that train together; a single process is rank 0 of 1."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run folder and reports to callbacks."""
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum the values over all processes, in place; every process gets the same result."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any process; does not synchronise with the device."""
        return flag if self.size == 1 else bool(self.sum(torch.tensor([int(flag)])).item())

    def max(self, value: float) -> float:
        """Return the largest value over all processes; does not synchronise with the device."""
        if self.size == 1:
            return value
        values = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return float(values.item())

    def from_main(self, value: float) -> float:
        """Return the value of rank 0 on every process; does not synchronise with the device.

        Decisions need it: GPUs of different kinds may round differently, and all processes have to decide the same.
        """
        own = value if self.is_main else 0.0
        return value if self.size == 1 else float(self.sum(torch.tensor([own], dtype=torch.float64)).item())

    @contextmanager
    def raise_together(self) -> Iterator[None]:
        """Raise on every process if the block raises on any of them."""
        problem: UserError | OSError | None = None
        try:
            yield
        except (UserError, OSError) as error:
            problem = error
        failed = self.any(problem is not None)
        if problem is not None:
            raise problem
        if failed:
            raise UserError(f"process {self.rank} ends because another process reported an error")

    def barrier(self) -> None:
        """Wait for all processes, on the CPU: a barrier of NCCL would need the device and a kernel of its own."""
        self.any(False)


def _process_count() -> int:
    """Return the number of processes that torchrun describes in the environment; 1 without torchrun."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return 1
    return _environment_number("WORLD_SIZE")


def _environment_number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise UserError(f"{name} is {text!r:.40}, expected a number; unset it or start with torchrun")
    return int(text)


def own_device(device: torch.device) -> torch.device:
    """Return the device of this process, and make it the current one: under torchrun the GPU numbered LOCAL_RANK."""
    if device.type != "cuda":
        return device
    if _process_count() > 1:
        if device.index is not None:
            raise UserError(
                f"runtime.device={device} would put all processes of torchrun on one GPU; set runtime.device=cuda, and"
                " choose GPUs with CUDA_VISIBLE_DEVICES"
            )
        local, n_devices = _environment_number("LOCAL_RANK"), torch.cuda.device_count()
        if local >= n_devices:
            raise UserError(
                f"process {local} of this machine sees {n_devices} GPUs; start at most one process per GPU (torchrun"
                " --nproc-per-node), and let every process see all of them (in Slurm, without gpus-per-task and"
                " gpu-bind)"
            )
        device = torch.device("cuda", local)
    if device.index is not None:
        torch.cuda.set_device(device)
    return device


def init_distributed(device: torch.device) -> Distributed:
    """Join the process group that torchrun describes in the environment; without torchrun, a single process.

    Tensors on a GPU are exchanged by NCCL, flags and numbers of the host by gloo.
    """
    size = _process_count()
    if size == 1:
        return Distributed()
    use_nccl = device.type == "cuda" and dist.is_nccl_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_nccl else "gloo")
    return Distributed(dist.get_rank(), size)


def shut_down_distributed(failed: bool) -> None:
    """Leave the process group; after a failure with NCCL, leave that to the end of the process, which aborts it.

    Destroying the group would wait for collectives that the other processes take part in and this one does not, so that
    neither the error nor the end of this process would reach torchrun.
    """
    if not dist.is_available() or not dist.is_initialized():
        return
    if not failed or "nccl" not in dist.get_backend_config():
        dist.destroy_process_group()
