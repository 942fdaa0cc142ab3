"""What the word search keeps between frames: the beam, the log of words, and the numbers it weighs them with."""

from typing import NamedTuple

import numpy as np
from numba import njit

from arcuate.decoding.backpointers import borrow
from arcuate.decoding.word_search.lookahead import Ahead
from arcuate.decoding.word_search.tree import Tree
from arcuate.language.ngram.query import NGramArrays

# One reading so far: the words before, and a place in the lexicon tree.
TOKEN = np.dtype(
    [
        ("identity", np.uint64),  # of the words so far
        ("log_blank", np.float64),  # sound: alignments that end in blank
        ("log_token", np.float64),  # sound: alignments that end in the last token
        ("lm", np.float64),  # n-gram score of the words so far, unweighted
        ("bonus", np.float64),  # word bonuses and weights of the words so far
        ("ahead", np.float32),  # the best the n-gram may still give from here, unweighted
        ("base", np.float32),  # back-offs down to the last word
        ("floor", np.float32),  # the same and the last word's own: for words without a bigram
        ("lm_state", np.int32),
        ("node", np.int32),  # in the tree; 0 between words
        ("row", np.int32),  # in the sprout of the last word; -1 where no bigram leads
        ("history", np.int32),  # row of the log, -1 before the first word
        ("word", np.int32),  # a word that just ended and is not in the log yet, or -1
        ("first", np.int32),  # frame of the first token of the word that is being read, or that just ended
        ("last", np.int32),  # last token, -1 before the first
    ],
    align=True,
)

# One row of the log: a word after a history (word >= 0), or two histories that became one (word < 0).
RECORD = np.dtype(
    [
        ("lm", np.float64),  # up to here
        ("bonus", np.float64),  # up to here
        ("before", np.int32),  # the row before; where two became one, that of the better
        ("other", np.int32),  # where two became one: the worse, and by how much
        ("loss", np.float32),
        ("word", np.int32),
        ("first", np.int32),  # frames of the word's first and last token
        ("last", np.int32),
    ],
    align=True,
)


class Weights(NamedTuple):
    """The settings as the compiled search sees them."""

    lm: float
    word: float  # per word
    silence: float  # per silence
    join: float  # per word that begins without a silence before it
    threshold: float  # keep what is at most this much worse than the best
    width: int  # keep at most so many
    blank: int  # class indices
    boundary: int  # -1: no class for silence
    summing: bool  # sum over alignments; False: the best one
    merging: bool  # histories that the n-gram cannot tell apart become one


class Memo(NamedTuple):
    """Answers of the n-gram that were asked before; a fixed number of places, the newest stays."""

    keys: np.ndarray  # (power of two,) int64, state and word
    log_probs: np.ndarray  # float32
    states: np.ndarray  # int32


class Models(NamedTuple):
    """Everything that stays the same over a trial."""

    tree: Tree
    arrays: NGramArrays
    ahead: Ahead
    memo: Memo


class Pool(NamedTuple):
    """Candidates of one frame, found by identity."""

    tokens: np.ndarray  # (room,) TOKEN
    keys: np.ndarray  # (room,) uint64
    priors: np.ndarray  # (room,) float64, all of a candidate's rank but its sound; then the rank itself
    slots: np.ndarray  # (power of two,) int32, candidate or -1
    n: np.ndarray  # (2,) int64, how many, and whether there were more than fit
    chains: np.ndarray  # (room,) int32, scratch: the next of those that became one with a better one


@njit(cache=True, inline="always")
def borrow_models(models: Models) -> Models:
    """The same models for an inner loop; the caller goes on to own them."""
    tree, arrays, ahead, memo = models.tree, models.arrays, models.ahead, models.memo
    return Models(
        Tree(
            borrow(tree.firsts),
            borrow(tree.parents),
            borrow(tree.tokens),
            borrow(tree.entry_firsts),
            borrow(tree.entry_words),
            borrow(tree.entry_nodes),
            borrow(tree.lm_words),
            borrow(tree.weights),
        ),
        NGramArrays(
            borrow(arrays.words),
            borrow(arrays.log_probs),
            borrow(arrays.backoffs),
            borrow(arrays.firsts),
            borrow(arrays.suffixes),
            borrow(arrays.nexts),
        ),
        Ahead(
            borrow(ahead.unigrams),
            borrow(ahead.roots),
            borrow(ahead.heads),
            borrow(ahead.nodes),
            borrow(ahead.values),
            borrow(ahead.children),
            borrow(ahead.used),
            borrow(ahead.marks),
            borrow(ahead.extras),
            borrow(ahead.entry_firsts),
            borrow(ahead.entry_nodes),
        ),
        Memo(
            borrow(memo.keys),
            borrow(memo.log_probs),
            borrow(memo.states),
        ),
    )


@njit(cache=True, inline="always")
def borrow_pool(pool: Pool) -> Pool:
    return Pool(
        borrow(pool.tokens),
        borrow(pool.keys),
        borrow(pool.priors),
        borrow(pool.slots),
        borrow(pool.n),
        borrow(pool.chains),
    )
