"""From the candidates of a frame to the next beam: prune by score and by number, make equals one, log the words."""

import numpy as np
from numba import njit

from arcuate.decode.borrow import borrow
from arcuate.decode.logs import NEVER, Row, mix
from arcuate.decode.lookahead import UNBUILT, context_of, row_of, sprout
from arcuate.decode.word_beam import Models, Pool, Weights, borrow_models, borrow_pool
from arcuate.decode.word_frame import either, spread
from arcuate.lm.query import backoff

DONE, POOL_FULL, LOG_FULL, SPROUTS_FULL = 0, 1, 2, 3
N_BINS = 512


@njit(cache=True)
def run_frames(
    frames: np.ndarray,  # (F, V) float32, as weighed
    beam: np.ndarray,  # (n,) TOKEN
    t0: int,  # number of the first frame
    log: np.ndarray,  # (room,) RECORD, appended to
    n_log: int,
    models: Models,
    weights: Weights,
    pool: Pool,
) -> tuple[np.ndarray, int, int, int]:
    """The beam after the frames, rows in the log, how many frames are done, and why not more.

    A frame that found too little room leaves no trace: make room and go on with it.
    """
    models, pool, log = borrow_models(models), borrow_pool(pool), borrow(log)
    for t in range(frames.shape[0]):
        pool.n[:] = 0
        pool.slots[:] = -1
        spread(borrow(beam), borrow(frames[t]), t0 + t, models, weights, pool)
        if pool.n[1]:
            return beam, n_log, t, POOL_FULL
        if n_log + 3 * pool.n[0] > log.shape[0]:
            return beam, n_log, t, LOG_FULL
        kept = choose(pool, weights)
        if not prepare(pool, kept, models):
            return beam, n_log, t, SPROUTS_FULL
        beam, n_log = rebuild(pool, kept, t0 + t, log, n_log, models, weights)
    return beam, n_log, frames.shape[0], DONE


@njit(cache=True)
def choose(pool: Pool, weights: Weights) -> np.ndarray:
    """Candidates that go on, in the order they were found."""
    n, best = pool.n[0], NEVER
    for i in range(n):
        token = pool.tokens[i]
        pool.priors[i] += either(token.log_blank, token.log_token, weights)
        pool.chains[i] = -1
        best = max(best, pool.priors[i])
    kept = np.empty(n, np.int32)
    m = 0
    for i in range(n):
        if pool.priors[i] >= best - weights.threshold and pool.priors[i] > NEVER:
            kept[m] = i
            m += 1
    kept = kept[:m]
    if weights.merging:
        kept = merge(pool, kept)
    if kept.shape[0] > weights.width:
        kept = cut(pool, kept, best, weights.width)
    return kept


@njit(cache=True)
def merge(pool: Pool, kept: np.ndarray) -> np.ndarray:
    """Of readings with the same future the best stays; the others hang on its chain."""
    slots, mask = pool.slots, pool.slots.shape[0] - 1
    slots[:] = -1
    winners = np.empty_like(kept)
    m = 0
    for k in range(kept.shape[0]):
        i = kept[k]
        at = np.int64(future_of(pool.tokens[i]) & np.uint64(mask))
        while slots[at] >= 0 and not same_future(pool.tokens[winners[slots[at]]], pool.tokens[i]):
            at = (at + 1) & mask
        if slots[at] < 0:
            slots[at] = m
            winners[m] = i
            m += 1
            continue
        rival = winners[slots[at]]
        if pool.priors[i] > pool.priors[rival]:
            winners[slots[at]] = i
            pool.chains[i] = rival
        else:
            pool.chains[i] = pool.chains[rival]
            pool.chains[rival] = i
    return winners[:m]


@njit(cache=True)
def future_of(token: Row) -> np.uint64:
    return mix(
        np.uint64(token.lm_state), (np.uint64(token.node) << np.uint64(16)) | np.uint64(token.last + 1)
    )


@njit(cache=True)
def same_future(a: Row, b: Row) -> bool:
    return a.node == b.node and a.lm_state == b.lm_state and a.last == b.last


