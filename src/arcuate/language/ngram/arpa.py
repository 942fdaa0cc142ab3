"""ARPA files of any order and from any tool, plain or gzipped, read and written as a stream."""

import codecs
import gzip
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from arcuate.errors import UserError
from arcuate.language.jit import njit
from arcuate.language.ngram.model import MAX_ORDER, LanguageModel, open_output
from arcuate.language.ngram.text import (
    LN10,
    LineBuffer,
    Vocabulary,
    decompressed,
    find_word,
    index_words,
    make_vocabulary,
    open_binary,
)
from arcuate.language.ngram.trie import NGramTable, NGramTables, add_special_words, tables_from_model
from arcuate.progress import Progress

_COUNT = re.compile(rb"ngram\s+(\d{1,3})\s*=\s*(\d{1,15})$")
_SECTION = re.compile(rb"\\(\d{1,3})-grams:$")
_OK, _BAD_NUMBER, _TOO_FEW_WORDS, _TOO_MANY_WORDS = 0, 1, 2, 3
_PROBLEMS = {
    _BAD_NUMBER: "a number is missing or malformed",
    _TOO_FEW_WORDS: "there are fewer words than the section requires",
    _TOO_MANY_WORDS: "there are more words than the section allows",
}
_MAX_BACKOFF = 99.0  # log10; positive back-offs compensate for sums below one, which are never that small
_ROUNDING = 1e-3  # log10; largest excess over probability one that rounding can cause
_LINES_PER_WRITE = 2**16

# Character codes of the parser.
_TAB, _NEWLINE, _CARRIAGE_RETURN, _SPACE, _PLUS, _MINUS, _POINT, _BACKSLASH = 9, 10, 13, 32, 43, 45, 46, 92
_DIGIT_0, _DIGIT_9 = 48, 57
_LOWER = 32  # c | 32 is the lower-case letter
_E, _F, _I, _N = 101, 102, 105, 110


def read_arpa(path: Path, *, recount: bool = False, progress: Progress | None = None) -> NGramTables:
    """Read all n-grams of an ARPA file. With `recount` the counts in its header may be wrong."""
    with open_binary(path) as raw, decompressed(raw) as stream:
        text = LineBuffer(path, raw, stream, progress)
        declared = _read_header(text)
        tables: list[NGramTable] = []
        n_repeated = 0
        vocabulary: Vocabulary | None = None
        for order, section_line in _sections(text, len(declared)):
            if order == 1:
                vocabulary, table, n_lines = _read_unigrams(text)
                n_repeated = n_lines - len(table)
            else:
                assert vocabulary is not None
                table = _read_section(text, order, vocabulary)
                n_lines = len(table)
            n, count_line = declared[order - 1]
            if not text.fill():
                raise text.error(f"the {order}-grams are followed by {_quoted(None)}")
            # Some tools count a repeated n-gram once, others every line.
            if n not in (n_lines, len(table)) and n != len(np.unique(table.ids, axis=0)) and not recount:
                raise text.error(
                    f"{n:,} {order}-grams are declared, but the section of line {section_line} has {n_lines:,};"
                    " if the file is complete, import it with --recount",
                    count_line,
                )
            tables.append(table)
    assert vocabulary is not None
    while len(tables) > 1 and not len(tables[-1]):
        tables.pop()
    return add_special_words(NGramTables(vocabulary, tuple(tables), source=str(path), n_repeated=n_repeated))


def _read_header(text: LineBuffer) -> list[tuple[int, int]]:
    """(count, line) of each order. Text before \\data\\ is a comment."""
    while (line := text.next_line()) is not None and line.removeprefix(codecs.BOM_UTF8) != b"\\data\\":
        pass
    if line is None:
        raise UserError(f"{text.path} is not an ARPA file: it has no line \\data\\")
    declared: list[tuple[int, int]] = []
    while text.fill() and text.buffer[text.at : text.at + 1].tobytes() != b"\\":
        at = text.line
        line = text.next_line() or b""
        if not line:
            continue
        found = _COUNT.match(line)
        if not found:
            raise text.error("expected a count such as 'ngram 1=5000' or a section", at)
        if int(found[1]) != len(declared) + 1 or len(declared) == MAX_ORDER:
            raise text.error(f"expected the count of {len(declared) + 1}-grams", at)
        declared.append((int(found[2]), at))
    if not declared:
        raise text.error("the header has no counts of n-grams")
    return declared


