"""Safe loading of third-party pickles and PyTorch checkpoints, without executing code from the file.

An interpreter of pickle opcodes that builds plain values only. A name in the file is an inert marker: it is looked up
in a list of builders written here, never imported, and arrays and tensors are assembled from checked shapes and bytes.
Neither `pickle.load` nor `torch.load` reads the file, so a file cannot call anything, and cannot make an array whose
memory it chooses (`numpy.ndarray((1,), 'O', b'...')` crashes a process that touches it).
"""

import io
import math
import mmap
import pickle
import pickletools
import re
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from arcuate.errors import UserError

MAX_DEPTH = 100  # levels of nested containers
_MAX_BYTES = 2**28  # size of a pickle, without the tensors of a checkpoint
_MAX_OPCODES = 3_000_000
_MAX_VALUES = 20_000_000  # a shared container counts each time it is used
_MAX_AXES = 32
_DTYPE = re.compile(r"[<>=|]?(?:b1|[iuf][1248]|c8|c16|[SU]\d{1,6}|\?)")
_SCALARS = (type(None), bool, int, float, complex, str, bytes, np.generic)
_BROKEN = (ValueError, TypeError, LookupError, AttributeError, EOFError, ArithmeticError, RecursionError, MemoryError)


class _ForbiddenName(Exception):
    """A name outside the allowed list."""


@dataclass(frozen=True)
class _Marker:
    """A name in the file. It has no behaviour: `build` is called by the interpreter with checked arguments."""

    name: str
    build: Callable[..., Any] | None = field(repr=False)


@dataclass(eq=False)
class _Pending:
    """A dtype or array that was created but has no state yet; replaced when its state is read."""

    finish: Callable[[Any], Any] = field(repr=False)
    memo_keys: list[int] = field(default_factory=list)


def load_pickle(path: Path) -> Any:
    """The content of a plain pickle."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"larger than {_MAX_BYTES} bytes")
        return _Interpreter(io.BytesIO(path.read_bytes()), _PLAIN).load()
    except _ForbiddenName as name:
        raise _forbidden(path, str(name)) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except (*_BROKEN, pickle.UnpicklingError) as error:
        raise UserError(f"{path} cannot be read as a pickle ({_first_line(error)}); copy it again") from error


def load_checkpoint(path: Path) -> Any:
    """The content of a file written by torch.save, with tensors on the CPU that share the file's memory."""
    try:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return _load_zip(path, content) if zipfile.is_zipfile(path) else _load_legacy(content)
    except _ForbiddenName as name:
        raise _forbidden(path, str(name)) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except (*_BROKEN, pickle.UnpicklingError, struct.error, zipfile.BadZipFile, NotImplementedError) as error:
        raise UserError(
            f"{path} cannot be read as a PyTorch checkpoint ({_first_line(error)}); copy it again"
        ) from error


def _forbidden(path: Path, name: str) -> UserError:
    return UserError(
        f"{path} refers to {name:.80}, which is not a tensor, number or plain container and is not loaded; "
        "save its plain values instead"
    )


