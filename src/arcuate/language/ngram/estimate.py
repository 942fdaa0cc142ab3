"""Estimate a language model from text: modified Kneser–Ney smoothing with interpolation (Chen & Goodman 1999).

Different from the paper: fallback discounts, pruning and counts of counts follow KenLM's `lmplz`, so both programs give
the same probabilities.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.data.text import normalise_text
from arcuate.errors import UserError
from arcuate.language.ngram.counts import BOS_ID, EOS_ID, UNK_ID, Corpus, Counts, count_ngrams, read_corpus
from arcuate.language.ngram.file import check_can_write
from arcuate.language.ngram.io import ModelInfo, write_model
from arcuate.language.ngram.model import LanguageModel, hash_sentence, hash_sentences
from arcuate.language.ngram.perplexity import Leakage, measure_leakage
from arcuate.language.ngram.text import decode_line, read_lines, read_sentences
from arcuate.language.ngram.trie import model_from_tables
from arcuate.language.ngram.vocabulary import LOG_ZERO, NGramTable, NGramTables, index_words, join_bytes
from arcuate.progress import Progress, logger

_FALLBACK_DISCOUNTS = (0.5, 1.0, 1.5)
_MAX_ORDER = 16


@dataclass(frozen=True)
class BuildResult:
    """Result of `build_model`."""

    info: ModelInfo
    n_left_out: int  # sentences
    leakage: Leakage | None = None  # None if not requested

    def to_dict(self) -> dict[str, Any]:
        result = self.info.to_dict() | {"n_left_out": self.n_left_out}
        if self.leakage is not None:
            result["leakage"] = self.leakage.to_dict()
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


@dataclass(frozen=True)
class Estimated:
    """A model with statistics of its text."""

    model: LanguageModel
    corpus: Corpus
    discounts: list["Discounts"]  # by order
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


@dataclass(frozen=True)
class Discounts:
    """Absolute discounts of n-grams with count 1, 2, and 3 or more."""

    amounts: tuple[float, float, float]
    fallback: bool  # the text was too small or too regular to estimate them


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
    adjusted = _adjust(counts)
    discounts = [_discounts(n) for n in _counts_of_counts(counts, adjusted)]
    smoothed: list[_Smoothed] = []
    for k in range(1, order + 1):
        if progress:
            progress(k, order, f"smoothing {k}-grams")
        below = smoothed[-1] if smoothed else None
        smoothed.append(_smooth(k, counts, adjusted[k - 1], discounts[k - 1], thresholds[k - 1], below))
    tables = NGramTables(index_words(*join_bytes(corpus.words)), tuple(_tables(counts, smoothed)), source=name)
    return tables, discounts


def _prune_thresholds(prune: Sequence[int], order: int) -> list[int]:
    """One threshold per order: n-grams with at most this count are pruned. The last one given is repeated."""
    given = list(prune) or [0]
    if len(given) > order:
        raise UserError(f"--prune has {len(given)} thresholds for a model of order {order}; give at most {order}")
    if given[0] != 0 or any(b < a for a, b in pairwise(given)):
        raise UserError("--prune starts with 0 (words are always kept) and must not decrease, as in --prune 0 0 1")
    return given + [given[-1]] * (order - len(given)) if order > 1 else [0]


def _adjust(counts: list[Counts]) -> list[np.ndarray]:
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


def _discounts(n: np.ndarray) -> Discounts:
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


def _tables(counts: list[Counts], smoothed: list[_Smoothed]) -> list[NGramTable]:
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
