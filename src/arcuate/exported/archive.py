"""The `.arcx` file: an uncompressed zip archive whose members can be mapped into memory.

Any zip tool lists and extracts it. The archive comment holds the BLAKE2b digest of all bytes before it, so a file that
was changed anywhere is rejected before a member is read. The digest protects against damage, not against malicious
files; the contents are therefore validated as well (`check.py`, `read.py`).
"""

import hashlib
import mmap
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from arcuate.errors import UserError
from arcuate.files import atomic_write, explain_write_error

Content = bytes | Path  # content of a member: in memory, or a file to copy
METADATA = "metadata.json"
CARD = "MODEL_CARD.md"
STARTS_AS_EXPORT = re.compile(rb"PK\x03\x04.{26}" + re.escape(METADATA).encode(), re.DOTALL)
_ALIGNMENT = 64
_MAX_BYTES = 2**32 - 2**20  # limit of a zip archive without 64-bit extensions
_MAX_MEMBERS = 256
_CHUNK = 2**22
_NAME = re.compile(rf"[a-z][a-z0-9_.]{{0,59}}|{re.escape(CARD)}")
_COMMENT = b"arcuate-export blake2b "
_DIGEST_BYTES = 20
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_LOCAL_SIGNATURE, _CENTRAL_SIGNATURE, _END_SIGNATURE = 0x04034B50, 0x02014B50, 0x06054B50
_VERSION, _DATE = 20, 0x21  # zip 2.0; 1980-01-01, so that equal contents give equal files
_PADDING_ID = 0xA5C0  # extra field that aligns the data
_COMMENT_BYTES = len(_COMMENT) + 2 * _DIGEST_BYTES


@dataclass(frozen=True)
class Member:
    """Position and size of a member in the file."""

    name: str
    offset: int
    size: int
    crc: int


@dataclass(frozen=True, eq=False)
class Archive:
    """A verified file, mapped read-only."""

    path: Path
    members: Mapping[str, Member]
    data: mmap.mmap

    @property
    def digest(self) -> str:
        """Digest that identifies the contents."""
        return self.data[-2 * _DIGEST_BYTES :].decode("ascii", "replace")

    def __contains__(self, name: str) -> bool:
        return name in self.members

    def bytes(self, name: str, max_bytes: int = _MAX_BYTES) -> bytes:
        """Copy of a member."""
        member = self.member(name)
        if member.size > max_bytes:
            raise damaged(self.path, f"{name} has {member.size:,} bytes, at most {max_bytes:,} are expected")
        return self.data[member.offset : member.offset + member.size]

    def member(self, name: str) -> Member:
        if name not in self.members:
            raise damaged(self.path, f"it lacks {name}")
        return self.members[name]

    def array(self, name: str, dtype: str, shape: tuple[int | None, ...]) -> np.ndarray:
        """A mapped member as an array of this type and shape; one dimension may be None, which is inferred."""
        member = self.member(name)
        fixed = int(np.prod([n for n in shape if n is not None], dtype=object)) * np.dtype(dtype).itemsize
        n_free = sum(n is None for n in shape)
        matches = member.size % fixed == 0 if n_free and fixed else member.size == fixed
        if n_free > 1 or not matches:
            raise damaged(self.path, f"{name} has {member.size:,} bytes, which do not match its shape")
        flat = np.frombuffer(self.data, np.uint8, member.size, member.offset)
        return flat.view(dtype).reshape([-1 if n is None else n for n in shape])


def damaged(path: Path, problem: str) -> UserError:
    return UserError(f"{path} is damaged or not an exported model: {problem}; export it again with `arcuate export`")


def is_export(path: str | Path) -> bool:
    """Whether a path names an exported model, by its suffix or first bytes; it is validated when it is opened."""
    path = Path(path)
    if path.suffix == ".arcx":
        return not path.is_dir()
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return STARTS_AS_EXPORT.match(file.read(64)) is not None


# --- writing ----------------------------------------------------------------------------------------------


def write_archive(path: Path, members: Mapping[str, Content]) -> int:
    """Write the members in order; equal contents give equal bytes. Returns the size of the file."""
    total = sum(_size(content) for content in members.values())
    if total + 1024 * len(members) > _MAX_BYTES:
        raise UserError(f"{path} would have {total:,} bytes, more than the 4 GiB of the format; use a smaller n-gram")
    try:
        with atomic_write(path) as stream:
            return _write(_HashedStream(stream), members)
    except OSError as error:
        raise explain_write_error(error, path) from error


class _HashedStream:
    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.n_bytes, self.hash = stream, 0, hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def write(self, block: bytes) -> None:
        self.stream.write(block)
        self.hash.update(block)
        self.n_bytes += len(block)


