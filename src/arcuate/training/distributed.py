"""Data-parallel training in several processes: the process group, and the model as all of them call it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from arcuate.errors import UserError
from arcuate.models.interfaces import Flow, Joint, ModelInputs, Outputs
from arcuate.models.model import Model
from arcuate.training.config import TrainingConfig


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
        raise UserError(
            f"WORLD_SIZE is {text!r:.40}, expected a number; start with torchrun, which sets it, or unset it"
        )
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


Encode = Callable[[ModelInputs, bool], Outputs]  # `encode_for_training` of a model
_INTERMEDIATE = "intermediate."


def make_encode(model: Model, recipe: TrainingConfig, device: torch.device, distributed: Distributed) -> Encode:
    """Return `encode_for_training` of the model for the components trained now.

    It is compiled if runtime.compile is set, and averages gradients over processes.
    """
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = recipe.runtime.cudnn_benchmark
        torch.set_float32_matmul_precision("high" if recipe.runtime.tf32 else "highest")
    if distributed.size > 1:
        # Unused parameters: session layers without a trial in the batch get no gradient on any process.
        module: nn.Module = DistributedDataParallel(
            EncodeModule(model),
            device_ids=[device] if device.type == "cuda" else None,
            find_unused_parameters=True,
        )
        return lambda inputs, match_flow: outputs_from_tensors(module(inputs, match_flow))
    if recipe.runtime.compile and device.type == "cuda":
        return partial(torch.compile(encode_for_training), model)
    return partial(encode_for_training, model)


def encode_for_training(model: Model, inputs: ModelInputs, match_flow: bool = False) -> Outputs:
    """Return the outputs of `Model.encode`, and with `match_flow` the denoiser's flow from augmented to clean frames.

    The target frames are those of the clean bins without dropout and gradients. Times are drawn between encoder and
    heads, which fixes the order of all draws of a step.
    """
    encoded = model.encode_frames(inputs)
    flow = None
    if match_flow and model.denoiser is not None and inputs.clean is not None:
        noisy = encoded.frames
        times = torch.rand(len(noisy), device=noisy.device, dtype=noisy.dtype)
        training = model.training
        model.eval()
        with torch.no_grad():
            clean = replace(inputs, bins=inputs.clean.clone(), layers=())
            target = model.encode_frames(clean, encoded.mode).frames
        model.train(training)
        flow = model.denoiser.match(noisy, target, encoded.n_frames, times)
    return replace(model.predict(encoded, inputs.tokens), flow=flow)


class EncodeModule(nn.Module):
    """`encode_for_training` as a module that returns named tensors, as DistributedDataParallel requires."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: ModelInputs, match_flow: bool) -> dict[str, Tensor]:
        outputs = encode_for_training(self.model, inputs, match_flow)
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