@njit(cache=True)
def cut(pool: Pool, kept: np.ndarray, best: float, width: int) -> np.ndarray:
    """The `width` best of the kept, found with a histogram instead of a sort."""
    worst = best
    for k in range(kept.shape[0]):
        worst = min(worst, pool.priors[kept[k]])
    scale = (N_BINS - 1) / max(best - worst, 1e-9)
    counts = np.zeros(N_BINS, np.int64)
    for k in range(kept.shape[0]):
        counts[np.int64((best - pool.priors[kept[k]]) * scale)] += 1
    edge, n_above = 0, 0
    while n_above + counts[edge] <= width:
        n_above += counts[edge]
        edge += 1
    within = np.empty(counts[edge])
    m = 0
    for k in range(kept.shape[0]):
        if np.int64((best - pool.priors[kept[k]]) * scale) == edge:
            within[m] = pool.priors[kept[k]]
            m += 1
    within.sort()
    room = width - n_above  # places left for the bin at the edge, taken by its best
    least = within[m - room] if room else np.inf
    n_ties = room
    for k in range(m):
        n_ties -= within[k] > least
    out = np.empty(width, np.int32)
    m = 0
    for k in range(kept.shape[0]):
        rank = pool.priors[kept[k]]
        b = np.int64((best - rank) * scale)
        tied = b == edge and rank == least and n_ties > 0
        if b < edge or (b == edge and rank > least) or tied:
            n_ties -= tied
            out[m] = kept[k]
            m += 1
    return out[:m]


@njit(cache=True)
def prepare(pool: Pool, kept: np.ndarray, models: Models) -> bool:
    """Sprouts for the words that have just ended; False where there is no room for one."""
    for k in range(kept.shape[0]):
        token = pool.tokens[kept[k]]
        if token.word >= 0:
            context, _ = context_of(models.ahead, models.arrays, token.lm_state)
            if models.ahead.heads[context] == UNBUILT and not sprout(
                models.ahead, models.arrays, models.tree, context
            ):
                return False
            token.row = max(models.ahead.heads[context], -1)
    return True


@njit(cache=True)
def rebuild(
    pool: Pool, kept: np.ndarray, t: int, log: np.ndarray, n_log: int, models: Models, weights: Weights
) -> tuple[np.ndarray, int]:
    """The next beam; words that ended and histories that became one go into the log."""
    beam = np.empty(kept.shape[0], pool.tokens.dtype)
    for k in range(kept.shape[0]):
        i = kept[k]
        n_log = write_word(pool.tokens[i], t, log, n_log)
        other = pool.chains[i]
        while other >= 0:
            n_log = write_word(pool.tokens[other], t, log, n_log)
            n_log = write_merge(pool, i, other, log, n_log)
            other = pool.chains[other]
        beam[k] = pool.tokens[i]
    return beam, n_log


@njit(cache=True)
def write_word(token: Row, t: int, log: np.ndarray, n_log: int) -> int:
    if token.word < 0:
        return n_log
    row = log[n_log]
    row.lm, row.bonus = token.lm, token.bonus
    row.before, row.other, row.loss = token.history, -1, 0.0
    row.word, row.first, row.last = token.word, token.first, t
    token.history, token.word = n_log, -1
    return n_log + 1


@njit(cache=True)
def write_merge(pool: Pool, i: int, other: int, log: np.ndarray, n_log: int) -> int:
    token, row = pool.tokens[i], log[n_log]
    row.lm, row.bonus = token.lm, token.bonus
    row.before, row.other = token.history, pool.tokens[other].history
    row.loss = pool.priors[i] - pool.priors[other]
    row.word, row.first, row.last = -1, -1, -1
    token.history = n_log
    return n_log + 1


@njit(cache=True)
def relocate(beam: np.ndarray, models: Models) -> bool:
    """Look-ahead of every reading from the sprouts as they are now; False where there is no room for one."""
    ahead = models.ahead
    for i in range(beam.shape[0]):
        token = beam[i]
        context, base = context_of(ahead, models.arrays, token.lm_state)
        if ahead.heads[context] == UNBUILT and not sprout(ahead, models.arrays, models.tree, context):
            return False
        token.row = row_of(ahead, models.tree, context, token.node)
        token.base, token.floor = base, base + backoff(models.arrays, context)
        if token.node == 0:
            token.ahead = base + ahead.roots[context]
    return True
