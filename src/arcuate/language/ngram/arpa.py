"""A text file, plain or gzipped, as blocks of whole lines."""

import codecs
import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numba import njit

from arcuate.errors import UserError
from arcuate.language.ngram.model import MAX_ORDER
from arcuate.language.ngram.vocabulary import (
    LN10,
    Table,
    Tables,
    Vocabulary,
    find_word,
    index_words,
    vocabulary_of,
    with_specials,
)
from arcuate.progress import Progress

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

    def __init__(self, path: Path, raw: BinaryIO, stream: BinaryIO, report: Progress | None) -> None:
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


# Compiled reading of n-gram lines: a probability, words, perhaps a back-off.

NEWLINE, BACKSLASH = 10, 92
OK, BAD_NUMBER, TOO_FEW, TOO_MANY = 0, 1, 2, 3


@njit(cache=True)
def parse_lines(
    text: np.ndarray,
    at: int,
    line: int,
    order: int,
    numbers: np.ndarray,
    spans: np.ndarray,
    lines: np.ndarray,
) -> tuple[int, int, int, int]:
    """Read n-gram lines from `at` to the end of the text or a line that starts with a backslash.

    Fills numbers (n, 2) with probability and back-off as the file has them, spans (n, order, 2) with where the
    words stand, lines (n,) with line numbers. Gives (n, where it stopped, lines passed, what was wrong).
    """
    n = 0
    size = text.shape[0]
    while at < size and n < numbers.shape[0]:
        end = at
        while end < size and text[end] != NEWLINE:
            end += 1
        start = skip_space(text, at, end)
        if start < end:
            if text[start] == BACKSLASH:
                return n, at, line, OK
            problem = parse_line(text, start, end, order, numbers[n], spans[n])
            if problem != OK:
                return n, at, line, problem
            lines[n] = line
            n += 1
        at = end + 1
        line += 1
    return n, min(at, size), line, OK


@njit(cache=True)
def parse_line(
    text: np.ndarray, at: int, end: int, order: int, numbers: np.ndarray, spans: np.ndarray
) -> int:
    stop = token_end(text, at, end)
    good, numbers[0] = parse_number(text, at, stop)
    if not good:
        return BAD_NUMBER
    for i in range(order):
        at = skip_space(text, stop, end)
        if at == end:
            return TOO_FEW
        stop = token_end(text, at, end)
        spans[i, 0] = at
        spans[i, 1] = stop
    numbers[1] = 0.0
    at = skip_space(text, stop, end)
    if at < end:
        stop = token_end(text, at, end)
        good, numbers[1] = parse_number(text, at, stop)
        if not good:
            return BAD_NUMBER
        if skip_space(text, stop, end) < end:
            return TOO_MANY
    return OK


@njit(cache=True)
def skip_space(text: np.ndarray, at: int, end: int) -> int:
    while at < end and (text[at] == 32 or 9 <= text[at] <= 13):
        at += 1
    return at


@njit(cache=True)
def token_end(text: np.ndarray, at: int, end: int) -> int:
    while at < end and not (text[at] == 32 or 9 <= text[at] <= 13):
        at += 1
    return at


@njit(cache=True)
def parse_number(text: np.ndarray, at: int, end: int) -> tuple[bool, float]:
    """A decimal number or -inf; (False, 0) where it is neither."""
    negative = at < end and text[at] == 45
    if at < end and (text[at] == 45 or text[at] == 43):
        at += 1
    if end - at == 3 and text[at] | 32 == 105 and text[at + 1] | 32 == 110 and text[at + 2] | 32 == 102:
        return negative, -np.inf
    mantissa, n_digits, exponent, seen_point = 0.0, 0, 0, False
    while at < end:
        c = text[at]
        if c == 46 and not seen_point:
            seen_point = True
        elif 48 <= c <= 57:
            mantissa = mantissa * 10.0 + (c - 48)
            n_digits += 1
            if seen_point:
                exponent -= 1
        else:
            break
        at += 1
    if n_digits == 0:
        return False, 0.0
    if at < end:
        if text[at] | 32 != 101:
            return False, 0.0
        good, power = parse_power(text, at + 1, end)
        if not good:
            return False, 0.0
        exponent += power
    value = mantissa * 10.0**exponent if exponent > 0 else mantissa / 10.0 ** (-exponent)
    if not np.isfinite(value):
        return False, 0.0
    return True, -value if negative else value


@njit(cache=True)
def parse_power(text: np.ndarray, at: int, end: int) -> tuple[bool, int]:
    negative = at < end and text[at] == 45
    if at < end and (text[at] == 45 or text[at] == 43):
        at += 1
    if at >= end or end - at > 3:
        return False, 0
    power = 0
    for i in range(at, end):
        if not 48 <= text[i] <= 57:
            return False, 0
        power = power * 10 + (text[i] - 48)
    return True, -power if negative else power


