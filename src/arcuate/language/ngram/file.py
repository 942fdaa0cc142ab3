"""Model files (.alm): named arrays in the safetensors layout, memory-mapped and never loaded completely.

Any safetensors reader opens them. They are written to a temporary file that is renamed when it is complete.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from arcuate.errors import UserError
from arcuate.files import atomic_write, check_writable, explain_write_error
from arcuate.progress import Progress

VERSION = 1
_FORMAT = "arcuate-lm"
_DTYPES = {"U64": np.uint64, "I64": np.int64, "I32": np.int32, "F32": np.float32, "U8": np.uint8}
_DTYPE_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_MAX_HEADER = 2**22
_CHUNK = 2**24


def write_arrays(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    metadata: dict[str, Any],
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write a model file. After a failure the previous file is unchanged."""
    ordered = dict(sorted(arrays.items(), key=lambda item: -item[1].itemsize))  # keeps every array aligned
    metadata = metadata | {"crc32": {name: _crc(array) for name, array in ordered.items()}}
    head = _header(ordered, metadata)
    total = sum(array.nbytes for array in ordered.values())
    with open_output(path, force) as stream:
        stream.write(len(head).to_bytes(8, "little") + head)
        done = 0
        for name, array in ordered.items():
            for block in _blocks(array):
                stream.write(block)
                done += block.nbytes
                if progress:
                    progress(done, total, f"writing {name}")


@contextmanager
def open_output(path: Path, force: bool) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block succeeds."""
    check_can_write(path, force)
    try:
        with atomic_write(path) as stream:
            yield stream
    except OSError as error:
        raise explain_write_error(error, path) from error


def check_can_write(path: Path, force: bool, *inputs: Path | str) -> None:
    """Check before the work that `path` can be written and is neither an input nor, without `force`, a file."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file for the model")
    check_writable(path, *inputs)
    if (path.is_file() or (path.is_symlink() and not path.exists())) and not force:
        raise UserError(f"{path} exists; add --force to replace it or choose another name")


def _header(arrays: Mapping[str, np.ndarray], metadata: dict[str, Any]) -> bytes:
    entries: dict[str, Any] = {
        "__metadata__": {"format": _FORMAT, "version": str(VERSION), "about": json.dumps(metadata)}
    }
    at = 0
    for name, array in arrays.items():
        entries[name] = {
            "dtype": _DTYPE_NAMES[array.dtype],
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
    """Whether a file has the header of a model file. Its contents are not checked."""
    with path.open("rb") as stream:
        return _FORMAT.encode() in stream.read(256)


def map_arrays(
    path: Path, layout: Mapping[str, str], optional: frozenset[str]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Map the arrays of a model file read-only; return them and the metadata. All sizes are checked."""
    try:
        head, start = _read_header(path)
        size = path.stat().st_size
        data = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    metadata = _read_metadata(head.pop("__metadata__", None), path)
    arrays, end = {}, 0
    for name, entry in head.items():
        dtype, shape, (first, last) = _parse_entry(name, entry, layout, path)
        if first != end or last - first != int(np.prod(shape, dtype=object)) * dtype.itemsize:
            raise damaged(path, f"array {name} has a wrong offset or size")
        if start + last > size:
            raise damaged(path, "it is truncated")
        end = last
        arrays[name] = np.asarray(data[start + first : start + last]).view(dtype)
    if start + end != size:
        raise damaged(path, "its size does not match its header")
    if missing := set(layout) - set(arrays) - optional:
        raise damaged(path, f"it lacks {', '.join(sorted(missing))}")
    return arrays, metadata


def damaged(path: Path, problem: str) -> UserError:
    return UserError(f"{path} is damaged or not a language model: {problem}; import or build it again")


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


def _read_metadata(meta: Any, path: Path) -> dict[str, Any]:
    if not isinstance(meta, dict) or meta.get("format") != _FORMAT:
        raise damaged(path, "its header names a different format")
    if meta.get("version") != str(VERSION):
        raise UserError(f"{path} has format version {meta.get('version')}; this arcuate reads {VERSION}")
    try:
        metadata = json.loads(meta["about"])
    except (KeyError, TypeError, ValueError, RecursionError):
        raise damaged(path, "its metadata cannot be read") from None
    if not isinstance(metadata, dict):
        raise damaged(path, "its metadata cannot be read")
    return metadata


def _parse_entry(
    name: str, entry: Any, layout: Mapping[str, str], path: Path
) -> tuple[np.dtype, list[int], tuple[int, int]]:
    try:
        dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
        valid = layout.get(name) == dtype and all(type(n) is int and n >= 0 for n in (*shape, first, last))
        if not valid or len(shape) != 1 or first > last:
            raise ValueError(name)
    except (KeyError, TypeError, ValueError):
        raise damaged(path, f"array {name[:40]!r} is not part of the format") from None
    return np.dtype(_DTYPES[dtype]), shape, (first, last)


def check_crc(name: str, array: np.ndarray, metadata: dict[str, Any], path: Path) -> None:
    """Raise UserError if the checksum of an array does not match the header."""
    known = metadata.get("crc32")
    if not isinstance(known, dict) or known.get(name) != _crc(array):
        raise damaged(path, f"the checksum of {name} does not match")
