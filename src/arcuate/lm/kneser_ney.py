"""Modified Kneser–Ney smoothing with interpolation (Chen and Goodman 1998), as lmplz of KenLM estimates it.

Every order below the longest counts in how many contexts an n-gram is new, not how often it occurs; one discount each
for counts of 1, 2 and 3 or more; what discounting frees is spread by the next shorter order, down to the uniform
distribution over all words and the unknown one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from arcuate.errors import UserError
from arcuate.lm.counts import (
    BOS_ID,
    EOS_ID,
    UNK_ID,
    Corpus,
    Counts,
    Report,
    count_ngrams,
    vocabulary_of_corpus,
)
from arcuate.lm.tables import ZERO, Table, Tables

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
    corpus: Corpus, order: int, prune: Sequence[int] = (), name: str = "text", report: Report | None = None
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
