"""The step of a third-party encoder as ONNX nodes, traced by torch.

Built-in encoders are written node by node (`graphs.py`). Any other causal encoder is traced for one patch with the
state as further inputs, and the trace is compared with the encoder itself on random patches: control flow that depends
on values would be traced wrongly.
"""

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from arcuate.errors import UserError
from arcuate.models.interfaces import Encoder

_FRAME, _STATE = "frame", "custom."
_DTYPES = ("float32", "float64", "int64")
_N_COMPARED = 4  # random patches
_TOLERANCE = 1e-4


@dataclass(frozen=True, eq=False)
class TracedStep:
    """Nodes and constants of one step, whose inputs are `patch` (bins, channels) and the states."""

    nodes: tuple[onnx.NodeProto, ...]
    constants: tuple[onnx.TensorProto, ...]
    states: tuple[tuple[str, np.ndarray], ...]  # name and initial value
    frame: str  # name of the output (1, width)

    def after(self, state: str) -> str:
        """Name of the new value of a state."""
        return f"{_STATE}{state}.new"


class _Step(nn.Module):
    """One patch with flat states in and out."""

    def __init__(self, encoder: Encoder, structure: object) -> None:
        super().__init__()
        self.encoder, self.structure = encoder, structure

    def forward(self, patch: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        state = tree_unflatten(list(leaves), self.structure)  # type: ignore[arg-type]
        frames, after, _ = self.encoder.forward_with_layers(patch[None], None, state, ())
        return (frames[0], *tree_flatten(after)[0])


def trace_step(encoder: Encoder, kind: str, patch_bins: int, n_channels: int, name: str) -> TracedStep:
    """Trace one step of a causal encoder on the patch `name`; UserError with the reason if that is not possible."""
    leaves, structure = tree_flatten(encoder.start(1))
    if not all(isinstance(leaf, Tensor) and str(leaf.dtype).removeprefix("torch.") in _DTYPES for leaf in leaves):
        raise _not_exportable(kind, f"its state must consist of tensors of {', '.join(_DTYPES)}")
    names = [f"{_STATE}{i}" for i in range(len(leaves))]
    step, patch = _Step(encoder, structure).eval(), torch.zeros(patch_bins, n_channels)
    buffer = io.BytesIO()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = step(patch, *leaves)
            torch.onnx.export(
                step,
                (patch, *leaves),
                buffer,  # type: ignore[arg-type]
                dynamo=False,
                opset_version=17,
                input_names=[name, *names],
                output_names=[_FRAME, *(f"{state}.new" for state in names)],
            )
    except Exception as error:
        raise _not_exportable(kind, " ".join(str(error).split())[:200] or type(error).__name__) from error
    if tuple(results[0].shape) != (1, encoder.n_outputs):
        raise _not_exportable(kind, f"one patch gives frames of shape {tuple(results[0].shape)}, expected one frame")
    if [r.shape for r in results[1:]] != [leaf.shape for leaf in leaves]:
        raise _not_exportable(kind, "the shape of its state changes from step to step")
    traced = onnx.shape_inference.infer_shapes(onnx.load_from_string(buffer.getvalue()))
    _compare(step, leaves, traced, [name, *names], kind)
    nodes, constants = _plain_nodes(traced.graph)
    initial = [leaf.detach().cpu().numpy() for leaf in leaves]
    return TracedStep(tuple(nodes), tuple(constants), tuple(zip(names, initial, strict=True)), f"{_STATE}{_FRAME}")


def _compare(step: _Step, leaves: Sequence[Tensor], traced: onnx.ModelProto, names: Sequence[str], kind: str) -> None:
    """Run trace and encoder on the same random patches, each with its own state."""
    graph, generator = ReferenceEvaluator(traced), torch.Generator().manual_seed(0)
    state, own = list(leaves), [leaf.detach().numpy() for leaf in leaves]
    n_bins, n_channels = (d.dim_value for d in traced.graph.input[0].type.tensor_type.shape.dim)
    for _ in range(_N_COMPARED):
        patch = torch.randn(n_bins, n_channels, generator=generator)
        with torch.no_grad():
            frame, *state = step(patch, *state)
        inputs = dict(zip(names, [patch.numpy(), *own], strict=True))
        used = {i.name for i in traced.graph.input}
        outputs: Any = graph.run(None, {name: value for name, value in inputs.items() if name in used})
        found, own = outputs[0], outputs[1:]
        if not np.allclose(found, frame.numpy(), atol=_TOLERANCE):
            difference = float(np.abs(found - frame.numpy()).max())
            raise _not_exportable(
                kind, f"the traced step differs by {difference:.2g}: its control flow depends on values"
            )


def _plain_nodes(graph: onnx.GraphProto) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """Nodes with unique names; constants and known shapes become initializers."""
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in (*graph.value_info, *graph.input)}
    inputs = {i.name for i in graph.input}
    rename = lambda name: name if name in inputs or not name else f"{_STATE}{name}"
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    nodes = []
    for node in graph.node:
        if node.op_type == "Constant":
            values[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
        elif node.op_type == "Shape" and all(shapes.get(node.input[0], [0])):
            values[node.output[0]] = np.array(shapes[node.input[0]], np.int64)
        else:
            copied = onnx.NodeProto(op_type=f"{node.domain}.{node.op_type}" if node.domain else node.op_type)
            copied.input.extend(map(rename, node.input))
            copied.output.extend(map(rename, node.output))
            copied.attribute.extend(node.attribute)
            nodes.append(copied)
    constants = [numpy_helper.from_array(np.array(value, order="C"), rename(name)) for name, value in values.items()]
    return nodes, constants


def _not_exportable(kind: str, reason: str) -> UserError:
    return UserError(f"the encoder {kind} cannot be exported: {reason}; use the run folder instead")
