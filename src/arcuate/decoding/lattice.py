"""Exact scores of many token sequences under both heads and the internal language model of the transducer.

Hypotheses of one trial share most of their tokens, so all sequences are scored in one pass over a tree of their
prefixes: the forward variables of a prefix are computed once, and the joiner once per frame and distinct prediction.
The scores are those of the RNN-T loss (Graves 2012) and the CTC loss (Graves et al. 2006). Time is linear in frames
times prefixes; memory does not grow with the number of frames.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arcuate.data.alphabet import BLANK
from arcuate.decoding.compiled import NEG_INF, log_add
from arcuate.decoding.heads import HeadWeights, TransducerHead, array_head, predict_prefixes, to_array
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.errors import UserError
from arcuate.language.jit import njit

_JOINED = 1 << 21  # activations of the joiner computed at a time


@dataclass(frozen=True, eq=False)
class HeadScores:
    """Log-probabilities of n token sequences, in nats."""

    transducer: np.ndarray  # (n,)
    ctc: np.ndarray  # (n,)
    ilm: np.ndarray  # (n,) internal language model of the transducer


@dataclass(frozen=True, eq=False)
class _PrefixTree:
    """All prefixes of some token sequences; node 0 is the empty one, and parents precede their children."""

    parents: np.ndarray  # (M,) int64
    tokens: np.ndarray  # (M,) int64, last token of each prefix
    ends: np.ndarray  # (n,) int64, node of each sequence


def _build_tree(sequences: Iterable[Sequence[int]]) -> _PrefixTree:
    children: dict[tuple[int, int], int] = {}
    parents, tokens, ends = [0], [BLANK], []
    for sequence in sequences:
        node = 0
        for token in sequence:
            child = children.setdefault((node, int(token)), len(parents))
            if child == len(parents):
                parents.append(node)
                tokens.append(int(token))
            node = child
        ends.append(node)
    return _PrefixTree(np.array(parents, np.int64), np.array(tokens, np.int64), np.array(ends, np.int64))


def score_sequences(
    head: Any,  # TransducerHead, or a torch module that has one
    frames: Any,  # (F, D) encoder frames
    log_probs: np.ndarray,  # (F, V) CTC log-probabilities
    sequences: Sequence[Sequence[int]],
) -> HeadScores:
    """Log-probability of every token sequence under each head, summed over all alignments."""
    head, tree = array_head(head), _build_tree(sequences)
    predicted, node_rows = predict_prefixes(head, tree.parents, tree.tokens)  # (R, W)
    ctc = np.ascontiguousarray(log_probs, np.float64)
    arrived = np.full(len(tree.parents), NEG_INF)
    on_token, on_blank = arrived.copy(), arrived.copy()
    arrived[0] = on_blank[0] = 0.0
    projected = head.project(to_array(frames))
    n_joined = max(1, _JOINED // max(1, predicted.size))
    for first in range(0, len(projected), n_joined):
        logits, norms = head.join(projected[first : first + n_joined], predicted)  # (f, R, V), (f, R)
        _run_lattices(
            logits,
            norms,
            ctc[first : first + n_joined],
            tree.parents,
            tree.tokens,
            node_rows,
            arrived,
            on_token,
            on_blank,
        )
    ctc_scores = np.logaddexp(on_token, on_blank)
    ilm = _sum_over_prefixes(_internal_scores(head, predicted), tree.parents, tree.tokens, node_rows)
    return HeadScores(arrived[tree.ends], ctc_scores[tree.ends], ilm[tree.ends])


def rescore(
    head: Any,  # TransducerHead, or a torch module that has one
    frames: Any,  # (F, D)
    log_probs: Any,  # (F, V) CTC log-probabilities
    token_sequences: Iterable[Sequence[int]],
    weights: HeadWeights = HeadWeights(),
) -> list[Hypothesis]:
    """Score token sequences exactly with both heads; best first."""
    candidates = list(dict.fromkeys(tuple(int(t) for t in sequence) for sequence in token_sequences))
    if not candidates:
        raise UserError("no hypothesis to rescore; pass the n-best list of at least one search")
    scores = score_sequences(head, frames, to_array(log_probs), candidates)
    transducer, ctc = scores.transducer.tolist(), scores.ctc.tolist()
    totals = [weights.total(t, c) for t, c in zip(transducer, ctc, strict=True)]
    order = sorted(range(len(candidates)), key=lambda i: -totals[i])
    return [Hypothesis(candidates[i], {"transducer": transducer[i], "ctc": ctc[i]}, total=totals[i]) for i in order]


def _internal_scores(head: TransducerHead, predicted: np.ndarray) -> np.ndarray:
    """Log-probability of each token after each prediction, without acoustic input. (R, V)

    Internal language model estimation: the encoder output is set to zero (Variani et al. 2020, Meng et al. 2021), and
    the blank is excluded, because it carries no information about the next token.
    """
    logits = head.join(head.silent_frame()[None], predicted)[0][0].astype(np.float64)
    logits[:, BLANK] = NEG_INF
    highest = logits.max(axis=1, keepdims=True)
    return logits - (highest + np.log(np.exp(logits - highest).sum(axis=1, keepdims=True)))


@njit(cache=True)
def _run_lattices(
    logits: np.ndarray,  # (F, R, V) joiner logits
    norms: np.ndarray,  # (F, R) log-sum-exp of the logits
    ctc: np.ndarray,  # (F, V) log-probabilities
    parents: np.ndarray,
    tokens: np.ndarray,
    rows: np.ndarray,  # (M,) prediction of each prefix
    arrived: np.ndarray,  # (M,) transducer: prefix emitted before this frame; updated
    on_token: np.ndarray,  # (M,) CTC: prefix emitted, last frame was its last token; updated
    on_blank: np.ndarray,  # (M,) CTC: prefix emitted, last frame was a blank; updated
) -> None:
    """Forward recursions over some frames and all prefixes at once."""
    n = parents.shape[0]
    emitted = np.empty(n)
    for t in range(logits.shape[0]):
        emitted[0] = arrived[0]
        for i in range(1, n):  # a frame may emit several tokens: parents first
            parent = rows[parents[i]]
            label = np.float64(logits[t, parent, tokens[i]]) - norms[t, parent]
            emitted[i] = log_add(arrived[i], emitted[parents[i]] + label)
        for i in range(n):
            arrived[i] = emitted[i] + np.float64(logits[t, rows[i], BLANK]) - norms[t, rows[i]]
        for i in range(n - 1, 0, -1):  # children first: parents still hold the values of the frame before
            parent = parents[i]
            before = log_add(on_token[i], on_blank[parent])
            if tokens[parent] != tokens[i]:  # equal tokens need a blank between them
                before = log_add(before, on_token[parent])
            on_blank[i] = log_add(on_blank[i], on_token[i]) + ctc[t, BLANK]
            on_token[i] = before + ctc[t, tokens[i]]
        on_blank[0] += ctc[t, BLANK]


@njit(cache=True)
def _sum_over_prefixes(scores: np.ndarray, parents: np.ndarray, tokens: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Sum of token scores (R, V) along every prefix. (M,)"""
    total = np.zeros(parents.shape[0])
    for i in range(1, parents.shape[0]):
        total[i] = total[parents[i]] + scores[rows[parents[i]], tokens[i]]
    return total
