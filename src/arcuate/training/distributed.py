"""Several processes training one model: who am I, and sums over all of us."""

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
class World:
    """This process among all that train together; alone it is rank 0 of 1."""

    rank: int = 0
    size: int = 1

    @property
    def writes(self) -> bool:
        """Only one process writes the run folder and the terminal."""
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The values added up over all processes, the same on each."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether any process says so; the answer is the same on each, and costs the device nothing."""
        return flag if self.size == 1 else bool(self.sum(torch.tensor([int(flag)])).item())

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """All go on, or none does: where one process has to refuse, the others end with it."""
        problem: UserError | OSError | None = None
        try:
            yield
        except (UserError, OSError) as error:
            problem = error
        refused = self.any(problem is not None)
        if problem is not None:
            raise problem
        if refused:
            raise UserError(f"process {self.rank} ends, for another one cannot go on and says why")

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


def join_world(device: torch.device) -> World:
    """Join the group that torchrun describes in the environment; without torchrun, a world of one."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return World()
    given = os.environ["WORLD_SIZE"]
    if not given.isdecimal():
        raise UserError(
            f"WORLD_SIZE is {given!r:.40}, no number; torchrun sets it: start with torchrun, or unset it"
        )
    size = int(given)
    if size == 1:
        return World()
    if device.type == "mps":
        raise UserError("several processes cannot share an mps device; start without torchrun")
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return World(dist.get_rank(), size)


def leave_world() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


# The model as the loop calls it: compiled where asked for, and with gradients averaged over processes.

Encode = Callable[[ModelInputs, bool], Outputs]  # `encode_for_training` of a model
INNER = "intermediate."


def encode_for_training(model: Model, inputs: ModelInputs, match_flow: bool = False) -> Outputs:
    """`Model.encode`, and with `match_flow` the flow of the denoiser from augmented to clean frames.

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


class Encoding(nn.Module):
    """`encode_for_training` as a module with tensors as outputs, as DistributedDataParallel requires."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: ModelInputs, match_flow: bool) -> dict[str, Tensor]:
        outputs = encode_for_training(self.model, inputs, match_flow)
        parts = {"frames": outputs.frames, "n_frames": outputs.n_frames, "ctc": outputs.log_probs["ctc"]}
        parts |= {f"{INNER}{layer}": log_probs for layer, log_probs in outputs.intermediate.items()}
        if outputs.joint is not None:
            joint = outputs.joint  # views, so that engines find the parameters among what came out
            weight, bias = joint.weight.view_as(joint.weight), joint.bias.view_as(joint.bias)
            parts |= {"joint.0": joint.frames, "joint.1": joint.predicted, "joint.2": weight, "joint.3": bias}
        if outputs.mode is not None:
            parts["mode"] = outputs.mode
        if outputs.flow is not None:
            parts |= {"flow.0": outputs.flow.predicted, "flow.1": outputs.flow.target}
        return parts


def parallel_encode(model: Model, recipe: TrainingConfig, device: torch.device, world: World) -> Encode:
    """The function from normalised bins to outputs that training uses, for what learns now."""
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = recipe.runtime.cudnn_benchmark
        torch.set_float32_matmul_precision("high" if recipe.runtime.tf32 else "highest")
    if world.size > 1:
        where = [device] if device.type == "cuda" else None
        # Session layers without a trial in the batch get no gradient on any process.
        module: nn.Module = DistributedDataParallel(
            Encoding(model), device_ids=where, find_unused_parameters=True
        )
        return lambda inputs, match_flow: as_outputs(module(inputs, match_flow))
    if recipe.runtime.compile and device.type == "cuda":
        return partial(torch.compile(encode_for_training), model)
    return partial(encode_for_training, model)


def as_outputs(parts: dict[str, Tensor]) -> Outputs:
    joint = [parts[f"joint.{i}"] for i in range(4) if f"joint.{i}" in parts]
    flow = [parts[f"flow.{i}"] for i in range(2) if f"flow.{i}" in parts]
    return Outputs(
        parts["frames"],
        parts["n_frames"],
        {"ctc": parts["ctc"]},
        Joint(*joint) if joint else None,
        parts.get("mode"),
        Flow(*flow) if flow else None,
        {int(name.removeprefix(INNER)): part for name, part in parts.items() if name.startswith(INNER)},
    )
