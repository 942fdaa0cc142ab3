"""The lexicon as a prefix tree over tokens, in flat arrays: all pronunciations, all homophones, no limits.

Nodes are numbered breadth first, so the children of a node stand side by side: those of node i are
`firsts[i]` to `firsts[i + 1]`. Node 0 is the root, where words begin and end.
"""

from typing import NamedTuple

import numpy as np
from numba import njit


class Tree(NamedTuple):
    """The tree as compiled code sees it. `entries` are words at nodes, side by side as well."""

    firsts: np.ndarray  # (n + 1,) int32, first child
    parents: np.ndarray  # (n,) int32
    tokens: np.ndarray  # (n,) int16, the token that leads here; -1 at the root
    entry_firsts: np.ndarray  # (n + 1,) int32, first entry of a node
    entry_words: np.ndarray  # (m,) int32, number of the word in the lexicon
    entry_nodes: np.ndarray  # (m,) int32
    lm_words: np.ndarray  # (w,) int32, the word of the n-gram for each word of the lexicon
    weights: np.ndarray  # (w,) float32, what a word is worth beyond the n-gram (hot words)


def grow_tree(
    words: np.ndarray,  # (m,) word of each entry
    tokens: np.ndarray,  # all pronunciations one after another
    offsets: np.ndarray,  # (m + 1,)
    lm_words: np.ndarray,
    weights: np.ndarray,
) -> Tree:
    """The prefix tree of all entries; pronunciations must not be empty."""
    lengths = np.diff(offsets)
    longest = int(lengths.max())
    grid = np.full((len(lengths), longest), -1, np.int16)  # (m, longest), padded with -1, which sorts first
    grid[np.arange(longest) < lengths[:, None]] = tokens
    order = np.lexsort((words, *grid.T[::-1]))
    firsts, parents, node_tokens, ends = grow(grid[order])
    by_node = np.argsort(ends, kind="stable")
    entry_nodes = ends[by_node].astype(np.int32)
    return Tree(
        firsts=firsts,
        parents=parents,
        tokens=node_tokens,
        entry_firsts=np.searchsorted(entry_nodes, np.arange(len(node_tokens) + 1)).astype(np.int32),
        entry_words=np.asarray(words, np.int32)[order][by_node],
        entry_nodes=entry_nodes,
        lm_words=np.ascontiguousarray(lm_words, np.int32),
        weights=np.ascontiguousarray(weights, np.float32),
    )


def grow(grid: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Level by level from sorted rows: a new node wherever a row differs from the one before it so far."""
    n_rows, longest = grid.shape
    at = np.zeros(n_rows, np.int64)  # node of each row at the level above
    ends = np.zeros(n_rows, np.int64)
    parents, tokens = [np.array([-1], np.int32)], [np.array([-1], np.int16)]
    n_nodes = 1
    for level in range(longest):
        column = grid[:, level]
        alive = np.flatnonzero(column >= 0)
        new = np.ones(len(alive), bool)
        new[1:] = (at[alive][1:] != at[alive][:-1]) | (column[alive][1:] != column[alive][:-1])
        parents.append(at[alive][new].astype(np.int32))
        tokens.append(column[alive][new])
        at[alive] = n_nodes + np.cumsum(new) - 1
        ends[alive] = at[alive]
        n_nodes += int(new.sum())
    all_parents, all_tokens = np.concatenate(parents), np.concatenate(tokens)
    firsts = (1 + np.searchsorted(all_parents[1:], np.arange(n_nodes + 1))).astype(np.int32)
    return firsts, all_parents, all_tokens, ends


@njit(cache=True)
def smear(tree: Tree, scores: np.ndarray) -> np.ndarray:
    """For every node the best score of any word at or below it (n,); `scores` by word of the lexicon."""
    best = np.full(tree.tokens.shape[0], -np.inf, np.float32)
    for entry in range(tree.entry_words.shape[0]):
        node = tree.entry_nodes[entry]
        best[node] = max(best[node], scores[tree.entry_words[entry]])
    for node in range(best.shape[0] - 1, 0, -1):
        parent = tree.parents[node]
        best[parent] = max(best[parent], best[node])
    return best