def _sections(text: LineBuffer, n_orders: int) -> Iterator[tuple[int, int]]:
    """(order, line) of each section, with the position after its title."""
    for order in range(1, n_orders + 1):
        at, line = _next_title(text)
        found = _SECTION.match(line or b"")
        if not found or int(found[1]) != order:
            raise text.error(f"expected \\{order}-grams:, found {_quoted(line)}", at)
        yield order, at
    at, line = _next_title(text)
    if line != b"\\end\\":
        raise text.error(f"expected \\end\\, found {_quoted(line)}", at)


def _next_title(text: LineBuffer) -> tuple[int, bytes | None]:
    while True:
        at = text.line
        line = text.next_line()
        if line != b"":
            return at, line


def _quoted(line: bytes | None) -> str:
    if line is None:
        return "the end of the file (is it complete?)"
    return repr(line[:40].decode("utf-8", "replace"))


def _blocks(text: LineBuffer, order: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(values (n, 2) in nats, spans (n, order, 2), lines (n,)) of a section, block by block."""
    capacity = max(1, 2**20 // order)
    while text.fill():
        numbers = np.empty((capacity, 2), np.float64)
        spans = np.empty((capacity, order, 2), np.int32)
        lines = np.empty(capacity, np.int64)
        n, text.at, text.line, status = _parse_lines(text.buffer, text.at, text.line, order, numbers, spans, lines)
        if n:
            yield _to_natural_log(text, numbers[:n], lines[:n]), spans[:n], lines[:n].copy()
        if status != _OK:
            raise text.error(f"{_PROBLEMS[status]} (an n-gram of {order} words)")
        if text.at < len(text.buffer) and n < capacity:
            return


def _to_natural_log(text: LineBuffer, numbers: np.ndarray, lines: np.ndarray) -> np.ndarray:
    """Convert log10 (n, 2) to natural logarithms; probabilities are clamped to [1e-99, 1]."""
    wrong = numbers[:, 0] > _ROUNDING
    if wrong.any():
        raise text.error("a log-probability is positive", int(lines[wrong.argmax()]))
    wrong = ~(numbers[:, 1] <= _MAX_BACKOFF)
    if wrong.any():
        raise text.error(f"a back-off is above {_MAX_BACKOFF:g} (log10)", int(lines[wrong.argmax()]))
    numbers[:, 0] = np.minimum(numbers[:, 0], 0.0)
    return (np.maximum(numbers, -99) * LN10).astype(np.float32)


def _read_unigrams(text: LineBuffer) -> tuple[Vocabulary, NGramTable, int]:
    """The words, their table, and the number of lines read."""
    numbers, lines, blobs, lengths = [], [], [], []
    for values, spans, at in _blocks(text, 1):
        blob, n_bytes = _copy_spans(text.buffer, spans[:, 0])
        numbers.append(values)
        lines.append(at)
        blobs.append(blob)
        lengths.append(n_bytes)
    if not numbers:
        raise text.error("there are no unigrams")
    offsets = np.zeros(sum(map(len, lengths)) + 1, np.int64)
    np.cumsum(np.concatenate(lengths), out=offsets[1:])
    vocabulary = index_words(np.concatenate(blobs), offsets)
    ids = np.arange(len(vocabulary), dtype=np.int32)[:, None]
    table = _make_table([ids], numbers, lines, 1)
    _check_encoding(text, vocabulary, table)
    return *_without_repeats(text, vocabulary, table), len(table)


def _read_section(text: LineBuffer, order: int, vocabulary: Vocabulary) -> NGramTable:
    ids, numbers, lines = [], [], []
    for values, spans, at in _blocks(text, order):
        words = np.empty(spans.shape[:2], np.int32)
        unknown = _find_words(text.buffer, spans, vocabulary.blob, vocabulary.offsets, vocabulary.slots, words)
        if unknown >= 0:
            raise text.error("a word of this n-gram has no unigram", int(at[unknown]))
        ids.append(words)
        numbers.append(values)
        lines.append(at)
    return _make_table(ids, numbers, lines, order)


def _make_table(ids: list[np.ndarray], numbers: list[np.ndarray], lines: list[np.ndarray], order: int) -> NGramTable:
    if not ids:
        return NGramTable(np.zeros((0, order), np.int32), np.zeros(0, np.float32), np.zeros(0, np.float32))
    log_probs = np.concatenate([values[:, 0] for values in numbers])
    backoffs = np.concatenate([values[:, 1] for values in numbers])
    return NGramTable(np.concatenate(ids), log_probs, backoffs, np.concatenate(lines))


def _check_encoding(text: LineBuffer, vocabulary: Vocabulary, table: NGramTable) -> None:
    assert table.lines is not None
    try:
        vocabulary.blob.tobytes().decode("utf-8")
    except UnicodeDecodeError as error:
        word = int(np.searchsorted(vocabulary.offsets, error.start, side="right")) - 1
        line = int(table.lines[word])
        raise text.error("a word is not UTF-8; convert the file (e.g. with iconv)", line) from None


def _without_repeats(text: LineBuffer, vocabulary: Vocabulary, table: NGramTable) -> tuple[Vocabulary, NGramTable]:
    """Remove repeated words; a repetition with different values is an error."""
    assert table.lines is not None
    first = vocabulary.first_ids()
    again = np.flatnonzero(first != np.arange(len(vocabulary)))
    if not len(again):
        return vocabulary, table
    for at, before in zip(again.tolist(), first[again].tolist(), strict=True):
        if not np.allclose(
            [table.log_probs[at], table.backoffs[at]], [table.log_probs[before], table.backoffs[before]], atol=1e-5
        ):
            raise text.error(
                f"the word '{vocabulary[at]}' of line {table.lines[before]} is repeated with different values;"
                " remove one of them",
                int(table.lines[at]),
            )
    kept = np.delete(np.arange(len(vocabulary)), again)
    ids = np.arange(len(kept), dtype=np.int32)[:, None]
    rest = NGramTable(ids, table.log_probs[kept], table.backoffs[kept], table.lines[kept])
    return make_vocabulary(vocabulary[int(i)] for i in kept), rest


# Parser of n-gram lines: log10 probability, words, optional log10 back-off. One pass over the bytes of complete lines,
# O(length), without Python objects per line: numbers go into a float64 array, words are stored as byte spans and looked
# up in the vocabulary afterwards.


@njit(cache=True)
def _parse_lines(
    text: np.ndarray, at: int, line: int, order: int, numbers: np.ndarray, spans: np.ndarray, lines: np.ndarray
) -> tuple[int, int, int, int]:
    """Parse lines from `at` to the end of the text or a line that starts with a backslash.

    Fills numbers (n, 2) with probability and back-off as written, spans (n, order, 2) with the start and end of each
    word, and lines (n,) with line numbers. Returns (n, position, line number, status).
    """
    n = 0
    size = text.shape[0]
    while at < size and n < numbers.shape[0]:
        end = at
        while end < size and text[end] != _NEWLINE:
            end += 1
        start = _skip_space(text, at, end)
        if start < end:
            if text[start] == _BACKSLASH:
                return n, at, line, _OK
            status = _parse_line(text, start, end, order, numbers[n], spans[n])
            if status != _OK:
                return n, at, line, status
            lines[n] = line
            n += 1
        at = end + 1
        line += 1
    return n, min(at, size), line, _OK


@njit(cache=True)
def _parse_line(text: np.ndarray, at: int, end: int, order: int, numbers: np.ndarray, spans: np.ndarray) -> int:
    stop = _field_end(text, at, end)
    good, numbers[0] = _parse_number(text, at, stop)
    if not good:
        return _BAD_NUMBER
    for i in range(order):
        at = _skip_space(text, stop, end)
        if at == end:
            return _TOO_FEW_WORDS
        stop = _field_end(text, at, end)
        spans[i, 0] = at
        spans[i, 1] = stop
    numbers[1] = 0.0
    at = _skip_space(text, stop, end)
    if at < end:
        stop = _field_end(text, at, end)
        good, numbers[1] = _parse_number(text, at, stop)
        if not good:
            return _BAD_NUMBER
        if _skip_space(text, stop, end) < end:
            return _TOO_MANY_WORDS
    return _OK


@njit(cache=True)
def _skip_space(text: np.ndarray, at: int, end: int) -> int:
    while at < end and (text[at] == _SPACE or _TAB <= text[at] <= _CARRIAGE_RETURN):
        at += 1
    return at


@njit(cache=True)
def _field_end(text: np.ndarray, at: int, end: int) -> int:
    while at < end and not (text[at] == _SPACE or _TAB <= text[at] <= _CARRIAGE_RETURN):
        at += 1
    return at


@njit(cache=True)
def _parse_number(text: np.ndarray, at: int, end: int) -> tuple[bool, float]:
    """Parse a decimal number or -inf; (False, 0) for anything else.

    The mantissa is accumulated as an integer-valued float and scaled once. Up to 15 digits and powers up to 10^22 are
    exact in float64, so such numbers are correctly rounded.
    """
    negative = at < end and text[at] == _MINUS
    if at < end and (text[at] == _MINUS or text[at] == _PLUS):
        at += 1
    if end - at == 3 and text[at] | _LOWER == _I and text[at + 1] | _LOWER == _N and text[at + 2] | _LOWER == _F:
        return negative, -np.inf
    mantissa, n_digits, exponent, seen_point = 0.0, 0, 0, False
    while at < end:
        c = text[at]
        if c == _POINT and not seen_point:
            seen_point = True
        elif _DIGIT_0 <= c <= _DIGIT_9:
            mantissa = mantissa * 10.0 + (c - _DIGIT_0)
            n_digits += 1
            if seen_point:
                exponent -= 1
        else:
            break
        at += 1
    if n_digits == 0:
        return False, 0.0
    if at < end:
        if text[at] | _LOWER != _E:
            return False, 0.0
        good, power = _parse_exponent(text, at + 1, end)
        if not good:
            return False, 0.0
        exponent += power
    value = mantissa * 10.0**exponent if exponent > 0 else mantissa / 10.0 ** (-exponent)
    if not np.isfinite(value):
        return False, 0.0
    return True, -value if negative else value


@njit(cache=True)
def _parse_exponent(text: np.ndarray, at: int, end: int) -> tuple[bool, int]:
    negative = at < end and text[at] == _MINUS
    if at < end and (text[at] == _MINUS or text[at] == _PLUS):
        at += 1
    if at >= end or end - at > 3:
        return False, 0
    power = 0
    for i in range(at, end):
        if not _DIGIT_0 <= text[i] <= _DIGIT_9:
            return False, 0
        power = power * 10 + (text[i] - _DIGIT_0)
    return True, -power if negative else power


@njit(cache=True)
def _find_words(
    text: np.ndarray, spans: np.ndarray, blob: np.ndarray, offsets: np.ndarray, slots: np.ndarray, ids: np.ndarray
) -> int:
    """Write the word ids (n, order) of spans; return the first row with an unknown word, or -1."""
    for i in range(spans.shape[0]):
        for j in range(spans.shape[1]):
            word = find_word(text, spans[i, j, 0], spans[i, j, 1], blob, offsets, slots)
            if word < 0:
                return i
            ids[i, j] = word
    return -1


@njit(cache=True)
def _copy_spans(text: np.ndarray, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Concatenated bytes of spans (n, 2), and the length of each."""
    lengths = spans[:, 1] - spans[:, 0]
    blob = np.empty(lengths.sum(), np.uint8)
    at = 0
    for i in range(spans.shape[0]):
        for j in range(spans[i, 0], spans[i, 1]):
            blob[at] = text[j]
            at += 1
    return blob, lengths


def write_arpa(model: LanguageModel, path: Path, *, force: bool = False, progress: Progress | None = None) -> None:
    """Write an ARPA file, gzipped if its name ends in .gz. Reading it back gives the same numbers."""
    tables = tables_from_model(model)
    total, done = sum(map(len, tables.orders)), 0
    with open_output(path, force) as raw, _compressed(raw, path) as stream:
        stream.write(b"\\data\\\n")
        for order, table in enumerate(tables.orders, start=1):
            stream.write(f"ngram {order}={len(table)}\n".encode())
        words = list(model.words)
        for order, table in enumerate(tables.orders, start=1):
            stream.write(f"\n\\{order}-grams:\n".encode())
            for text, n in _format_lines(table, words, longest=order == tables.order):
                stream.write(text.encode("utf-8"))
                done += n
                if progress:
                    progress(done, total, f"writing {order}-grams")
        stream.write(b"\n\\end\\\n")


def _compressed(raw: BinaryIO, path: Path) -> AbstractContextManager[Any]:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=6, mtime=0)
    return nullcontext(raw)


def _format_lines(table: NGramTable, words: list[str], longest: bool) -> Iterator[tuple[str, int]]:
    """Lines of a section in batches, with their number; a back-off of zero is omitted."""
    for start in range(0, len(table), _LINES_PER_WRITE):
        batch = slice(start, start + _LINES_PER_WRITE)
        rows = table.ids[batch].tolist()
        log_probs = (table.log_probs[batch].astype(np.float64) / LN10).tolist()
        backoffs = (table.backoffs[batch].astype(np.float64) / LN10).tolist()
        lines = []
        for row, log_prob, backoff in zip(rows, log_probs, backoffs, strict=True):
            tail = f"\t{backoff:.10g}" if backoff and not longest else ""
            lines.append(f"{log_prob:.10g}\t{' '.join([words[w] for w in row])}{tail}\n")
        yield "".join(lines), len(lines)
