"""Graphs of an exported model: checked before ONNX Runtime loads them, and run within limits.

An ONNX file can reference external weight files and custom operators of libraries. `check_graph` parses the
protocol-buffer encoding itself, so that the check needs no other package, and rejects operators and fields that
exported graphs do not use. Sizes of weights and shapes are checked by ONNX Runtime, in bounded memory; every graph is
computed once, in bounded time, before it is used.
"""

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn, TypeAlias

import numpy as np

from arcuate.errors import UserError

OPERATORS = frozenset(
    "Abs Add Cast Concat Div DynamicQuantizeLinear Erf Exp Gather Greater GreaterOrEqual Identity LayerNormalization"
    " LessOrEqual Log LogSoftmax MatMul MatMulInteger Max Min Mul Neg ReduceMean ReduceSum Relu Reshape ScatterElements"
    " Sigmoid Sign Slice Softmax Softsign Split Sqrt Sub Tanh Transpose Where"
    " Clip Conv Cos Elu Equal Gemm LeakyRelu Less Not Pow Reciprocal ReduceMax Sin Softplus Squeeze Unsqueeze".split()
)  # the last line: used by third-party encoders
_MAX_NODES = 20_000
_MAX_BYTES = 2**28  # of all values while graphs are computed; weights do not count
_MAX_S = 10.0  # for one frame, which has 80 ms
_INSTALL = "exported models run in ONNX Runtime; install it with: pip install 'arcuate[runtime]'"
_NUMPY_TYPES = {"tensor(bool)": "bool", "tensor(double)": "float64", "tensor(int64)": "int64"}
# Accepted fields by number (onnx.proto): those that hold messages with their own fields, the others with None.
_Fields: TypeAlias = dict[int, "_Fields | None"]
_TENSOR: _Fields = {1: None, 2: None, 8: None, 9: None}  # dims, data_type, name, raw_data; no external data
_ATTRIBUTE: _Fields = {1: None, 2: None, 3: None, 8: None, 20: None}  # name, f, i, ints, type; no tensors, no graphs
_NODE: _Fields = {1: None, 2: None, 3: None, 4: None, 5: _ATTRIBUTE}  # input, output, name, op_type; no domain
_GRAPH: _Fields = {1: _NODE, 2: None, 5: _TENSOR, 11: None, 12: None}  # node, name, initializer, input, output
_OPSET: _Fields = {1: None, 2: None}  # domain, version
_MODEL: _Fields = {1: None, 2: None, 3: None, 7: _GRAPH, 8: _OPSET}  # ir_version, producer, graph, opset_import


@dataclass(frozen=True, eq=False)
class Graph:
    """A graph in ONNX Runtime whose failures are user errors: a malicious one may load and fail on its inputs."""

    session: Any
    where: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def run(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Compute all outputs; `values` may contain more than the inputs."""
        try:
            found = self.session.run(self.outputs, {name: values[name] for name in self.inputs})
        except _runtime_errors() as error:
            reason = " ".join(str(error).split())[:120]
            raise UserError(f"{self.where} cannot be computed ({reason}); export the model again") from None
        return dict(zip(self.outputs, found, strict=True))


def load_graph(content: bytes, where: str) -> Graph:
    """Check a graph, load it into ONNX Runtime and compute it once."""
    try:
        import onnxruntime
    except ImportError:
        raise UserError(_INSTALL) from None
    check_graph(content, where)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    _limit_memory()
    options.add_session_config_entry("session.use_env_allocators", "1")
    try:  # constants are not folded, because that allocates memory without a limit
        session = onnxruntime.InferenceSession(
            content,
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=["ConstantFolding"],
            enable_fallback=0,  # which prints to stdout and tries the same again
        )
        _try_graph(session)
    except _runtime_errors() as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(f"{where} cannot be loaded ({reason}); export the model again") from None
    inputs, outputs = (tuple(v.name for v in values) for values in (session.get_inputs(), session.get_outputs()))
    return Graph(session, where, inputs, outputs)


@cache
def _limit_memory() -> None:
    """Bound the memory of all graphs of this process: a few operators can expand a small input a millionfold."""
    import onnxruntime as ort

    info = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(info, ort.OrtArenaCfg({"max_mem": _MAX_BYTES}))


def _try_graph(session: Any) -> None:
    """Compute a graph once, with a bound on time; its work is the same for every frame."""
    import onnxruntime as ort

    shapes = {
        i.name: (i.type, [n if isinstance(n, int) and n > 0 else 1 for n in i.shape]) for i in session.get_inputs()
    }
    if sum(math.prod(shape) for _, shape in shapes.values()) * 8 > _MAX_BYTES or len(shapes) > 2000:
        raise ValueError("its inputs are too large")
    inputs = {name: np.zeros(shape, _NUMPY_TYPES.get(kind, "float32")) for name, (kind, shape) in shapes.items()}
    options = ort.RunOptions()
    timer = threading.Timer(_MAX_S, setattr, (options, "terminate", True))
    timer.daemon = True
    timer.start()
    try:
        session.run(None, inputs, options)
    finally:
        timer.cancel()


@cache
def _runtime_errors() -> tuple[type[Exception], ...]:
    """The exceptions of ONNX Runtime, which share no base class."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    found = [c for c in vars(state).values() if isinstance(c, type) and issubclass(c, Exception)]
    return (*found, RuntimeError, ValueError)


# --- what a file may contain -------------------------------------------------------------------------------


def check_graph(content: bytes, where: str) -> None:
    """Raise `UserError` unless the bytes are a graph of the form that `arcuate export` writes."""
    if _check_message(memoryview(content), _MODEL, where).count(7) != 1:
        _refuse(where, "it does not have one graph")


def _refuse(where: str, problem: str) -> NoReturn:
    raise UserError(f"{where} is not a supported ONNX graph: {problem}; export the model again")


def _check_message(data: memoryview, known: _Fields, where: str) -> list[int]:
    """Numbers of the fields of a message, after the messages within it were checked."""
    found = []
    for number, value in _fields(data, where):
        if number not in known:
            _refuse(where, f"it has an unexpected field {number}")
        inner = known[number]
        if inner is not None:
            if isinstance(value, int):
                _refuse(where, "a field has the wrong type")
            _check_message(value, inner, where)
        elif (known is _NODE and number == 4) or (known is _OPSET and number == 1):
            name = "" if isinstance(value, int) else bytes(value).decode("ascii", "replace")
            if (name not in OPERATORS) if known is _NODE else name:
                _refuse(where, f"the operator or operator set {name!r:.40} is not allowed")
        found.append(number)
    if known is _NODE and found.count(4) != 1:
        _refuse(where, "a node does not have one operator")
    if found.count(1) > _MAX_NODES:
        _refuse(where, f"it has {found.count(1)} nodes")
    return found


def _fields(data: memoryview, where: str) -> Iterator[tuple[int, int | memoryview]]:
    """Fields of a message: integers, and the bytes of everything else."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at, where)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(data, at, where)
            yield number, value
            continue
        if kind not in (2, 5):  # bytes, 32 bits
            _refuse(where, f"it has an unexpected field {number}")
        size = 4
        if kind == 2:
            size, at = _varint(data, at, where)
        if at + size > len(data):
            _refuse(where, "it is truncated")
        yield number, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int, where: str) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    _refuse(where, "it is truncated")
