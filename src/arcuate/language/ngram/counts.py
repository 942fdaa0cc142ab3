"""n-gram counts of a text: sorted keys in bounded batches, without a dictionary of n-grams.

A k-gram is the pair (row of its first k − 1 words, last word) packed into one integer. Sorting integers therefore sorts
n-grams, and equal n-grams are adjacent at every order.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from arcuate.errors import UserError
from arcuate.language.ngram.vocabulary import BOS, EOS, UNK
from arcuate.progress import Progress

UNK_ID, BOS_ID, EOS_ID = 0, 1, 2
_BATCH = 2**23  # positions sorted at a time


@dataclass(frozen=True, eq=False)
class Counts:
    """n-grams of one order, sorted by their words."""

    parents: np.ndarray  # (n,) int64, row of the first k − 1 words one order below
    words: np.ndarray  # (n,) int64, last word
    counts: np.ndarray  # (n,) int64
    suffixes: np.ndarray  # (n,) int64, row of the last k − 1 words one order below
    from_start: np.ndarray  # (n,) bool, whether the first word is <s>

    def __len__(self) -> int:
        return len(self.words)


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text as word ids: <s> words </s> per line."""

    words: list[bytes]  # id to word
    ids: np.ndarray  # (n,) int32
    n_sentences: int
    n_empty: int


class _Ids(dict[bytes, int]):
    """Assigns ids in order of first occurrence."""

    def __missing__(self, word: bytes) -> int:
        self[word] = new_id = len(self)
        return new_id


def read_corpus(lines: Iterable[bytes], name: str) -> Corpus:
    """Convert a text with one sentence per line to word ids. Words are separated by white space."""
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
                f"{name}, line {n_sentences}: the text contains {found}, which is added automatically; remove it"
            )
        stream.append(BOS_ID)
        stream.extend([ids[word] for word in words])
        stream.append(EOS_ID)
    if n_sentences == n_empty:
        raise UserError(f"{name} contains no words; give a text with one sentence per line")
    return Corpus(_check_encoding(list(ids), name), np.frombuffer(stream, np.int32), n_sentences, n_empty)


def _check_encoding(words: list[bytes], name: str) -> list[bytes]:
    for word in words:
        try:
            word.decode("utf-8")
        except UnicodeDecodeError:
            shown = word.decode("utf-8", "backslashreplace")
            raise UserError(f"{name}: the word '{shown}' is not UTF-8; convert the text") from None
    return words


def count_ngrams(corpus: Corpus, order: int, progress: Progress | None = None) -> list[Counts]:
    """Count all n-grams up to an order. Memory: about 8 bytes per word of text and 40 per distinct n-gram."""
    ids, n_words = corpus.ids, len(corpus.words)
    unigrams = np.bincount(ids, minlength=n_words)
    word_ids = np.arange(n_words)
    tables = [Counts(np.zeros(n_words, np.int64), word_ids, unigrams, np.zeros(n_words, np.int64), word_ids == BOS_ID)]
    rows = ids.copy()  # row of the (k − 1)-gram that starts at each position; -1 if it crosses a sentence end
    keys = np.zeros(0, np.int64)
    for k in range(2, order + 1):
        if progress:
            progress(k - 1, order, f"counting {k}-grams")
        below, below_keys = tables[-1], keys
        keys, counts = _distinct(rows, ids, k, n_words)
        parents, words = np.divmod(keys, n_words)
        suffixes = words if k == 2 else np.searchsorted(below_keys, below.suffixes[parents] * n_words + words)
        tables.append(Counts(parents, words, counts, suffixes, below.from_start[parents]))
        if k < order:
            _renumber(rows, ids, k, n_words, keys)
    return tables


def _batches(n: int) -> Iterator[slice]:
    for start in range(0, n, _BATCH):
        yield slice(start, min(start + _BATCH, n))


def _keys(rows: np.ndarray, ids: np.ndarray, k: int, n_words: int, batch: slice) -> tuple[np.ndarray, np.ndarray]:
    """(positions, keys) of the k-grams that start in a batch and end within their sentence."""
    start, end = batch.start, min(batch.stop, len(ids) - k + 1)
    if end <= start:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    first = rows[start:end]
    inside = (first >= 0) & (ids[start + k - 2 : end + k - 2] != EOS_ID)
    at = np.flatnonzero(inside) + start
    return at, rows[at].astype(np.int64) * n_words + ids[at + k - 1]


def _distinct(rows: np.ndarray, ids: np.ndarray, k: int, n_words: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorted keys of all k-grams with their counts. Sorted runs are merged as in a merge sort: O(n log n)."""
    runs: list[tuple[np.ndarray, np.ndarray]] = []
    for batch in _batches(len(ids)):
        runs.append(np.unique(_keys(rows, ids, k, n_words, batch)[1], return_counts=True))
        while len(runs) > 1 and len(runs[-2][0]) < 2 * len(runs[-1][0]):
            runs.append(_merged(runs.pop(), runs.pop()))
    while len(runs) > 1:
        runs.append(_merged(runs.pop(), runs.pop()))
    return runs[0]


def _merged(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    keys = np.concatenate([a[0], b[0]])
    order = np.argsort(keys, kind="stable")
    keys, counts = keys[order], np.concatenate([a[1], b[1]])[order]
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    return keys[starts], np.add.reduceat(counts, starts) if len(starts) else counts


def _renumber(rows: np.ndarray, ids: np.ndarray, k: int, n_words: int, keys: np.ndarray) -> None:
    """Replace rows of (k − 1)-grams by rows of k-grams, in place."""
    for batch in _batches(len(ids)):
        at, own = _keys(rows, ids, k, n_words, batch)
        rows[batch] = -1
        rows[at] = np.searchsorted(keys, own)
