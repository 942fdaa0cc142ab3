"""Text files, plain or gzipped: lines, sentences, and blocks of complete lines for the ARPA parser."""

import codecs
import gzip
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from arcuate.errors import UserError
from arcuate.progress import Progress

_BLOCK = 2**23
_MAX_LINE = 2**20
_REPORT_EVERY = 50_000


def open_binary(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def decompressed(raw: BinaryIO) -> BinaryIO:
    """Decompress a stream if its first bytes are those of gzip; its name is ignored."""
    is_gzip = raw.peek(2)[:2] == b"\x1f\x8b"  # type: ignore[attr-defined]
    return gzip.GzipFile(fileobj=raw) if is_gzip else raw  # type: ignore[return-value]


def read_lines(path: Path, progress: Progress | None = None) -> Iterator[bytes]:
    """Lines of a text file without a byte order mark."""
    with open_binary(path) as raw, decompressed(raw) as stream:
        size, number = path.stat().st_size, 0
        lines = iter(stream)
        while True:
            try:
                line = next(lines, None)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise _decompression_error(path, error) from error
            if line is None:
                return
            number += 1
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if progress and number % _REPORT_EVERY == 0:
                progress(raw.tell(), size, f"reading {path.name}")
            yield line


def _decompression_error(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} cannot be decompressed ({error}); download it again")


def decode_line(line: bytes, path: Path, number: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path}, line {number}: not UTF-8 text; convert it (e.g. with iconv)") from None


def read_sentences(path: str | Path, progress: Progress | None = None) -> list[str]:
    """Sentences of a text with one per line, without empty lines; `-` reads standard input."""
    if str(path) == "-":
        sentences = [line.strip() for line in sys.stdin if line.strip()]
        if not sentences:
            raise UserError("standard input contains no sentences; pipe in a text with one per line")
        return sentences
    path = Path(path)
    lines = enumerate(read_lines(path, progress), start=1)
    sentences = [text for number, line in lines if (text := decode_line(line, path, number).strip())]
    if not sentences:
        raise UserError(f"{path} contains no sentences")
    return sentences


class LineBuffer:
    """A file in blocks of complete lines, with the current position and line number."""

    def __init__(self, path: Path, raw: BinaryIO, stream: BinaryIO, progress: Progress | None) -> None:
        self.path, self._raw, self._stream, self._progress = path, raw, stream, progress
        self._size = path.stat().st_size
        self._bytes, self.buffer = b"", np.zeros(0, np.uint8)
        self.at, self.line = 0, 1
        self._rest, self._ended = b"", False

    def fill(self) -> bool:
        """Make sure that the buffer has unread lines; return False at the end of the file."""
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
            if len(rest) > _MAX_LINE:
                raise self.error("the line is too long for an ARPA file")
        return False

    def _read(self) -> bytes:
        try:
            block = self._stream.read(_BLOCK)
        except (EOFError, zlib.error, OSError) as error:
            raise _decompression_error(self.path, error) from error
        if self._progress:
            self._progress(self._raw.tell(), self._size, "reading n-grams")
        return block

    def next_line(self) -> bytes | None:
        """The next line without surrounding white space; None at the end."""
        if not self.fill():
            return None
        found = self._bytes.find(b"\n", self.at)
        end = found if found >= 0 else len(self._bytes)
        line = self._bytes[self.at : end].strip()
        self.at, self.line = end + 1, self.line + 1
        return line

    def error(self, problem: str, line: int | None = None) -> UserError:
        return UserError(f"{self.path}, line {line or self.line}: {problem}")
