"""The lexicon as a prefix tree over tokens, in flat arrays.

Nodes are numbered breadth first, so the children of node i are the range `first_children[i]` to
`first_children[i + 1]`. Node 0 is the root, where words start and end. All pronunciations and all homophones are kept:
an entry is one (word, pronunciation) pair and belongs to the node where the pronunciation ends.
"""

from typing import NamedTuple

import numpy as np
from numba import njit


class Tree(NamedTuple):
    """Prefix tree of n nodes with m entries of w words, as the compiled search sees it."""

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
def max_below(tree: Tree, word_scores: np.ndarray) -> np.ndarray:
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
