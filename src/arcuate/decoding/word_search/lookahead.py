"""Language-model lookahead: the best n-gram score that the current word can still get, before the word is known.

Lookahead over a lexicon tree (Ortmanns et al. 1996) lets pruning compare hypotheses in the middle of a word. Full
bigram lookahead would need one value per node and context. Here every node stores its best unigram, and only the few
bigrams that the model contains explicitly are added per context: the nodes on the paths to their words form a small
subtree, the context's successor rows, which are computed on first use and cached. For node c after n-gram state s

    lookahead(s, c) = backoffs(s) + max(best explicit bigram below c, backoff(last word) + best unigram below c)

where backoffs(s) is the sum of back-off weights from s down to its last word. It is exact for a bigram
model and an estimate for longer ones; the exact score replaces it when the word ends. The cache is never part of a
search state.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from arcuate.decoding.word_search.tree import Tree, max_below
from arcuate.language.ngram.query import (
    MIN_LOG_PROB,
    NGramArrays,
    backoff,
    child_range,
    clamp_log_prob,
    shorter_context,
)

NOT_CACHED = -1  # of a context: its successor rows are not computed yet
_NO_BIGRAMS = -2  # of a context: it has no explicit bigrams


class Lookahead(NamedTuple):
    """Lookahead tables. A context is a history of one word: 1 + its n-gram word id; 0 is the empty context.

    Row p of the cache is a tree node, its score and its first child row; children end where those of the next row
    start. The rows of one context are sorted by node, and the first one is the root.
    """

    best_unigrams: np.ndarray  # (n_nodes,) float32, best unigram at or below each node
    best_next: np.ndarray  # (n_contexts,) float32, best score of any next word
    roots: np.ndarray  # (n_contexts,) int32, first row of the context, or NOT_CACHED or _NO_BIGRAMS
    row_nodes: np.ndarray  # (capacity,) int32
    row_scores: np.ndarray  # (capacity,) float32
    row_children: np.ndarray  # (capacity,) int32
    n_rows: np.ndarray  # (1,) int64, rows in use
    scratch: np.ndarray  # (n_nodes,) float32, all -inf between calls
    entry_bonuses: np.ndarray  # (m,) float32, word bonus of each entry divided by the LM weight
    first_entries: np.ndarray  # (n_lm_words + 1,) int32, entries by n-gram word
    entry_nodes: np.ndarray  # (m,) int32, tree node where the entry ends


def make_lookahead(
    tree: Tree, arrays: NGramArrays, n_lm_words: int, lm_weight: float, capacity: int = 1 << 18
) -> Lookahead:
    """Compute the tables of one lexicon and one n-gram, with an empty cache."""
    with np.errstate(over="ignore"):
        bonuses = tree.word_bonuses / np.float32(lm_weight) if lm_weight > 0 else np.zeros_like(tree.word_bonuses)
    bonuses = np.clip(bonuses, MIN_LOG_PROB, -MIN_LOG_PROB)
    unigrams = np.nan_to_num(arrays.log_probs[1 + tree.lm_words], nan=MIN_LOG_PROB).clip(MIN_LOG_PROB, 0.0)
    entry_lm_words = tree.lm_words[tree.entry_words]  # (m,)
    order = np.argsort(entry_lm_words, kind="stable")
    n_contexts = min(n_lm_words + 1, len(arrays.backoffs))
    lookahead = Lookahead(
        best_unigrams=max_below(tree, unigrams + bonuses),
        best_next=np.empty(n_contexts, np.float32),
        roots=np.full(n_contexts, NOT_CACHED, np.int32),
        row_nodes=np.empty(capacity, np.int32),
        row_scores=np.empty(capacity, np.float32),
        row_children=np.empty(capacity, np.int32),
        n_rows=np.zeros(1, np.int64),
        scratch=np.full(len(tree.tokens), -np.inf, np.float32),
        entry_bonuses=bonuses[tree.entry_words[order]],
        first_entries=np.searchsorted(entry_lm_words[order], np.arange(n_lm_words + 1)).astype(np.int32),
        entry_nodes=tree.entry_nodes[order],
    )
    _fill_best_next(lookahead, arrays)
    return lookahead


def grow_cache(lookahead: Lookahead) -> Lookahead:
    """Return the same tables with twice the cache capacity."""
    longer = {
        name: np.concatenate([getattr(lookahead, name), np.empty_like(getattr(lookahead, name))])
        for name in ("row_nodes", "row_scores", "row_children")
    }
    return lookahead._replace(**longer)


@njit(cache=True)
def _fill_best_next(lookahead: Lookahead, arrays: NGramArrays) -> None:
    for context in range(lookahead.best_next.shape[0]):
        best = backoff(arrays, context) + lookahead.best_unigrams[0]
        if context > 0:
            low, end = child_range(arrays, context)
            for at in range(low, end):
                first, last = _entries_of(lookahead, arrays.words[at])
                for entry in range(first, last):
                    best = max(best, clamp_log_prob(arrays.log_probs[at]) + lookahead.entry_bonuses[entry])
        lookahead.best_next[context] = best


@njit(cache=True, inline="always")
def _entries_of(lookahead: Lookahead, word: int) -> tuple[Any, Any]:
    """Range of the lexicon entries of an n-gram word; empty for ids outside the vocabulary."""
    if 0 <= word < lookahead.first_entries.shape[0] - 1:
        return lookahead.first_entries[word], lookahead.first_entries[word + 1]
    return 0, 0


@njit(cache=True)
def bigram_context(lookahead: Lookahead, arrays: NGramArrays, state: int) -> tuple[int, float]:
    """Reduce an n-gram state to its last word; return that context and the sum of back-offs on the way."""
    backoffs = 0.0
    while state >= lookahead.roots.shape[0]:
        backoffs += backoff(arrays, state)
        state = shorter_context(arrays, state)
    return state, backoffs


@njit(cache=True)
def cache_successors(lookahead: Lookahead, arrays: NGramArrays, tree: Tree, context: int) -> bool:
    """Compute the successor rows of a context; return False if the cache is full.

    Marks every node on the path from a successor word to the root, sorts the marked nodes and links each to its
    children. O(k log k) for k marked nodes.
    """
    if context == 0 or arrays.firsts[context] == arrays.firsts[context + 1]:
        lookahead.roots[context] = _NO_BIGRAMS
        return True
    first = lookahead.n_rows[0]
    n = _mark_successors(lookahead, arrays, tree, context, first)
    if n < 0:
        return False
    rows = lookahead.row_nodes[first : first + n]
    rows.sort()  # breadth-first numbering: parents come first and siblings are adjacent
    at = first + 1
    for p in range(first, first + n):
        lookahead.row_scores[p] = lookahead.scratch[lookahead.row_nodes[p]]
        lookahead.row_children[p] = at
        while at < first + n and tree.parents[lookahead.row_nodes[at]] == lookahead.row_nodes[p]:
            at += 1
    for p in range(first, first + n):
        lookahead.scratch[lookahead.row_nodes[p]] = -np.inf
    if n:
        lookahead.row_children[first + n] = at  # sentinel: end of the last row's children
        lookahead.n_rows[0] = first + n + 1
    lookahead.roots[context] = first if n else _NO_BIGRAMS
    return True


def cache_likely_contexts(lookahead: Lookahead, arrays: NGramArrays, tree: Tree, max_rows: int) -> Lookahead:
    """Cache the successor rows of the most probable contexts, up to `max_rows` rows, and leave spare capacity."""
    n_contexts = len(lookahead.roots)
    order = np.argsort(-arrays.log_probs[:n_contexts], kind="stable")
    done = 0
    while done < n_contexts and lookahead.n_rows[0] <= max_rows:
        done = _cache_contexts(lookahead, arrays, tree, order, done, max_rows)
        if done < n_contexts and lookahead.n_rows[0] <= max_rows:
            lookahead = grow_cache(lookahead)
    return grow_cache(lookahead) if 2 * lookahead.n_rows[0] > len(lookahead.row_nodes) else lookahead


@njit(cache=True)
def _cache_contexts(
    lookahead: Lookahead, arrays: NGramArrays, tree: Tree, order: np.ndarray, done: int, max_rows: int
) -> int:
    """Cache contexts in this order until all are done, the cache is full or `max_rows` is reached; return the count."""
    while done < order.shape[0] and lookahead.n_rows[0] <= max_rows:
        context = order[done]
        if lookahead.roots[context] == NOT_CACHED and not cache_successors(lookahead, arrays, tree, context):
            break
        done += 1
    return done


@njit(cache=True)
def _mark_successors(lookahead: Lookahead, arrays: NGramArrays, tree: Tree, context: int, first: int) -> int:
    """Write the best bigram below each node into `scratch` and list the nodes; return their number, or -1 if full."""
    n = 0
    low, end = child_range(arrays, context)
    for at in range(low, end):
        begin, last = _entries_of(lookahead, arrays.words[at])
        for entry in range(begin, last):
            score = np.float32(clamp_log_prob(arrays.log_probs[at]) + lookahead.entry_bonuses[entry])
            node = lookahead.entry_nodes[entry]
            while node >= 0 and lookahead.scratch[node] < score:  # above it a better word is marked already
                if lookahead.scratch[node] == -np.inf:
                    if first + n + 2 > lookahead.row_nodes.shape[0]:
                        for p in range(first, first + n):
                            lookahead.scratch[lookahead.row_nodes[p]] = -np.inf
                        return -1
                    lookahead.row_nodes[first + n] = node
                    n += 1
                lookahead.scratch[node] = score
                node = tree.parents[node]
    return n


@njit(cache=True)
def find_row(lookahead: Lookahead, tree: Tree, context: int, node: int) -> int:
    """Row of a node among the successor rows of a context, or -1. Descends from the root."""
    row = lookahead.roots[context]
    depth = 0
    above = node
    while above > 0:
        above, depth = tree.parents[above], depth + 1
    for level in range(depth - 1, -1, -1):
        if row < 0:
            break
        target = node
        for _ in range(level):
            target = tree.parents[target]
        row = _child_row(lookahead, row, target)
    return max(row, -1)


@njit(cache=True)
def _child_row(lookahead: Lookahead, row: int, node: int) -> int:
    for p in range(lookahead.row_children[row], lookahead.row_children[row + 1]):
        if lookahead.row_nodes[p] == node:
            return p
    return -1
