"""One frame of the word search, compiled: every reading stays, pauses, or takes one step in the lexicon tree."""

import numpy as np
from numba import njit

from arcuate.decoding.backpointers import NEVER, Row, borrow, log_add, mix
from arcuate.decoding.word_search.beam import Memo, Models, Pool, Weights, borrow_models, borrow_pool
from arcuate.decoding.word_search.lookahead import UNBUILT, context_of, row_of, sprout
from arcuate.language.ngram.query import NGramArrays, advance, backoff


@njit(cache=True)
def spread(beam: np.ndarray, logp: np.ndarray, t: int, models: Models, weights: Weights, pool: Pool) -> None:
    """All candidates of a frame that may survive it, into the pool."""
    best = stay(beam, logp, weights, pool)
    loudest = NEVER  # best class but blank
    for c in range(logp.shape[0]):
        if c != weights.blank:
            loudest = max(loudest, logp[c])
    for i in range(beam.shape[0]):
        here = beam[i]
        whole = either(here.log_blank, here.log_token, weights)
        reach = whole + weights.lm * (here.lm + here.ahead) + here.bonus
        if reach + loudest + max(weights.silence, weights.join, 0.0) < best - weights.threshold:
            continue
        if here.node == 0 and weights.boundary >= 0:
            best = pause(here, whole, logp, weights, pool, best)
        best = descend(here, whole, logp, t, models, weights, pool, best)


@njit(cache=True, inline="always")
def either(a: float, b: float, weights: Weights) -> float:
    """Two ways to the same reading: their sum, or the better."""
    return log_add(a, b) if weights.summing else max(a, b)


@njit(cache=True, inline="always")
def stay(beam: np.ndarray, logp: np.ndarray, weights: Weights, pool: Pool) -> float:
    """Readings that remain where they are: a blank, or their last token prolonged. The best rank."""
    best = NEVER
    for i in range(beam.shape[0]):
        here = beam[i]
        at, _ = place(pool, key_of(here.identity, here.node, here.last))
        if at < 0:
            return best
        new = pool.tokens[at]
        pool.tokens[at] = here
        new.log_blank = either(here.log_blank, here.log_token, weights) + logp[weights.blank]
        new.log_token = here.log_token + logp[here.last] if here.last >= 0 else NEVER
        pool.priors[at] = weights.lm * (here.lm + here.ahead) + here.bonus
        best = max(best, pool.priors[at] + max(new.log_blank, new.log_token))
    return best


@njit(cache=True, inline="always")
def pause(here: Row, whole: float, logp: np.ndarray, weights: Weights, pool: Pool, best: float) -> float:
    """A silence between words; a second one only after a blank."""
    before = here.log_blank if here.last == weights.boundary else whole
    sound = before + logp[weights.boundary] + weights.silence
    prior = weights.lm * (here.lm + here.ahead) + here.bonus
    if sound + prior < best - weights.threshold or sound == NEVER:
        return best
    at, fresh = place(pool, key_of(here.identity, 0, weights.boundary))
    if at < 0:
        return best
    new = pool.tokens[at]
    if fresh:
        pool.tokens[at] = here
        new.last, new.log_blank, new.log_token = weights.boundary, NEVER, sound
        pool.priors[at] = prior
    else:
        arrive(new, sound, here.history, -1, here.first, weights)
    return max(best, sound + prior)


@njit(cache=True, inline="always")
def descend(
    here: Row,
    whole: float,
    logp: np.ndarray,
    t: int,
    models: Models,
    weights: Weights,
    pool: Pool,
    best: float,
) -> float:
    """One token further in the tree, with the words that end there."""
    tree, ahead = models.tree, models.ahead
    firsts, tokens, entry_firsts = tree.firsts, tree.tokens, tree.entry_firsts
    nodes, unigrams = ahead.nodes, ahead.unigrams
    prior = weights.lm * here.lm + here.bonus
    if here.node == 0 and here.last >= 0 and here.last != weights.boundary:
        prior += weights.join
    bound = prior + weights.lm * here.ahead
    p = end = 0
    if here.row >= 0:
        p, end = ahead.children[here.row], ahead.children[here.row + 1]
    last, log_blank = here.last, here.log_blank
    for node in range(firsts[here.node], firsts[here.node + 1]):
        token = tokens[node]
        sound = logp[token] + (log_blank if token == last else whole)
        if sound + bound < best - weights.threshold or sound == NEVER:
            continue
        while p < end and nodes[p] < node:
            p += 1
        row, value = -1, here.floor + unigrams[node]
        if p < end and nodes[p] == node:
            row, value = p, max(value, here.base + ahead.values[p])
        if sound + prior + weights.lm * value < best - weights.threshold:
            continue
        if firsts[node] < firsts[node + 1]:
            best = enter(here, node, token, sound, prior, value, row, t, weights, pool, best)
        for entry in range(entry_firsts[node], entry_firsts[node + 1]):
            word = tree.entry_words[entry]
            best = leave(here, word, token, sound + prior, t, models, weights, pool, best)
    return best


