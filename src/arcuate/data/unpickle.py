"""Loading of third-party pickles and PyTorch checkpoints without executing code from the file.

A pickle is read in a watched child process by an unpickler that knows a few names, each of which stands for a function
written here, so that a file can build plain values and call nothing else. A checkpoint is read by `torch.load` with
`weights_only`, which has such a list as well.
"""

import io
import pickle
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.data.readers.source import FILE_ERRORS, UnreadableFile
from arcuate.data.watched import call_watched
from arcuate.errors import UserError, check_resources

_MAX_BYTES = 2**28  # size of a pickle
_MAX_DEPTH = 100  # levels of nested containers
_MAX_VALUES = 5_000_000  # a shared container counts each time it is used
_MAX_INTEGER_BITS = 64
_DTYPE = re.compile(r"[<>=|]?(?:b1|[iuf][1248]|c8|c16|[SU]\d{1,6}|\?)")
_BROKEN = (*FILE_ERRORS, pickle.UnpicklingError, AttributeError, IndexError, RecursionError, zipfile.BadZipFile)


def load_pickle(path: Path) -> Any:
    """The content of a plain pickle."""
    try:
        return call_watched(path, _read_pickle, path)
    except UnreadableFile as error:
        raise UserError(f"{path} cannot be read as a pickle: {error}") from error


def load_checkpoint(path: Path) -> Any:
    """The content of a file written by torch.save, with tensors on the CPU that share the file's memory."""
    import torch

    try:
        is_zip = zipfile.is_zipfile(path)  # the format since PyTorch 1.6
        with torch.serialization.safe_globals(_numpy_scalars()), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")  # what it cannot read is an error anyway
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except (*_BROKEN, AssertionError) as error:
        check_resources(error, path)
        if found := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise _forbidden(path, found[1]) from error
        line = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        raise UserError(f"{path} cannot be read as a PyTorch checkpoint ({line}); copy it again") from error


def _numpy_scalars() -> list[Any]:
    """What `torch.load` needs to read NumPy scalars, such as a stored error rate."""
    scalar = np.float64(0).__reduce__()[0]
    dtypes = [type(np.dtype(kind)) for kind in ("f4", "f8", "i4", "i8", "?")]
    return [(scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")] + [np.dtype, *dtypes]


def _forbidden(path: Path, name: str) -> UserError:
    return UserError(
        f"{path} refers to {name:.80}, which is not a tensor, number or plain container and is not loaded; "
        "save its plain values instead"
    )


# --- pickles, in the child ----------------------------------------------------------------------------------------


def _read_pickle(path: Path) -> Any:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"larger than {_MAX_BYTES} bytes")
        return _plain(_PlainUnpickler(io.BytesIO(path.read_bytes()), path).load())
    except _BROKEN as error:
        check_resources(error, path)
        raise UnreadableFile((str(error).splitlines() or [type(error).__name__])[0][:120]) from error


class _PlainUnpickler(pickle.Unpickler):
    """Knows no class and no function but those in `_BUILDERS`."""

    def __init__(self, stream: io.BytesIO, path: Path) -> None:
        super().__init__(stream)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if builder := _BUILDERS.get(f"{module}.{name}"):
            return builder
        raise _forbidden(self._path, f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to an object outside the file")


class _ArrayType:
    """Stands for numpy.ndarray, which a file may name but not call."""


class _Array:
    """An array that is complete once its state is set."""

    value: np.ndarray

    def __setstate__(self, state: Any) -> None:
        """State (version, shape, dtype, Fortran order, bytes)."""
        _, shape, dtype, is_fortran, content = state
        self.value = _make_array(content, dtype, shape, "F" if is_fortran else "C")


class _Dtype:
    """A type of plain numbers or text."""

    def __init__(self, code: Any, align: Any = False, copy: Any = True) -> None:
        if not isinstance(code, str) or not _DTYPE.fullmatch(code):
            raise ValueError(f"numpy dtype {code!r:.20} is not a plain number or text type")
        self.value = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        """State (version, byte order, subarray, names, fields, ...)."""
        if any(part is not None for part in state[2:5]) or state[1] not in ("<", ">", "=", "|"):
            raise ValueError("a numpy dtype has fields")
        self.value = self.value.newbyteorder(state[1])


def _make_array(content: Any, dtype: Any, shape: Any, order: Any = "C") -> np.ndarray:
    if not isinstance(dtype, _Dtype):
        raise ValueError("a numpy array has no type")
    if isinstance(content, str):
        content = content.encode("latin1")  # written by Python 2
    values = np.frombuffer(bytes(content), dtype.value) if content else np.zeros(0, dtype.value)
    return values.reshape(shape, order="F" if order == "F" else "C")


def _reconstruct(subtype: Any, shape: Any, kind: Any) -> _Array:
    return _Array()


def _make_scalar(dtype: Any, content: Any) -> Any:
    return _make_array(content, dtype, (1,))[0]


def _encode(text: str, encoding: str = "latin1") -> bytes:
    return text.encode("latin1")


_BUILDERS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": OrderedDict,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.complex": complex,
    "__builtin__.set": set,
    "_codecs.encode": _encode,
    "numpy.ndarray": _ArrayType,
    "numpy.dtype": _Dtype,
    **{f"numpy.{core}.multiarray.scalar": _make_scalar for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray._reconstruct": _reconstruct for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _make_array for core in ("core", "_core")},
}


def _plain(content: Any) -> Any:
    """The content with finished arrays; ValueError if it holds anything but plain values of bounded size and depth."""
    n_values = 0

    def convert(value: Any, depth: int) -> Any:
        nonlocal n_values
        n_values += 1
        if depth > _MAX_DEPTH or n_values > _MAX_VALUES:
            raise ValueError(f"containers are nested deeper than {_MAX_DEPTH}, contain themselves or repeat too often")
        if isinstance(value, _Array):
            return value.value
        if type(value) in (dict, OrderedDict):
            return {convert(key, depth + 1): convert(item, depth + 1) for key, item in value.items()}
        if type(value) in (list, tuple, set, frozenset):
            return type(value)(convert(item, depth + 1) for item in value)
        if isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:
            raise ValueError(f"an integer has {value.bit_length()} bits")
        if isinstance(value, str):
            value.encode()  # a surrogate raises
        elif not isinstance(value, (type(None), bool, int, float, complex, bytes, bytearray, np.generic, np.ndarray)):
            raise ValueError(f"there is a {type(value).__name__.strip('_')} where a value is expected")
        return value

    return convert(content, 0)
