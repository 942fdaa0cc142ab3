"""N-best lists, partial results and compaction: everything that traces back-pointers.

A recombination keeps the worse history and its score gap, so every word sequence that survived pruning is still in the
back-pointers. The n best are found best-first with a heap, without a second search.
"""

import heapq

import numpy as np

from arcuate.language.jit import NEG_INF, hash_append, log_add, njit, power_of_two
from arcuate.language.ngram.query import NGramArrays, advance


@njit(cache=True)
def final_hypotheses(
    beam: np.ndarray, ngram: NGramArrays, eos: int, lm_weight: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """End the sentence; return back-pointers, totals, n-gram scores and bonuses, one per word sequence.

    Entries inside a word are dropped. If no entry is between words, the complete words of all entries are used.
    """
    complete = np.flatnonzero(beam["node"] == 0)
    if not complete.shape[0]:
        complete = np.arange(beam.shape[0])
    complete = complete[np.argsort(beam["history_hash"][complete])]
    backpointers = np.empty(complete.shape[0], np.int64)
    totals, lms, bonuses = (np.empty(complete.shape[0]), np.empty(complete.shape[0]), np.empty(complete.shape[0]))
    n, best = 0, NEG_INF
    for k in range(complete.shape[0]):
        entry = beam[complete[k]]
        acoustic = log_add(entry.log_blank, entry.log_token)
        if k == 0 or entry.history_hash != beam[complete[k - 1]].history_hash:
            lms[n] = entry.lm + advance(ngram, entry.lm_state, eos)[0]
            bonuses[n], totals[n], best = entry.bonus, NEG_INF, NEG_INF
            n += 1
        if acoustic > best:
            backpointers[n - 1], best = entry.backpointer, acoustic
        totals[n - 1] = log_add(totals[n - 1], acoustic)
    for k in range(n):
        totals[k] += lm_weight * lms[k] + bonuses[k]
    return backpointers[:n], totals[:n], lms[:n], bonuses[:n]


@njit(cache=True)
def best_paths(
    rows: np.ndarray,  # (capacity,) BACKPOINTER
    ends: np.ndarray,  # (m,) int64, last rows of complete hypotheses
    totals: np.ndarray,  # (m,) float64
    lms: np.ndarray,  # (m,) float64, n-gram scores
    bonuses: np.ndarray,  # (m,) float64
    n_best: int,
    max_paths: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the n best distinct word sequences, best first.

    Returns scores (n, 3: total, n-gram, bonus), offsets (n + 1,) into the rows of their words, and those rows, from the
    first word to the last. A path popped from the heap follows `previous` to the start and pushes one new path per
    recombination on its way, whose score is lower by the gap; so paths are popped in order of score. At most
    `max_paths` paths are followed. O(max_paths · path length · log heap).
    """
    # path: (-score, next row, link to the words after it, n-gram score, bonus, hash of the words after it)
    heap = [(np.inf, np.int64(-1), np.int64(-1), 0.0, 0.0, np.uint64(0))]
    heap.pop()
    for i in range(ends.shape[0]):
        heapq.heappush(heap, (-totals[i], np.int64(ends[i]), np.int64(-1), lms[i], bonuses[i], np.uint64(0)))
    links = [(np.int64(-1), np.int64(-1))]  # (row, next link): words after a point, shared between paths
    seen = np.zeros(power_of_two(2 * n_best + 2), np.uint64)
    scores = np.empty((n_best, 3))
    offsets = np.zeros(n_best + 1, np.int64)
    word_rows = [np.int64(0)]
    word_rows.pop()
    n = 0
    while n < n_best and heap and max_paths > 0:
        max_paths -= 1
        cost, at, link, lm, bonus, word_hash = heapq.heappop(heap)
        while at >= 0:
            row = rows[at]
            if row.word >= 0:
                links.append((at, link))
                link = np.int64(len(links) - 1)
                word_hash = hash_append(word_hash, np.uint64(row.word + 1))
            else:
                alternative = np.int64(row.alternative)
                alternative_lm, alternative_bonus = 0.0, 0.0
                if alternative >= 0:
                    alternative_lm, alternative_bonus = rows[alternative].lm, rows[alternative].bonus
                heapq.heappush(
                    heap,
                    (
                        cost + np.float64(row.score_gap),
                        alternative,
                        link,
                        lm + alternative_lm - row.lm,
                        bonus + alternative_bonus - row.bonus,
                        word_hash,
                    ),
                )
            at = np.int64(row.previous)
        if not _insert_new(seen, word_hash):
            continue  # the same words along another path
        scores[n, 0], scores[n, 1], scores[n, 2] = -cost, lm, bonus
        while link >= 0:
            word_rows.append(links[link][0])
            link = links[link][1]
        n += 1
        offsets[n] = len(word_rows)
    return scores[:n], offsets[: n + 1], np.array(word_rows, np.int64)


@njit(cache=True)
def _insert_new(seen: np.ndarray, value: np.uint64) -> bool:
    """Insert a hash into the table; return False if it was already present."""
    value = max(value, np.uint64(1))  # 0 marks an empty slot
    at = np.int64(value & np.uint64(seen.shape[0] - 1))
    while seen[at]:
        if seen[at] == value:
            return False
        at = (at + 1) & (seen.shape[0] - 1)
    seen[at] = value
    return True


@njit(cache=True)
def trace_words(rows: np.ndarray, backpointer: int) -> np.ndarray:
    """Rows of the words that lead to a back-pointer, first word first, along the best history."""
    n, at = 0, backpointer
    while at >= 0:
        n += rows[at].word >= 0
        at = rows[at].previous
    found = np.empty(n, np.int64)
    at = backpointer
    while at >= 0:
        if rows[at].word >= 0:
            n -= 1
            found[n] = at
        at = rows[at].previous
    return found


@njit(cache=True)
def n_common_words(rows: np.ndarray, backpointers: np.ndarray) -> int:
    """Length of the longest common word prefix of several histories."""
    backpointers = np.unique(backpointers)
    first = rows["word"][trace_words(rows, backpointers[0])]
    n = first.shape[0]
    for k in range(1, backpointers.shape[0]):
        found = trace_words(rows, backpointers[k])
        n = min(n, found.shape[0])
        for i in range(n):
            if rows[found[i]].word != first[i]:
                n = i
                break
    return n


@njit(cache=True)
def compact(rows: np.ndarray, n_rows: int, beam: np.ndarray, new: np.ndarray) -> int:
    """Copy the rows that the beam can reach into `new` and redirect the beam; return their number.

    Mark and sweep: rows only point to earlier rows, so one backward and one forward pass are enough.
    """
    needed = np.zeros(n_rows, np.bool_)
    for i in range(beam.shape[0]):
        if beam[i].backpointer >= 0:
            needed[beam[i].backpointer] = True
    for at in range(n_rows - 1, -1, -1):
        if needed[at]:
            if rows[at].previous >= 0:
                needed[rows[at].previous] = True
            if rows[at].alternative >= 0:
                needed[rows[at].alternative] = True
    moved = np.full(n_rows, -1, np.int32)
    n = 0
    for at in range(n_rows):
        if needed[at]:
            new[n] = rows[at]
            if rows[at].previous >= 0:
                new[n].previous = moved[rows[at].previous]
            if rows[at].alternative >= 0:
                new[n].alternative = moved[rows[at].alternative]
            moved[at] = n
            n += 1
    for i in range(beam.shape[0]):
        if beam[i].backpointer >= 0:
            beam[i].backpointer = moved[beam[i].backpointer]
    return n
