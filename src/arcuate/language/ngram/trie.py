"""Tables of n-grams to the trie that is asked during a search."""

import gzip
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numba import njit

from arcuate.errors import UserError
from arcuate.language.ngram.file import check_crc, damaged, refuse_existing, write_arrays, writing
from arcuate.language.ngram.model import LanguageModel
from arcuate.language.ngram.query import NGramArrays, advance, find_child
from arcuate.language.ngram.vocabulary import LN10, Table, Tables, Vocabulary
from arcuate.progress import Progress

_LIMIT = 2**31 - 2
_SAME = 1e-5  # n-grams given twice with values this close are one n-gram


@dataclass(frozen=True)
class Remarks:
    """What became of n-grams that were not simply taken over."""

    n_repeated: int  # given again with the same values, and counted once
    n_implied: int  # contexts that only longer n-grams mention


def build_trie(tables: Tables, report: Progress | None = None) -> tuple[NGramArrays, Remarks]:
    """Sort, link and complete the n-grams.

    Contexts that a longer n-gram needs and the source left out get the probability that backing off gives them, so
    that nothing but the layout changes.
    """
    orders, n_implied = list(tables.orders), 0
    while True:
        built = _Levels(orders, tables, report)
        lacking = built.lacking
        if lacking is None:
            break
        k, rows = lacking
        orders[k - 1] = _with_implied(orders[k - 1], rows)
        n_implied += len(rows)
    arrays = built.arrays()
    link(arrays)
    drop_useless(arrays)
    return frozen(arrays), Remarks(tables.n_repeated + built.n_repeated, n_implied)


def frozen(arrays: NGramArrays) -> NGramArrays:
    """The same arrays, read-only like those of a file."""
    for array in arrays:
        array.setflags(write=False)
    return arrays


