"""A causal model as ONNX graphs of one streaming step, written node by node from its weights.

`Model.step` is split into two graphs. The bin graph applies normalisation, smoothing, session layer, stem and speaking
mode to one stored bin, and appends it to the patch. The frame graph applies encoder, denoiser and output layer to a
complete patch. Everything that is kept between steps is a state tensor: an input, and an output with the same name and
`.next` appended. The caller counts bins (`exported/model.py`), so the graphs
have no control flow.

GRU cells are written as matrix products, so that dynamic int8 quantisation applies to them: activations are quantised
per step (`DynamicQuantizeLinear`), weights per output channel. Weights use 7 of 8 bits, because the int8 kernels of
CPUs without VNNI add two products in 16 bits, which 8-bit weights overflow; results do not depend on the CPU.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from arcuate.exported.model import NEXT
from arcuate.exported.trace import trace_step
from arcuate.models.front_end import FrontEnd
from arcuate.models.gru import GRU
from arcuate.models.mode import SpeakingMode
from arcuate.models.model import Model
from arcuate.models.ssm import SSM
from arcuate.models.transducer import LSTMPredictor, StatelessPredictor, Transducer
from arcuate.models.transformer import Transformer, relative_position_buckets

OPSET, IR_VERSION = 17, 8
_MAX_INT8 = 63  # 7 bits, see above
_MIN_QUANTISED = 4096  # smaller matrices stay in fp32: quantising their input costs more than it saves
_FLOAT_MAX = float(np.finfo(np.float32).max)
_MASKED = -1e9  # attention bias of positions before the first frame
_NP_TYPES = {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE, "int64": TensorProto.INT64}


@dataclass(frozen=True, eq=False)
class StateTensor:
    """A tensor that a graph takes and returns, with its value before the first bin."""

    name: str
    initial: np.ndarray


@dataclass(frozen=True, eq=False)
class StepGraph:
    """One ONNX graph and its state."""

    model: onnx.ModelProto
    states: tuple[StateTensor, ...]


@dataclass(frozen=True, eq=False)
class ModelGraphs:
    """All graphs of a model. The session layers are inputs of the bin graph unless one session is folded in."""

    bin: StepGraph
    frame: StepGraph
    predictor: StepGraph | None = None  # prediction network of the transducer
    joiner: StepGraph | None = None


class _Graph:
    """A graph under construction; every method returns the name of a value."""

    def __init__(self, name: str, int8: bool = False) -> None:
        self.name, self.int8 = name, int8
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.states: list[StateTensor] = []
        self.names: dict[str, str] = {}  # of values that are outputs: `Identity` would copy large states

    def input(self, name: str, shape: Sequence[int | str], dtype: int = TensorProto.FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, name: str, value: str, shape: Sequence[int | str], dtype: int = TensorProto.FLOAT) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, dtype, shape))
        made_here = any(value in node.output for node in self.nodes)
        if made_here and value not in self.names:
            self.names[value] = name
        else:  # an input, or a value with a name already
            self.nodes.append(helper.make_node("Identity", [value], [name]))

    def state(self, name: str, initial: np.ndarray) -> str:
        self.states.append(StateTensor(name, initial))
        return self.input(name, initial.shape, _NP_TYPES[initial.dtype.name])

    def update(self, name: str, value: str) -> None:
        """Set the new value of a state tensor."""
        initial = next(s.initial for s in self.states if s.name == name)
        self.output(name + NEXT, value, initial.shape, _NP_TYPES[initial.dtype.name])

    def const(self, value: Any, dtype: Any = np.float32) -> str:
        array = np.ascontiguousarray(np.asarray(value, dtype))
        name = f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(array.reshape(np.shape(value)), name))
        return name

    def op(self, kind: str, *inputs: str, n_outputs: int = 1, **attributes: Any) -> Any:
        outputs = [f"v{len(self.nodes)}.{i}" for i in range(n_outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), outputs, **attributes))
        return outputs[0] if n_outputs == 1 else outputs

    def ints(self, *values: int) -> str:
        return self.const(np.array(values), np.int64)

    def add(self, a: str, b: str) -> str:
        return self.op("Add", a, b)

    def mul(self, a: str, b: str) -> str:
        return self.op("Mul", a, b)

    def double(self, x: str) -> str:
        return self.op("Cast", x, to=TensorProto.DOUBLE)

    def float(self, x: str) -> str:
        return self.op("Cast", x, to=TensorProto.FLOAT)

    def rows(self, x: str, first: int, last: int, axis: int = 0) -> str:
        return self.op("Slice", x, self.ints(first), self.ints(last), self.ints(axis))

    def split(self, x: str, sizes: Sequence[int], axis: int = 1) -> list[str]:
        return self.op("Split", x, self.ints(*sizes), n_outputs=len(sizes), axis=axis)

    def reshape(self, x: str, *shape: int) -> str:
        return self.op("Reshape", x, self.ints(*shape))

    def silu(self, x: str) -> str:
        return self.mul(x, self.op("Sigmoid", x))

    def shift(self, name: str, new: str, n: int) -> str:
        """Append a row to a buffer of the last n rows, update it, and return all n + 1 rows."""
        window = self.op("Concat", name, new, axis=0)
        self.update(name, self.rows(window, 1, n + 1))
        return window

    def layer_norm(self, x: str, norm: nn.LayerNorm) -> str:
        weight, bias = self.const(_array(norm.weight)), self.const(_array(norm.bias))
        return self.op("LayerNormalization", x, weight, bias, axis=-1, epsilon=norm.eps)

    def linear(self, x: str, weight: Tensor, bias: Tensor | None, exact: bool = False) -> str:
        """x W^T + b for x (n, in); in int8 unless `exact` or small."""
        matrix = np.ascontiguousarray(_array(weight).T)
        if self.int8 and not exact and matrix.size >= _MIN_QUANTISED:
            product = self._int8_product(x, matrix)
        else:
            product = self.op("MatMul", x, self.const(matrix))
        return product if bias is None else self.add(product, self.const(_array(bias)))

    def _int8_product(self, x: str, matrix: np.ndarray) -> str:
        scale = np.maximum(np.abs(matrix).max(axis=0), 1e-12) / _MAX_INT8
        quantised = np.rint(matrix / scale).astype(np.int8)
        values, x_scale, zero_point = self.op("DynamicQuantizeLinear", x, n_outputs=3)
        weight, weight_zero = self.const(quantised, np.int8), self.const(np.zeros(matrix.shape[1]), np.int8)
        product = self.op("MatMulInteger", values, weight, zero_point, weight_zero)
        return self.mul(self.float(product), self.mul(x_scale, self.const(scale)))

    def finish(self) -> StepGraph:
        for node in self.nodes:
            for field in (node.input, node.output):
                field[:] = [self.names.get(value, value) for value in field]
        graph = helper.make_graph(self.nodes, self.name, self.inputs, self.outputs, self.initializers)
        opsets = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="arcuate")
        onnx.checker.check_model(model, full_check=True)
        return StepGraph(model, tuple(self.states))


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()


def build_graphs(model: Model, session: int | None = None, int8: bool = False, transducer: bool = False) -> ModelGraphs:
    """Graphs of a causal model, with the layer of one session folded in or with the layers as inputs."""
    step = _bin_graph(model, session), _frame_graph(model, int8, transducer)
    if not transducer or model.transducer is None:
        return ModelGraphs(*step)
    return ModelGraphs(*step, _predictor_graph(model.transducer), _joiner_graph(model.transducer))


# --- one bin ----------------------------------------------------------------------------------------------


def _bin_graph(model: Model, session: int | None) -> StepGraph:
    g = _Graph("bin")
    front_end, patch, n_channels = model.front_end, model.config.settings.front_end.patch, model.config.n_channels
    bins = g.input("bin", (1, n_channels))
    is_data = g.input("is_data", (1, 1), TensorProto.BOOL)  # false: zeros appended to the end of a trial
    zeros = g.const(np.zeros((1, n_channels)))
    normalised = g.op("Where", is_data, _normalise(g, bins, model), zeros)
    mode = None if model.mode is None else _mode(g, normalised, model.mode, front_end.right)
    ready = _session_layer(g, _smooth(g, normalised, front_end), front_end, session)
    if front_end.stem is not None:
        ready = _stem(g, ready, front_end)
    if mode is not None and model.mode is not None and model.mode.gain is not None and model.mode.shift is not None:
        posterior = g.op("Softmax", mode, axis=-1)
        gain = g.op("MatMul", posterior, g.const(_array(model.mode.gain)))
        shift = g.op("MatMul", posterior, g.const(_array(model.mode.shift)))
        ready = g.add(g.mul(ready, g.add(gain, g.const(1.0))), shift)
    name = g.state("patch", np.zeros((patch.bins, n_channels), np.float32))
    recent = g.op("Concat", g.rows(name, 1, patch.bins), ready, axis=0) if patch.bins > 1 else ready
    g.update(name, recent)
    return g.finish()


def _normalise(g: _Graph, bins: str, model: Model) -> str:
    settings, n = model.config.settings.front_end, model.config.n_channels
    if settings.log1p:  # in float64, because Log(1 + x) is inaccurate for small x
        magnitude = g.op("Log", g.add(g.double(g.op("Abs", bins)), g.const(1.0, np.float64)))
        bins = g.mul(g.op("Sign", bins), g.float(magnitude))
    if settings.normalise != "none":
        mean, sd = g.input("mean", (1, n)), g.input("sd", (1, n))
        rolling = _normalise_rolling(g, bins, mean, sd, n)
        if settings.normalise == "block":
            by_block = g.op("Div", g.op("Sub", bins, mean), g.add(sd, g.const(1e-8)))
            rolling = g.op("Where", g.input("by_block", (1, 1), TensorProto.BOOL), by_block, rolling)
        bins = rolling
    return g.op("Where", _is_finite(g, bins), bins, g.const(np.zeros((1, n))))


def _is_finite(g: _Graph, x: str) -> str:
    return g.op("LessOrEqual", g.op("Abs", x), g.const(_FLOAT_MAX))  # false for NaN as well


def _normalise_rolling(g: _Graph, bins: str, mean: str, sd: str, n: int) -> str:
    """As `front_end._normalise_rolling`; `past_bins` is the weight of the statistics."""
    weight = g.input("past_bins", (1, 1), TensorProto.DOUBLE)
    zero, none = g.const(0.0, np.float64), g.const(np.zeros((1, n)), np.float64)
    total = g.state("rolling.total", np.zeros((1, n)))
    squares = g.state("rolling.squares", np.zeros((1, n)))
    count = g.state("rolling.bins", np.zeros((1, 1)))
    has_past = g.op("Greater", weight, zero)
    past_mean = g.op("Where", has_past, g.double(g.op("Where", _is_finite(g, mean), mean, g.const(0.0))), zero)
    past_sd = g.op("Where", has_past, g.double(g.op("Where", _is_finite(g, sd), sd, g.const(0.0))), zero)
    centred = g.op("Where", _is_finite(g, bins), g.op("Sub", g.double(bins), past_mean), none)
    new_total = g.add(centred, total)
    new_squares = g.add(g.mul(centred, centred), squares)
    new_count = g.add(count, g.const(1.0, np.float64))
    weights = g.add(weight, new_count)
    shift = g.op("Div", new_total, weights)
    squared = g.add(g.mul(weight, g.mul(past_sd, past_sd)), new_squares)
    variance = g.op("Sub", g.op("Div", squared, weights), g.mul(shift, shift))
    scale = g.add(g.op("Sqrt", g.op("Max", variance, zero)), g.const(1e-8, np.float64))
    g.update(total, new_total)
    g.update(squares, new_squares)
    g.update(count, new_count)
    return g.float(g.op("Div", g.op("Sub", centred, shift), scale))


def _smooth(g: _Graph, bins: str, front_end: FrontEnd) -> str:
    taps = len(front_end.kernel)
    if taps == 1:
        return bins
    name = g.state("smoothing", np.zeros((taps - 1, front_end.n_channels), np.float32))
    window = g.shift(name, bins, taps - 1)
    return g.op("MatMul", g.const(np.array(front_end.kernel)[None]), window)


def _session_layer(g: _Graph, bins: str, front_end: FrontEnd, session: int | None) -> str:
    layer, n = front_end.session_layer, front_end.n_channels
    if layer.settings.enabled:
        if session is None:
            weight, bias = g.input("session_weight", (n, n)), g.input("session_bias", (1, n))
        else:
            weight = g.const(_array(layer.weights[session]))
            bias = g.const(_array(layer.biases[session])[None])
        bins = g.add(g.op("MatMul", bins, weight), bias)
    if layer.settings.activation == "softsign":
        bins = g.op("Softsign", bins)
    return bins if layer.layer_norm is None else g.layer_norm(bins, layer.layer_norm)


def _stem(g: _Graph, bins: str, front_end: FrontEnd) -> str:
    """Convolution with a residual; `is_ready` is false while smoothing still waits for its first bins."""
    stem, n = front_end.stem, front_end.n_channels
    assert stem is not None
    is_ready = g.input("is_ready", (1, 1), TensorProto.BOOL)
    recent = g.state("stem", np.zeros((stem.kernel_size - 1, n), np.float32))
    window = g.op("Concat", recent, bins, axis=0)
    g.update(recent, g.op("Where", is_ready, g.rows(window, 1, stem.kernel_size), recent))
    return g.add(bins, g.op("Relu", _convolve(g, window, stem.weight, stem.bias)))


def _convolve(g: _Graph, window: str, weight: Tensor, bias: Tensor) -> str:
    """One output of a depthwise convolution. (K, C), (K, C), (C,) -> (1, C)"""
    products = g.mul(window, g.const(_array(weight)))
    return g.add(g.op("ReduceSum", products, g.ints(0), keepdims=1), g.const(_array(bias)))


def _mode(g: _Graph, bins: str, mode: SpeakingMode, delay: int) -> str:
    """Logits (1, 2) of the speaking mode for the bin that was smoothed last, which arrived `delay` bins ago."""
    n, stride, lags, prior = mode.n_channels, mode.stride, mode.settings.lags, float(mode.settings.prior_frames)
    one, n_evidence = g.const(1.0, np.float64), lags * n
    position = g.add(g.state("mode.bins", np.zeros((1, 1))), one)  # position within the stride
    is_complete = g.op("GreaterOrEqual", position, g.const(float(stride), np.float64))
    g.update("mode.bins", g.op("Where", is_complete, g.const(np.zeros((1, 1)), np.float64), position))
    window = bins
    if stride > 1:
        window = g.shift(g.state("mode.window", np.zeros((stride - 1, n), np.float32)), bins, stride - 1)
    frame = g.op("ReduceMean", window, axes=[0], keepdims=1)  # (1, C)
    if lags > 1:
        recent = g.state("mode.recent", np.zeros((lags - 1, n), np.float32))
        padded = g.op("Concat", recent, frame, axis=0)
        g.update(recent, g.op("Where", is_complete, g.rows(padded, 1, lags), recent))
        lagged = g.op("Slice", padded, g.ints(lags - 1), g.ints(-lags - 1), g.ints(0), g.ints(-1))  # newest first
        evidence = g.reshape(g.mul(lagged, frame), 1, n_evidence)
    else:
        evidence = g.mul(frame, frame)
    total, count = g.state("mode.total", np.zeros((1, n_evidence))), g.state("mode.frames", np.zeros((1, 1)))
    new_total = g.op("Where", is_complete, g.add(total, g.double(evidence)), total)
    new_count = g.op("Where", is_complete, g.add(count, one), count)
    g.update(total, new_total)
    g.update(count, new_count)
    expected = g.mul(new_count, g.const(_array(mode.evidence_mean)[None], np.float64))
    deviation = g.op("Div", g.op("Sub", new_total, expected), g.add(new_count, g.const(prior, np.float64)))
    standardised = g.float(g.op("Div", deviation, g.const(_array(mode.evidence_sd)[None], np.float64)))
    logits = g.linear(standardised, mode.classifier.weight, mode.classifier.bias, exact=True)
    if not delay:
        return logits
    window = g.shift(g.state("mode.pending", np.zeros((delay, 2), np.float32)), logits, delay)
    return g.rows(window, 0, 1)


# --- one frame --------------------------------------------------------------------------------------------


def _frame_graph(model: Model, int8: bool, transducer: bool) -> StepGraph:
    g = _Graph("frame", int8)
    patch, n_channels = model.config.settings.front_end.patch, model.config.n_channels
    sampled = g.input("patch", (patch.bins, n_channels))
    if patch.dilation > 1:
        sampled = g.op("Slice", sampled, g.ints(0), g.ints(patch.bins), g.ints(0), g.ints(patch.dilation))
    if not isinstance(model.encoder, GRU | SSM | Transformer):
        frame = _traced(g, sampled, model)
    else:
        frame = _built_in(g, g.reshape(sampled, 1, patch.sampled.bins * n_channels), model.encoder)
    if model.denoiser is not None:
        frame = _denoise(g, frame, model)
    logits = g.linear(frame, model.head.weight, model.head.bias, exact=True)
    g.output("log_probs", g.op("LogSoftmax", logits, axis=-1), (1, len(model.config.classes)))
    if transducer and model.transducer is not None:
        projection = model.transducer.encoder_proj
        projected = g.linear(frame, projection.weight, projection.bias, exact=True)
        g.output("joiner_frame", projected, (1, projection.out_features))
    return g.finish()


def _built_in(g: _Graph, bins: str, encoder: GRU | SSM | Transformer) -> str:
    match encoder:
        case GRU():
            return _gru(g, bins, encoder)
        case SSM():
            return _ssm(g, bins, encoder)
        case Transformer():
            return _transformer(g, bins, encoder)


def _traced(g: _Graph, bins: str, model: Model) -> str:
    """The frame of a third-party encoder."""
    settings = model.config.settings
    n_bins = settings.front_end.patch.sampled.bins
    step = trace_step(model.encoder, settings.encoder.kind, n_bins, model.config.n_channels, bins)
    for name, initial in step.states:
        g.state(name, initial)
    g.nodes += step.nodes
    g.initializers += step.constants
    for name, _ in step.states:
        g.update(name, step.after(name))
    return step.frame


def _gru(g: _Graph, x: str, encoder: GRU) -> str:
    width, start = encoder.settings.width, encoder.start(1)
    for k in range(encoder.settings.depth):
        parameter = lambda name, k=k: getattr(encoder.gru, f"{name}_l{k}")
        h = g.state(f"gru.{k}", _array(start[k]))
        inputs = g.linear(x, parameter("weight_ih"), parameter("bias_ih"))
        recurrent = g.linear(h, parameter("weight_hh"), parameter("bias_hh"))
        r, z, n = g.split(inputs, (width,) * 3)
        r_h, z_h, n_h = g.split(recurrent, (width,) * 3)
        candidate = g.op("Tanh", g.add(n, g.mul(g.op("Sigmoid", g.add(r, r_h)), n_h)))
        update = g.op("Sigmoid", g.add(z, z_h))
        x = g.add(candidate, g.mul(update, g.op("Sub", h, candidate)))
        g.update(h, x)
    return x


def _ssm(g: _Graph, x: str, encoder: SSM) -> str:
    """The recurrence S = a S + dt x b^T, y = S c + skip x of `ssd_scan`, one frame at a time."""
    frame = g.layer_norm(g.linear(x, encoder.input.weight, encoder.input.bias), encoder.input_norm)
    blocks: Any = encoder.blocks
    for k, block in enumerate(blocks):
        mixer = block.mixer
        width, heads, n, kernel = mixer.width, mixer.n_heads, mixer.state_dim, mixer.conv_kernel
        per_head = width // heads
        projected = g.linear(g.layer_norm(frame, block.norm), mixer.in_proj.weight, None)
        gate, inputs, dt = g.split(projected, (width, width + 2 * n, heads))
        conv = g.state(f"ssm.{k}.conv", np.zeros((kernel - 1, width + 2 * n), np.float32))
        window = g.shift(conv, inputs, kernel - 1)
        xs, b, c = g.split(g.silu(_convolve(g, window, mixer.conv_weight, mixer.conv_bias)), (width, n, n))
        per_head_const = lambda values, dtype=np.float32: g.const(values.reshape(-1, 1, 1), dtype)
        dt = g.add(g.reshape(dt, heads, 1, 1), per_head_const(_array(mixer.dt_bias)))
        dt = _softplus(g, dt)  # (H, 1, 1) float64
        rate = -np.exp(_array(mixer.a_log).astype(np.float64))
        decay = g.float(g.op("Exp", g.mul(dt, per_head_const(rate, np.float64))))
        columns = g.reshape(xs, heads, per_head, 1)
        state = g.state(f"ssm.{k}.state", np.zeros((heads, per_head, n), np.float32))
        added = g.mul(g.mul(columns, g.float(dt)), b)
        after = g.add(g.mul(state, decay), added)
        g.update(state, after)
        y = g.op("MatMul", after, g.reshape(c, n, 1))  # (H, P, 1)
        y = g.reshape(g.add(y, g.mul(columns, per_head_const(_array(mixer.skip)))), 1, width)
        mixed = g.layer_norm(g.mul(y, g.silu(gate)), mixer.norm)
        frame = g.add(frame, g.linear(mixed, block.output.weight, None))
    return g.layer_norm(frame, encoder.output_norm)


def _softplus(g: _Graph, x: str) -> str:
    """log(1 + exp(x)) in float64: in float32 the sum is inaccurate for small step sizes."""
    x, zero, one = g.double(x), g.const(0.0, np.float64), g.const(1.0, np.float64)
    return g.add(g.op("Max", x, zero), g.op("Log", g.add(one, g.op("Exp", g.op("Neg", g.op("Abs", x))))))


def _transformer(g: _Graph, x: str, encoder: Transformer) -> str:
    settings, embedding = encoder.settings, encoder.embedding
    heads, context, width = settings.n_heads, settings.context, settings.width
    d = width // heads
    x = g.linear(g.layer_norm(x, embedding.input_norm), embedding.linear.weight, embedding.linear.bias)
    frame, ring = g.layer_norm(x, embedding.output_norm), _attention_ring(g, encoder)
    blocks: Any = encoder.blocks
    for k, block in enumerate(blocks):
        attention = block.attention
        projected = g.linear(g.layer_norm(frame, block.attention_norm), attention.qkv.weight, None)
        q, key, value = (g.reshape(part, heads, 1, d) for part in g.split(projected, (width,) * 3))
        if ring is not None:  # keys transposed, so that the product with the query needs no copy
            keys = g.state(f"attention.{k}.keys", np.zeros((heads, d, context), np.float32))
            values = g.state(f"attention.{k}.values", np.zeros((heads, context, d), np.float32))
            all_keys = g.op("ScatterElements", keys, ring.key_index, g.reshape(key, heads, d, 1), axis=2)
            all_values = g.op("ScatterElements", values, ring.value_index, value, axis=1)
            g.update(keys, all_keys)
            g.update(values, all_values)
            scores = g.mul(g.op("MatMul", q, all_keys), g.const(1 / math.sqrt(d)))
            value = g.op("MatMul", g.op("Softmax", g.add(scores, ring.bias), axis=-1), all_values)
        attended = g.linear(g.reshape(value, 1, width), attention.output.weight, attention.output.bias)
        frame = g.add(frame, attended)
        hidden = g.linear(g.layer_norm(frame, block.ffn_norm), block.ffn_in.weight, block.ffn_in.bias)
        frame = g.add(frame, g.linear(_gelu(g, hidden), block.ffn_out.weight, block.ffn_out.bias))
    return g.layer_norm(frame, encoder.output_norm)


@dataclass(frozen=True)
class _Ring:
    """Values that the ring buffers of all layers share: the last `context` frames, each in slot number % context."""

    key_index: str  # (H, d, 1) slot of the frame
    value_index: str  # (H, 1, d)
    bias: str  # (H, 1, context) by slot


def _attention_ring(g: _Graph, encoder: Transformer) -> _Ring | None:
    """Slot of the frame, and the attention bias by the age of each slot; slots without a frame are masked.

    A ring buffer copies the cache once per step; a shifted one would copy it twice.
    """
    settings, context = encoder.settings, encoder.settings.context
    if context == 1:
        return None
    heads, d = settings.n_heads, settings.width // settings.n_heads
    one, size = g.const(1.0, np.float64), g.const(float(context), np.float64)
    slot = g.state("attention.slot", np.zeros((1, 1)))
    following = g.add(slot, one)
    is_last = g.op("GreaterOrEqual", following, size)
    g.update(slot, g.op("Where", is_last, g.const(np.zeros((1, 1)), np.float64), following))
    n_frames = g.state("attention.frames", np.zeros((1, 1)))
    new = g.op("Min", g.add(n_frames, one), size)
    g.update(n_frames, new)
    age = g.op("Sub", slot, g.const(np.arange(float(context))[None], np.float64))  # (1, context)
    age = g.op("Where", g.op("GreaterOrEqual", age, g.const(0.0, np.float64)), age, g.add(age, size))
    buckets = relative_position_buckets(context, settings.n_buckets, False)  # farthest first
    by_age = g.const(_array(encoder.position_bias.table)[:, list(reversed(buckets))][:, None])
    bias = g.op("Gather", by_age, g.reshape(g.op("Cast", age, to=TensorProto.INT64), context), axis=2)
    is_filled = g.op("Greater", new, age)
    index = g.op("Cast", slot, to=TensorProto.INT64)
    return _Ring(
        g.add(index, g.const(np.zeros((heads, d, 1)), np.int64)),
        g.add(index, g.const(np.zeros((heads, 1, d)), np.int64)),
        g.op("Where", is_filled, bias, g.const(_MASKED)),
    )


def _gelu(g: _Graph, x: str) -> str:
    return g.mul(g.mul(x, g.add(g.op("Erf", g.mul(x, g.const(math.sqrt(0.5)))), g.const(1.0))), g.const(0.5))


def _denoise(g: _Graph, frame: str, model: Model) -> str:
    denoiser = model.denoiser
    assert denoiser is not None
    width, kernel, n_steps = denoiser.settings.width, denoiser.settings.conv_kernel, denoiser.settings.steps
    for i in range(n_steps):
        bias = denoiser.input.bias + denoiser.time.weight[:, 0] * (i / n_steps)
        hidden = g.silu(g.linear(frame, denoiser.input.weight, bias))
        recent = g.state(f"denoiser.{i}", np.zeros((kernel - 1, width), np.float32))
        window = g.shift(recent, hidden, kernel - 1)  # (kernel, W); weights expect (W, kernel) flattened
        flat = g.reshape(g.op("Transpose", window, perm=[1, 0]), 1, width * kernel)
        velocity = g.silu(g.linear(flat, denoiser.conv_weight, denoiser.conv_bias))
        velocity = g.linear(velocity, denoiser.output.weight, denoiser.output.bias)
        frame = g.add(frame, g.mul(velocity, g.const(1 / n_steps)))
    return frame


# --- transducer -------------------------------------------------------------------------------------------


def _predictor_graph(transducer: Transducer) -> StepGraph:
    """One step of the prediction network for n hypotheses, and its projection for the joiner."""
    g, predictor = _Graph("predictor"), transducer.predictor
    embedding = g.const(_array(predictor.embedding.weight))
    width = transducer.predictor_proj.in_features
    if isinstance(predictor, StatelessPredictor):
        recent = g.input("recent", ("n", predictor.context), TensorProto.INT64)
        embedded = g.reshape(g.op("Gather", embedding, recent, axis=0), -1, predictor.context * width)
        hidden = g.op("Relu", g.linear(embedded, predictor.linear.weight, predictor.linear.bias))
    else:
        hidden = _lstm(g, g.op("Gather", embedding, g.input("tokens", ("n",), TensorProto.INT64), axis=0), predictor)
    g.output("predicted", g.linear(hidden, transducer.predictor_proj.weight, None), ("n", width))
    return g.finish()


def _lstm(g: _Graph, x: str, predictor: LSTMPredictor) -> str:
    """Layers of an LSTM for one token per hypothesis; the state (n, 2, depth, W) holds hidden and cell state."""
    depth, width = predictor.settings.depth, predictor.settings.width
    hidden, cell = g.split(g.input("state", ("n", 2, depth, width)), (1, 1), axis=1)
    new: list[tuple[str, str]] = []
    for k in range(depth):
        parameter = lambda name, k=k: getattr(predictor.lstm, f"{name}_l{k}")
        h, c = (g.reshape(g.rows(part, k, k + 1, axis=2), -1, width) for part in (hidden, cell))
        gates = g.linear(x, parameter("weight_ih"), parameter("bias_ih"))
        gates = g.add(gates, g.linear(h, parameter("weight_hh"), parameter("bias_hh")))
        i, f, candidate, o = g.split(gates, (width,) * 4)
        kept, added = g.mul(g.op("Sigmoid", f), c), g.mul(g.op("Sigmoid", i), g.op("Tanh", candidate))
        c = g.add(kept, added)
        x = g.mul(g.op("Sigmoid", o), g.op("Tanh", c))
        new.append((g.reshape(x, -1, 1, 1, width), g.reshape(c, -1, 1, 1, width)))
    stacked = [g.op("Concat", *(layer[part] for layer in new), axis=2) for part in (0, 1)]
    g.output("state" + NEXT, g.op("Concat", *stacked, axis=1), ("n", 2, depth, width))
    return x


def _joiner_graph(transducer: Transducer) -> StepGraph:
    """Logits of every projected frame (f, 1, W) with every prediction (r, W)."""
    g, width = _Graph("joiner"), transducer.output.in_features
    joined = g.op("Tanh", g.add(g.input("frames", ("f", 1, width)), g.input("predicted", ("r", width))))
    logits = g.linear(joined, transducer.output.weight, transducer.output.bias)
    g.output("logits", logits, ("f", "r", transducer.output.out_features))
    return g.finish()
