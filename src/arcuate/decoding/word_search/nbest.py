"""Reading the log of a word search: the best word sequences through it, and forgetting what nobody needs any more.

Where two histories became one, the log kept the worse one and how much worse it was. So every sequence that survived
pruning is still there, and the best n are found best first, without searching again.
"""

import heapq

import numpy as np
from numba import njit

from arcuate.decoding.backpointers import NEVER, log_add, mix, power_of_two
from arcuate.language.ngram.query import NGramArrays, advance


@njit(cache=True)
def best_paths(
    log: np.ndarray,  # (room,) RECORD
    histories: np.ndarray,  # (m,) int64, last rows of complete readings
    totals: np.ndarray,  # (m,) float64
    lms: np.ndarray,  # (m,) float64, n-gram scores
    bonuses: np.ndarray,  # (m,) float64
    n_best: int,
    n_tries: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores (n, 3: total, n-gram, bonus), ends (n + 1,) into the rows of their words, and those rows, last word first.

    A sequence of words comes once, however many ways lead to it; at most `n_tries` ways are looked at.
    """
    # a way: minus its score, row to go on from, link to the words behind it, n-gram and bonus, identity of the words
    ways = [(np.inf, np.int64(-1), np.int64(-1), 0.0, 0.0, np.uint64(0))]
    ways.pop()
    for i in range(histories.shape[0]):
        heapq.heappush(
            ways, (-totals[i], np.int64(histories[i]), np.int64(-1), lms[i], bonuses[i], np.uint64(0))
        )
    links = [(np.int64(-1), np.int64(-1))]  # row, next link
    seen = np.zeros(power_of_two(2 * n_best + 2), np.uint64)
    scores = np.empty((n_best, 3))
    ends = np.zeros(n_best + 1, np.int64)
    rows = [np.int64(0)]
    rows.pop()
    n = 0
    while n < n_best and ways and n_tries > 0:
        n_tries -= 1
        minus, at, link, lm, bonus, identity = heapq.heappop(ways)
        while at >= 0:
            row = log[at]
            if row.word >= 0:
                links.append((at, link))
                link = np.int64(len(links) - 1)
                identity = mix(identity, np.uint64(row.word + 1))
            else:
                other = np.int64(row.other)
                other_lm, other_bonus = 0.0, 0.0
                if other >= 0:
                    other_lm, other_bonus = log[other].lm, log[other].bonus
                heapq.heappush(
                    ways,
                    (
                        minus + np.float64(row.loss),
                        other,
                        link,
                        lm + other_lm - row.lm,
                        bonus + other_bonus - row.bonus,
                        identity,
                    ),
                )
            at = np.int64(row.before)
        if not remember(seen, identity):
            continue
        scores[n, 0], scores[n, 1], scores[n, 2] = -minus, lm, bonus
        while link >= 0:
            rows.append(links[link][0])
            link = links[link][1]
        n += 1
        ends[n] = len(rows)
    return scores[:n], ends[: n + 1], np.array(rows, np.int64)


@njit(cache=True)
def remember(seen: np.ndarray, identity: np.uint64) -> bool:
    """Whether an identity is new to the table; it is in it from then on."""
    identity = max(identity, np.uint64(1))  # nought marks an empty place
    at = np.int64(identity & np.uint64(seen.shape[0] - 1))
    while seen[at]:
        if seen[at] == identity:
            return False
        at = (at + 1) & (seen.shape[0] - 1)
    seen[at] = identity
    return True


@njit(cache=True)
def endings(
    beam: np.ndarray, arrays: NGramArrays, eos: int, lm_weight: float, summing: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Complete readings, each sequence of words once: last rows, totals, n-gram scores with the end, bonuses.

    Words cut off by the end do not count; where no reading is complete, what was complete before them does.
    """
    complete = np.flatnonzero(beam["node"] == 0)
    if not complete.shape[0]:
        complete = np.arange(beam.shape[0])
    complete = complete[np.argsort(beam["identity"][complete])]
    histories = np.empty(complete.shape[0], np.int64)
    totals, lms, bonuses = (
        np.empty(complete.shape[0]),
        np.empty(complete.shape[0]),
        np.empty(complete.shape[0]),
    )
    n, loudest = 0, NEVER
    for k in range(complete.shape[0]):
        token = beam[complete[k]]
        sound = (
            log_add(token.log_blank, token.log_token) if summing else max(token.log_blank, token.log_token)
        )
        if k == 0 or token.identity != beam[complete[k - 1]].identity:
            lms[n] = token.lm + advance(arrays, token.lm_state, eos)[0]
            bonuses[n], totals[n], loudest = token.bonus, NEVER, NEVER
            n += 1
        if sound > loudest:
            histories[n - 1], loudest = token.history, sound
        totals[n - 1] = log_add(totals[n - 1], sound) if summing else max(totals[n - 1], sound)
    for k in range(n):
        totals[k] += lm_weight * lms[k] + bonuses[k]
    return histories[:n], totals[:n], lms[:n], bonuses[:n]


@njit(cache=True)
def read_words(log: np.ndarray, history: int) -> np.ndarray:
    """Rows of the words of one history, first word first, by its best way."""
    n, at = 0, history
    while at >= 0:
        n += log[at].word >= 0
        at = log[at].before
    rows = np.empty(n, np.int64)
    at = history
    while at >= 0:
        if log[at].word >= 0:
            n -= 1
            rows[n] = at
        at = log[at].before
    return rows


@njit(cache=True)
def n_settled(log: np.ndarray, histories: np.ndarray) -> int:
    """How many words from the beginning on all these histories have in common, by their best ways."""
    histories = np.unique(histories)
    first = log["word"][read_words(log, histories[0])]
    n = first.shape[0]
    for k in range(1, histories.shape[0]):
        rows = read_words(log, histories[k])
        n = min(n, rows.shape[0])
        for i in range(n):
            if log[rows[i]].word != first[i]:
                n = i
                break
    return n


@njit(cache=True)
def forget(log: np.ndarray, n_log: int, beam: np.ndarray, new: np.ndarray) -> int:
    """Copy the rows that the beam still leads to into `new`, and point the beam there; how many they are."""
    needed = np.zeros(n_log, np.bool_)
    for i in range(beam.shape[0]):
        if beam[i].history >= 0:
            needed[beam[i].history] = True
    for at in range(n_log - 1, -1, -1):
        if needed[at]:
            if log[at].before >= 0:
                needed[log[at].before] = True
            if log[at].other >= 0:
                needed[log[at].other] = True
    moved = np.full(n_log, -1, np.int32)
    n = 0
    for at in range(n_log):
        if needed[at]:
            new[n] = log[at]
            if log[at].before >= 0:
                new[n].before = moved[log[at].before]
            if log[at].other >= 0:
                new[n].other = moved[log[at].other]
            moved[at] = n
            n += 1
    for i in range(beam.shape[0]):
        if beam[i].history >= 0:
            beam[i].history = moved[beam[i].history]
    return n