class _Levels:
    """The levels of a trie, filled from the shortest order up."""

    def __init__(self, orders: list[Table], tables: Tables, report: Progress | None) -> None:
        self.tables = tables
        n_words, n_nodes = len(tables.vocabulary), 1 + sum(map(len, orders))
        if n_nodes > _LIMIT:
            raise UserError(f"{tables.source}: {n_nodes:,} n-grams are too many; prune the model")
        n_inner = n_nodes - len(orders[-1])
        self.words = np.full(n_nodes, -1, np.int32)
        self.log_probs = np.zeros(n_nodes, np.float32)
        self.backoffs = np.zeros(n_inner, np.float32)
        self.firsts = np.full(n_inner + 1, 1, np.int32)
        self.n_words, self.end, self.begin = n_words, 1, 0
        self.n_repeated = 0
        self.lacking: tuple[int, np.ndarray] | None = None
        for k, table in enumerate(orders, start=1):
            if report:
                report(self.end, n_nodes, f"{k}-grams")
            parents = self._parents(table, k)
            if (parents < 0).any():
                self.lacking = k - 1, np.unique(table.ids[parents < 0, :-1], axis=0)
                return
            self._place(table, parents, longest=k == len(orders))
        if report:
            report(n_nodes, n_nodes, "linking")

    def _parents(self, table: Table, k: int) -> np.ndarray:
        if k == 1:
            return np.zeros(len(table), np.int64)
        return locate(self._so_far(), np.ascontiguousarray(table.ids[:, :-1]))

    def _so_far(self) -> NGramArrays:
        none = np.zeros(0, np.int32)
        return NGramArrays(self.words, self.log_probs, self.backoffs, self.firsts, none, none)

    def _place(self, table: Table, parents: np.ndarray, longest: bool) -> None:
        """Put an order behind the ones before it, by parent and word."""
        keys = parents * self.n_words + table.ids[:, -1]
        row = np.argsort(keys, kind="stable")
        row = row[self._distinct(table, keys[row], row)]
        start, end = self.end, self.end + len(row)
        self.words[start:end] = table.ids[row, -1]
        self.log_probs[start:end] = table.log_probs[row]
        if not longest:
            self.backoffs[start:end] = table.backoffs[row]
            self.firsts[start] = end
        counts = np.bincount(parents[row] - self.begin, minlength=start - self.begin)
        self.firsts[self.begin + 1 : start + 1] = start + np.cumsum(counts)
        self.firsts[self.begin] = start
        self.begin, self.end = start, end

    def _distinct(self, table: Table, keys: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Which rows to keep; the same n-gram twice is refused unless both say the same."""
        again = np.flatnonzero(keys[1:] == keys[:-1])
        if not len(again):
            return np.arange(len(keys))
        a, b = row[again], row[again + 1]
        with np.errstate(invalid="ignore"):
            differ = ~(np.abs(table.log_probs[a] - table.log_probs[b]) <= _SAME)
            differ |= ~(np.abs(table.backoffs[a] - table.backoffs[b]) <= _SAME)
        if differ.any():
            raise self._twice(table, a[differ][0], b[differ][0])
        self.n_repeated += len(again)
        return np.delete(np.arange(len(keys)), again + 1)

    def _twice(self, table: Table, first: int, second: int) -> UserError:
        text, source = " ".join(self.tables.vocabulary[int(w)] for w in table.ids[first]), self.tables.source
        if table.lines is None:
            return UserError(f"{source}: the n-gram '{text}' comes twice with different values; remove one")
        return UserError(
            f"{source}, line {table.lines[second]}: the n-gram '{text}' (as in line {table.lines[first]}) comes again"
            " with other values; remove one of them"
        )

    def arrays(self) -> NGramArrays:
        """Cut to size where duplicates were dropped."""
        n_nodes, n_inner = self.end, self.begin
        firsts = self.firsts[: n_inner + 1]
        firsts[n_inner] = n_nodes
        return NGramArrays(
            self.words[:n_nodes],
            self.log_probs[:n_nodes],
            self.backoffs[:n_inner],
            firsts,
            np.zeros(n_inner, np.int32),
            np.zeros(n_nodes - n_inner, np.int32),
        )


def _with_implied(table: Table, rows: np.ndarray) -> Table:
    """A table with n-grams that only longer ones mention; their probability follows from backing off."""
    n = len(rows)
    return Table(
        np.concatenate([table.ids, rows.astype(np.int32)]),
        np.concatenate([table.log_probs, np.full(n, np.nan, np.float32)]),
        np.concatenate([table.backoffs, np.zeros(n, np.float32)]),
        None if table.lines is None else np.concatenate([table.lines, np.zeros(n, np.int64)]),
    )


@njit(cache=True)
def locate(arrays: NGramArrays, ids: np.ndarray) -> np.ndarray:
    """Node of each n-gram (n, k); -1 where there is none."""
    found = np.empty(ids.shape[0], np.int64)
    for i in range(ids.shape[0]):
        node = 1 + int(ids[i, 0])
        for j in range(1, ids.shape[1]):
            node = find_child(arrays, node, ids[i, j])
            if node < 0:
                break
        found[i] = node
    return found


@njit(cache=True)
def link(arrays: NGramArrays) -> None:
    """Suffix of every n-gram: the longest one that ends like it; implied n-grams get their probability."""
    n_inner = arrays.backoffs.shape[0]
    for parent in range(n_inner):
        for i in range(arrays.firsts[parent], arrays.firsts[parent + 1]):
            word = arrays.words[i]
            ending = 0
            if parent > 0:
                ending = longest_ending(arrays, arrays.suffixes[parent], word)
                if np.isnan(arrays.log_probs[i]):
                    shorter_prob, _ = advance(arrays, arrays.suffixes[parent], word)
                    arrays.log_probs[i] = arrays.backoffs[parent] + shorter_prob
            if i < n_inner:
                arrays.suffixes[i] = ending
            else:
                arrays.nexts[i - n_inner] = ending


@njit(cache=True)
def longest_ending(arrays: NGramArrays, context: int, word: int) -> int:
    while context > 0:
        found = find_child(arrays, context, word)
        if found >= 0:
            return found
        context = arrays.suffixes[context]
    return 1 + int(word)


@njit(cache=True)
def drop_useless(arrays: NGramArrays) -> None:
    """Point past contexts that have no children and cost nothing to leave: asking them changes no answer."""
    n_inner = arrays.backoffs.shape[0]
    useful = np.zeros(n_inner, np.int32)
    for i in range(1, n_inner):
        arrays.suffixes[i] = useful[arrays.suffixes[i]]
        matters = arrays.firsts[i] != arrays.firsts[i + 1] or arrays.backoffs[i] != 0.0
        useful[i] = i if matters else arrays.suffixes[i]
    for i in range(arrays.nexts.shape[0]):
        arrays.nexts[i] = useful[arrays.nexts[i]]


# A model file read whole and checked number by number: what opening it leaves out for speed.


def check_file(path: Path) -> LanguageModel:
    """Open a model and check every part of it; UserError says what is wrong."""
    model = LanguageModel.open(path)
    for name in NGramArrays._fields:
        check_crc(name, getattr(model.arrays, name), model.about, path)
    if model.sentences is not None:
        check_crc("sentences", model.sentences, model.about, path)
        if (model.sentences[1:] <= model.sentences[:-1]).any():
            raise damaged(path, "its sentence hashes are not in order")
    require_links(model)
    if not (np.isfinite(model.arrays.log_probs).all() and np.isfinite(model.arrays.backoffs).all()):
        raise damaged(path, "it contains values that are not numbers")
    if model.arrays.log_probs.max() > 0:
        raise damaged(path, "it contains probabilities above one")
    return model


def require_links(model: LanguageModel) -> None:
    """Refuse a model whose n-grams could not be listed."""
    if not links_fit(model.arrays, len(model.words)):
        raise damaged(Path(model.name), "its n-grams are not linked as they should be")


@njit(cache=True)
def links_fit(arrays: NGramArrays, n_words: int) -> bool:
    """Whether children are in order, and all links point to shorter contexts."""
    n_inner, n_nodes = arrays.backoffs.shape[0], arrays.words.shape[0]
    for node in range(n_inner):
        first, end = arrays.firsts[node], arrays.firsts[node + 1]
        if first > end or first <= node or end > n_nodes:
            return False
        for i in range(first, end):
            if (
                arrays.words[i] < 0
                or arrays.words[i] >= n_words
                or (i > first and arrays.words[i] <= arrays.words[i - 1])
            ):
                return False
        if node > 0 and not 0 <= arrays.suffixes[node] < node:
            return False
    for i in range(arrays.nexts.shape[0]):  # noqa: SIM110 (compiled)
        if not 0 <= arrays.nexts[i] < n_inner:
            return False
    return True


# A trie back to tables, and tables to an ARPA file.

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
    model: LanguageModel, path: Path, *, force: bool = False, report: Progress | None = None
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


# Tables to a model, in memory or as a file.


def to_model(
    tables: Tables,
    about: dict[str, Any] | None = None,
    sentences: np.ndarray | None = None,
    report: Progress | None = None,
) -> LanguageModel:
    """A model in memory."""
    arrays, remarks = build_trie(tables, report)
    about = (about or {}) | {
        "order": tables.order,
        "source": Path(tables.source).name,
        "added": list(tables.added),
        "n_repeated": remarks.n_repeated,
        "n_implied": remarks.n_implied,
    }
    vocabulary = tables.vocabulary
    words = Vocabulary(*(_read_only(a) for a in (vocabulary.blob, vocabulary.offsets, vocabulary.slots)))
    return LanguageModel(arrays, words, tables.order, Path(tables.source).name, about, sentences)


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.setflags(write=False)
    return view


def write_model(
    model: LanguageModel, path: Path, *, force: bool = False, report: Progress | None = None
) -> None:
    """A model as a file that processes can share."""
    refuse_existing(path, force)
    arrays: dict[str, np.ndarray] = {name: getattr(model.arrays, name) for name in NGramArrays._fields}
    arrays |= {"vocabulary": model.words.blob, "offsets": model.words.offsets, "slots": model.words.slots}
    if model.sentences is not None:
        arrays["sentences"] = model.sentences
    about = {key: value for key, value in model.about.items() if key != "crc32"}
    write_arrays(path, arrays, about, force=force, report=report)
