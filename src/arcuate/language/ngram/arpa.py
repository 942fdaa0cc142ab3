"""ARPA files of any order and from any tool, plain or gzipped, read and written as a stream."""

import gzip
import re
from array import array
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from arcuate.errors import UserError
from arcuate.language.ngram.model import MAX_ORDER, LanguageModel, open_output
from arcuate.language.ngram.text import LN10, read_lines
from arcuate.language.ngram.trie import NGramTable, NGramTables, add_special_words, tables_from_model
from arcuate.progress import Progress, logger

_COUNT = re.compile(rb"ngram\s+(\d{1,3})\s*=\s*(\d{1,15})$")
_MAX_BACKOFF = 99.0  # log10; positive back-offs compensate for sums below one, which are never that small
_ROUNDING = 1e-3  # log10; largest excess over probability one that rounding can cause
_LINES_PER_WRITE = 2**16


class _Lines:
    """The lines of an ARPA file without surrounding white space; blank lines are skipped."""

    def __init__(self, path: Path, progress: Progress | None) -> None:
        self.path, self.number, self.text = path, 0, b""
        self._lines = read_lines(path, progress)

    def __iter__(self) -> Iterator[bytes]:
        for line in self._lines:
            self.number += 1
            self.text = line.strip()
            if self.text:
                yield self.text
        self.text = b""

    def expect(self, title: str) -> None:
        """Raise UserError if the current line is not the title of a section."""
        if self.text != title.encode():
            found = repr(self.text[:40].decode("utf-8", "replace")) if self.text else "the end of the file"
            complete = "" if self.text else " (is it complete?)"
            raise self.error(f"expected {title}, found {found}{complete}")

    def error(self, problem: str, line: int | None = None) -> UserError:
        return UserError(f"{self.path}, line {line or self.number}: {problem}")


def read_arpa(path: Path, progress: Progress | None = None) -> NGramTables:
    """Read all n-grams of an ARPA file. Counts in its header that are wrong are reported and otherwise ignored."""
    lines = _Lines(path, progress)
    declared = _read_header(lines)
    ids: dict[bytes, int] = {}
    tables: list[NGramTable] = []
    for order, (n, at) in enumerate(declared, start=1):
        lines.expect(f"\\{order}-grams:")
        table = _read_section(lines, order, ids)
        if not ids:
            raise lines.error("there are no unigrams")
        # Some tools count a repeated n-gram once, others every line.
        if n != len(table) and n != len(np.unique(table.ids, axis=0)):
            logger.warning(f"{path}, line {at}: {n:,} {order}-grams are declared, but there are {len(table):,}")
        tables.append(table)
    lines.expect("\\end\\")
    while len(tables) > 1 and not len(tables[-1]):
        tables.pop()
    return add_special_words(NGramTables([word.decode() for word in ids], tuple(tables), source=str(path)))


def _read_header(lines: _Lines) -> list[tuple[int, int]]:
    """(count, line) of each order. Text before \\data\\ is a comment."""
    if not any(text == b"\\data\\" for text in lines):
        raise UserError(f"{lines.path} is not an ARPA file: it has no line \\data\\")
    declared: list[tuple[int, int]] = []
    for text in lines:
        if text.startswith(b"\\"):
            break
        found = _COUNT.match(text)
        if not found:
            raise lines.error("expected a count such as 'ngram 1=5000' or a section")
        if int(found[1]) != len(declared) + 1 or len(declared) == MAX_ORDER:
            raise lines.error(f"expected the count of {len(declared) + 1}-grams")
        declared.append((int(found[2]), lines.number))
    if not declared:
        raise lines.error("the header has no counts of n-grams")
    return declared


def _read_section(lines: _Lines, order: int, ids: dict[bytes, int]) -> NGramTable:
    """The n-grams up to the next title: log10 probability, words, optional log10 back-off. Unigrams fill `ids`."""
    log_probs, backoffs, words, numbers = array("d"), array("d"), array("i"), array("q")
    for text in lines:
        fields = text.split()
        try:
            backoff = float(fields[-1]) if len(fields) == order + 2 else 0.0
            log_probs.append(float(fields[0]))
            backoffs.append(backoff)
        except ValueError:
            if text.startswith(b"\\"):
                break
            raise lines.error(f"a number is missing or malformed (an n-gram of {_words(order)})") from None
        if not order < len(fields) <= order + 2:
            few = "fewer" if len(fields) <= order else "more"
            raise lines.error(f"there are {few} words than the section has (an n-gram of {_words(order)})")
        if order == 1:
            words.append(ids.setdefault(_check_word(lines, fields[1]), len(ids)))
        else:
            try:
                words.extend([ids[word] for word in fields[1 : order + 1]])
            except KeyError:
                raise lines.error("a word of this n-gram has no unigram") from None
        numbers.append(lines.number)
    at = np.frombuffer(numbers, np.int64)
    return NGramTable(
        np.frombuffer(words, np.int32).reshape(-1, order),
        _to_natural_log(lines, np.frombuffer(log_probs), at, _ROUNDING, "a log-probability is positive"),
        _to_natural_log(
            lines, np.frombuffer(backoffs), at, _MAX_BACKOFF, f"a back-off is above {_MAX_BACKOFF:g} (log10)"
        ),
        at,
    )


def _words(order: int) -> str:
    return "1 word" if order == 1 else f"{order} words"


def _check_word(lines: _Lines, word: bytes) -> bytes:
    try:
        word.decode()
    except UnicodeDecodeError:
        raise lines.error("a word is not UTF-8; convert the file (e.g. with iconv)") from None
    return word


def _to_natural_log(lines: _Lines, log10: np.ndarray, at: np.ndarray, limit: float, problem: str) -> np.ndarray:
    """Convert to natural logarithms; values are at least -99, and probabilities at most 1."""
    if (wrong := ~(log10 <= limit)).any():
        first = wrong.argmax()
        raise lines.error("a number is malformed" if np.isnan(log10[first]) else problem, int(at[first]))
    highest = 0.0 if limit == _ROUNDING else limit
    return (np.clip(log10, -99, highest) * LN10).astype(np.float32)


def write_arpa(model: LanguageModel, path: Path, progress: Progress | None = None) -> None:
    """Write an ARPA file, gzipped if its name ends in .gz. Reading it back gives the same numbers."""
    tables = tables_from_model(model)
    total, done = sum(map(len, tables.orders)), 0
    with open_output(path) as raw, _compressed(raw, path) as stream:
        stream.write(b"\\data\\\n")
        for order, table in enumerate(tables.orders, start=1):
            stream.write(f"ngram {order}={len(table)}\n".encode())
        for order, table in enumerate(tables.orders, start=1):
            stream.write(f"\n\\{order}-grams:\n".encode())
            for text, n in _format_lines(table, model.words, longest=order == tables.order):
                stream.write(text.encode("utf-8"))
                done += n
                if progress:
                    progress(done, total, f"writing {order}-grams")
        stream.write(b"\n\\end\\\n")


def _compressed(raw: BinaryIO, path: Path) -> AbstractContextManager[Any]:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=6, mtime=0)
    return nullcontext(raw)


def _format_lines(table: NGramTable, words: tuple[str, ...], longest: bool) -> Iterator[tuple[str, int]]:
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
