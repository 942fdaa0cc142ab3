"""Reading pickles that somebody else wrote, without running anything they say.

Only tensors, numpy arrays and scalars, and plain containers come out; any other name in the file is refused.
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
# What reading a damaged or hostile file may raise, whatever it holds.
_BROKEN: tuple[type[Exception], ...] = (
    *(pickle.UnpicklingError, zipfile.BadZipFile, EOFError, OSError, ImportError, MemoryError),
    *(RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError),
)


def _dtype(code: str, align: bool = False, copy: bool = True) -> np.dtype[Any]:
    if not isinstance(code, str) or not _DTYPE.fullmatch(code):
        raise pickle.UnpicklingError(f"numpy dtype {code!r} is not a plain number or text")
    return np.dtype(code)


def _scalar(dtype: Any, data: Any) -> Any:
    if not isinstance(dtype, np.dtype) or dtype.hasobject or not isinstance(data, bytes):
        raise pickle.UnpicklingError("a numpy scalar is not a plain number or text")
    return np.frombuffer(data, dtype=dtype, count=1)[0]


def _array(subtype: Any, shape: Any, kind: Any) -> np.ndarray:
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


ALLOWED: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.complex": complex,
    "__builtin__.set": set,
    "_codecs.encode": _encode,
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": _dtype,
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray._reconstruct": _array for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _array_from_buffer for core in ("core", "_core")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (found := ALLOWED.get(f"{module}.{name}")) is None:
            raise _Refused(f"{module}.{name}")
        return found


class _Refused(Exception):
    """A name outside the list; the argument is that name."""


def load_pickle(path: Path) -> Any:
    """What a plain pickle holds."""
    try:
        with path.open("rb") as file:
            return _Unpickler(file).load()
    except _Refused as refused:
        raise _refusal(path, str(refused)) from None
    except _BROKEN as error:
        raise UserError(f"{path} cannot be read as a pickle ({_brief(error)}); copy it again.") from error


def load_checkpoint(path: Path) -> Any:
    """What torch.save wrote, tensors on the CPU."""
    import torch  # here, so that a plain pickle is read without it

    dtypes = {type(np.dtype(code)) for code in "?bBhHiIlLqQefdFDSU"}
    names = [
        (found, name) for name, found in ALLOWED.items() if not name.startswith(("collections", "_codecs"))
    ]
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals([*names, *dtypes]):
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        if named := re.search(r"GLOBAL (\S+)|function <?([^>\n]+)", str(error)):
            raise _refusal(path, (named[1] or named[2]).rstrip(".")) from None
        raise UserError(f"{path} is not a PyTorch checkpoint ({_brief(error)}).") from error
    except _BROKEN as error:
        raise UserError(
            f"{path} cannot be read as a PyTorch checkpoint ({_brief(error)}); copy it again."
        ) from error


def _refusal(path: Path, name: str) -> UserError:
    return UserError(
        f"{path} asks for {name}, which is neither a tensor, a number nor a plain container: refused; "
        "save its plain values instead."
    )


def _brief(error: BaseException) -> str:
    """The first sentence of what went wrong."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
