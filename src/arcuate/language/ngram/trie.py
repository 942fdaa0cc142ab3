"""n-gram tables, the form between readers or estimators and the trie that `query` searches; conversion both ways.

Nodes are placed order by order; within an order they are sorted by (parent, word), so every node's children are
consecutive and sorted. Then each node gets its suffix link: the longest n-gram that is a proper suffix of it. Sorting
dominates the cost: O(N log N) for N n-grams.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.errors import UserError
from arcuate.language.jit import njit
from arcuate.language.ngram.model import LanguageModel, check_links, special_id
from arcuate.language.ngram.query import NGramArrays, advance, find_child
from arcuate.language.ngram.text import BOS, EOS, LOG_ZERO, UNK
from arcuate.progress import Progress

_MAX_NODES = 2**31 - 2
_SAME = 1e-5  # repeated n-grams whose values differ by less are one n-gram


@dataclass(frozen=True, eq=False)
class NGramTable:
    """n-grams of one order, in any sequence."""

    ids: np.ndarray  # (n, order) int32
    log_probs: np.ndarray  # (n,) float32, nats; NaN if only a longer n-gram implies this one
    backoffs: np.ndarray  # (n,) float32, nats; unused at the longest order
    lines: np.ndarray | None = None  # (n,) int64, line numbers in the source file

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, ids: np.ndarray, log_prob: float) -> "NGramTable":
        """Append n-grams (n, order) with one log-probability and without back-off."""
        n = len(ids)
        return NGramTable(
            np.concatenate([self.ids, ids.astype(np.int32)]),
            np.concatenate([self.log_probs, np.full(n, log_prob, np.float32)]),
            np.concatenate([self.backoffs, np.zeros(n, np.float32)]),
            None if self.lines is None else np.concatenate([self.lines, np.zeros(n, np.int64)]),
        )


@dataclass(frozen=True, eq=False)
class NGramTables:
    """A back-off model as one table per order, starting with unigrams."""

    words: Sequence[str]
    orders: tuple[NGramTable, ...]
    added: tuple[str, ...] = ()  # special words (<unk>, <s>, </s>) that the source lacks
    source: str = ""  # name used in messages

    @property
    def order(self) -> int:
        return len(self.orders)


def add_special_words(tables: NGramTables) -> NGramTables:
    """Add those of <unk>, <s> and </s> that are missing, with probability zero."""
    ids = {word: i for i, word in enumerate(tables.words)}
    added = tuple(word for word in (UNK, BOS, EOS) if special_id(ids, word) < 0)
    new_ids = len(tables.words) + np.arange(len(added))
    unigrams = tables.orders[0].extend(new_ids[:, None], LOG_ZERO)
    return replace(tables, words=[*tables.words, *added], orders=(unigrams, *tables.orders[1:]), added=added)


def model_from_tables(
    tables: NGramTables,
    metadata: dict[str, Any] | None = None,
    sentences: np.ndarray | None = None,
    progress: Progress | None = None,
) -> LanguageModel:
    """Build a model in memory."""
    arrays, n_repeated, n_implied = build_trie(tables, progress)
    name = Path(tables.source).name
    counts = {"n_repeated": n_repeated, "n_implied": n_implied}
    about = {"order": tables.order, "source": name, "added": list(tables.added), **counts}
    return LanguageModel(arrays, tuple(tables.words), tables.order, name, (metadata or {}) | about, sentences)


def build_trie(tables: NGramTables, progress: Progress | None = None) -> tuple[NGramArrays, int, int]:
    """Sort and link the n-grams; return the trie and the numbers of repeated and of implied n-grams.

    An n-gram that is repeated with the same values is counted once. Contexts that a longer n-gram needs and the source
    lacks are added with the probability given by backing off, so no query changes.
    """
    orders, n_implied = list(tables.orders), 0
    while True:
        levels = _Levels(orders, tables, progress)
        if levels.missing is None:
            break
        k, ngrams = levels.missing
        orders[k - 1] = orders[k - 1].extend(ngrams, np.nan)  # `_link` computes the probability by backing off
        n_implied += len(ngrams)
    arrays = levels.arrays()
    _link(arrays)
    _skip_irrelevant_contexts(arrays)
    for array in arrays:
        array.setflags(write=False)  # like the arrays of a mapped file
    return arrays, levels.n_repeated, n_implied


class _Levels:
    """The levels of a trie, filled from the shortest order up."""

    def __init__(self, orders: list[NGramTable], tables: NGramTables, progress: Progress | None) -> None:
        self.tables = tables
        n_words, n_nodes = len(tables.words), 1 + sum(map(len, orders))
        if n_nodes > _MAX_NODES:
            raise UserError(f"{tables.source}: {n_nodes:,} n-grams exceed the limit of {_MAX_NODES:,}; prune the model")
        n_inner = n_nodes - len(orders[-1])
        self.words = np.full(n_nodes, -1, np.int32)
        self.log_probs = np.zeros(n_nodes, np.float32)
        self.backoffs = np.zeros(n_inner, np.float32)
        self.firsts = np.full(n_inner + 1, 1, np.int32)
        self.n_words = n_words
        self.begin, self.end = 0, 1  # nodes of the longest order so far; at first the empty context
        self.n_repeated = 0
        self.missing: tuple[int, np.ndarray] | None = None  # order and contexts that are not in the tables
        for k, table in enumerate(orders, start=1):
            if progress:
                progress(self.end, n_nodes, f"{k}-grams")
            parents = self._parents(table, k)
            if (parents < 0).any():
                self.missing = k - 1, np.unique(table.ids[parents < 0, :-1], axis=0)
                return
            self._append(table, parents, longest=k == len(orders))
        if progress:
            progress(n_nodes, n_nodes, "linking")

    def _parents(self, table: NGramTable, k: int) -> np.ndarray:
        if k == 1:
            return np.zeros(len(table), np.int64)
        none = np.zeros(0, np.int32)
        so_far = NGramArrays(self.words, self.log_probs, self.backoffs, self.firsts, none, none)
        return find_nodes(so_far, np.ascontiguousarray(table.ids[:, :-1]))

    def _append(self, table: NGramTable, parents: np.ndarray, longest: bool) -> None:
        """Append an order, sorted by parent and word."""
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

    def _distinct(self, table: NGramTable, keys: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Rows to keep; a repeated n-gram with different values is an error."""
        again = np.flatnonzero(keys[1:] == keys[:-1])
        if not len(again):
            return np.arange(len(keys))
        a, b = row[again], row[again + 1]
        with np.errstate(invalid="ignore"):
            differ = ~(np.abs(table.log_probs[a] - table.log_probs[b]) <= _SAME)
            differ |= ~(np.abs(table.backoffs[a] - table.backoffs[b]) <= _SAME)
        if differ.any():
            raise self._conflict(table, a[differ][0], b[differ][0])
        self.n_repeated += len(again)
        return np.delete(np.arange(len(keys)), again + 1)

    def _conflict(self, table: NGramTable, first: int, second: int) -> UserError:
        text, source = " ".join(self.tables.words[int(w)] for w in table.ids[first]), self.tables.source
        if table.lines is None:
            return UserError(f"{source}: the n-gram '{text}' occurs twice with different values; remove one")
        return UserError(
            f"{source}, line {table.lines[second]}: the n-gram '{text}' of line {table.lines[first]} is repeated"
            " with different values; remove one of them"
        )

    def arrays(self) -> NGramArrays:
        """The arrays, shortened by the repeated n-grams."""
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


