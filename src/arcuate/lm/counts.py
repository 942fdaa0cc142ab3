"""Counting n-grams in text: sorted keys in bounded pieces, no dictionary of n-grams.

A k-gram is the pair (number of its first k − 1 words, last word) packed into one integer, so sorting integers sorts
n-grams, and equal n-grams stand side by side at every order.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from arcuate.errors import UserError
from arcuate.lm.tables import BOS, EOS, UNK
from arcuate.lm.vocabulary import Vocabulary, index_words, join

Report = Callable[[int, int, str], None]
UNK_ID, BOS_ID, EOS_ID = 0, 1, 2
_PIECE = 2**23  # positions sorted at a time


@dataclass(frozen=True, eq=False)
class Counts:
    """n-grams of one order, sorted by their words from the first on."""

    parents: np.ndarray  # (n,) int64, row of the first k − 1 words one order below
    words: np.ndarray  # (n,) int64, last word
    counts: np.ndarray  # (n,) int64
    suffixes: np.ndarray  # (n,) int64, row of the last k − 1 words one order below
    from_start: np.ndarray  # (n,) bool, whether it begins with <s>

    def __len__(self) -> int:
        return len(self.words)


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text as word ids: <s> words </s> for every line."""

    words: list[bytes]  # id to word
    ids: np.ndarray  # (n,) int32
    n_sentences: int
    n_empty: int


class _Ids(dict[bytes, int]):
    """Numbers words in the order they are first seen."""

    def __missing__(self, word: bytes) -> int:
        self[word] = number = len(self)
        return number


def read_corpus(lines: Iterable[bytes], name: str) -> Corpus:
    """Word ids of a text with a sentence per line; words are what stands between spaces."""
    ids = _Ids({UNK.encode(): UNK_ID, BOS.encode(): BOS_ID, EOS.encode(): EOS_ID})
    reserved = frozenset(ids)
    stream = array("i")
    n_sentences = n_empty = 0
    for line in lines:
        words = line.split()
        n_sentences += 1
        n_empty += not words
        if not reserved.isdisjoint(words):
            found = next(word for word in words if word in reserved).decode()
            raise UserError(
                f"{name}, line {n_sentences}: the text contains {found}, which the model adds itself"
            )
        stream.append(BOS_ID)
        stream.extend([ids[word] for word in words])
        stream.append(EOS_ID)
    if n_sentences == n_empty:
        raise UserError(f"{name} contains no words")
    return Corpus(_checked(list(ids), name), np.frombuffer(stream, np.int32), n_sentences, n_empty)


def _checked(words: list[bytes], name: str) -> list[bytes]:
    for word in words:
        try:
            word.decode("utf-8")
        except UnicodeDecodeError:
            shown = word.decode("utf-8", "backslashreplace")
            raise UserError(f"{name}: the word '{shown}' is not UTF-8; convert the text") from None
    return words


def vocabulary_of_corpus(corpus: Corpus) -> Vocabulary:
    return index_words(*join(corpus.words))


def count_ngrams(corpus: Corpus, order: int, report: Report | None = None) -> list[Counts]:
    """Counts of all n-grams up to an order; memory is about 8 bytes per word of text and 40 per distinct n-gram."""
    ids, n_words = corpus.ids, len(corpus.words)
    unigrams = np.bincount(ids, minlength=n_words)
    every = np.arange(n_words)
    tables = [
        Counts(np.zeros(n_words, np.int64), every, unigrams, np.zeros(n_words, np.int64), every == BOS_ID)
    ]
    rows = ids.copy()  # row of the (k − 1)-gram that starts at each position, -1 where a sentence ends before
    keys = np.zeros(0, np.int64)
    for k in range(2, order + 1):
        if report:
            report(k - 1, order, f"counting {k}-grams")
        below, below_keys = tables[-1], keys
        keys, counts = _distinct(rows, ids, k, n_words)
        parents, words = np.divmod(keys, n_words)
        suffixes = words if k == 2 else _find(below_keys, below.suffixes[parents] * n_words + words)
        tables.append(Counts(parents, words, counts, suffixes, below.from_start[parents]))
        if k < order:
            _renumber(rows, ids, k, n_words, keys)
    return tables


def _pieces(n: int) -> Iterator[slice]:
    for start in range(0, n, _PIECE):
        yield slice(start, min(start + _PIECE, n))


def _keys(
    rows: np.ndarray, ids: np.ndarray, k: int, n_words: int, piece: slice
) -> tuple[np.ndarray, np.ndarray]:
    """(positions, keys) of the k-grams that start in a piece and stay within their sentence."""
    start, end = piece.start, min(piece.stop, len(ids) - k + 1)
    if end <= start:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    first = rows[start:end]
    inside = (first >= 0) & (ids[start + k - 2 : end + k - 2] != EOS_ID)
    at = np.flatnonzero(inside) + start
    return at, rows[at].astype(np.int64) * n_words + ids[at + k - 1]


def _distinct(rows: np.ndarray, ids: np.ndarray, k: int, n_words: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorted keys of all k-grams with their counts; runs of doubling size are merged, as in a merge sort."""
    runs: list[tuple[np.ndarray, np.ndarray]] = []
    for piece in _pieces(len(ids)):
        runs.append(np.unique(_keys(rows, ids, k, n_words, piece)[1], return_counts=True))
        while len(runs) > 1 and len(runs[-2][0]) < 2 * len(runs[-1][0]):
            runs.append(_merged(runs.pop(), runs.pop()))
    while len(runs) > 1:
        runs.append(_merged(runs.pop(), runs.pop()))
    return runs[0]


def _merged(
    a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    keys = np.concatenate([a[0], b[0]])
    order = np.argsort(keys, kind="stable")
    keys, counts = keys[order], np.concatenate([a[1], b[1]])[order]
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    return keys[starts], np.add.reduceat(counts, starts) if len(starts) else counts


def _renumber(rows: np.ndarray, ids: np.ndarray, k: int, n_words: int, keys: np.ndarray) -> None:
    """Rows of (k − 1)-grams become rows of k-grams, in place."""
    for piece in _pieces(len(ids)):
        at, own = _keys(rows, ids, k, n_words, piece)
        rows[piece] = -1
        rows[at] = _find(keys, own)


def _find(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    return np.searchsorted(keys, wanted)
