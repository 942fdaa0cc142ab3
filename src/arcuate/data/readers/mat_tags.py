"""Validation of the tags of a MATLAB 5 file before scipy's compiled reader follows them.

That reader trusts every type code and size; a damaged file can crash the process. The validation reads tags only,
inflating compressed variables chunk by chunk, and raises ValueError at the first impossible one.
"""

import math
import struct
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

_MATRIX, _COMPRESSED, _UINT32, _INT32 = 14, 15, 6, 5
_NUMBERS = frozenset((1, 2, 3, 4, 5, 6, 7, 9, 12, 13))
_CHARACTERS = frozenset((1, 2, 3, 4, 16, 17, 18))
_CELL, _CHAR, _OPAQUE = 1, 4, 17
_NUMERIC = range(6, 16)
_COMPLEX = 0x800
_KNOWN_CLASSES = range(1, 17)
_CHUNK_BYTES = 2**20
_MAX_CELLS = 1_000_000


@dataclass(frozen=True)
class _Variable:
    """Header of a MATLAB variable."""

    shape: tuple[int, ...]
    is_complex: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class _ByteStream(Protocol):
    """A stream that is read forward."""

    def read(self, n: int) -> bytes: ...
    def skip(self, n: int) -> None: ...


def list_variables(path: Path, wanted: Collection[str]) -> dict[str, _Variable]:
    """The variables of a file; the `wanted` ones are validated down to the last cell."""
    size = path.stat().st_size
    found: dict[str, _Variable] = {}
    with path.open("rb") as stream:
        order = _byte_order(stream.read(128))
        end = 128
        while end < size:
            stream.seek(end)
            kind, n_bytes = struct.unpack(f"{order}II", _read_exactly(stream, 8))
            start, end = end + 8, end + 8 + n_bytes
            if end > size or kind not in (_MATRIX, _COMPRESSED):
                raise ValueError(f"the file is damaged or truncated at byte {start - 8}")
            source: _ByteStream = _Plain(stream, end)
            if kind == _COMPRESSED:
                source = _Inflated(stream, n_bytes)
                kind, n_bytes = struct.unpack(f"{order}II", source.read(8))
                if kind != _MATRIX:
                    raise ValueError(f"the compressed part at byte {start} is not a variable")
            reader = _VariableReader(source, order)
            name, variable, kind = reader.header()
            if name in wanted:
                reader.check_body(variable, kind, depth=0)
            found[name] = variable
    return found


def _byte_order(header: bytes) -> str:
    if len(header) == 128 and header[126:128] == b"IM" and header[125] == 1:
        return "<"
    if len(header) == 128 and header[126:128] == b"MI" and header[124] == 1:
        return ">"
    raise ValueError("it is not a MATLAB 5 file")


