"""Estimate a language model from text: modified Kneser–Ney smoothing with interpolation (Chen & Goodman 1999).

Differences from the paper: fallback discounts, pruning and counts of counts follow KenLM's `lmplz`, so both programs
give the same probabilities.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.data.text import normalise_text
from arcuate.errors import UserError
from arcuate.files import fields_to_dict
from arcuate.language.ngram.io import ModelInfo
from arcuate.language.ngram.model import LanguageModel, check_can_write, hash_sentence, hash_sentences, write_model
from arcuate.language.ngram.perplexity import Leakage, measure_leakage
from arcuate.language.ngram.text import (
    BOS,
    EOS,
    LOG_ZERO,
    UNK,
    decode_line,
    index_words,
    join_bytes,
    read_lines,
    read_sentences,
)
from arcuate.language.ngram.trie import NGramTable, NGramTables, model_from_tables
from arcuate.progress import Progress, logger

_FALLBACK_DISCOUNTS = (0.5, 1.0, 1.5)
_MAX_ORDER = 16
UNK_ID, BOS_ID, EOS_ID = 0, 1, 2
_BATCH = 2**23  # positions sorted at a time


@dataclass(frozen=True)
class BuildResult:
    """Result of `build_model`."""

    info: ModelInfo
    n_left_out: int  # sentences
    leakage: Leakage | None = None  # None if not requested

    def to_dict(self) -> dict[str, Any]:
        result = self.info.to_dict() | {"n_left_out": self.n_left_out}
        if self.leakage is not None:
            result["leakage"] = fields_to_dict(self.leakage)
        return result


def build_model(
    texts: Sequence[str | Path],
    path: str | Path,
    *,
    order: int = 4,
    prune: Sequence[int] = (),
    normalise: bool = False,
    leave_out: str | Path | None = None,
    against: str | Path | None = None,
    keep_hashes: bool = True,
    force: bool = False,
    progress: Progress | None = None,
) -> BuildResult:
    """Estimate a model from text files with one sentence per line and write it to a model file.

    `leave_out` names a text whose sentences are not trained on, `against` a text whose leakage is measured.
    """
    path = Path(path)
    check_can_write(path, force, *texts, *(other for other in (leave_out, against) if other is not None))
    evaluation = read_sentences(against) if against else None
    if evaluation and not keep_hashes:
        raise UserError("--against needs the sentence hashes; remove --no-hashes")
    estimated = estimate_model(
        [Path(text) for text in texts],
        order,
        prune=prune,
        normalise=normalise,
        leave_out=read_sentences(leave_out) if leave_out else (),
        keep_hashes=keep_hashes,
        progress=progress,
    )
    write_model(estimated.model, path, force=force, progress=progress)
    for k, discounts in enumerate(estimated.discounts, start=1):
        if discounts.fallback:
            logger.info(
                f"the text is too small or too regular to estimate the discounts of {k}-grams; 0.5, 1, 1.5 are used"
            )
    if estimated.corpus.n_empty:
        logger.info(f"{estimated.corpus.n_empty} empty lines count as sentences without words")
    return BuildResult(
        ModelInfo.of(estimated.model, path),
        estimated.n_left_out,
        measure_leakage(estimated.model, evaluation) if evaluation else None,
    )


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text as word ids: <s> words </s> per line."""

    words: list[bytes]  # id to word
    ids: np.ndarray  # (n,) int32
    n_sentences: int
    n_empty: int


@dataclass(frozen=True)
class Discounts:
    """Absolute discounts of n-grams with count 1, 2, and 3 or more."""

    amounts: tuple[float, float, float]
    fallback: bool  # the text was too small or too regular to estimate them


@dataclass(frozen=True)
class Estimated:
    """A model with statistics of its text."""

    model: LanguageModel
    corpus: Corpus
    discounts: list[Discounts]  # by order
    n_left_out: int  # sentences


def estimate_model(
    texts: Sequence[Path],
    order: int,
    *,
    prune: Sequence[int] = (),
    normalise: bool = False,
    leave_out: Iterable[str] = (),
    keep_hashes: bool = True,
    progress: Progress | None = None,
) -> Estimated:
    """Estimate a model in memory from text files with one sentence per line."""
    if not 1 <= order <= _MAX_ORDER:
        raise UserError(f"the order must be between 1 and {_MAX_ORDER}, not {order}")
    _prune_thresholds(prune, order)  # reports a mistake before the text is read
    reader = _CorpusReader(frozenset(hash_sentences(leave_out).tolist()), keep_hashes, normalise)
    name = " + ".join(path.name for path in texts)
    corpus = read_corpus(reader.lines(texts, progress), name)
    tables, discounts = estimate_tables(corpus, order, prune, name, progress)
    metadata = {
        "made_by": "modified Kneser-Ney",
        "prune": list(prune),
        "n_sentences": corpus.n_sentences,
        "n_words": int(len(corpus.ids) - 2 * corpus.n_sentences),
        "discounts": [list(d.amounts) for d in discounts],
    }
    sentences = reader.hashes() if keep_hashes else None
    model = model_from_tables(tables, metadata, sentences, progress)
    return Estimated(model, corpus, discounts, reader.n_left_out)


