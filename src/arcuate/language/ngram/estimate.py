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
from arcuate.language.ngram.model import LanguageModel, check_can_write, hash_sentence, write_model
from arcuate.language.ngram.open import ModelInfo
from arcuate.language.ngram.perplexity import Leakage, measure_leakage
from arcuate.language.ngram.text import BOS, EOS, LOG_ZERO, UNK, decode_line, read_lines, read_sentences
from arcuate.language.ngram.trie import NGramTable, NGramTables, model_from_tables
from arcuate.progress import Progress, logger

_FALLBACK_DISCOUNTS = (0.5, 1.0, 1.5)
_MAX_ORDER = 16
UNK_ID, BOS_ID, EOS_ID = 0, 1, 2


@dataclass(frozen=True)
class BuildResult:
    """Result of `build_model`."""

    info: ModelInfo
    n_left_out: int  # sentences
    leakage: Leakage | None = None  # None if not requested

    def to_dict(self) -> dict[str, Any]:
        leakage = {} if self.leakage is None else {"leakage": fields_to_dict(self.leakage)}
        return {**self.info.to_dict(), "n_left_out": self.n_left_out, **leakage}


def build_model(
    texts: Sequence[str | Path],
    path: str | Path,
    *,
    order: int = 4,
    prune: Sequence[int] = (),
    normalise: bool = False,
    leave_out: str | Path | None = None,
    against: str | Path | None = None,
    progress: Progress | None = None,
) -> BuildResult:
    """Estimate a model from text files and write it to a model file.

    Args:
        texts: Texts with one sentence per line, plain or gzipped.
        path: Model file to write.
        order: Length of the longest n-grams.
        prune: Drop n-grams with counts up to this value, one value per order, such as 0 0 1.
        normalise: Normalise sentences as for the word error rate.
        leave_out: Text whose sentences are excluded from training.
        against: Evaluation text to check for leakage: report how many of its sentences are in the training text.
    """
    path = Path(path)
    check_can_write(path, *texts, leave_out, against)
    evaluation = read_sentences(against) if against else None
    excluded = read_sentences(leave_out) if leave_out else ()
    estimated = estimate_model([Path(text) for text in texts], order, prune, normalise, excluded, progress)
    write_model(estimated.model, path, progress)
    if estimated.n_empty:
        logger.info(f"{estimated.n_empty} empty lines count as sentences without words")
    leakage = measure_leakage(estimated.model, evaluation) if evaluation else None
    return BuildResult(ModelInfo.of(estimated.model, path), estimated.n_left_out, leakage)


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text as word ids: <s> words </s> per line."""

    words: list[str]  # id to word
    ids: np.ndarray  # (n,) int32
    n_sentences: int
    n_empty: int


Discounts = tuple[float, float, float]  # absolute discounts of n-grams with count 1, 2, and 3 or more


@dataclass(frozen=True)
class Estimated:
    """A model with statistics of its text."""

    model: LanguageModel
    n_left_out: int  # sentences
    n_empty: int  # lines without words


def estimate_model(
    texts: Sequence[Path],
    order: int,
    prune: Sequence[int] = (),
    normalise: bool = False,
    leave_out: Iterable[str] = (),
    progress: Progress | None = None,
) -> Estimated:
    """Estimate a model in memory from text files with one sentence per line."""
    if not 1 <= order <= _MAX_ORDER:
        raise UserError(f"the order must be between 1 and {_MAX_ORDER}, not {order}")
    prune_thresholds(prune, order)  # reports a mistake before the text is read
    excluded, seen, n_left_out = {hash_sentence(text) for text in leave_out}, set[int](), 0

    def lines() -> Iterator[bytes]:
        nonlocal n_left_out
        for path in texts:
            for number, line in enumerate(read_lines(path, progress), start=1):
                text = decode_line(line, path, number)
                sentence, value = normalise_text(text), hash_sentence(text)
                if sentence and value in excluded:
                    n_left_out += 1
                    continue
                if sentence:
                    seen.add(value)
                yield sentence.encode() if normalise else line

    name = " + ".join(path.name for path in texts)
    corpus = read_corpus(lines(), name)
    tables, discounts = estimate_tables(corpus, order, prune, name, progress)
    if regular := [f"{k}-grams" for k, amounts in enumerate(discounts, start=1) if amounts == _FALLBACK_DISCOUNTS]:
        logger.info(
            f"the text is too small or too regular to estimate the discounts of {', '.join(regular)}; 0.5, 1, 1.5 are"
            " used"
        )
    metadata = {
        "made_by": "modified Kneser-Ney",
        "prune": list(prune),
        "n_sentences": corpus.n_sentences,
        "n_words": int(len(corpus.ids) - 2 * corpus.n_sentences),
        "discounts": [list(amounts) for amounts in discounts],
    }
    sentences = np.sort(np.fromiter(seen, np.uint64, len(seen)))
    model = model_from_tables(tables, metadata, sentences, progress)
    return Estimated(model, n_left_out, corpus.n_empty)


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
    thresholds = prune_thresholds(prune, order)
    counts = count_ngrams(corpus, order, progress)
    adjusted = _adjusted_counts(counts)
    discounts = [_estimate_discounts(n) for n in _counts_of_counts(counts, adjusted)]
    smoothed: list[_Smoothed] = []
    for k in range(1, order + 1):
        if progress:
            progress(k, order, f"smoothing {k}-grams")
        below = smoothed[-1] if smoothed else None
        smoothed.append(_smooth(k, counts, adjusted[k - 1], discounts[k - 1], thresholds[k - 1], below))
    tables = NGramTables(corpus.words, tuple(_make_tables(counts, smoothed)), source=name)
    return tables, discounts


def prune_thresholds(prune: Sequence[int], order: int) -> list[int]:
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
    if n[1:4].all():
        y = n[1] / (n[1] + 2 * n[2])
        first, second, third = (float(j - (j + 1) * y * n[j + 1] / n[j]) for j in (1, 2, 3))
        if 0 <= first <= 1 and 0 <= second <= 2 and 0 <= third <= 3:
            return first, second, third
    return _FALLBACK_DISCOUNTS


def _smooth(
    k: int, counts: list[Counts], adjusted: np.ndarray, discounts: Discounts, threshold: int, below: _Smoothed | None
) -> _Smoothed:
    """Discount and interpolate the n-grams of order k."""
    table = counts[k - 1]
    amounts = np.array([0.0, *discounts])[np.minimum(adjusted, 3)]
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


# --- n-gram counts ----------------------------------------------------------------------------------------------


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
    return Corpus([word.decode() for word in ids], np.frombuffer(stream, np.int32), n_sentences, n_empty)


def count_ngrams(corpus: Corpus, order: int, progress: Progress | None = None) -> list[Counts]:
    """Count all n-grams up to an order.

    A k-gram is the pair (row of its first k − 1 words, last word) packed into one integer. Sorting integers therefore
    sorts n-grams without a dictionary of them.
    """
    ids, n_words = corpus.ids, len(corpus.words)
    unigrams, word_ids = np.bincount(ids, minlength=n_words), np.arange(n_words)
    tables = [Counts(np.zeros(n_words, np.int64), word_ids, unigrams, np.zeros(n_words, np.int64), word_ids == BOS_ID)]
    at = np.flatnonzero(ids != EOS_ID)  # positions at which a k-gram starts that ends within its sentence
    rows, keys = ids[at], word_ids  # row of the (k − 1)-gram at each position, and the keys of all (k − 1)-grams
    for k in range(2, order + 1):
        if progress:
            progress(k - 1, order, f"counting {k}-grams")
        below, below_keys = tables[-1], keys
        keys, rows, counts = np.unique(
            rows.astype(np.int64) * n_words + ids[at + k - 1], return_inverse=True, return_counts=True
        )
        parents, words = np.divmod(keys, n_words)
        suffixes = words if k == 2 else np.searchsorted(below_keys, below.suffixes[parents] * n_words + words)
        tables.append(Counts(parents, words, counts, suffixes, below.from_start[parents]))
        inside = words[rows] != EOS_ID
        at, rows = at[inside], rows[inside]
    return tables