@njit(cache=True)
def look_up(
    text: np.ndarray,
    spans: np.ndarray,
    blob: np.ndarray,
    offsets: np.ndarray,
    slots: np.ndarray,
    ids: np.ndarray,
) -> int:
    """Word ids (n, order) of spans; gives the first row with a word that is not in the vocabulary, or -1."""
    for i in range(spans.shape[0]):
        for j in range(spans.shape[1]):
            word = find_word(text, spans[i, j, 0], spans[i, j, 1], blob, offsets, slots)
            if word < 0:
                return i
            ids[i, j] = word
    return -1


@njit(cache=True)
def gather(text: np.ndarray, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of spans (n, 2) one after another, and the length of each."""
    lengths = spans[:, 1] - spans[:, 0]
    blob = np.empty(lengths.sum(), np.uint8)
    at = 0
    for i in range(spans.shape[0]):
        for j in range(spans[i, 0], spans[i, 1]):
            blob[at] = text[j]
            at += 1
    return blob, lengths


# ARPA files, of any order and any tool, plain or gzipped, read as a stream.

_COUNT = re.compile(rb"ngram\s+(\d{1,3})\s*=\s*(\d{1,15})$")
_SECTION = re.compile(rb"\\(\d{1,3})-grams:$")
_PROBLEMS = {
    BAD_NUMBER: "a number is missing or malformed",
    TOO_FEW: "there are fewer words than the section says",
    TOO_MANY: "there are more words than the section says",
}
_MOST = 99.0  # log10; a back-off above nought makes up for a sum below one, and no sum is that small
_POSITIVE = 1e-3  # log10; what rounding can make of probability one


def read_arpa(path: Path, *, recount: bool = False, report: Progress | None = None) -> Tables:
    """All n-grams of an ARPA file. With `recount` the counts in its head may be wrong."""
    with open_raw(path) as raw, unpacked(raw) as stream:
        text = Text(path, raw, stream, report)
        announced = _read_head(text)
        tables: list[Table] = []
        n_repeated = 0
        vocabulary: Vocabulary | None = None
        for order, section_line in _sections(text, len(announced)):
            if order == 1:
                vocabulary, table, n_lines = _read_unigrams(text)
                n_repeated = n_lines - len(table)
            else:
                assert vocabulary is not None
                table = _read_section(text, order, vocabulary)
                n_lines = len(table)
            n, count_line = announced[order - 1]
            if not text.fill():
                raise text.problem(f"the {order}-grams lead to {_shown(None)}")
            if n not in (n_lines, len(table)) and n != _n_distinct(table) and not recount:
                raise text.problem(
                    f"{n:,} {order}-grams are announced, but the section of line {section_line} has {n_lines:,};"
                    " if the file is whole, import it with --recount",
                    count_line,
                )
            tables.append(table)
    assert vocabulary is not None
    while len(tables) > 1 and not len(tables[-1]):
        tables.pop()
    return with_specials(Tables(vocabulary, tuple(tables), source=str(path), n_repeated=n_repeated))


def _n_distinct(table: Table) -> int:
    """How many n-grams there are if one given twice counts once, as some tools count them."""
    return len(np.unique(table.ids, axis=0))


def _read_head(text: Text) -> list[tuple[int, int]]:
    """(count, line) of each order; text before the data mark is a comment."""
    while (line := text.next_line()) is not None and line.removeprefix(codecs.BOM_UTF8) != b"\\data\\":
        pass
    if line is None:
        raise UserError(f"{text.path} is no ARPA file: it has no line \\data\\")
    announced: list[tuple[int, int]] = []
    while text.fill() and text.buffer[text.at : text.at + 1].tobytes() != b"\\":
        at = text.line
        line = text.next_line() or b""
        if not line:
            continue
        found = _COUNT.match(line)
        if not found:
            raise text.problem("expected a count such as 'ngram 1=5000' or a section", at)
        if int(found[1]) != len(announced) + 1 or len(announced) == MAX_ORDER:
            raise text.problem(f"expected the count of {len(announced) + 1}-grams", at)
        announced.append((int(found[2]), at))
    if not announced:
        raise text.problem("no counts of n-grams")
    return announced


def _sections(text: Text, n_orders: int) -> Iterator[tuple[int, int]]:
    """(order, line) of each section in turn, with the text just behind its title."""
    for order in range(1, n_orders + 1):
        at, line = _next_title(text)
        found = _SECTION.match(line or b"")
        if not found or int(found[1]) != order:
            raise text.problem(f"expected \\{order}-grams:, found {_shown(line)}", at)
        yield order, at
    at, line = _next_title(text)
    if line != b"\\end\\":
        raise text.problem(f"expected \\end\\, found {_shown(line)}", at)


def _next_title(text: Text) -> tuple[int, bytes | None]:
    while True:
        at = text.line
        line = text.next_line()
        if line != b"":
            return at, line


def _shown(line: bytes | None) -> str:
    return (
        "the end of the file (is it whole?)" if line is None else repr(line[:40].decode("utf-8", "replace"))
    )


def _blocks(text: Text, order: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(values (n, 2) in nat, spans (n, order, 2), lines (n,)) of a section, piece by piece."""
    room = max(1, 2**20 // order)
    while text.fill():
        numbers = np.empty((room, 2), np.float64)
        spans = np.empty((room, order, 2), np.int32)
        lines = np.empty(room, np.int64)
        n, text.at, text.line, problem = parse_lines(
            text.buffer, text.at, text.line, order, numbers, spans, lines
        )
        if n:
            yield _natural(text, numbers[:n], lines[:n]), spans[:n], lines[:n].copy()
        if problem != OK:
            raise text.problem(f"{_PROBLEMS[problem]} (an n-gram of {order} words)")
        if text.at < len(text.buffer) and n < room:
            return


def _natural(text: Text, numbers: np.ndarray, lines: np.ndarray) -> np.ndarray:
    """Natural logarithms (n, 2); nothing is less likely than 1e-99, and nothing more than certain."""
    wrong = numbers[:, 0] > _POSITIVE
    if wrong.any():
        raise text.problem("a log-probability is above nought", int(lines[wrong.argmax()]))
    wrong = ~(numbers[:, 1] <= _MOST)
    if wrong.any():
        raise text.problem(f"a back-off is above {_MOST:g} (log10)", int(lines[wrong.argmax()]))
    numbers[:, 0] = np.minimum(numbers[:, 0], 0.0)
    return (np.maximum(numbers, -99) * LN10).astype(np.float32)


def _read_unigrams(text: Text) -> tuple[Vocabulary, Table, int]:
    """Words, their table, and the number of lines that gave them."""
    numbers, lines, blobs, lengths = [], [], [], []
    for values, spans, at in _blocks(text, 1):
        blob, n_bytes = gather(text.buffer, spans[:, 0])
        numbers.append(values)
        lines.append(at)
        blobs.append(blob)
        lengths.append(n_bytes)
    if not numbers:
        raise text.problem("there are no unigrams")
    offsets = np.zeros(sum(map(len, lengths)) + 1, np.int64)
    np.cumsum(np.concatenate(lengths), out=offsets[1:])
    vocabulary = index_words(np.concatenate(blobs), offsets)
    ids = np.arange(len(vocabulary), dtype=np.int32)[:, None]
    table = _table([ids], numbers, lines, 1)
    _check_encoding(text, vocabulary, table)
    return *_without_repeats(text, vocabulary, table), len(table)


def _table(ids: list[np.ndarray], numbers: list[np.ndarray], lines: list[np.ndarray], order: int) -> Table:
    if not ids:
        return Table(np.zeros((0, order), np.int32), np.zeros(0, np.float32), np.zeros(0, np.float32))
    log_probs = np.concatenate([values[:, 0] for values in numbers])
    backoffs = np.concatenate([values[:, 1] for values in numbers])
    return Table(np.concatenate(ids), log_probs, backoffs, np.concatenate(lines))


def _check_encoding(text: Text, vocabulary: Vocabulary, table: Table) -> None:
    assert table.lines is not None
    try:
        vocabulary.blob.tobytes().decode("utf-8")
    except UnicodeDecodeError as error:
        word = int(np.searchsorted(vocabulary.offsets, error.start, side="right")) - 1
        line = int(table.lines[word])
        raise text.problem("a word is not UTF-8; convert the file, for example with iconv", line) from None


def _without_repeats(text: Text, vocabulary: Vocabulary, table: Table) -> tuple[Vocabulary, Table]:
    """Each word once; given twice with the same values it counts once."""
    assert table.lines is not None
    first = vocabulary.first_ids()
    again = np.flatnonzero(first != np.arange(len(vocabulary)))
    if not len(again):
        return vocabulary, table
    for at, before in zip(again.tolist(), first[again].tolist(), strict=True):
        if not np.allclose(
            [table.log_probs[at], table.backoffs[at]],
            [table.log_probs[before], table.backoffs[before]],
            atol=1e-5,
        ):
            raise text.problem(
                f"the word '{vocabulary[at]}' of line {table.lines[before]} comes again with other values;"
                " remove one of them",
                int(table.lines[at]),
            )
    kept = np.delete(np.arange(len(vocabulary)), again)
    ids = np.arange(len(kept), dtype=np.int32)[:, None]
    rest = Table(ids, table.log_probs[kept], table.backoffs[kept], table.lines[kept])
    return vocabulary_of(vocabulary[int(i)] for i in kept), rest


def _read_section(text: Text, order: int, vocabulary: Vocabulary) -> Table:
    ids, numbers, lines = [], [], []
    for values, spans, at in _blocks(text, order):
        words = np.empty(spans.shape[:2], np.int32)
        unknown = look_up(text.buffer, spans, vocabulary.blob, vocabulary.offsets, vocabulary.slots, words)
        if unknown >= 0:
            raise text.problem("a word of this n-gram has no unigram", int(at[unknown]))
        ids.append(words)
        numbers.append(values)
        lines.append(at)
    return _table(ids, numbers, lines, order)
