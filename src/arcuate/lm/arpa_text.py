"""A text file, plain or gzipped, as blocks of whole lines."""

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from arcuate.errors import UserError

Report = Callable[[int, int, str], None]
_BLOCK = 2**23
_LONGEST_LINE = 2**20


def open_raw(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def unpacked(raw: BinaryIO) -> BinaryIO:
    """The same stream, or what is inside if it is gzip by its first bytes, whatever its name."""
    packed = raw.peek(2)[:2] == b"\x1f\x8b"  # type: ignore[attr-defined]
    return gzip.GzipFile(fileobj=raw) if packed else raw  # type: ignore[return-value]


class Text:
    """A file as whole lines in a buffer, with the number of the line that is next."""

    def __init__(self, path: Path, raw: BinaryIO, stream: BinaryIO, report: Report | None) -> None:
        self.path, self._raw, self._stream, self._report = path, raw, stream, report
        self._size = path.stat().st_size
        self._bytes, self.buffer = b"", np.zeros(0, np.uint8)
        self.at, self.line = 0, 1
        self._rest, self._ended = b"", False

    def fill(self) -> bool:
        """Have unread text in the buffer, whole lines only; False at the end of the file."""
        if self.at < len(self.buffer):
            return True
        rest = self._rest
        while not self._ended:
            block = self._read()
            self._ended = not block
            cut = block.rfind(b"\n") + 1
            if cut or self._ended:
                self._bytes = rest + block[:cut] if cut else rest
                self.buffer = np.frombuffer(self._bytes, np.uint8)
                self._rest, self.at = block[cut:], 0
                return len(self.buffer) > 0
            rest += block
            if len(rest) > _LONGEST_LINE:
                raise self.problem("the line is too long to be part of an ARPA file")
        return False

    def _read(self) -> bytes:
        try:
            block = self._stream.read(_BLOCK)
        except (EOFError, zlib.error, OSError) as error:
            raise UserError(f"{self.path} cannot be unpacked ({error}); fetch it again") from error
        if self._report:
            self._report(self._raw.tell(), self._size, "reading n-grams")
        return block

    def next_line(self) -> bytes | None:
        """The next line without surrounding space; None at the end."""
        if not self.fill():
            return None
        found = self._bytes.find(b"\n", self.at)
        end = found if found >= 0 else len(self._bytes)
        line = self._bytes[self.at : end].strip()
        self.at, self.line = end + 1, self.line + 1
        return line

    def problem(self, what: str, line: int | None = None) -> UserError:
        return UserError(f"{self.path}, line {line or self.line}: {what}")