class _CorpusReader:
    """Reads training lines, skips excluded sentences and records the hashes of the others."""

    def __init__(self, excluded: frozenset[int], keep_hashes: bool, normalise: bool) -> None:
        self._excluded, self._keep_hashes, self._normalise = excluded, keep_hashes, normalise
        self._seen: set[int] = set()
        self.n_left_out = 0

    def lines(self, paths: Sequence[Path], progress: Progress | None) -> Iterator[bytes]:
        for path in paths:
            for number, line in enumerate(read_lines(path, progress), start=1):
                yield from self._filter(line, decode_line(line, path, number))

    def _filter(self, line: bytes, text: str) -> Iterator[bytes]:
        if self._keep_hashes or self._excluded or self._normalise:
            sentence = normalise_text(text)
            value = hash_sentence(sentence)
            if value in self._excluded:
                self.n_left_out += 1
                return
            if sentence and self._keep_hashes:
                self._seen.add(value)
            if self._normalise:
                line = sentence.encode()
        yield line

    def hashes(self) -> np.ndarray:
        return np.sort(np.fromiter(self._seen, np.uint64, len(self._seen)))


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
class _Smoothed:
    """Smoothed probabilities of one order; rows as in its Counts."""

    probs: np.ndarray  # (n,) float64, interpolated
    gammas: np.ndarray  # (rows one order below,) float64, interpolation weight of the lower order, per context
    kept: np.ndarray  # (n,) bool


def estimate_tables(
    corpus: Corpus, order: int, prune: Sequence[int] = (), name: str = "text", progress: Progress | None = None
) -> tuple[NGramTables, list[Discounts]]:
    """Estimate a back-off model; return it with the discounts of each order.

    Per order k, with adjusted counts c and discounts D of the count:

        p(w | h) = (c(hw) − D(c(hw))) / Σ_w c(hw) + γ(h) · p(w | h')
        γ(h)     = Σ_w D(c(hw)) / Σ_w c(hw)

    where h' drops the first word of h. Pruned n-grams give their complete count to γ, so distributions sum to one.
    """
    thresholds = _prune_thresholds(prune, order)
    counts = count_ngrams(corpus, order, progress)
    adjusted = _adjusted_counts(counts)
    discounts = [_estimate_discounts(n) for n in _counts_of_counts(counts, adjusted)]
    smoothed: list[_Smoothed] = []
    for k in range(1, order + 1):
        if progress:
            progress(k, order, f"smoothing {k}-grams")
        below = smoothed[-1] if smoothed else None
        smoothed.append(_smooth(k, counts, adjusted[k - 1], discounts[k - 1], thresholds[k - 1], below))
    tables = NGramTables(index_words(*join_bytes(corpus.words)), tuple(_make_tables(counts, smoothed)), source=name)
    return tables, discounts


def _prune_thresholds(prune: Sequence[int], order: int) -> list[int]:
    """One threshold per order: n-grams with at most this count are pruned. The last one given is repeated."""
    given = list(prune) or [0]
    if len(given) > order:
        raise UserError(f"--prune has {len(given)} thresholds for a model of order {order}; give at most {order}")
    if given[0] != 0 or any(b < a for a, b in pairwise(given)):
        raise UserError("--prune starts with 0 (words are always kept) and must not decrease, as in --prune 0 0 1")
    return given + [given[-1]] * (order - len(given)) if order > 1 else [0]


def _adjusted_counts(counts: list[Counts]) -> list[np.ndarray]:
    """Adjusted counts: the number of distinct words that precede an n-gram.

    The longest order keeps its plain counts, and so do n-grams that start with <s>, because no word precedes them.
    """
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
    """Number of n-grams of each order with an adjusted count of 0, 1, …, 4, and 5 or more.

    lmplz counts the last n-gram of its sort order, and the suffixes of it, by their plain counts. The same is done here
    to obtain the same discounts.
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


def _estimate_discounts(n: np.ndarray) -> Discounts:
    """Estimate the discounts from counts of counts, Chen & Goodman's closed form."""
    if n[1] == 0 or n[2] == 0 or n[3] == 0:
        return Discounts(_FALLBACK_DISCOUNTS, True)
    y = n[1] / (n[1] + 2 * n[2])
    first, second, third = (float(j - (j + 1) * y * n[j + 1] / n[j]) for j in (1, 2, 3))
    if not (0 <= first <= 1 and 0 <= second <= 2 and 0 <= third <= 3):
        return Discounts(_FALLBACK_DISCOUNTS, True)
    return Discounts((first, second, third), False)