@njit(cache=True, inline="always")
def enter(
    here: Row,
    node: int,
    token: int,
    sound: float,
    prior: float,
    value: float,
    row: int,
    t: int,
    weights: Weights,
    pool: Pool,
    best: float,
) -> float:
    """A reading inside a word."""
    joined = prior - weights.lm * here.lm - here.bonus  # what beginning without a silence is worth
    at, fresh = place(pool, key_of(here.identity, node, token))
    if at < 0:
        return best
    new = pool.tokens[at]
    first = t if here.node == 0 else here.first
    if fresh:
        pool.tokens[at] = here
        new.log_blank, new.log_token = NEVER, sound + joined
        new.node, new.last, new.first = node, token, first
        new.row, new.ahead = row, value
        pool.priors[at] = prior - joined + weights.lm * value
    else:
        arrive(new, sound + joined, here.history, -1, first, weights)
    return max(best, sound + prior + weights.lm * value)


@njit(cache=True, inline="always")
def leave(
    here: Row,
    word: int,
    token: int,
    score: float,
    t: int,
    models: Models,
    weights: Weights,
    pool: Pool,
    best: float,
) -> float:
    """A reading whose word has just ended; `score` is all up to here but the word itself."""
    lm, state = ask(models.memo, models.arrays, here.lm_state, models.tree.lm_words[word])
    context, base = context_of(models.ahead, models.arrays, state)
    value = base + models.ahead.roots[context]
    bonus = weights.word + models.tree.weights[word]
    rank = score + weights.lm * (lm + value) + bonus
    if rank < best - weights.threshold:
        return best
    identity = mix(here.identity, np.uint64(word + 1))
    at, fresh = place(pool, key_of(identity, 0, token))
    if at < 0:
        return best
    new = pool.tokens[at]
    sound = score - weights.lm * here.lm - here.bonus
    first = t if here.node == 0 else here.first
    if not fresh:
        arrive(new, sound, here.history, word, first, weights)
        return max(best, rank)
    new.identity, new.log_blank, new.log_token = identity, NEVER, sound
    new.lm, new.bonus, new.lm_state = here.lm + lm, here.bonus + bonus, state
    new.ahead, new.base, new.floor = value, base, base + backoff(models.arrays, context)
    new.node, new.row, new.last = 0, -1, token
    new.history, new.word, new.first = here.history, word, first
    pool.priors[at] = weights.lm * (new.lm + value) + new.bonus
    return max(best, rank)


@njit(cache=True, inline="always")
def arrive(new: Row, sound: float, history: int, word: int, first: int, weights: Weights) -> None:
    """One more way to a candidate that is there already; the better way tells the times of its words."""
    if sound > max(new.log_blank, new.log_token):
        new.history, new.word, new.first = history, word, first
    new.log_token = either(new.log_token, sound, weights)


@njit(cache=True, inline="always")
def ask(memo: Memo, arrays: NGramArrays, state: int, word: int) -> tuple[float, int]:
    """`advance`, from memory where the same was asked lately."""
    key = (np.int64(state) << 32) | np.int64(word)
    at = np.int64(mix(np.uint64(key), np.uint64(0)) & np.uint64(memo.keys.shape[0] - 1))
    if memo.keys[at] != key:
        log_prob, after = advance(arrays, state, word)
        memo.keys[at], memo.log_probs[at], memo.states[at] = key, log_prob, after
    return memo.log_probs[at], memo.states[at]


@njit(cache=True, inline="always")
def key_of(identity: np.uint64, node: int, last: int) -> np.uint64:
    return mix(identity, (np.uint64(node) << np.uint64(16)) | np.uint64(last + 1))


@njit(cache=True, inline="always")
def place(pool: Pool, key: np.uint64) -> tuple[np.int64, bool]:
    """The place of a candidate, and whether it is new there; -1 where the pool is full."""
    mask = pool.slots.shape[0] - 1
    at = np.int64(key & np.uint64(mask))
    while pool.slots[at] >= 0:
        if pool.keys[pool.slots[at]] == key:
            return np.int64(pool.slots[at]), False
        at = (at + 1) & mask
    n = pool.n[0]
    if n == pool.tokens.shape[0]:
        pool.n[1] = 1
        return np.int64(-1), False
    pool.slots[at] = n
    pool.keys[n] = key
    pool.n[0] = n + 1
    return n, True


# From the candidates of a frame to the next beam: prune by score and by number, make equals one, log the words.

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