def _first_line(error: BaseException) -> str:
    """The first line of an error message, printable."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
    return "".join(c if c.isprintable() else "?" for c in line)


# --- The interpreter -----------------------------------------------------------------------------------------


class _Interpreter:
    """One pickle: a stack, a memo and the opcodes of protocols 0 to 5 that plain values need."""

    def __init__(
        self,
        stream: io.BytesIO | mmap.mmap,
        names: Mapping[str, Any],
        storage: Callable[[tuple[Any, ...]], Any] | None = None,
    ) -> None:
        self._stream, self._names, self._storage = stream, names, storage
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._spent = 0

    def load(self) -> Any:
        for n, (opcode, argument, _) in enumerate(pickletools.genops(cast(IO[bytes], self._stream))):
            if n > _MAX_OPCODES:
                raise ValueError(f"more than {_MAX_OPCODES} values")
            if opcode.name in _LITERALS:
                self._stack.append(argument)
            elif opcode.name != "STOP":
                self._run(opcode.name, argument)
        result = self._pop()
        _check_plain(result)
        return result

    def _pop(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise ValueError("a value is missing")
        return self._stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _top(self, kind: type) -> Any:
        top = self._stack[-1]
        if type(top) is not kind and not (kind is dict and type(top) is OrderedDict):
            raise ValueError(f"expected a {kind.__name__}")
        return top

    def _run(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in ("PROTO", "FRAME"):
            return
        if name == "MARK":
            self._marks.append(len(stack))
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._remember(len(self._memo) if name == "MEMOIZE" else int(argument))
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self._memo[int(argument)])
        elif name == "APPEND":
            value = self._pop()
            self._top(list).append(value)
        elif name == "APPENDS":
            values = self._pop_to_mark()
            self._top(list).extend(values)
        elif name == "SETITEM":
            value, key = self._pop(), self._pop()
            self._top(dict)[_check_key(key)] = value
        elif name in ("SETITEMS", "DICT"):
            items = self._pop_to_mark()
            if name == "DICT":
                stack.append({})
            self._top(dict).update(_pairs(items))
        elif name == "ADDITEMS":
            values = self._pop_to_mark()
            self._top(set).update(map(_check_key, values))
        elif name in _COLLECT:
            stack.append(_COLLECT[name](self._pop_to_mark()))
        elif name in _SMALL_TUPLES:
            items = [self._pop() for _ in range(_SMALL_TUPLES[name])]
            stack.append(tuple(reversed(items)))
        elif name == "POP":
            if self._marks and len(stack) == self._marks[-1]:
                self._marks.pop()
            else:
                self._pop()
        elif name == "POP_MARK":
            self._pop_to_mark()
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "GLOBAL":
            stack.append(self._find(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            last, module = self._pop(), self._pop()
            stack.append(self._find(module, last))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, marker = self._pop(), self._pop()
            stack.append(self._build(marker, arguments))
        elif name == "BUILD":
            self._set_state(self._pop())
        elif name == "BINPERSID" and self._storage is not None:
            stack.append(self._storage(self._pop()))
        else:
            raise ValueError(f"opcode {name} is not part of plain values")

    def _remember(self, key: int) -> None:
        value = self._memo[key] = self._stack[-1]
        if isinstance(value, _Pending):
            value.memo_keys.append(key)

    def _find(self, module: Any, name: Any) -> _Marker:
        full = f"{module}.{name}"
        if not isinstance(module, str) or not isinstance(name, str) or full not in self._names:
            raise _ForbiddenName(full)
        return _Marker(full, self._names[full])

    def _build(self, marker: Any, arguments: Any) -> Any:
        if not isinstance(marker, _Marker) or marker.build is None or type(arguments) is not tuple:
            raise ValueError(f"{getattr(marker, 'name', 'a value')} cannot be called")
        self._spent += sum(len(a) for a in arguments if isinstance(a, (str, bytes, list, dict, tuple)))
        if self._spent > _MAX_BYTES:
            raise ValueError("its values repeat too often")
        return marker.build(*arguments)

    def _set_state(self, state: Any) -> None:
        """Finish a dtype or array; attributes of an ordered dictionary, such as `_metadata`, are ignored."""
        top = self._stack[-1]
        if type(top) is OrderedDict:
            return
        if not isinstance(top, _Pending):
            raise ValueError("the state of a plain value cannot be set")
        self._stack[-1] = finished = top.finish(state)
        for key in top.memo_keys:
            self._memo[key] = finished


_LITERALS = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 STRING BINSTRING SHORT_BINSTRING UNICODE SHORT_BINUNICODE BINUNICODE"
    " BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 FLOAT BINFLOAT".split()
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
_COLLECT: dict[str, Callable[[list[Any]], Any]] = {
    "LIST": list,
    "TUPLE": tuple,
    "FROZENSET": lambda items: frozenset(map(_check_key, items)),
}
_SMALL_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _check_key(key: Any) -> Any:
    """A key of a dictionary or set: a scalar or a flat tuple, because hashing a deep one overflows the C stack."""
    if isinstance(key, _SCALARS) or (type(key) is tuple and all(isinstance(part, _SCALARS) for part in key)):
        return key
    raise ValueError("a key is not a plain value")


def _pairs(items: list[Any]) -> Iterable[tuple[Any, Any]]:
    if len(items) % 2:
        raise ValueError("a key has no value")
    return ((_check_key(key), value) for key, value in zip(items[::2], items[1::2], strict=True))


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()  # keys are flat
    return value if type(value) in (list, tuple, set, frozenset) else ()


def _check_plain(result: Any) -> None:
    """Check that only finished plain values remain, nested and repeated within bounds.

    Post-order without recursion. A container used several times counts each time, as it does in a walk of the
    result: thirty lists that each hold the previous one twice are a billion values.
    """
    measured: dict[int, tuple[int, int]] = {}  # id -> depth, number of values
    open_ids: set[int] = set()
    pending: list[tuple[Any, bool]] = [(result, False)]
    while pending:
        value, done = pending.pop()
        if isinstance(value, (_Marker, _Pending)):
            raise ValueError("there is a name where a value is expected")
        children = _children(value)
        if done:
            open_ids.discard(id(value))
            found = [measured.get(id(child), (0, 1)) for child in children]
            depth = 1 + max((d for d, _ in found), default=0)
            size = 1 + sum(n for _, n in found)
            if depth > MAX_DEPTH or size > _MAX_VALUES:
                raise ValueError(f"containers are nested deeper than {MAX_DEPTH} or repeat too often")
            measured[id(value)] = depth, size
        elif children and id(value) not in measured:
            if id(value) in open_ids or len(open_ids) > MAX_DEPTH:
                raise ValueError(f"a container contains itself or is nested deeper than {MAX_DEPTH}")
            open_ids.add(id(value))
            pending.append((value, True))
            pending.extend((child, False) for child in children)


# --- Builders: the only functions a file can reach, each with checked arguments ---------------------------------


def _make_dtype(code: Any, align: Any = False, copy: Any = True) -> _Pending:
    if not isinstance(code, str) or not _DTYPE.fullmatch(code):
        raise ValueError(f"numpy dtype {code!r:.20} is not a plain number or text type")
    plain = np.dtype(code)

    def finish(state: Any) -> np.dtype[Any]:
        """State (version, byte order, subarray, names, fields, item size, alignment, flags, ...)."""
        if type(state) is not tuple or len(state) < 5 or any(part is not None for part in state[2:5]):
            raise ValueError("a numpy dtype has fields")
        if state[1] not in ("<", ">", "=", "|") or state[5:6] not in ((), (-1,), (plain.itemsize,)):
            raise ValueError("a numpy dtype has an invalid byte order or size")
        return plain.newbyteorder(state[1])

    return _Pending(finish)


def _make_array(subtype: Any, shape: Any, kind: Any) -> _Pending:
    if not isinstance(subtype, _Marker) or subtype.name != "numpy.ndarray":
        raise ValueError("a numpy array is not a plain array")

    def finish(state: Any) -> np.ndarray:
        """State (version, shape, dtype, Fortran order, bytes)."""
        if type(state) is not tuple or len(state) != 5:
            raise ValueError("a numpy array has no shape or no values")
        return _array_from_buffer(state[4], state[2], state[1], "F" if state[3] else "C")

    return _Pending(finish)


def _array_from_buffer(buffer: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    if not isinstance(dtype, np.dtype) or dtype.hasobject or type(shape) is not tuple or len(shape) > _MAX_AXES:
        raise ValueError("a numpy array does not hold plain numbers or text")
    if isinstance(buffer, str):
        buffer = buffer.encode("latin1")  # written by Python 2
    if not isinstance(buffer, (bytes, bytearray)) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("a numpy array has no values or an invalid shape")
    if math.prod(shape) * dtype.itemsize != len(buffer):
        raise ValueError("the values of a numpy array do not fit its shape")
    values = np.frombuffer(buffer, dtype=dtype) if buffer else np.zeros(0, dtype)
    return values.reshape(shape, order="F" if order == "F" else "C")


def _make_scalar(dtype: Any, data: Any) -> Any:
    return _array_from_buffer(data, dtype, (1,), "C")[0]


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if encoding != "latin1" or not isinstance(text, str):
        raise ValueError(f"text encoding {encoding!r:.20} is not expected here")
    return text.encode("latin1")


def _make_set(items: Any = ()) -> set[Any]:
    if type(items) not in (list, tuple):
        raise ValueError("a set has no list of items")
    return set(map(_check_key, items))


def _make_ordered(items: Any = ()) -> OrderedDict[Any, Any]:
    if type(items) not in (list, tuple) or any(type(i) not in (list, tuple) or len(i) != 2 for i in items):
        raise ValueError("an ordered dictionary has no list of pairs")
    return OrderedDict((_check_key(key), value) for key, value in items)


def _make_complex(real: Any = 0.0, imaginary: Any = 0.0) -> complex:
    if not isinstance(real, (int, float)) or not isinstance(imaginary, (int, float)):
        raise ValueError("the parts of a complex number are not numbers")
    return complex(real, imaginary)


_PLAIN: dict[str, Callable[..., Any] | None] = {
    "collections.OrderedDict": _make_ordered,
    "builtins.set": _make_set,
    "builtins.frozenset": lambda items=(): frozenset(_make_set(items)),
    "builtins.complex": _make_complex,
    "__builtin__.set": _make_set,
    "_codecs.encode": _encode,
    "numpy.ndarray": None,
    "numpy.dtype": _make_dtype,
    **{f"numpy.{core}.multiarray.scalar": _make_scalar for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray._reconstruct": _make_array for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _array_from_buffer for core in ("core", "_core")},
}


# --- Tensors: the two formats of torch.save ---------------------------------------------------------------------

_STORAGE_DTYPES = {
    "torch.DoubleStorage": "float64",
    "torch.FloatStorage": "float32",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
}
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C


@dataclass(frozen=True)
class _Storage:
    """Values of tensors as stored in the file; `values` is None while only the structure is read."""

    key: str
    dtype: str
    values: Any = field(repr=False)


def _make_tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Any:
    """torch._utils._rebuild_tensor_v2, with the bounds checked before a view is made."""
    sizes = (*shape, *stride) if type(shape) is tuple and type(stride) is tuple and len(shape) == len(stride) else (-1,)
    if not isinstance(storage, _Storage) or not all(type(n) is int and n >= 0 for n in (offset, *sizes)):
        raise ValueError("a tensor has an invalid storage or shape")
    if storage.values is None:
        return None
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if math.prod(shape) else -1
    if last >= len(storage.values) or math.prod(max(n, 1) for n in shape) >= 2**62 or len(shape) > _MAX_AXES:
        raise ValueError("a tensor exceeds its storage")
    if max(stride, default=0) >= 2**62:
        raise ValueError("a tensor has an invalid stride")
    return storage.values.as_strided(shape, stride, offset if math.prod(shape) else 0)


def _make_parameter(data: Any, *_: Any) -> Any:
    if isinstance(data, (_Marker, _Pending, _Storage)):
        raise ValueError("a parameter has no tensor")
    return data


_TENSORS: dict[str, Callable[..., Any] | None] = {
    **_PLAIN,
    **dict.fromkeys(_STORAGE_DTYPES),
    "torch._utils._rebuild_tensor_v2": _make_tensor,
    "torch._utils._rebuild_parameter": _make_parameter,
}


def _describe_storage(reference: Any) -> tuple[str, str, int]:
    """Key, dtype and number of values in a persistent id ('storage', type, key, device, n, ...)."""
    if type(reference) is not tuple or len(reference) not in (5, 6) or reference[0] != "storage":
        raise ValueError("a tensor has no storage")
    kind, key, n = reference[1], reference[2], reference[4]
    dtype = _STORAGE_DTYPES.get(kind.name) if isinstance(kind, _Marker) else None
    if dtype is None or not isinstance(key, str) or type(n) is not int or n < 0:
        raise ValueError("a tensor has an invalid storage")
    if len(reference) == 6 and reference[5] is not None:
        raise ValueError("a storage is a view of another; save the tensors again")
    return key, dtype, n


def _view(content: mmap.mmap, start: int, n: int, dtype: str) -> Any:
    """`n` values of the file as a tensor, without copying."""
    import torch  # not needed for a plain pickle

    kind = getattr(torch, dtype)
    if start < 0 or start + n * kind.itemsize > len(content):
        raise ValueError("the file ends before its tensors do")
    if not n:
        return torch.zeros(0, dtype=kind)
    return torch.frombuffer(content, dtype=kind, count=n, offset=start)


def _load_zip(path: Path, content: mmap.mmap) -> Any:
    """The format since PyTorch 1.6: `<name>/data.pkl`, and one uncompressed entry `<name>/data/<key>` per storage."""
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: info for info in archive.infolist()}
        pickles = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise ValueError("it has no data.pkl")
        if any(info.compress_type != zipfile.ZIP_STORED for info in entries.values()):
            raise ValueError("its entries are compressed")
        folder = pickles[0].removesuffix("data.pkl")
        order = entries.get(folder + "byteorder")
        if order is not None and archive.read(order).strip() != b"little":
            raise ValueError("its numbers are big-endian; save it on a little-endian machine")
        if entries[pickles[0]].file_size > _MAX_BYTES:
            raise ValueError(f"its data.pkl is larger than {_MAX_BYTES} bytes")
        storages: dict[str, _Storage] = {}

        def find_storage(reference: Any) -> _Storage:
            key, dtype, n = _describe_storage(reference)
            if key not in storages:
                info = entries[f"{folder}data/{key}"]
                start = _entry_start(content, info)
                values = _view(content, start, n, dtype)
                if n * values.itemsize != info.file_size or zlib.crc32(_bytes(content, start, info)) != info.CRC:
                    raise ValueError(f"the storage {key} does not match its checksum")
                storages[key] = _Storage(key, dtype, values)
            if (storages[key].dtype, len(storages[key].values)) != (dtype, n):
                raise ValueError(f"the storage {key} is used with two types")
            return storages[key]

        return _Interpreter(io.BytesIO(archive.read(pickles[0])), _TENSORS, find_storage).load()


def _entry_start(content: mmap.mmap, info: zipfile.ZipInfo) -> int:
    """First byte of an entry's values, behind its local header."""
    head = content[info.header_offset : info.header_offset + 30]
    n_name, n_extra = struct.unpack("<26xHH", head)
    return info.header_offset + 30 + int(n_name) + int(n_extra)


