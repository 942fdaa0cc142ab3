"""Looking ahead: the best a word at or below a tree node can get from the n-gram, known before the word is.

Every node has the best unigram below it. For the last word of a history the bigrams that the model has are sharper,
and few: they are laid out as a small tree of their own (a "sprout") the first time the word ends a history. The value
of node c after history s is then

    base(s) + max(best explicit bigram below c, back-off(last word) + best unigram below c)

where base(s) are the back-offs from s down to its last word. Sprouts are a memo and never part of a state.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from arcuate.decoding.word_search.tree import Tree, smear
from arcuate.language.ngram.query import LEAST, NGramArrays, backoff, price, shorter, span

UNBUILT, EMPTY = -1, -2


class Ahead(NamedTuple):
    """All that looking ahead needs. A context is a history of one word, by its number in the n-gram; 0 is none.

    Row p of the sprouts: a tree node, its value, and its first child row (the next row's is where they end). The rows
    of one sprout are in order of their nodes; its first row is the root.
    """

    unigrams: np.ndarray  # (n_nodes,) float32, best unigram at or below each node
    roots: np.ndarray  # (n_contexts,) float32, best value of any word after each context
    heads: np.ndarray  # (n_contexts,) int32, first row of a context's sprout, or UNBUILT or EMPTY
    nodes: np.ndarray  # (room,) int32
    values: np.ndarray  # (room,) float32
    children: np.ndarray  # (room,) int32
    used: np.ndarray  # (1,) int64, rows in use
    marks: np.ndarray  # (n_nodes,) float32, scratch: all -inf between calls
    extras: np.ndarray  # (m,) float32, by entry: what the word weighs beyond the n-gram, in its units
    entry_firsts: np.ndarray  # (n_lm_words + 1,) int32, entries by word of the n-gram
    entry_nodes: np.ndarray  # (m,) int32, where each entry ends in the tree


def look_ahead(
    tree: Tree, arrays: NGramArrays, n_lm_words: int, lm_weight: float, room: int = 1 << 18
) -> Ahead:
    """The tables for one lexicon and one n-gram, with room for some sprouts to begin with."""
    with np.errstate(over="ignore"):
        extras = tree.weights / np.float32(lm_weight) if lm_weight > 0 else np.zeros_like(tree.weights)
    extras = np.clip(extras, LEAST, -LEAST)
    unigrams = np.nan_to_num(arrays.log_probs[1 + tree.lm_words], nan=LEAST).clip(LEAST, 0.0)
    said = tree.lm_words[tree.entry_words]  # (m,)
    order = np.argsort(said, kind="stable")
    n_contexts = min(n_lm_words + 1, len(arrays.backoffs))
    ahead = Ahead(
        unigrams=smear(tree, unigrams + extras),
        roots=np.empty(n_contexts, np.float32),
        heads=np.full(n_contexts, UNBUILT, np.int32),
        nodes=np.empty(room, np.int32),
        values=np.empty(room, np.float32),
        children=np.empty(room, np.int32),
        used=np.zeros(1, np.int64),
        marks=np.full(len(tree.tokens), -np.inf, np.float32),
        extras=extras[tree.entry_words[order]],
        entry_firsts=np.searchsorted(said[order], np.arange(n_lm_words + 1)).astype(np.int32),
        entry_nodes=tree.entry_nodes[order],
    )
    best_next(ahead, arrays)
    return ahead


def with_room(ahead: Ahead) -> Ahead:
    """The same tables with twice the room for sprouts."""
    longer = {
        name: np.concatenate([getattr(ahead, name), np.empty_like(getattr(ahead, name))])
        for name in ("nodes", "values", "children")
    }
    return ahead._replace(**longer)


@njit(cache=True)
def best_next(ahead: Ahead, arrays: NGramArrays) -> None:
    """Fill `roots`."""
    for context in range(ahead.roots.shape[0]):
        best = backoff(arrays, context) + ahead.unigrams[0]
        if context > 0:
            low, end = span(arrays, context)
            for at in range(low, end):
                first, last = entries_of(ahead, arrays.words[at])
                for entry in range(first, last):
                    best = max(best, price(arrays.log_probs[at]) + ahead.extras[entry])
        ahead.roots[context] = best


@njit(cache=True, inline="always")
def entries_of(ahead: Ahead, word: int) -> tuple[Any, Any]:
    """Where the lexicon's entries of a word begin and end; none for a word that there is not."""
    if 0 <= word < ahead.entry_firsts.shape[0] - 1:
        return ahead.entry_firsts[word], ahead.entry_firsts[word + 1]
    return 0, 0


@njit(cache=True)
def context_of(ahead: Ahead, arrays: NGramArrays, state: int) -> tuple[int, float]:
    """The last word of a history as a context, and the back-offs on the way down to it."""
    base = 0.0
    while state >= ahead.heads.shape[0]:
        base += backoff(arrays, state)
        state = shorter(arrays, state)
    return state, base


@njit(cache=True)
def sprout(ahead: Ahead, arrays: NGramArrays, tree: Tree, context: int) -> bool:
    """Lay out the sprout of a context; False where there is no room for it yet."""
    if context == 0 or arrays.firsts[context] == arrays.firsts[context + 1]:
        ahead.heads[context] = EMPTY
        return True
    first = ahead.used[0]
    n = mark(ahead, arrays, tree, context, first)
    if n < 0:
        return False
    rows = ahead.nodes[first : first + n]
    rows.sort()
    at = first + 1
    for p in range(first, first + n):
        ahead.values[p] = ahead.marks[ahead.nodes[p]]
        ahead.children[p] = at
        while at < first + n and tree.parents[ahead.nodes[at]] == ahead.nodes[p]:
            at += 1
    for p in range(first, first + n):
        ahead.marks[ahead.nodes[p]] = -np.inf
    if n:
        ahead.children[first + n] = at
        ahead.used[0] = first + n + 1
    ahead.heads[context] = first if n else EMPTY
    return True


def sprout_all(ahead: Ahead, arrays: NGramArrays, tree: Tree, max_rows: int) -> Ahead:
    """The same tables with the sprouts of the likeliest contexts laid out, as many as `max_rows` hold; room is left."""
    n_contexts = len(ahead.heads)
    order = np.argsort(-arrays.log_probs[:n_contexts], kind="stable")
    done = 0
    while done < n_contexts and ahead.used[0] <= max_rows:
        done = sprout_some(ahead, arrays, tree, order, done, max_rows)
        if done < n_contexts and ahead.used[0] <= max_rows:
            ahead = with_room(ahead)
    return with_room(ahead) if 2 * ahead.used[0] > len(ahead.nodes) else ahead


@njit(cache=True)
def sprout_some(
    ahead: Ahead, arrays: NGramArrays, tree: Tree, order: np.ndarray, done: int, max_rows: int
) -> int:
    """Go on laying out sprouts in this order until all are, the room is full or `max_rows` are; how many are done."""
    while done < order.shape[0] and ahead.used[0] <= max_rows:
        context = order[done]
        if ahead.heads[context] == UNBUILT and not sprout(ahead, arrays, tree, context):
            break
        done += 1
    return done


@njit(cache=True)
def mark(ahead: Ahead, arrays: NGramArrays, tree: Tree, context: int, first: int) -> int:
    """Mark every node on the way from the root to a word that follows; the number of nodes, -1 without room."""
    n = 0
    low, end = span(arrays, context)
    for at in range(low, end):
        begin, last = entries_of(ahead, arrays.words[at])
        for entry in range(begin, last):
            value = np.float32(price(arrays.log_probs[at]) + ahead.extras[entry])
            node = ahead.entry_nodes[entry]
            while node >= 0 and ahead.marks[node] < value:
                if ahead.marks[node] == -np.inf:
                    if first + n + 2 > ahead.nodes.shape[0]:
                        for p in range(first, first + n):
                            ahead.marks[ahead.nodes[p]] = -np.inf
                        return -1
                    ahead.nodes[first + n] = node
                    n += 1
                ahead.marks[node] = value
                node = tree.parents[node]
    return n


@njit(cache=True)
def row_of(ahead: Ahead, tree: Tree, context: int, node: int) -> int:
    """The row of a node in the sprout of a context, or -1: down from the root, one ancestor after another."""
    row = ahead.heads[context]
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
        row = child_row(ahead, row, target)
    return max(row, -1)


@njit(cache=True)
def child_row(ahead: Ahead, row: int, node: int) -> int:
    for p in range(ahead.children[row], ahead.children[row + 1]):
        if ahead.nodes[p] == node:
            return p
    return -1
