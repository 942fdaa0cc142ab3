"""The model as the loop calls it: compiled where asked for, and with gradients averaged over processes."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from arcuate.models.model import Model
from arcuate.models.outputs import Outputs
from arcuate.recipe import Recipe
from arcuate.training.world import World


class Encoding(nn.Module):
    """`Model.encode` as a module of its own, for engines that wrap `forward` and want tensors out of it."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, bins: Tensor, n_bins: Tensor, session: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outputs = self.model.encode(bins, n_bins, session)
        return outputs.frames, outputs.n_frames, outputs.log_probs["ctc"]


def parallel_encode(
    model: Model, recipe: Recipe, device: torch.device, world: World
) -> Callable[[Tensor, Tensor, Tensor], Outputs]:
    """The function from normalised bins to outputs that training uses."""
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = recipe.runtime.cudnn_benchmark
        torch.set_float32_matmul_precision("high" if recipe.runtime.tf32 else "highest")
    if world.size > 1:
        where = [device] if device.type == "cuda" else None
        # Session layers without a trial in the batch get no gradient on any process.
        module: nn.Module = DistributedDataParallel(
            Encoding(model), device_ids=where, find_unused_parameters=True
        )
        return lambda bins, n_bins, session: as_outputs(module(bins, n_bins, session))
    if recipe.runtime.compile and device.type == "cuda":
        compiled: Callable[[Tensor, Tensor, Tensor], Outputs] = torch.compile(model.encode)
        return compiled
    return model.encode


def as_outputs(parts: tuple[Tensor, Tensor, Tensor]) -> Outputs:
    frames, n_frames, log_probs = parts
    return Outputs(frames, n_frames, {"ctc": log_probs})
