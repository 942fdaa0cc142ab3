"""Data-parallel training in several processes: the process group, and the model as a module for it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arcuate.errors import UserError
from arcuate.models.interfaces import Flow, Joint, ModelInputs, Outputs
from arcuate.models.model import Model


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
        """Add the values up over all processes, in place; every process gets the same result."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any process; does not synchronise with the device."""
        return flag if self.size == 1 else bool(self.sum(torch.tensor([int(flag)])).item())

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
        if self.size > 1:
            dist.barrier()


def init_distributed(device: torch.device) -> Distributed:
    """Join the process group that torchrun describes in the environment; without torchrun, a single process."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Distributed()
    text = os.environ["WORLD_SIZE"]
    if not text.isdecimal():
        raise UserError(f"WORLD_SIZE is {text!r:.40}, expected a number; unset it or start with torchrun")
    size = int(text)
    if size == 1:
        return Distributed()
    if device.type == "mps":
        raise UserError("several processes cannot share an mps device; start without torchrun")
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return Distributed(dist.get_rank(), size)


def shut_down_distributed() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


_INTERMEDIATE = "intermediate."


class EncodeModule(nn.Module):
    """Model and forward pass as a module that returns named tensors, as DistributedDataParallel requires."""

    def __init__(self, model: Model, encode: Callable[[Model, ModelInputs, bool], Outputs]) -> None:
        super().__init__()
        self.model, self.encode = model, encode

    def forward(self, inputs: ModelInputs, match_flow: bool) -> dict[str, Tensor]:
        outputs = self.encode(self.model, inputs, match_flow)
        parts = {"frames": outputs.frames, "n_frames": outputs.n_frames, "ctc": outputs.log_probs["ctc"]}
        parts |= {f"{_INTERMEDIATE}{layer}": log_probs for layer, log_probs in outputs.intermediate.items()}
        if outputs.joint is not None:
            joint = outputs.joint  # views, so that DistributedDataParallel finds the parameters in the output
            weight, bias = joint.weight.view_as(joint.weight), joint.bias.view_as(joint.bias)
            parts |= {"joint.0": joint.frames, "joint.1": joint.predicted, "joint.2": weight, "joint.3": bias}
        if outputs.mode is not None:
            parts["mode"] = outputs.mode
        if outputs.flow is not None:
            parts |= {"flow.0": outputs.flow.predicted, "flow.1": outputs.flow.target}
        return parts


def outputs_from_tensors(parts: dict[str, Tensor]) -> Outputs:
    """Rebuild the outputs from the tensors of `EncodeModule`."""
    joint = [parts[f"joint.{i}"] for i in range(4) if f"joint.{i}" in parts]
    flow = [parts[f"flow.{i}"] for i in range(2) if f"flow.{i}" in parts]
    return Outputs(
        parts["frames"],
        parts["n_frames"],
        {"ctc": parts["ctc"]},
        Joint(*joint) if joint else None,
        parts.get("mode"),
        Flow(*flow) if flow else None,
        {int(name.removeprefix(_INTERMEDIATE)): part for name, part in parts.items() if name.startswith(_INTERMEDIATE)},
    )
