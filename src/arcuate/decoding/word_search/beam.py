"""The beam: memory layout of entries, candidates and back-pointers, pruning, recombination and the next beam.

Pruning of one frame's candidates, in this order: threshold (score at least best − threshold), recombination of
histories with the same future, then histogram pruning to the beam size. Recombination comes before the size limit so
that duplicates of one hypothesis do not use up the beam.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from arcuate.decoding.word_search.lookahead import (
    NOT_CACHED,
    Lookahead,
    Tree,
    bigram_context,
    cache_successors,
    find_row,
)
from arcuate.language.jit import NEG_INF, Row, hash_append, log_add, njit
from arcuate.language.ngram.query import NGramArrays, backoff

_N_BINS = 512  # bins of the histogram that finds the beam-size cut

# One hypothesis: its complete words, a position in the lexicon tree, and its scores in nats.
BEAM_ENTRY = np.dtype(
    [
        ("history_hash", np.uint64),  # hash of the complete words
        ("log_blank", np.float64),  # acoustic score of the alignments that end in blank
        ("log_token", np.float64),  # acoustic score of the alignments that end in the last token
        ("lm", np.float64),  # n-gram score of the complete words, unweighted
        ("bonus", np.float64),  # word bonuses of the complete words
        ("lookahead", np.float32),  # best n-gram score of the word in progress, unweighted
        ("context_backoff", np.float32),  # back-offs from lm_state down to its last word
        ("unigram_backoff", np.float32),  # the same plus the last word's back-off: words without a bigram
        ("lm_state", np.int32),
        ("node", np.int32),  # in the tree; 0 between words
        ("row", np.int32),  # successor row of the node in the lookahead cache; -1 without explicit bigrams
        ("backpointer", np.int32),  # row of the last complete word; -1 before the first
        ("pending_word", np.int32),  # word that ended in this frame and has no back-pointer yet, or -1
        ("first_frame", np.int32),  # first frame of the word in progress, or of the pending word
        ("last_token", np.int32),  # -1 before the first
    ],
    align=True,
)

# One back-pointer: a word (word >= 0), or the recombination of two histories (word < 0).
BACKPOINTER = np.dtype(
    [
        ("lm", np.float64),  # n-gram score up to here
        ("bonus", np.float64),  # word bonuses up to here
        ("previous", np.int32),  # previous row; for a recombination, the better history
        ("alternative", np.int32),  # worse history of a recombination, else -1
        ("score_gap", np.float32),  # score difference between the two histories of a recombination
        ("word", np.int32),
        ("first_frame", np.int32),  # frames of the word's first and last token
        ("last_frame", np.int32),
    ],
    align=True,
)


@dataclass(frozen=True, eq=False)
class Backpointers:
    """The first `n` rows of an append-only buffer that several search states may share.

    Rows are written once, so older states stay valid and a state can be passed around as a value without copying its
    past. `written` counts the rows in use by any state. A state at the end of the buffer appends in place; a state that
    was left behind (two continuations of one prefix) continues in a copy.
    """

    rows: np.ndarray  # (capacity,), structured
    written: list[int]
    n: int

    @staticmethod
    def empty(dtype: np.dtype, capacity: int) -> "Backpointers":
        return Backpointers(np.empty(capacity, dtype), [0], 0)

    def reserve(self, n_more: int) -> "Backpointers":
        """Return a buffer with the same rows and space for `n_more` further ones."""
        if self.written[0] == self.n and self.n + n_more <= len(self.rows):
            return self
        rows = np.empty(max(2 * self.n, self.n + 2 * n_more), self.rows.dtype)
        rows[: self.n] = self.rows[: self.n]
        return Backpointers(rows, [self.n], self.n)

    def appended(self, n: int) -> "Backpointers":
        """Return the buffer after compiled code has filled it up to row `n`."""
        self.written[0] = n
        return Backpointers(self.rows, self.written, n)


class SearchWeights(NamedTuple):
    """`DecodingConfig` in the form that the compiled search uses."""

    lm: float
    word: float
    silence: float
    missing_silence: float
    threshold: float
    beam: int
    blank: int  # class index
    boundary: int  # class index; -1: no silence class
    merge_histories: bool
    truncate: bool = False  # ignore candidates beyond the capacity of the table


class LmCache(NamedTuple):
    """Direct-mapped cache of n-gram queries; a new query replaces the old one in its slot."""

    keys: np.ndarray  # (power of two,) int64, state and word
    log_probs: np.ndarray  # float32
    states: np.ndarray  # int32


class SearchModels(NamedTuple):
    """Everything that is constant over a trial, and the caches of it."""

    tree: Tree
    ngram: NGramArrays
    lookahead: Lookahead
    lm_cache: LmCache


class Candidates(NamedTuple):
    """Candidates of one frame in an open-addressing hash table."""

    entries: np.ndarray  # (capacity,) BEAM_ENTRY
    keys: np.ndarray  # (capacity,) uint64
    language_scores: np.ndarray  # (capacity,) float64, weighted n-gram score with lookahead, plus bonuses
    totals: np.ndarray  # (capacity,) float64, language score plus acoustic score; computed by `prune`
    slots: np.ndarray  # (power of two, at least 2 · capacity,) int32, candidate or -1
    counts: np.ndarray  # (2,) int64: number of candidates, and 1 if there were more than fit
    next_merged: np.ndarray  # (capacity,) int32, linked list of the candidates recombined with a better one


def make_candidates(capacity: int) -> Candidates:
    return Candidates(
        entries=np.zeros(capacity, BEAM_ENTRY),
        keys=np.empty(capacity, np.uint64),
        language_scores=np.empty(capacity),
        totals=np.empty(capacity),
        slots=np.empty(2 << (capacity - 1).bit_length(), np.int32),
        counts=np.zeros(2, np.int64),
        next_merged=np.empty(capacity, np.int32),
    )


@njit(cache=True, inline="always")
def candidate_key(history_hash: np.uint64, node: int, last_token: int) -> np.uint64:
    """Candidates with the same word history, tree node and last token are one hypothesis."""
    return hash_append(history_hash, (np.uint64(node) << np.uint64(16)) | np.uint64(last_token + 1))


@njit(cache=True, inline="always")
def find_or_insert(candidates: Candidates, key: np.uint64) -> tuple[np.int64, bool]:
    """Index of the candidate with this key, and whether it was inserted; (-1, False) if the table is full."""
    mask = candidates.slots.shape[0] - 1
    at = np.int64(key & np.uint64(mask))
    while candidates.slots[at] >= 0:
        if candidates.keys[candidates.slots[at]] == key:
            return np.int64(candidates.slots[at]), False
        at = (at + 1) & mask
    n = candidates.counts[0]
    if n == candidates.entries.shape[0]:
        candidates.counts[1] = 1
        return np.int64(-1), False
    candidates.slots[at] = n
    candidates.keys[n] = key
    candidates.counts[0] = n + 1
    return n, True


@njit(cache=True)
def prune(candidates: Candidates, weights: SearchWeights) -> np.ndarray:
    """Indices of the candidates that survive the frame, in order of insertion. Computes `totals`."""
    n, best = candidates.counts[0], NEG_INF
    for i in range(n):
        entry = candidates.entries[i]
        candidates.totals[i] = candidates.language_scores[i] + log_add(entry.log_blank, entry.log_token)
        candidates.next_merged[i] = -1
        best = max(best, candidates.totals[i])
    kept = np.empty(n, np.int32)
    m = 0
    for i in range(n):
        if candidates.totals[i] >= best - weights.threshold and candidates.totals[i] > NEG_INF:
            kept[m] = i
            m += 1
    kept = kept[:m]
    if weights.merge_histories:
        kept = _recombine(candidates, kept)
    if kept.shape[0] > weights.beam:
        kept = _histogram_prune(candidates, kept, best, weights.beam)
    return kept


@njit(cache=True)
def _recombine(candidates: Candidates, kept: np.ndarray) -> np.ndarray:
    """Keep the best of the candidates with the same future; the others are linked to it by `next_merged`.

    The future depends on tree node, n-gram state and last token only. Reuses the hash slots of the expansion.
    """
    slots, mask = candidates.slots, candidates.slots.shape[0] - 1
    slots[:] = -1
    winners = np.empty_like(kept)
    m = 0
    for k in range(kept.shape[0]):
        i = kept[k]
        at = np.int64(_future_hash(candidates.entries[i]) & np.uint64(mask))
        while slots[at] >= 0 and not _same_future(candidates.entries[winners[slots[at]]], candidates.entries[i]):
            at = (at + 1) & mask
        if slots[at] < 0:
            slots[at] = m
            winners[m] = i
            m += 1
            continue
        incumbent = winners[slots[at]]
        if candidates.totals[i] > candidates.totals[incumbent]:
            winners[slots[at]] = i
            candidates.next_merged[i] = incumbent
        else:
            candidates.next_merged[i] = candidates.next_merged[incumbent]
            candidates.next_merged[incumbent] = i
    return winners[:m]


@njit(cache=True)
def _future_hash(entry: Row) -> np.uint64:
    return hash_append(
        np.uint64(entry.lm_state), (np.uint64(entry.node) << np.uint64(16)) | np.uint64(entry.last_token + 1)
    )


@njit(cache=True)
def _same_future(a: Row, b: Row) -> bool:
    return a.node == b.node and a.lm_state == b.lm_state and a.last_token == b.last_token


@njit(cache=True)
def _histogram_prune(candidates: Candidates, kept: np.ndarray, best: float, beam: int) -> np.ndarray:
    """Keep exactly the `beam` best in O(n): only the scores of the histogram bin at the cut are sorted.

    Ties at the cut are resolved in favour of earlier candidates, so the result does not depend on the bin width.
    """
    worst = best
    for k in range(kept.shape[0]):
        worst = min(worst, candidates.totals[kept[k]])
    scale = (_N_BINS - 1) / max(best - worst, 1e-9)
    counts = np.zeros(_N_BINS, np.int64)
    for k in range(kept.shape[0]):
        counts[np.int64((best - candidates.totals[kept[k]]) * scale)] += 1
    edge, n_above = 0, 0
    while n_above + counts[edge] <= beam:
        n_above += counts[edge]
        edge += 1
    within = np.empty(counts[edge])
    m = 0
    for k in range(kept.shape[0]):
        if np.int64((best - candidates.totals[kept[k]]) * scale) == edge:
            within[m] = candidates.totals[kept[k]]
            m += 1
    within.sort()
    n_free = beam - n_above  # candidates that still fit from the histogram bin at the cut
    least = within[m - n_free] if n_free else np.inf
    n_ties = n_free
    for k in range(m):
        n_ties -= within[k] > least
    out = np.empty(beam, np.int32)
    m = 0
    for k in range(kept.shape[0]):
        score = candidates.totals[kept[k]]
        b = np.int64((best - score) * scale)
        tied = b == edge and score == least and n_ties > 0
        if b < edge or (b == edge and score > least) or tied:
            n_ties -= tied
            out[m] = kept[k]
            m += 1
    return out[:m]


@njit(cache=True)
def attach_successor_rows(candidates: Candidates, kept: np.ndarray, models: SearchModels) -> bool:
    """Point entries whose word has just ended at their lookahead rows; return False if the cache is full."""
    lookahead = models.lookahead
    for k in range(kept.shape[0]):
        entry = candidates.entries[kept[k]]
        if entry.pending_word >= 0:
            context, _ = bigram_context(lookahead, models.ngram, entry.lm_state)
            if lookahead.roots[context] == NOT_CACHED and not cache_successors(
                lookahead, models.ngram, models.tree, context
            ):
                return False
            entry.row = max(lookahead.roots[context], -1)
    return True


@njit(cache=True)
def collect_beam(
    candidates: Candidates, kept: np.ndarray, t: int, backpointers: np.ndarray, n_rows: int
) -> tuple[np.ndarray, int]:
    """Copy the surviving candidates into the next beam and append back-pointers for words and recombinations.

    Appends at most three rows per candidate: its word, the word of a recombined one, the recombination.
    """
    beam = np.empty(kept.shape[0], candidates.entries.dtype)
    for k in range(kept.shape[0]):
        i = kept[k]
        n_rows = _append_word(candidates.entries[i], t, backpointers, n_rows)
        other = candidates.next_merged[i]
        while other >= 0:
            n_rows = _append_word(candidates.entries[other], t, backpointers, n_rows)
            n_rows = _append_recombination(candidates, i, other, backpointers, n_rows)
            other = candidates.next_merged[other]
        beam[k] = candidates.entries[i]
    return beam, n_rows


@njit(cache=True)
def _append_word(entry: Row, t: int, backpointers: np.ndarray, n_rows: int) -> int:
    if entry.pending_word < 0:
        return n_rows
    row = backpointers[n_rows]
    row.lm, row.bonus = entry.lm, entry.bonus
    row.previous, row.alternative, row.score_gap = entry.backpointer, -1, 0.0
    row.word, row.first_frame, row.last_frame = entry.pending_word, entry.first_frame, t
    entry.backpointer, entry.pending_word = n_rows, -1
    return n_rows + 1


@njit(cache=True)
def _append_recombination(candidates: Candidates, i: int, other: int, backpointers: np.ndarray, n_rows: int) -> int:
    entry, row = candidates.entries[i], backpointers[n_rows]
    row.lm, row.bonus = entry.lm, entry.bonus
    row.previous, row.alternative = entry.backpointer, candidates.entries[other].backpointer
    row.score_gap = candidates.totals[i] - candidates.totals[other]
    row.word, row.first_frame, row.last_frame = -1, -1, -1
    entry.backpointer = n_rows
    return n_rows + 1


@njit(cache=True)
def refresh_lookahead(beam: np.ndarray, models: SearchModels) -> bool:
    """Point every entry at the current lookahead cache after it was cleared; return False if the cache is full."""
    lookahead = models.lookahead
    for i in range(beam.shape[0]):
        entry = beam[i]
        context, context_backoff = bigram_context(lookahead, models.ngram, entry.lm_state)
        if lookahead.roots[context] == NOT_CACHED and not cache_successors(
            lookahead, models.ngram, models.tree, context
        ):
            return False
        entry.row = find_row(lookahead, models.tree, context, entry.node)
        entry.context_backoff = context_backoff
        entry.unigram_backoff = context_backoff + backoff(models.ngram, context)
        if entry.node == 0:
            entry.lookahead = context_backoff + lookahead.best_next[context]
    return True
