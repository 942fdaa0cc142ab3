"""Validation of an ONNX graph before ONNX Runtime loads it: known operators, no external data, no subgraphs.

An ONNX file can reference external weight files and custom operators of libraries. The reader below parses the
protocol-buffer encoding itself, so that the check needs no other package; fields that exported graphs do not use are
rejected.
"""

from collections.abc import Iterator
from typing import NoReturn

from arcuate.errors import UserError

OPERATORS = frozenset(
    "Abs Add Cast Concat Div DynamicQuantizeLinear Erf Exp Gather Greater GreaterOrEqual Identity LayerNormalization"
    " LessOrEqual Log LogSoftmax MatMul MatMulInteger Max Min Mul Neg ReduceMean ReduceSum Relu Reshape ScatterElements"
    " Sigmoid Sign Slice Softmax Softsign Split Sqrt Sub Tanh Transpose Where"
    " Clip Conv Cos Elu Equal Gemm LeakyRelu Less Not Pow Reciprocal ReduceMax Sin Softplus Squeeze Unsqueeze".split()
)  # the last line: used by third-party encoders
_VERSIONS = range(17, 21)  # accepted versions of the operator set
_MAX_NODES, _MAX_DIMENSIONS = 20_000, 8
# Fields by number (onnx.proto), and the wire type of each: 0 varint, 2 bytes, 5 32 bits.
_MODEL = {1: 0, 2: 2, 3: 2, 7: 2, 8: 2}  # ir_version, producer name and version, graph, opset_import
_GRAPH = {1: 2, 2: 2, 5: 2, 11: 2, 12: 2}  # node, name, initializer, input, output
_NODE = {1: 2, 2: 2, 3: 2, 4: 2, 5: 2}  # input, output, name, op_type, attribute; no domain
_ATTRIBUTE = {1: 2, 2: 5, 3: 0, 8: 0, 20: 0}  # name, f, i, ints, type; no tensors and no graphs
_TENSOR = {1: 0, 2: 0, 8: 2, 9: 2}  # dims, data_type, name, raw_data; no external data
_OPSET = {1: 2, 2: 0}
_ITEM_BYTES = {1: 4, 2: 1, 3: 1, 6: 4, 7: 8, 9: 1, 11: 8}  # bytes per element of the accepted tensor types

Field = tuple[int, int | memoryview]


def check_graph(content: bytes, where: str) -> None:
    """Raise `UserError` unless the bytes are a graph of the form that `arcuate export` writes."""
    graphs = 0
    for number, value in _fields(memoryview(content), _MODEL, where):
        if number == 8:
            _check_opset(value, where)
        elif number == 7:
            graphs += 1
            _check_graph(value, where)
    if graphs != 1:
        _refuse(where, f"it has {graphs} graphs")


def _refuse(where: str, problem: str) -> NoReturn:
    raise UserError(f"{where} is not a supported ONNX graph: {problem}; export the model again")


def _fields(data: memoryview, known: dict[int, int], where: str) -> Iterator[Field]:
    """Fields of a message; ints and nested messages are returned, packed ints as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at, where)
        number, kind = key >> 3, key & 7
        if number not in known or (kind != known[number] and not (kind == 2 and known[number] == 0)):
            _refuse(where, f"it has an unexpected field {number}")
        if kind == 0:
            value, at = _varint(data, at, where)
            yield number, value
            continue
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


def _message(value: int | memoryview, where: str) -> memoryview:
    if isinstance(value, int):
        _refuse(where, "a field has the wrong type")
    return value


def _check_opset(value: int | memoryview, where: str) -> None:
    fields = dict(_fields(_message(value, where), _OPSET, where))
    if fields.get(1, b"") != b"" or fields.get(2) not in _VERSIONS:
        _refuse(where, "its operator set is not supported")


def _check_graph(value: int | memoryview, where: str) -> None:
    n_nodes = 0
    for number, part in _fields(_message(value, where), _GRAPH, where):
        if number == 1:
            n_nodes += 1
            _check_node(part, where)
        elif number == 5:
            _check_tensor(part, where)
    if n_nodes > _MAX_NODES:
        _refuse(where, f"it has {n_nodes} nodes")


def _check_node(value: int | memoryview, where: str) -> None:
    operator = ""
    for number, part in _fields(_message(value, where), _NODE, where):
        if number == 4:
            operator = bytes(_message(part, where)).decode("ascii", "replace")
        elif number == 5:
            list(_fields(_message(part, where), _ATTRIBUTE, where))
    if operator not in OPERATORS:
        _refuse(where, f"the operator {operator!r:.40} is not allowed")


def _check_tensor(value: int | memoryview, where: str) -> None:
    dims: list[int] = []
    kind, n_bytes = 0, 0
    for number, part in _fields(_message(value, where), _TENSOR, where):
        if number == 1:
            dims += [part] if isinstance(part, int) else _packed(part, where)
        elif number == 2:
            kind = part if isinstance(part, int) else 0
        elif number == 9:
            n_bytes = len(_message(part, where))
    size = _ITEM_BYTES.get(kind, 0)
    for n in dims:
        size *= n
    if len(dims) > _MAX_DIMENSIONS or kind not in _ITEM_BYTES or size != n_bytes:
        _refuse(where, "the size of a weight does not match its shape")


def _packed(data: memoryview, where: str) -> list[int]:
    values, at = [], 0
    while at < len(data):
        value, at = _varint(data, at, where)
        values.append(value)
    return values
