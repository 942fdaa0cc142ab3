"""Text files, plain or gzipped: lines and sentences; and the special words of a language model."""

import codecs
import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from arcuate.errors import UserError
from arcuate.progress import Progress

LN10 = 2.302585092994046
LOG_ZERO = -99 * LN10  # nats; ARPA files write probability zero as -99
UNK, BOS, EOS = "<unk>", "<s>", "</s>"

_BUFFER = 2**20
_MAX_LINE = 2**24  # bytes
_MAX_EXPANSION = 100  # inflated bytes per compressed byte; English text has 3 to 5
_FREE_BYTES = 2**22  # inflated bytes that are always accepted
_REPORT_EVERY = 50_000


def read_lines(path: Path, progress: Progress | None = None) -> Iterator[bytes]:
    """Lines of a text file without a byte order mark. A gzipped file is recognised by its first bytes."""
    try:
        raw = path.open("rb")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    with raw, _decompressed(raw) as stream:
        size, lines = path.stat().st_size, iter(partial(stream.readline, _MAX_LINE), b"")
        try:
            for number, line in enumerate(lines, start=1):
                if len(line) == _MAX_LINE:
                    raise UserError(f"{path}, line {number}: longer than {_MAX_LINE:,} bytes, which is not text")
                if progress and number % _REPORT_EVERY == 0:
                    progress(raw.tell(), size, f"reading {path.name}")
                yield line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{path} cannot be decompressed ({error}); download it again") from error


def _decompressed(raw: BinaryIO) -> BinaryIO:
    is_gzip = raw.peek(2)[:2] == b"\x1f\x8b"  # type: ignore[attr-defined]
    return io.BufferedReader(_Inflated(raw), _BUFFER) if is_gzip else raw


class _Inflated(io.RawIOBase):
    """A gzipped stream that stops when it expands far more than text does."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._stream, self._n_bytes = raw, gzip.GzipFile(fileobj=raw), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self._stream.read1(len(buffer))
        self._n_bytes += len(block)
        if self._n_bytes > _FREE_BYTES + _MAX_EXPANSION * self._raw.tell():
            raise gzip.BadGzipFile(
                f"it expands to more than {_MAX_EXPANSION} times its size, which is not plausible for text"
            )
        buffer[: len(block)] = block
        return len(block)


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
