"""The lexicon as a prefix tree, and language-model lookahead over it.

The tree is held in flat arrays. Nodes are numbered breadth first, so the children of node i are the range
`first_children[i]` to `first_children[i + 1]`. Node 0 is the root, where words start and end. An entry is one (word,
pronunciation) pair and belongs to the node where the pronunciation ends; all pronunciations and homophones are kept.

The lookahead is the best n-gram score that the current word can still get, before the word is known. Lookahead over a
lexicon tree (Ortmanns et al. 1996) lets pruning compare hypotheses in the middle of a word. Full bigram lookahead would
need one value per node and context. Here every node stores its best unigram, and only the few bigrams that the model
contains explicitly are added per context: the nodes on the paths to their words form a small subtree, the context's
successor rows, which are computed on first use and cached. For node c after n-gram state s

    lookahead(s, c) = backoffs(s) + max(best explicit bigram below c, backoff(last word) + best unigram below c)

where backoffs(s) is the sum of back-off weights from s down to its last word. It is exact for a bigram model and an
estimate for longer ones; the exact score replaces it when the word ends. The cache is never part of a search state.
"""

from typing import Any, NamedTuple

import numpy as np

from arcuate.language.jit import njit
from arcuate.language.ngram.query import (
    MIN_LOG_PROB,
    NGramArrays,
    backoff,
    child_range,
    clamp_log_prob,
    shorter_context,
)

NOT_CACHED = -1  # marks a context whose successor rows are not computed yet
_NO_BIGRAMS = -2  # marks a context without explicit bigrams


class Tree(NamedTuple):
    """Prefix tree of n nodes with m entries of w words, in the form that the compiled search uses."""

    first_children: np.ndarray  # (n + 1,) int32
    parents: np.ndarray  # (n,) int32
    tokens: np.ndarray  # (n,) int16, token on the arc into the node; -1 at the root
    first_entries: np.ndarray  # (n + 1,) int32, entries of node i: first_entries[i] to first_entries[i + 1]
    entry_words: np.ndarray  # (m,) int32, lexicon index of the word
    entry_nodes: np.ndarray  # (m,) int32
    lm_words: np.ndarray  # (w,) int32, n-gram word id of each lexicon word
    word_bonuses: np.ndarray  # (w,) float32, score added to a word beyond the n-gram (hot words)


def build_tree(
    words: np.ndarray,  # (m,) word of each entry
    tokens: np.ndarray,  # all pronunciations, concatenated
    offsets: np.ndarray,  # (m + 1,)
    lm_words: np.ndarray,
    word_bonuses: np.ndarray,
) -> Tree:
    """Build the prefix tree of all entries. Pronunciations must not be empty."""
    lengths = np.diff(offsets)
    longest = int(lengths.max())
    grid = np.full((len(lengths), longest), -1, np.int16)  # (m, longest), padded with -1, which sorts first
    grid[np.arange(longest) < lengths[:, None]] = tokens
    order = np.lexsort((words, *grid.T[::-1]))
    first_children, parents, node_tokens, end_nodes = _build_levels(grid[order])
    by_node = np.argsort(end_nodes, kind="stable")
    entry_nodes = end_nodes[by_node].astype(np.int32)
    return Tree(
        first_children=first_children,
        parents=parents,
        tokens=node_tokens,
        first_entries=np.searchsorted(entry_nodes, np.arange(len(node_tokens) + 1)).astype(np.int32),
        entry_words=np.asarray(words, np.int32)[order][by_node],
        entry_nodes=entry_nodes,
        lm_words=np.ascontiguousarray(lm_words, np.int32),
        word_bonuses=np.ascontiguousarray(word_bonuses, np.float32),
    )


