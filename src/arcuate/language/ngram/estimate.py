"""Counting n-grams in text: sorted keys in bounded pieces, no dictionary of n-grams.

A k-gram is the pair (number of its first k − 1 words, last word) packed into one integer, so sorting integers sorts
n-grams, and equal n-grams stand side by side at every order.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from arcuate.errors import UserError
from arcuate.language.ngram.vocabulary import (
    BOS,
    EOS,
    UNK,
    ZERO,
    Table,
    Tables,
    Vocabulary,
    index_words,
    join,
)
from arcuate.progress import Progress

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


def count_ngrams(corpus: Corpus, order: int, report: Progress | None = None) -> list[Counts]:
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


# Modified Kneser–Ney smoothing with interpolation (Chen and Goodman 1998), as lmplz of KenLM estimates it.

FALLBACK = (0.5, 1.0, 1.5)
MAX_ORDER = 16


@dataclass(frozen=True)
class Discounts:
    """How much is taken from n-grams counted once, twice, and more often."""

    amounts: tuple[float, float, float]
    fallback: bool  # whether the text was too small or too regular to estimate them


@dataclass(frozen=True, eq=False)
class _Smoothed:
    """One order before it is written: rows as in its Counts."""

    probs: np.ndarray  # (n,) float64, interpolated
    gammas: np.ndarray  # (rows one order below,) float64, weight that each context gives to the shorter order
    kept: np.ndarray  # (n,) bool


def estimate(
    corpus: Corpus, order: int, prune: Sequence[int] = (), name: str = "text", report: Progress | None = None
) -> tuple[Tables, list[Discounts]]:
    """A back-off model of a text, and the discounts of each order."""
    thresholds = prune_thresholds(prune, order)
    counts = count_ngrams(corpus, order, report)
    adjusted = _adjust(counts)
    discounts = [_discounts(n) for n in _counts_of_counts(counts, adjusted)]
    smoothed: list[_Smoothed] = []
    for k in range(1, order + 1):
        if report:
            report(k, order, f"smoothing {k}-grams")
        below = smoothed[-1] if smoothed else None
        smoothed.append(_smooth(k, counts, adjusted[k - 1], discounts[k - 1], thresholds[k - 1], below))
    tables = Tables(vocabulary_of_corpus(corpus), tuple(_tables(counts, smoothed)), source=name)
    return tables, discounts


def prune_thresholds(prune: Sequence[int], order: int) -> list[int]:
    """One threshold per order: n-grams that occur no more often are left out; the last given one goes on."""
    given = list(prune) or [0]
    if len(given) > order:
        raise UserError(
            f"--prune has {len(given)} numbers for a model of order {order}; give at most {order}"
        )
    if given[0] != 0 or any(b < a for a, b in pairwise(given)):
        raise UserError(
            "--prune starts with 0 (words are always kept) and must not fall, as in --prune 0 0 1"
        )
    return given + [given[-1]] * (order - len(given)) if order > 1 else [0]


def _adjust(counts: list[Counts]) -> list[np.ndarray]:
    """Counts as Kneser–Ney wants them: the number of distinct words before an n-gram, but plain counts for the
    longest order and for n-grams at the start of a sentence, which nothing precedes."""
    adjusted = []
    for k, table in enumerate(counts):
        if k + 1 < len(counts):
            before = np.bincount(counts[k + 1].suffixes, minlength=len(table))
            adjusted.append(np.where(table.from_start, table.counts, before))
        else:
            adjusted.append(table.counts.copy())
    adjusted[0][[UNK_ID, BOS_ID]] = 0
    return adjusted


def _counts_of_counts(counts: list[Counts], adjusted: list[np.ndarray]) -> list[np.ndarray]:
    """How many n-grams of each order have an adjusted count of 0 to 4.

    lmplz counts the n-gram it sees last, and its endings, by their plain counts; so does this, to give the same
    discounts.
    """
    found = [np.bincount(np.minimum(a, 5), minlength=6) for a in adjusted]
    row, k = len(counts[0]) - 1, 0
    while k + 1 < len(counts) and not counts[k].from_start[row]:
        found[k][min(adjusted[k][row], 5)] -= 1
        found[k][min(counts[k].counts[row], 5)] += 1
        longer = np.flatnonzero(counts[k + 1].suffixes == row)
        if not len(longer):
            break
        row, k = int(longer[-1]), k + 1  # sorted by first word, so the last one has the greatest
    return found


def _discounts(n: np.ndarray) -> Discounts:
    """Chen and Goodman's estimate from the counts of counts."""
    if n[1] == 0 or n[2] == 0 or n[3] == 0:
        return Discounts(FALLBACK, True)
    y = n[1] / (n[1] + 2 * n[2])
    first, second, third = (float(j - (j + 1) * y * n[j + 1] / n[j]) for j in (1, 2, 3))
    if not (0 <= first <= 1 and 0 <= second <= 2 and 0 <= third <= 3):
        return Discounts(FALLBACK, True)
    return Discounts((first, second, third), False)


def _smooth(
    k: int,
    counts: list[Counts],
    adjusted: np.ndarray,
    discounts: Discounts,
    threshold: int,
    below: _Smoothed | None,
) -> _Smoothed:
    table = counts[k - 1]
    amounts = np.array([0.0, *discounts.amounts])[np.minimum(adjusted, 3)]
    kept = table.counts > threshold if k > 1 else np.ones(len(table), bool)
    n_contexts = 1 if below is None else len(counts[k - 2])
    totals = np.bincount(table.parents, adjusted, n_contexts)
    freed = np.bincount(table.parents, np.where(kept, amounts, adjusted), n_contexts)
    has_children = totals > 0
    gammas = np.where(has_children, freed / np.where(has_children, totals, 1), 1.0)
    if below is None:
        shorter = np.full(len(table), 1 / (len(table) - 1))  # all words and the unknown one, but not <s>
    else:
        shorter = below.probs[table.suffixes]
    probs = (adjusted - amounts) / totals[table.parents] + gammas[table.parents] * shorter
    if below is None:
        probs[BOS_ID] = 1.0
    return _Smoothed(probs, gammas, kept)


def _tables(counts: list[Counts], smoothed: list[_Smoothed]) -> list[Table]:
    tables = []
    ids = np.zeros((1, 0), np.int32)
    for k, (table, level) in enumerate(zip(counts, smoothed, strict=True)):
        ids = np.concatenate([ids[table.parents], table.words[:, None].astype(np.int32)], axis=1)
        gammas = smoothed[k + 1].gammas if k + 1 < len(counts) else np.ones(len(table))
        gammas = np.where(np.isin(table.words, (UNK_ID, EOS_ID)), 1.0, gammas)
        kept = level.kept
        with np.errstate(divide="ignore"):
            log_probs = np.clip(np.log(level.probs[kept]), ZERO, 0)
            backoffs = np.maximum(np.log(gammas[kept]), ZERO)
        tables.append(Table(ids[kept], log_probs.astype(np.float32), backoffs.astype(np.float32)))
    while len(tables) > 1 and not len(tables[-1]):
        tables.pop()
    return tables
