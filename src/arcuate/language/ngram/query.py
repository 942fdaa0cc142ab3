"""Compiled queries of a back-off n-gram model stored as a trie in flat arrays.

Nodes are numbered order by order, and within an order by context and then by word: node 0 is the empty context, node
1 + w is the unigram of word w, and the children of a node are consecutive and sorted by word. n-grams below the longest
order are contexts too ("inner" nodes: they have a back-off weight, children and a suffix link); those of the longest
order only store the state that follows.

A query follows suffix links until the word is found: p(w | h) = p(hw) if the model has hw, else backoff(h) · p(w | h'),
where h' drops the first word of h. Each step is one binary search among the children: O(order · log children).

Files are not trusted. Every index read from a file is checked before use, a suffix must have a lower number than its
node, log-probabilities are clamped to at least MIN_LOG_PROB and at most 0, and back-offs are clamped as well. A
damaged file can give wrong numbers, but never NaN, a crash or an endless loop.
"""

from typing import NamedTuple

import numpy as np

from arcuate.language.jit import njit

MIN_LOG_PROB = -1e30  # nats; replaces NaN and minus infinity, so that sums stay finite
_MAX_BACKOFF = 228.0  # nats; 99 in an ARPA file


class NGramArrays(NamedTuple):
    """Trie of a model; read-only, usually mapped from a file that several processes share."""

    words: np.ndarray  # (n_nodes,) int32, last word of each n-gram; -1 for the empty context
    log_probs: np.ndarray  # (n_nodes,) float32, nats
    backoffs: np.ndarray  # (n_inner,) float32, nats
    firsts: np.ndarray  # (n_inner + 1,) int32, first child of each context; ends where the next one starts
    suffixes: np.ndarray  # (n_inner,) int32, longest relevant context without the first word
    nexts: np.ndarray  # (n_nodes - n_inner,) int32, state after an n-gram of the longest order


@njit(cache=True)
def advance(arrays: NGramArrays, state: int, word: int) -> tuple[float, int]:
    """Log-probability (nats) of a word after a state, and the next state.

    A state is the node of the longest context that can still change a probability. Histories with equal states have
    equal futures, so a search may recombine them.
    """
    total = 0.0
    node = state
    while node > 0:
        at = find_child(arrays, node, word)
        if at >= 0:
            return clamp_log_prob(total + arrays.log_probs[at]), state_after(arrays, at)
        total += backoff(arrays, node)
        node = shorter_context(arrays, node)
    at = 1 + word
    return clamp_log_prob(total + arrays.log_probs[at]), state_after(arrays, at)


@njit(cache=True, inline="always")
def clamp_log_prob(log_prob: float) -> float:
    """Clamp to [MIN_LOG_PROB, 0]; NaN becomes MIN_LOG_PROB."""
    if log_prob > 0.0:
        return 0.0
    return log_prob if log_prob >= MIN_LOG_PROB else MIN_LOG_PROB


@njit(cache=True, inline="always")
def backoff(arrays: NGramArrays, node: int) -> float:
    """Back-off weight of a context, clamped. It may be positive: pruned models have such weights."""
    value = float(arrays.backoffs[node])
    if value > _MAX_BACKOFF:
        return _MAX_BACKOFF
    return value if value >= MIN_LOG_PROB else MIN_LOG_PROB


@njit(cache=True, inline="always")
def child_range(arrays: NGramArrays, node: int) -> tuple[int, int]:
    """First child of a context and the end of its children, clamped to the array."""
    return max(int(arrays.firsts[node]), 0), min(int(arrays.firsts[node + 1]), arrays.words.shape[0])


@njit(cache=True)
def find_child(arrays: NGramArrays, node: int, word: int) -> int:
    """Node of the n-gram (context, word), or -1. Binary search: children are sorted by word."""
    low, end = child_range(arrays, node)
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
def shorter_context(arrays: NGramArrays, node: int) -> int:
    """Context without its first word. Its number is always lower, so following suffixes terminates."""
    suffix = int(arrays.suffixes[node])
    return suffix if 0 <= suffix < node else 0


@njit(cache=True)
def state_after(arrays: NGramArrays, at: int) -> int:
    """State that an n-gram leads to: itself if it has children or a back-off, else a shorter context."""
    n_inner = arrays.backoffs.shape[0]
    if at >= n_inner:
        after = int(arrays.nexts[at - n_inner])
        return after if 0 <= after < n_inner else 0
    if arrays.firsts[at] != arrays.firsts[at + 1] or arrays.backoffs[at] != 0.0:
        return at
    return shorter_context(arrays, at)


@njit(cache=True)
def score_words(arrays: NGramArrays, state: int, words: np.ndarray, out: np.ndarray) -> int:
    """Write the log-probability of each word of a sequence into `out`; return the state after the last."""
    for i in range(words.shape[0]):
        out[i], state = advance(arrays, state, words[i])
    return state


@njit(cache=True)
def score_sentences(arrays: NGramArrays, start: int, eos: int, words: np.ndarray, out: np.ndarray) -> None:
    """Write the log-probability of each word of concatenated sentences into `out`; `eos` ends a sentence."""
    state = start
    for i in range(words.shape[0]):
        out[i], state = advance(arrays, state, words[i])
        if words[i] == eos:
            state = start


@njit(cache=True)
def score_ngrams(arrays: NGramArrays, ngrams: np.ndarray, out: np.ndarray) -> None:
    """Write log p(last word | preceding words) of each n-gram (n, k) into `out`."""
    for i in range(ngrams.shape[0]):
        state, log_prob = 0, 0.0
        for j in range(ngrams.shape[1]):
            log_prob, state = advance(arrays, state, ngrams[i, j])
        out[i] = log_prob


@njit(cache=True)
def links_are_valid(arrays: NGramArrays, n_words: int) -> bool:
    """Whether children are in order and all links point to shorter contexts."""
    n_inner, n_nodes = arrays.backoffs.shape[0], arrays.words.shape[0]
    for node in range(n_inner):
        first, end = arrays.firsts[node], arrays.firsts[node + 1]
        if first > end or first <= node or end > n_nodes:
            return False
        for i in range(first, end):
            if (
                arrays.words[i] < 0
                or arrays.words[i] >= n_words
                or (i > first and arrays.words[i] <= arrays.words[i - 1])
            ):
                return False
        if node > 0 and not 0 <= arrays.suffixes[node] < node:
            return False
    for i in range(arrays.nexts.shape[0]):  # noqa: SIM110 (compiled)
        if not 0 <= arrays.nexts[i] < n_inner:
            return False
    return True
