"""A trie back to tables, and tables to an ARPA file."""

import gzip
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from arcuate.lm.check import require_links
from arcuate.lm.file import Report, writing
from arcuate.lm.model import LanguageModel
from arcuate.lm.tables import LN10, Table, Tables

_PIECE = 2**16


def to_tables(model: LanguageModel) -> Tables:
    """All n-grams of a model, order by order, sorted."""
    require_links(model)
    arrays, n_inner = model.arrays, len(model.arrays.backoffs)
    tables: list[Table] = []
    ids, begin, start = np.zeros((1, 0), np.int32), 0, 1
    for n in model.counts:
        end = start + n
        firsts = arrays.firsts[begin : start + 1].astype(np.int64)
        parents = np.repeat(np.arange(start - begin), firsts[1:] - firsts[:-1])
        ids = np.concatenate([ids[parents], arrays.words[start:end, None]], axis=1)
        inner = start < n_inner
        backoffs = arrays.backoffs[start:end] if inner else np.zeros(n, np.float32)
        tables.append(Table(ids, np.asarray(arrays.log_probs[start:end]), np.asarray(backoffs)))
        begin, start = start, end
    return Tables(model.words, tuple(tables), source=model.name)


def write_arpa(
    model: LanguageModel, path: Path, *, force: bool = False, report: Report | None = None
) -> None:
    """The model as an ARPA file, gzipped if its name says so; reading it back gives the same numbers."""
    tables = to_tables(model)
    total, done = sum(map(len, tables.orders)), 0
    with writing(path, force) as raw, _packed(raw, path) as stream:
        stream.write(b"\\data\\\n")
        for order, table in enumerate(tables.orders, start=1):
            stream.write(f"ngram {order}={len(table)}\n".encode())
        words = list(model.words)
        for order, table in enumerate(tables.orders, start=1):
            stream.write(f"\n\\{order}-grams:\n".encode())
            for text, n in _lines(table, words, longest=order == tables.order):
                stream.write(text.encode("utf-8"))
                done += n
                if report:
                    report(done, total, f"writing {order}-grams")
        stream.write(b"\n\\end\\\n")


def _packed(raw: BinaryIO, path: Path) -> AbstractContextManager[Any]:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=6, mtime=0)
    return nullcontext(raw)


def _lines(table: Table, words: list[str], longest: bool) -> Iterator[tuple[str, int]]:
    """ARPA lines in pieces; a back-off is written where it is not nought."""
    for start in range(0, len(table), _PIECE):
        piece = slice(start, start + _PIECE)
        rows = table.ids[piece].tolist()
        log_probs = (table.log_probs[piece].astype(np.float64) / LN10).tolist()
        backoffs = (table.backoffs[piece].astype(np.float64) / LN10).tolist()
        lines = []
        for row, log_prob, backoff in zip(rows, log_probs, backoffs, strict=True):
            tail = f"\t{backoff:.10g}" if backoff and not longest else ""
            lines.append(f"{log_prob:.10g}\t{' '.join([words[w] for w in row])}{tail}\n")
        yield "".join(lines), len(lines)
