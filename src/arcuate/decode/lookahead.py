"""Looking ahead: the best a word at or below a tree node can get from the n-gram, known before the word is.

Every node has the best unigram below it. For the last word of a history the bigrams that the model has are sharper,
and few: they are laid out as a small tree of their own (a "sprout") the first time the word ends a history. The value
of node c after history s is then

    base(s) + max(best explicit bigram below c, back-off(last word) + best unigram below c)

where base(s) are the back-offs from s down to its last word. Sprouts are a memo, never part of a state.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from arcuate.decode.tree import Tree
from arcuate.lm.query import NGramArrays, shorter


class Ahead(NamedTuple):
    """All that looking ahead needs. Row p of the sprouts: tree node, value, and its first child row."""

    unigrams: np.ndarray  # (n_nodes,) float32, best unigram at or below each node
    roots: np.ndarray  # (n_contexts,) float32, best value of any word after each one-word history
    heads: np.ndarray  # (n_contexts,) int32, first row of the sprout of a history; -1 not laid out, -2 empty
    nodes: np.ndarray  # (room,) int32
    values: np.ndarray  # (room,) float32
    children: np.ndarray  # (room,) int32
    used: np.ndarray  # (1,) int64, rows in use
    marks: np.ndarray  # (n_nodes,) float32, scratch: all -inf between calls
    word_firsts: np.ndarray  # (n_lm_words + 1,) int32: entries of the lexicon by word of the n-gram
    word_entries: np.ndarray  # (m,) int32
