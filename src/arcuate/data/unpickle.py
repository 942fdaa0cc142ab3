"""Safe loading of third-party pickles and PyTorch checkpoints, without executing code from the file.

Only tensors, numpy arrays and scalars, and plain containers are loaded; any other name in the file raises UserError.
"""

import pickle
import re
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.errors import UserError

_DTYPE = re.compile(r"[<>=|]?[biufcSU?]\d{0,6}")
# Exceptions that a damaged or hostile file may cause.
_BROKEN: tuple[type[Exception], ...] = (
    *(pickle.UnpicklingError, zipfile.BadZipFile, EOFError, OSError, ImportError, MemoryError),
    *(RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError),
)


def _make_dtype(code: str, align: bool = False, copy: bool = True) -> np.dtype[Any]:
    if not isinstance(code, str) or not _DTYPE.fullmatch(code):
        raise pickle.UnpicklingError(f"numpy dtype {code!r} is not a plain number or text type")
    return np.dtype(code)


def _make_scalar(dtype: Any, data: Any) -> Any:
    if not isinstance(dtype, np.dtype) or dtype.hasobject or not isinstance(data, bytes):
        raise pickle.UnpicklingError("a numpy scalar is not a plain number or text")
    return np.frombuffer(data, dtype=dtype, count=1)[0]


def _make_array(subtype: Any, shape: Any, kind: Any) -> np.ndarray:
    if subtype is not np.ndarray or tuple(shape) != (0,):
        raise pickle.UnpicklingError("a numpy array is not a plain one")
    return np.ndarray((0,), dtype=np.int8)


def _array_from_buffer(buffer: Any, dtype: Any, shape: Any, order: str) -> np.ndarray:
    if not isinstance(dtype, np.dtype) or dtype.hasobject:
        raise pickle.UnpicklingError("a numpy array does not hold plain numbers or text")
    return np.frombuffer(buffer, dtype=dtype).reshape(shape, order="F" if order == "F" else "C")


def _encode(text: str, encoding: str = "latin1") -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"text encoding {encoding!r} is not expected here")
    return text.encode("latin1")


_ALLOWED: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.complex": complex,
    "__builtin__.set": set,
    "_codecs.encode": _encode,
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": _make_dtype,
    **{f"numpy.{core}.multiarray.scalar": _make_scalar for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray._reconstruct": _make_array for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _array_from_buffer for core in ("core", "_core")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (found := _ALLOWED.get(f"{module}.{name}")) is None:
            raise _ForbiddenName(f"{module}.{name}")
        return found


class _ForbiddenName(Exception):
    """A name outside the allowed list."""


def load_pickle(path: Path) -> Any:
    """The content of a plain pickle."""
    try:
        with path.open("rb") as file:
            return _Unpickler(file).load()
    except _ForbiddenName as name:
        raise _forbidden(path, str(name)) from None
    except _BROKEN as error:
        raise UserError(f"{path} cannot be read as a pickle ({_first_line(error)}); copy it again") from error


def load_checkpoint(path: Path) -> Any:
    """The content of a file written by torch.save, with tensors on the CPU."""
    import torch  # not needed for a plain pickle

    dtypes = {type(np.dtype(code)) for code in "?bBhHiIlLqQefdFDSU"}
    names = [(found, name) for name, found in _ALLOWED.items() if not name.startswith(("collections", "_codecs"))]
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals([*names, *dtypes]):
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        if named := re.search(r"GLOBAL (\S+)|function <?([^>\n]+)", str(error)):
            raise _forbidden(path, (named[1] or named[2]).rstrip(".")) from None
        raise UserError(f"{path} is not a PyTorch checkpoint ({_first_line(error)}); give another file") from error
    except _BROKEN as error:
        raise UserError(
            f"{path} cannot be read as a PyTorch checkpoint ({_first_line(error)}); copy it again"
        ) from error


def _forbidden(path: Path, name: str) -> UserError:
    return UserError(
        f"{path} refers to {name}, which is not a tensor, number or plain container and is not loaded; "
        "save its plain values instead"
    )


def _first_line(error: BaseException) -> str:
    """The first line of an error message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