def _write(stream: _HashedStream, members: Mapping[str, Content]) -> int:
    directory = b""
    for name, content in members.items():
        assert _NAME.fullmatch(name), name
        encoded, size, crc = name.encode(), _size(content), 0
        for block in _blocks(content):
            crc = zlib.crc32(block, crc)
        start = stream.n_bytes
        n_padding = -(start + _LOCAL.size + len(encoded) + 4) % _ALIGNMENT
        extra = struct.pack("<HH", _PADDING_ID, n_padding) + bytes(n_padding)
        common = (_VERSION, 0, 0, 0, _DATE, crc, size, size, len(encoded))
        stream.write(_LOCAL.pack(_LOCAL_SIGNATURE, *common, len(extra)) + encoded + extra)
        for block in _blocks(content):
            stream.write(block)
        directory += _CENTRAL.pack(_CENTRAL_SIGNATURE, _VERSION, *common, 0, 0, 0, 0, 0, start) + encoded
    start, n = stream.n_bytes, len(members)
    stream.write(directory)
    stream.write(_END.pack(_END_SIGNATURE, 0, 0, n, n, len(directory), start, _COMMENT_BYTES))
    stream.stream.write(_COMMENT + stream.hash.hexdigest().encode())
    return stream.n_bytes + _COMMENT_BYTES


def _size(content: Content) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _blocks(content: Content) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    with content.open("rb") as file:
        while block := file.read(_CHUNK):
            yield block


# --- reading ----------------------------------------------------------------------------------------------


def open_archive(path: str | Path) -> Archive:
    """Verify the digest of a file and map it; the archive must be laid out as `write_archive` does."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no exported model {path}; write one with `arcuate export RUN {path.name}`")
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if not _END.size + _COMMENT_BYTES < size <= _MAX_BYTES:
                raise damaged(path, f"it has {size:,} bytes")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            _check_digest(path, file, size)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    return Archive(path, {m.name: m for m in _read_directory(path, data)}, data)


def _check_digest(path: Path, file: BinaryIO, size: int) -> None:
    """Verify the digest; the file is read, not mapped, so that its pages do not count as resident memory."""
    digest, left = hashlib.blake2b(digest_size=_DIGEST_BYTES), size - _COMMENT_BYTES
    while left > 0 and (block := file.read(min(_CHUNK, left))):
        digest.update(block)
        left -= len(block)
    if file.read() != _COMMENT + digest.hexdigest().encode():
        raise damaged(path, "its checksum does not match")


def _read_directory(path: Path, data: mmap.mmap) -> list[Member]:
    end = len(data) - _COMMENT_BYTES - _END.size
    signature, *disks, n, n_total, size, start, n_comment = _END.unpack_from(data, end)
    expected = (_END_SIGNATURE, [0, 0], n, end - size, _COMMENT_BYTES)
    if (signature, disks, n_total, start, n_comment) != expected or not 0 < n <= _MAX_MEMBERS:
        raise damaged(path, "its table of contents is invalid")
    members: list[Member] = []
    at, position = start, 0
    for _ in range(n):
        if at + _CENTRAL.size > end:
            raise damaged(path, "its table of contents is invalid")
        fields = _CENTRAL.unpack_from(data, at)
        crc, size, n_name, offset = fields[7], fields[8], fields[10], fields[16]
        name = data[at + _CENTRAL.size : at + _CENTRAL.size + n_name].decode("ascii", "replace")
        common = (_VERSION, 0, 0, 0, _DATE, crc, size, size, n_name)
        member = _check_member(path, data, name, common, fields, offset, start)
        if offset != position or any(m.name == name for m in members):
            raise damaged(path, f"its member {name!r:.60} is misplaced")
        members.append(member)
        position, at = member.offset + member.size, at + _CENTRAL.size + n_name
    if at != end or position != start:
        raise damaged(path, "its table of contents does not match its members")
    return members


def _check_member(
    path: Path, data: mmap.mmap, name: str, common: tuple[int, ...], central: tuple[int, ...], offset: int, end: int
) -> Member:
    n_padding = -(offset + _LOCAL.size + len(name) + 4) % _ALIGNMENT
    first = offset + _LOCAL.size + len(name) + 4 + n_padding
    is_canonical = (
        _NAME.fullmatch(name) is not None
        and central == (_CENTRAL_SIGNATURE, _VERSION, *common, 0, 0, 0, 0, 0, offset)
        and first + common[6] <= end
        and _LOCAL.unpack_from(data, offset) == (_LOCAL_SIGNATURE, *common, 4 + n_padding)
        and data[offset + _LOCAL.size : offset + _LOCAL.size + len(name)] == name.encode()
    )
    if not is_canonical:
        raise damaged(path, f"its member {name!r:.60} is not stored as expected")
    return Member(name, first, common[6], common[5])