def _smooth(
    k: int, counts: list[Counts], adjusted: np.ndarray, discounts: Discounts, threshold: int, below: _Smoothed | None
) -> _Smoothed:
    """Discount and interpolate the n-grams of order k."""
    table = counts[k - 1]
    amounts = np.array([0.0, *discounts.amounts])[np.minimum(adjusted, 3)]
    kept = table.counts > threshold if k > 1 else np.ones(len(table), bool)
    n_contexts = 1 if below is None else len(counts[k - 2])
    totals = np.bincount(table.parents, adjusted, n_contexts)
    freed = np.bincount(table.parents, np.where(kept, amounts, adjusted), n_contexts)
    has_children = totals > 0
    gammas = np.where(has_children, freed / np.where(has_children, totals, 1), 1.0)
    if below is None:
        shorter = np.full(len(table), 1 / (len(table) - 1))  # uniform over all words and <unk>, without <s>
    else:
        shorter = below.probs[table.suffixes]
    probs = (adjusted - amounts) / totals[table.parents] + gammas[table.parents] * shorter
    if below is None:
        probs[BOS_ID] = 1.0
    return _Smoothed(probs, gammas, kept)


def _make_tables(counts: list[Counts], smoothed: list[_Smoothed]) -> list[NGramTable]:
    tables = []
    ids = np.zeros((1, 0), np.int32)
    for k, (table, level) in enumerate(zip(counts, smoothed, strict=True)):
        ids = np.concatenate([ids[table.parents], table.words[:, None].astype(np.int32)], axis=1)
        gammas = smoothed[k + 1].gammas if k + 1 < len(counts) else np.ones(len(table))
        gammas = np.where(np.isin(table.words, (UNK_ID, EOS_ID)), 1.0, gammas)
        kept = level.kept
        with np.errstate(divide="ignore"):
            log_probs = np.clip(np.log(level.probs[kept]), LOG_ZERO, 0)
            backoffs = np.maximum(np.log(gammas[kept]), LOG_ZERO)
        tables.append(NGramTable(ids[kept], log_probs.astype(np.float32), backoffs.astype(np.float32)))
    while len(tables) > 1 and not len(tables[-1]):
        tables.pop()
    return tables


# n-gram counts, as sorted keys in bounded batches, without a dictionary of n-grams: a k-gram is the pair (row of its
# first k − 1 words, last word) packed into one integer. Sorting integers therefore sorts n-grams, and equal n-grams are
# adjacent at every order.


class _WordIds(dict[bytes, int]):
    """Assigns ids in order of first occurrence."""

    def __missing__(self, word: bytes) -> int:
        self[word] = new_id = len(self)
        return new_id


def read_corpus(lines: Iterable[bytes], name: str) -> Corpus:
    """Convert UTF-8 text with one sentence per line to word ids. Words are separated by white space."""
    ids = _WordIds({UNK.encode(): UNK_ID, BOS.encode(): BOS_ID, EOS.encode(): EOS_ID})
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
    return Corpus(list(ids), np.frombuffer(stream, np.int32), n_sentences, n_empty)


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
        keys, counts = _count_keys(rows, ids, k, n_words)
        parents, words = np.divmod(keys, n_words)
        suffixes = words if k == 2 else np.searchsorted(below_keys, below.suffixes[parents] * n_words + words)
        tables.append(Counts(parents, words, counts, suffixes, below.from_start[parents]))
        if k < order:
            _extend_rows(rows, ids, k, n_words, keys)
    return tables


def _position_batches(n: int) -> Iterator[slice]:
    for start in range(0, n, _BATCH):
        yield slice(start, min(start + _BATCH, n))


def _ngram_keys(rows: np.ndarray, ids: np.ndarray, k: int, n_words: int, batch: slice) -> tuple[np.ndarray, np.ndarray]:
    """(positions, keys) of the k-grams that start in a batch and end within their sentence."""
    start, end = batch.start, min(batch.stop, len(ids) - k + 1)
    if end <= start:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    first = rows[start:end]
    inside = (first >= 0) & (ids[start + k - 2 : end + k - 2] != EOS_ID)
    at = np.flatnonzero(inside) + start
    return at, rows[at].astype(np.int64) * n_words + ids[at + k - 1]


def _count_keys(rows: np.ndarray, ids: np.ndarray, k: int, n_words: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorted keys of all k-grams with their counts. Sorted runs are merged as in a merge sort: O(n log n)."""
    runs: list[tuple[np.ndarray, np.ndarray]] = []
    for batch in _position_batches(len(ids)):
        runs.append(np.unique(_ngram_keys(rows, ids, k, n_words, batch)[1], return_counts=True))
        while len(runs) > 1 and len(runs[-2][0]) < 2 * len(runs[-1][0]):
            runs.append(_merge_runs(runs.pop(), runs.pop()))
    while len(runs) > 1:
        runs.append(_merge_runs(runs.pop(), runs.pop()))
    return runs[0]


def _merge_runs(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    keys = np.concatenate([a[0], b[0]])
    order = np.argsort(keys, kind="stable")
    keys, counts = keys[order], np.concatenate([a[1], b[1]])[order]
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    return keys[starts], np.add.reduceat(counts, starts) if len(starts) else counts


def _extend_rows(rows: np.ndarray, ids: np.ndarray, k: int, n_words: int, keys: np.ndarray) -> None:
    """Replace rows of (k − 1)-grams by rows of k-grams, in place."""
    for batch in _position_batches(len(ids)):
        at, own = _ngram_keys(rows, ids, k, n_words, batch)
        rows[batch] = -1
        rows[at] = np.searchsorted(keys, own)
