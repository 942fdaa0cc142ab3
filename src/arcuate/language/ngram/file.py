"""The file of a language model: arrays behind a JSON header, laid out as safetensors does, mapped and never loaded.

Any safetensors reader opens it. It is written aside and put in place when it is whole.
"""

import errno
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from arcuate.errors import UserError
from arcuate.files import atomic_write, check_writable
from arcuate.progress import Progress

FORMAT, VERSION = "arcuate-lm", 1
DTYPES = {"U64": np.uint64, "I64": np.int64, "I32": np.int32, "F32": np.float32, "U8": np.uint8}
_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
_MAX_HEADER = 2**22
_CHUNK = 2**24
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_arrays(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    about: dict[str, Any],
    *,
    force: bool = False,
    report: Progress | None = None,
) -> None:
    """Write a model file; a failure leaves what was there before."""
    ordered = dict(sorted(arrays.items(), key=lambda item: -item[1].itemsize))  # keeps every array aligned
    about = about | {"crc32": {name: _crc(array) for name, array in ordered.items()}}
    head = _header(ordered, about)
    total = sum(array.nbytes for array in ordered.values())
    with writing(path, force) as stream:
        stream.write(len(head).to_bytes(8, "little") + head)
        done = 0
        for name, array in ordered.items():
            for block in _blocks(array):
                stream.write(block)
                done += block.nbytes
                if report:
                    report(done, total, f"writing {name}")


@contextmanager
def writing(path: Path, force: bool) -> Iterator[BinaryIO]:
    """A file in the making beside its final place; put there only when it is whole."""
    refuse_existing(path, force)
    try:
        with atomic_write(path) as stream:
            yield stream
    except OSError as error:
        raise UserError(explain(error, path)) from error


def refuse_existing(path: Path, force: bool, *inputs: Path | str) -> None:
    """Before the work: no folder, no input, nothing that is there already; a pipe may be written into."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file for the model")
    check_writable(path, *inputs)
    if (path.is_file() or (path.is_symlink() and not path.exists())) and not force:
        raise UserError(f"{path} exists; add --force to replace it or choose another name")


def explain(error: OSError, path: Path) -> str:
    if error.errno in _FULL:
        return f"the disk is full; free some space and write {path} again (nothing was left behind)"
    return f"cannot write {path}: {error.strerror or error}; check the folder and its rights"


def _header(arrays: Mapping[str, np.ndarray], about: dict[str, Any]) -> bytes:
    entries: dict[str, Any] = {
        "__metadata__": {"format": FORMAT, "version": str(VERSION), "about": json.dumps(about)}
    }
    at = 0
    for name, array in arrays.items():
        entries[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(entries, ensure_ascii=True).encode()
    return text + b" " * (-len(text) % 64 + 56)  # the data starts at a multiple of 64


def _blocks(array: np.ndarray) -> Iterator[memoryview]:
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start in range(0, len(flat), _CHUNK):
        yield flat[start : start + _CHUNK].data


def _crc(array: np.ndarray) -> int:
    value = 0
    for block in _blocks(array):
        value = zlib.crc32(block, value)
    return value


def is_model_file(path: Path) -> bool:
    """Whether a file claims to be one of ours; says nothing about its health."""
    with path.open("rb") as stream:
        return FORMAT.encode() in stream.read(256)


def map_arrays(
    path: Path, layout: Mapping[str, str], optional: frozenset[str]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays of a model file, mapped read-only, and what it says about itself; all sizes checked."""
    try:
        head, start = _read_header(path)
        size = path.stat().st_size
        data = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    about = _about(head.pop("__metadata__", None), path)
    arrays, end = {}, 0
    for name, entry in head.items():
        dtype, shape, (first, last) = _entry(name, entry, layout, path)
        if first != end or last - first != int(np.prod(shape, dtype=object)) * dtype.itemsize:
            raise damaged(path, f"array {name} is not where it should be")
        if start + last > size:
            raise damaged(path, "it is shorter than it says")
        end = last
        arrays[name] = np.asarray(data[start + first : start + last]).view(dtype)
    if start + end != size:
        raise damaged(path, "its size is not what it says")
    if lacking := set(layout) - set(arrays) - optional:
        raise damaged(path, f"it lacks {', '.join(sorted(lacking))}")
    return arrays, about


def damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path} is damaged or no language model: {what}; import or build it again")


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= _MAX_HEADER:
            raise damaged(path, "it has no header")
        try:
            head = json.loads(stream.read(length))
        except (ValueError, RecursionError):
            raise damaged(path, "its header cannot be read") from None
    if not isinstance(head, dict):
        raise damaged(path, "its header cannot be read")
    return head, 8 + length


def _about(meta: Any, path: Path) -> dict[str, Any]:
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise damaged(path, "it is not marked as one")
    if meta.get("version") != str(VERSION):
        raise UserError(f"{path} has format version {meta.get('version')}; this arcuate reads {VERSION}")
    try:
        about = json.loads(meta["about"])
    except (KeyError, TypeError, ValueError, RecursionError):
        raise damaged(path, "its description cannot be read") from None
    if not isinstance(about, dict):
        raise damaged(path, "its description cannot be read")
    return about


def _entry(
    name: str, entry: Any, layout: Mapping[str, str], path: Path
) -> tuple[np.dtype, list[int], tuple[int, int]]:
    try:
        dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
        fits = layout.get(name) == dtype and all(type(n) is int and n >= 0 for n in (*shape, first, last))
        if not fits or len(shape) != 1 or first > last:
            raise ValueError(name)
    except (KeyError, TypeError, ValueError):
        raise damaged(path, f"array {name[:40]!r} is not one of its parts") from None
    return np.dtype(DTYPES[dtype]), shape, (first, last)


def check_crc(name: str, array: np.ndarray, about: dict[str, Any], path: Path) -> None:
    known = about.get("crc32")
    if not isinstance(known, dict) or known.get(name) != _crc(array):
        raise damaged(path, f"the checksum of {name} does not agree")
