"""The model as the loop calls it: compiled where asked for, and with gradients averaged over processes."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from arcuate.models.model import Model
from arcuate.models.outputs import Joint, Outputs
from arcuate.recipe import Recipe
from arcuate.training.world import World

Encode = Callable[[Tensor, Tensor, Tensor, Tensor | None, tuple[int, ...]], Outputs]


class Encoding(nn.Module):
    """`Model.encode` as a module of its own, for engines that wrap `forward` and want tensors out of it."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        bins: Tensor,
        n_bins: Tensor,
        session: Tensor,
        tokens: Tensor | None = None,
        layers: tuple[int, ...] = (),
    ) -> dict[str, Tensor]:
        outputs = self.model.encode(bins, n_bins, session, tokens, layers)
        parts = {"frames": outputs.frames, "n_frames": outputs.n_frames, "ctc": outputs.log_probs["ctc"]}
        if outputs.joint is not None:
            joint = outputs.joint  # views, so that engines find the parameters among what came out
            weight, bias = joint.weight.view_as(joint.weight), joint.bias.view_as(joint.bias)
            parts |= {"joint.0": joint.frames, "joint.1": joint.predicted, "joint.2": weight, "joint.3": bias}
        return parts | {f"layer.{layer}": scores for layer, scores in outputs.intermediate.items()}


def parallel_encode(model: Model, recipe: Recipe, device: torch.device, world: World) -> Encode:
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
        return lambda *given: as_outputs(module(*given))
    if recipe.runtime.compile and device.type == "cuda":
        compiled: Encode = torch.compile(model.encode)
        return compiled
    return model.encode


def as_outputs(parts: dict[str, Tensor]) -> Outputs:
    joint = [parts[f"joint.{i}"] for i in range(4) if f"joint.{i}" in parts]
    return Outputs(
        parts["frames"],
        parts["n_frames"],
        {"ctc": parts["ctc"]},
        Joint(*joint) if joint else None,
        intermediate={
            int(name.removeprefix("layer.")): t for name, t in parts.items() if name.startswith("layer.")
        },
    )