def _build_levels(grid: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Create the nodes level by level from sorted rows: a new node wherever a row differs from the previous one."""
    n_rows, longest = grid.shape
    row_nodes = np.zeros(n_rows, np.int64)  # node of each row at the level above
    end_nodes = np.zeros(n_rows, np.int64)
    parents, tokens = [np.array([-1], np.int32)], [np.array([-1], np.int16)]
    n_nodes = 1
    for level in range(longest):
        column = grid[:, level]
        alive = np.flatnonzero(column >= 0)
        new = np.ones(len(alive), bool)
        new[1:] = (row_nodes[alive][1:] != row_nodes[alive][:-1]) | (column[alive][1:] != column[alive][:-1])
        parents.append(row_nodes[alive][new].astype(np.int32))
        tokens.append(column[alive][new])
        row_nodes[alive] = n_nodes + np.cumsum(new) - 1
        end_nodes[alive] = row_nodes[alive]
        n_nodes += int(new.sum())
    all_parents, all_tokens = np.concatenate(parents), np.concatenate(tokens)
    first_children = (1 + np.searchsorted(all_parents[1:], np.arange(n_nodes + 1))).astype(np.int32)
    return first_children, all_parents, all_tokens, end_nodes


@njit(cache=True)
def _max_below(tree: Tree, word_scores: np.ndarray) -> np.ndarray:
    """Best score of any word at or below each node (n,): language-model smearing. `word_scores` is (w,).

    Children have higher numbers than their parents, so one backward pass is enough: O(n + m).
    """
    best = np.full(tree.tokens.shape[0], -np.inf, np.float32)
    for entry in range(tree.entry_words.shape[0]):
        node = tree.entry_nodes[entry]
        best[node] = max(best[node], word_scores[tree.entry_words[entry]])
    for node in range(best.shape[0] - 1, 0, -1):
        parent = tree.parents[node]
        best[parent] = max(best[parent], best[node])
    return best


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
    lm_word_offsets: np.ndarray  # (n_lm_words + 1,) int32, first entry of each n-gram word in the two arrays below
    sorted_bonuses: np.ndarray  # (m,) float32, word bonus / LM weight of each entry, sorted by n-gram word
    sorted_nodes: np.ndarray  # (m,) int32, tree node where the entry ends, in the same order


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
        best_unigrams=_max_below(tree, unigrams + bonuses),
        best_next=np.empty(n_contexts, np.float32),
        roots=np.full(n_contexts, NOT_CACHED, np.int32),
        row_nodes=np.empty(capacity, np.int32),
        row_scores=np.empty(capacity, np.float32),
        row_children=np.empty(capacity, np.int32),
        n_rows=np.zeros(1, np.int64),
        scratch=np.full(len(tree.tokens), -np.inf, np.float32),
        lm_word_offsets=np.searchsorted(entry_lm_words[order], np.arange(n_lm_words + 1)).astype(np.int32),
        sorted_bonuses=bonuses[tree.entry_words[order]],
        sorted_nodes=tree.entry_nodes[order],
    )
    _fill_best_next(lookahead, arrays)
    return lookahead


def grow_cache(lookahead: Lookahead) -> Lookahead:
    """Return the same tables with twice the cache capacity."""
    return _resize_cache(lookahead, 2 * len(lookahead.row_nodes))


def _resize_cache(lookahead: Lookahead, capacity: int) -> Lookahead:
    """Copy the rows in use; memory of unused rows is not touched."""
    n, resized = int(lookahead.n_rows[0]), {}
    for name in ("row_nodes", "row_scores", "row_children"):
        rows = getattr(lookahead, name)
        resized[name] = np.empty(capacity, rows.dtype)
        resized[name][:n] = rows[:n]
    return lookahead._replace(**resized)


@njit(cache=True)
def _fill_best_next(lookahead: Lookahead, arrays: NGramArrays) -> None:
    for context in range(lookahead.best_next.shape[0]):
        best = backoff(arrays, context) + lookahead.best_unigrams[0]
        if context > 0:
            low, end = child_range(arrays, context)
            for at in range(low, end):
                first, last = _entries_of(lookahead, arrays.words[at])
                for entry in range(first, last):
                    best = max(best, clamp_log_prob(arrays.log_probs[at]) + lookahead.sorted_bonuses[entry])
        lookahead.best_next[context] = best


@njit(cache=True, inline="always")
def _entries_of(lookahead: Lookahead, word: int) -> tuple[Any, Any]:
    """Range of the lexicon entries of an n-gram word; empty for ids outside the vocabulary."""
    if 0 <= word < lookahead.lm_word_offsets.shape[0] - 1:
        return lookahead.lm_word_offsets[word], lookahead.lm_word_offsets[word + 1]
    return 0, 0


@njit(cache=True)
def bigram_context(lookahead: Lookahead, arrays: NGramArrays, state: int) -> tuple[int, float]:
    """Reduce an n-gram state to its last word; return that context and the sum of the back-offs."""
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
    """Cache the successor rows of the most probable contexts, up to `max_rows` rows.

    If some are left out, spare capacity is added, else the capacity is cut to what is in use.
    """
    n_contexts = len(lookahead.roots)
    order = np.argsort(-arrays.log_probs[:n_contexts], kind="stable")
    done = 0
    while done < n_contexts and lookahead.n_rows[0] <= max_rows:
        done = _cache_contexts(lookahead, arrays, tree, order, done, max_rows)
        if done < n_contexts and lookahead.n_rows[0] <= max_rows:
            lookahead = grow_cache(lookahead)
    if done == n_contexts:
        return _resize_cache(lookahead, max(1, int(lookahead.n_rows[0])))
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
            score = np.float32(clamp_log_prob(arrays.log_probs[at]) + lookahead.sorted_bonuses[entry])
            node = lookahead.sorted_nodes[entry]
            # If this node has a score at least as high, so have all its ancestors.
            while node >= 0 and lookahead.scratch[node] < score:
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
