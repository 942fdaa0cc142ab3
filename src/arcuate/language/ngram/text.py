"""Text files, plain or gzipped (lines, sentences, blocks of complete lines for the ARPA parser), and vocabularies."""

import codecs
import gzip
import io
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from arcuate.errors import UserError
from arcuate.language.jit import njit
from arcuate.progress import Progress

LN10 = 2.302585092994046
LOG_ZERO = -99 * LN10  # nats; ARPA files write probability zero as -99
UNK, BOS, EOS = "<unk>", "<s>", "</s>"

_FNV_OFFSET = np.uint64(14695981039346656037)
_FNV_PRIME = np.uint64(1099511628211)
_BLOCK = 2**23
_MAX_LINE = 2**20
_MAX_EXPANSION = 100  # inflated bytes per compressed byte; English text has 3 to 5
_FREE_BYTES = 2**22  # inflated bytes that are always accepted
_REPORT_EVERY = 50_000


def open_binary(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def decompressed(raw: BinaryIO) -> BinaryIO:
    """Decompress a stream if its first bytes are those of gzip; its name is ignored."""
    is_gzip = raw.peek(2)[:2] == b"\x1f\x8b"  # type: ignore[attr-defined]
    return io.BufferedReader(_Inflated(raw), _BLOCK // 8) if is_gzip else raw


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


# --- vocabulary -------------------------------------------------------------------------------------------
#
# One blob of UTF-8 bytes with an open-addressing hash table over it. Both are stored in the model file, so a vocabulary
# of any size is mapped and needs no Python object per word.


@dataclass(frozen=True, eq=False)
class Vocabulary(Sequence[str]):
    """Maps word ids to words and back."""

    blob: np.ndarray  # (n_bytes,) uint8, all words concatenated
    offsets: np.ndarray  # (n_words + 1,) int64
    slots: np.ndarray  # (power of two,) int32, word id or -1, by hash

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        return self.blob[self.offsets[index] : self.offsets[index + 1]].tobytes().decode("utf-8", "replace")

    def find(self, word: str) -> int:
        """Id of a word, or -1."""
        text = np.frombuffer(word.encode("utf-8", "surrogatepass"), np.uint8)
        return int(find_word(text, 0, len(text), self.blob, self.offsets, self.slots))

    def find_all(self, words: Iterable[str]) -> np.ndarray:
        """Ids of many words at once; -1 for words that are not in the vocabulary."""
        blob, offsets = join_bytes([word.encode("utf-8", "surrogatepass") for word in words])
        spans = np.stack([offsets[:-1], offsets[1:]], axis=1)
        return _find_spans(blob, spans, self.blob, self.offsets, self.slots)

    def first_ids(self) -> np.ndarray:
        """First id of each word: its own, unless the word is a repetition."""
        spans = np.stack([self.offsets[:-1], self.offsets[1:]], axis=1)
        return _find_spans(self.blob, spans, self.blob, self.offsets, self.slots)


def make_vocabulary(words: Iterable[str]) -> Vocabulary:
    """Assign ids in the given order. A repeated word is found under its first id."""
    return index_words(*join_bytes([word.encode("utf-8", "surrogatepass") for word in words]))


def join_bytes(encoded: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate byte strings; return the blob and the offsets of each."""
    offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(word) for word in encoded], out=offsets[1:])
    return np.frombuffer(b"".join(encoded), np.uint8), offsets


def index_words(blob: np.ndarray, offsets: np.ndarray) -> Vocabulary:
    """Build the hash table of a blob of words; its load factor is at most one half."""
    n_words = len(offsets) - 1
    slots = np.full(1 << max(2 * n_words, 1).bit_length(), -1, np.int32)
    _fill_slots(blob, offsets, slots)
    return Vocabulary(blob, offsets, slots)


@njit(cache=True)
def _hash_bytes(text: np.ndarray, start: int, end: int) -> np.uint64:
    """FNV-1a with its upper half folded in."""
    value = _FNV_OFFSET
    for i in range(start, end):
        value = (value ^ np.uint64(text[i])) * _FNV_PRIME
    return value ^ (value >> np.uint64(32))


@njit(cache=True)
def _fill_slots(blob: np.ndarray, offsets: np.ndarray, slots: np.ndarray) -> None:
    for word in range(offsets.shape[0] - 1):
        start, end = offsets[word], offsets[word + 1]
        if find_word(blob, start, end, blob, offsets, slots) >= 0:
            continue
        at = np.int64(_hash_bytes(blob, start, end) & np.uint64(slots.shape[0] - 1))
        while slots[at] >= 0:
            at = (at + 1) & (slots.shape[0] - 1)
        slots[at] = word


@njit(cache=True)
def find_word(text: np.ndarray, start: int, end: int, blob: np.ndarray, offsets: np.ndarray, slots: np.ndarray) -> int:
    """Id of the word text[start:end], or -1. Linear probing, bounded so that a damaged table cannot loop."""
    size = slots.shape[0]
    at = np.int64(_hash_bytes(text, start, end) & np.uint64(size - 1))
    for _ in range(size):
        word = slots[at]
        if word < 0 or word >= offsets.shape[0] - 1:
            return -1
        if _same_bytes(text, start, end, blob, offsets[word], offsets[word + 1]):
            return int(word)
        at = (at + 1) & (size - 1)
    return -1


@njit(cache=True)
def _same_bytes(a: np.ndarray, start: int, end: int, b: np.ndarray, b_start: int, b_end: int) -> bool:
    if end - start != b_end - b_start or b_start < 0 or b_end > b.shape[0]:
        return False
    for i in range(end - start):  # noqa: SIM110 (compiled)
        if a[start + i] != b[b_start + i]:
            return False
    return True


@njit(cache=True)
def _find_spans(
    text: np.ndarray, spans: np.ndarray, blob: np.ndarray, offsets: np.ndarray, slots: np.ndarray
) -> np.ndarray:
    """Ids of the words text[start:end] of spans (n, 2); -1 for unknown words."""
    found = np.empty(spans.shape[0], np.int32)
    for i in range(spans.shape[0]):
        found[i] = find_word(text, spans[i, 0], spans[i, 1], blob, offsets, slots)
    return found


def special_id(words: Vocabulary, word: str) -> int:
    """Id of <unk>, <s> or </s> in lower or upper case, or -1."""
    found = words.find(word)
    return found if found >= 0 else words.find(word.upper())