@njit(cache=True)
def find_nodes(arrays: NGramArrays, ids: np.ndarray) -> np.ndarray:
    """Node of each n-gram (n, k), or -1."""
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
def _link(arrays: NGramArrays) -> None:
    """Set the suffix of every n-gram: the longest n-gram that is a proper suffix of it.

    Parents come before their children, so the suffix of (h, w) is found from the suffix of h: O(order) steps each.
    """
    n_inner = arrays.backoffs.shape[0]
    for parent in range(n_inner):
        for i in range(arrays.firsts[parent], arrays.firsts[parent + 1]):
            word = arrays.words[i]
            suffix = 0
            if parent > 0:
                suffix = _longest_suffix(arrays, arrays.suffixes[parent], word)
                if np.isnan(arrays.log_probs[i]):
                    shorter_prob, _ = advance(arrays, arrays.suffixes[parent], word)
                    arrays.log_probs[i] = arrays.backoffs[parent] + shorter_prob
            if i < n_inner:
                arrays.suffixes[i] = suffix
            else:
                arrays.nexts[i - n_inner] = suffix


@njit(cache=True)
def _longest_suffix(arrays: NGramArrays, context: int, word: int) -> int:
    while context > 0:
        found = find_child(arrays, context, word)
        if found >= 0:
            return found
        context = arrays.suffixes[context]
    return 1 + int(word)


@njit(cache=True)
def _skip_irrelevant_contexts(arrays: NGramArrays) -> None:
    """Redirect links past contexts without children and with back-off zero: they change no probability.

    Fewer distinct states let a search recombine more hypotheses.
    """
    n_inner = arrays.backoffs.shape[0]
    relevant = np.zeros(n_inner, np.int32)
    for i in range(1, n_inner):
        arrays.suffixes[i] = relevant[arrays.suffixes[i]]
        matters = arrays.firsts[i] != arrays.firsts[i + 1] or arrays.backoffs[i] != 0.0
        relevant[i] = i if matters else arrays.suffixes[i]
    for i in range(arrays.nexts.shape[0]):
        arrays.nexts[i] = relevant[arrays.nexts[i]]


def tables_from_model(model: LanguageModel) -> NGramTables:
    """List all n-grams of a model, order by order, sorted."""
    check_links(model)
    arrays, n_inner = model.arrays, len(model.arrays.backoffs)
    tables: list[NGramTable] = []
    ids, begin, start = np.zeros((1, 0), np.int32), 0, 1
    for n in model.counts:
        end = start + n
        firsts = arrays.firsts[begin : start + 1].astype(np.int64)
        parents = np.repeat(np.arange(start - begin), firsts[1:] - firsts[:-1])
        ids = np.concatenate([ids[parents], arrays.words[start:end, None]], axis=1)
        backoffs = arrays.backoffs[start:end] if start < n_inner else np.zeros(n, np.float32)
        tables.append(NGramTable(ids, np.asarray(arrays.log_probs[start:end]), np.asarray(backoffs)))
        begin, start = start, end
    return NGramTables(model.words, tuple(tables), source=model.name)