def _bytes(content: mmap.mmap, start: int, info: zipfile.ZipInfo) -> memoryview:
    return memoryview(content)[start : start + info.file_size]


def _load_legacy(content: mmap.mmap) -> Any:
    """The format before PyTorch 1.6: four pickles, the keys of the storages, and their values."""
    if len(content) < 12 or content[:2] not in (b"\x80\x02", b"\x80\x03", b"\x80\x04"):
        raise ValueError("it is neither a zip archive nor an older PyTorch file")
    described: dict[str, tuple[str, int]] = {}

    def describe(reference: Any) -> _Storage:
        key, dtype, n = _describe_storage(reference)
        if described.setdefault(key, (dtype, n)) != (dtype, n):
            raise ValueError(f"the storage {key} is used with two types")
        return _Storage(key, dtype, None)

    content.seek(0)  # the first pass finds the storages, which follow the pickles
    if _Interpreter(content, _PLAIN).load() != _LEGACY_MAGIC:
        raise ValueError("it is not a PyTorch checkpoint")
    _Interpreter(content, _PLAIN).load()  # protocol
    _Interpreter(content, _PLAIN).load()  # sizes of integers
    start = content.tell()
    _Interpreter(content, _TENSORS, describe).load()
    keys = _Interpreter(content, _PLAIN).load()
    if type(keys) is not list or sorted(map(str, keys)) != sorted(described):
        raise ValueError("its storages do not match its tensors")
    at, storages = content.tell(), {}
    for key in keys:
        dtype, n = described[key]
        (stored,) = struct.unpack("<q", content[at : at + 8])
        if stored != n:
            raise ValueError(f"the storage {key} has {stored} values instead of {n}")
        values = _view(content, at + 8, n, dtype)
        storages[key] = _Storage(key, dtype, values)
        at += 8 + n * values.itemsize
    content.seek(start)
    return _Interpreter(content, _TENSORS, lambda reference: storages[_describe_storage(reference)[0]]).load()
