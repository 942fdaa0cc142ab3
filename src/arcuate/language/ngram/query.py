"""The trie of n-grams as arrays, and the one question a search asks of it.

Nodes are numbered order by order, within an order by context and then by word: 0 is the empty context, node 1 + w the
unigram of word w, and the children of a node stand side by side. n-grams below the longest order are contexts too
("inner": they have a back-off, children and a suffix); those of the longest order only name the state that follows.

A file may say anything: every index read from it is checked before it is used, and a suffix must have a lower
number than its node, and every price lies between LEAST and nought, so a damaged file gives wrong numbers at worst,
never a crash or an endless loop.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

LEAST = -1e30  # nat: what NaN and minus infinity count as; sums of them stay finite
MOST = 228.0  # nat: no back-off counts for more, as 99 in an ARPA file


class NGramArrays(NamedTuple):
    """All of a model that is asked during a search; read-only, usually in a file that processes share."""

    words: np.ndarray  # (n_nodes,) int32, last word of each n-gram; -1 for the empty context
    log_probs: np.ndarray  # (n_nodes,) float32, nat
    backoffs: np.ndarray  # (n_inner,) float32, nat
    firsts: np.ndarray  # (n_inner + 1,) int32, number of the first child; ends where the next node's begin
    suffixes: np.ndarray  # (n_inner,) int32, longest useful context without the first word
    nexts: np.ndarray  # (n_nodes - n_inner,) int32, state after an n-gram of the longest order


@njit(cache=True)
def advance(arrays: NGramArrays, state: int, word: int) -> tuple[float, int]:
    """Log-probability (nat) of a word after a state, and the state after it.

    A state is the longest context that can still matter: one integer, equal for histories with equal futures.
    """
    total = 0.0
    node = state
    while node > 0:
        at = child(arrays, node, word)
        if at >= 0:
            return price(total + arrays.log_probs[at]), state_after(arrays, at)
        total += backoff(arrays, node)
        node = shorter(arrays, node)
    at = 1 + word
    return price(total + arrays.log_probs[at]), state_after(arrays, at)


@njit(cache=True, inline="always")
def price(log_prob: float) -> float:
    """A log-probability whatever the file says: nothing is more than certain, NaN is the worst there is."""
    if log_prob > 0.0:
        return 0.0
    return log_prob if log_prob >= LEAST else LEAST


@njit(cache=True, inline="always")
def backoff(arrays: NGramArrays, node: int) -> float:
    """The back-off of a context; it may be above nought, but not without bounds."""
    value = float(arrays.backoffs[node])
    if value > MOST:
        return MOST
    return value if value >= LEAST else LEAST


@njit(cache=True, inline="always")
def span(arrays: NGramArrays, node: int) -> tuple[int, int]:
    """Where the children of a context begin and end; within the model, whatever the file says."""
    return max(int(arrays.firsts[node]), 0), min(int(arrays.firsts[node + 1]), arrays.words.shape[0])


@njit(cache=True)
def child(arrays: NGramArrays, node: int, word: int) -> int:
    """The n-gram that a word makes of a context, or -1; children are in order of their words."""
    low, end = span(arrays, node)
    high = end
    while low < high:
        middle = (low + high) >> 1
        if arrays.words[middle] < word:
            low = middle + 1
        else:
            high = middle
    if low < end and arrays.words[low] == word:
        return low
    return -1


@njit(cache=True)
def shorter(arrays: NGramArrays, node: int) -> int:
    """The context without its first word; always a lower number, so following it ends."""
    suffix = int(arrays.suffixes[node])
    return suffix if 0 <= suffix < node else 0


@njit(cache=True)
def state_after(arrays: NGramArrays, at: int) -> int:
    """The state that an n-gram leads to: itself, if it is a context that changes anything."""
    n_inner = arrays.backoffs.shape[0]
    if at >= n_inner:
        after = int(arrays.nexts[at - n_inner])
        return after if 0 <= after < n_inner else 0
    if arrays.firsts[at] != arrays.firsts[at + 1] or arrays.backoffs[at] != 0.0:
        return at
    return shorter(arrays, at)


@njit(cache=True)
def score_words(arrays: NGramArrays, state: int, words: np.ndarray, out: np.ndarray) -> int:
    """Log-probabilities of a run of words, one each into `out`; gives the state after the last."""
    for i in range(words.shape[0]):
        out[i], state = advance(arrays, state, words[i])
    return state


@njit(cache=True)
def score_sentences(arrays: NGramArrays, start: int, eos: int, words: np.ndarray, out: np.ndarray) -> None:
    """Log-probability of each word of sentences that follow one another, each ended by `eos`."""
    state = start
    for i in range(words.shape[0]):
        out[i], state = advance(arrays, state, words[i])
        if words[i] == eos:
            state = start


@njit(cache=True)
def conditional(arrays: NGramArrays, ngrams: np.ndarray, out: np.ndarray) -> None:
    """Log-probability of the last word of each n-gram (n, k) after the words before it."""
    for i in range(ngrams.shape[0]):
        state, log_prob = 0, 0.0
        for j in range(ngrams.shape[1]):
            log_prob, state = advance(arrays, state, ngrams[i, j])
        out[i] = log_prob