class _VariableReader:
    """Reads the tags of one variable."""

    def __init__(self, source: _ByteStream, order: str) -> None:
        self.source, self.order = source, order

    def header(self) -> tuple[str, _Variable, int]:
        """Name, shape and class."""
        kind, flags = self.element()
        if kind != _UINT32 or len(flags) != 8:
            raise ValueError("a variable has no flags")
        (flag_bits,) = struct.unpack(f"{self.order}I", flags[:4])
        matlab_class, is_complex = flag_bits & 0xFF, bool(flag_bits & _COMPLEX)
        if matlab_class == _OPAQUE:  # a MATLAB object, without shape and name
            return "", _Variable(()), _OPAQUE
        kind, dims = self.element()
        if kind != _INT32 or len(dims) % 4 or not 8 <= len(dims) <= 128 or matlab_class not in _KNOWN_CLASSES:
            raise ValueError("a variable has no shape or an unknown class")
        shape = struct.unpack(f"{self.order}{len(dims) // 4}i", dims)
        kind, name = self.element()
        if min(shape) < 0 or kind not in _CHARACTERS:
            raise ValueError("a variable has an impossible shape or name")
        return name.decode("latin-1"), _Variable(shape, is_complex), matlab_class

    def check_body(self, variable: _Variable, matlab_class: int, depth: int) -> None:
        if variable.is_complex:
            raise ValueError("values are complex numbers")
        if matlab_class == _CELL and depth < 2:
            if variable.size > _MAX_CELLS:
                raise ValueError(f"a cell array has {variable.size} cells, expected at most {_MAX_CELLS}")
            for _ in range(variable.size):
                self._check_cell(depth)
        elif matlab_class == _CHAR:
            self._check_values(_CHARACTERS)
        elif matlab_class in _NUMERIC:
            self._check_values(_NUMBERS)
        else:
            raise ValueError(f"a variable has class {matlab_class}, expected numbers or text")

    def _check_cell(self, depth: int) -> None:
        kind, n_bytes = struct.unpack(f"{self.order}II", self.source.read(8))
        if kind != _MATRIX:
            raise ValueError("a cell is not an array")
        if n_bytes:
            _, variable, matlab_class = self.header()
            self.check_body(variable, matlab_class, depth + 1)

    def _check_values(self, allowed: Collection[int]) -> None:
        kind, n_bytes, small = self.tag()
        if kind not in allowed:
            raise ValueError(f"values have the unknown type {kind}")
        self.source.skip(4 if small else n_bytes + -n_bytes % 8)

    def element(self) -> tuple[int, bytes]:
        """Type and content of a small element."""
        kind, n_bytes, small = self.tag()
        if n_bytes > 4096:
            raise ValueError("a name or shape is too long")
        padded = self.source.read(4 if small else n_bytes + -n_bytes % 8)
        return kind, padded[:n_bytes]

    def tag(self) -> tuple[int, int, bool]:
        """Type, size, and whether the content is stored inside the tag itself."""
        (first,) = struct.unpack(f"{self.order}I", self.source.read(4))
        if first >> 16:
            if first >> 16 > 4:
                raise ValueError("a small element is longer than 4 bytes")
            return first & 0xFFFF, first >> 16, True
        (n_bytes,) = struct.unpack(f"{self.order}I", self.source.read(4))
        return first, n_bytes, False


def _read_exactly(stream: BinaryIO, n: int) -> bytes:
    content = stream.read(n)
    if len(content) != n:
        raise ValueError("the file is truncated")
    return content


class _Plain:
    """Bytes of an uncompressed variable, up to its end."""

    def __init__(self, stream: BinaryIO, end: int) -> None:
        self.stream, self.end = stream, end

    def read(self, n: int) -> bytes:
        self._check(n)
        return _read_exactly(self.stream, n)

    def skip(self, n: int) -> None:
        self._check(n)
        self.stream.seek(n, 1)

    def _check(self, n: int) -> None:
        if self.stream.tell() + n > self.end:
            raise ValueError("a variable ends before its values do")


class _Inflated:
    """Bytes of a compressed variable, inflated chunk by chunk."""

    def __init__(self, stream: BinaryIO, n_bytes: int) -> None:
        self.stream, self.left = stream, n_bytes
        self.inflate = zlib.decompressobj()
        self.ready = b""

    def read(self, n: int) -> bytes:
        while len(self.ready) < n:
            self.ready += self._next_chunk()
        content, self.ready = self.ready[:n], self.ready[n:]
        return content

    def skip(self, n: int) -> None:
        while len(self.ready) < n:
            n -= len(self.ready)
            self.ready = self._next_chunk()
        self.ready = self.ready[n:]

    def _next_chunk(self) -> bytes:
        packed = self.inflate.unconsumed_tail
        if not packed and self.left:
            packed = _read_exactly(self.stream, min(self.left, _CHUNK_BYTES))
            self.left -= len(packed)
        chunk = self.inflate.decompress(packed, _CHUNK_BYTES)
        if not chunk and (self.inflate.eof or not (self.left or self.inflate.unconsumed_tail)):
            raise ValueError("a compressed variable ends before its values do")
        return chunk
