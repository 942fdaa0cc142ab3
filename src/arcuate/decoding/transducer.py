"""Transducer heads in searches: their interface, and exact scores of token sequences under both heads.

Hypotheses of one trial share most of their tokens, so all sequences are scored in one pass over a tree of their
prefixes: the forward variables of a prefix are computed once, and the joiner once per frame and distinct prediction.
The scores are those of the RNN-T loss (Graves 2012) and the CTC loss (Graves et al. 2006). Time is linear in frames
times prefixes; memory does not grow with the number of frames.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from arcuate.data.alphabet import BLANK
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.errors import UserError
from arcuate.language.jit import NEG_INF, log_add, njit
from arcuate.models.layout import Frames

TRANSDUCER_BEAM = 8  # default number of hypotheses kept by a transducer or joint search
MAX_SYMBOLS = 4  # tokens per frame
_JOINED = 1 << 21  # activations of the joiner computed at a time
_Head = TypeVar("_Head")
_Score = TypeVar("_Score", float, np.ndarray)


@dataclass(frozen=True)
class HeadWeights:
    """Weights of the two heads in a joint score."""

    ctc: float = 0.3
    transducer: float = 1.0

    def total(self, transducer: _Score, ctc: _Score) -> _Score:
        """Weighted sum; a head with weight 0 is left out, because 0 · −inf would be NaN."""
        if not (self.transducer and self.ctc):
            return self.transducer * transducer if self.transducer else self.ctc * ctc
        return self.transducer * transducer + self.ctc * ctc


class TransducerHead(Protocol):
    """Prediction network and joiner, arrays in and out; the first input of the prediction network is the blank.

    `models/transducer.py` computes them with torch, `exported/transducer.py` with an exported model. The state of the
    prediction network has one row per hypothesis.
    """

    @property
    def n_classes(self) -> int: ...

    @property
    def context(self) -> int | None:
        """Context of the prediction network in tokens; None: all tokens so far."""
        ...

    def project(self, frames: np.ndarray) -> np.ndarray:
        """Project encoder frames for the joiner. (f, D) -> (f, W)"""
        ...

    def silent_frame(self) -> np.ndarray:
        """The projection of an encoder frame of zeros. (W,)"""
        ...

    def start(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Projected predictions (n, W) before the first token, and the state after them."""
        ...

    def step(self, state: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Projected predictions after one more token per row, and the state after them. (n,) -> (n, W)"""
        ...

    def join(self, frames: np.ndarray, predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logits of every projected frame (f, W) with every prediction (R, W), and their log-sums. (f, R, V), (f, R)"""
        ...


def require_transducer(head: _Head | None, where: str) -> _Head:
    """Return the head, or raise UserError if the model has none."""
    if head is None:
        raise UserError(f"{where} has no transducer; use --head ctc, or train with transducer.enabled=true")
    return head


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


def score_sequences(head: TransducerHead, frames: Frames, sequences: Sequence[Sequence[int]]) -> HeadScores:
    """Log-probability of every token sequence under each head, summed over all alignments."""
    tree = _build_tree(sequences)
    predicted, node_rows = _predict_prefixes(head, tree.parents, tree.tokens)  # (R, W)
    ctc = np.ascontiguousarray(frames.log_probs, np.float64)
    arrived = np.full(len(tree.parents), NEG_INF)
    on_token, on_blank = arrived.copy(), arrived.copy()
    arrived[0] = on_blank[0] = 0.0
    projected = head.project(frames.for_transducer)
    n_joined = max(1, _JOINED // max(1, predicted.size))
    for first in range(0, len(projected), n_joined):
        part = slice(first, first + n_joined)
        logits, norms = head.join(projected[part], predicted)  # (f, R, V), (f, R)
        lattices = arrived, on_token, on_blank
        _run_lattices(logits, norms, ctc[part], tree.parents, tree.tokens, node_rows, *lattices)
    ctc_scores = np.logaddexp(on_token, on_blank)
    ilm = _sum_over_prefixes(_internal_scores(head, predicted), tree.parents, tree.tokens, node_rows)
    return HeadScores(arrived[tree.ends], ctc_scores[tree.ends], ilm[tree.ends])


def rescore(
    head: TransducerHead,
    frames: Frames,
    token_sequences: Iterable[Sequence[int]],
    weights: HeadWeights = HeadWeights(),
) -> list[Hypothesis]:
    """Score token sequences exactly with both heads; best first."""
    candidates = list(dict.fromkeys(tuple(int(t) for t in sequence) for sequence in token_sequences))
    if not candidates:
        raise UserError("no hypothesis to rescore; pass the n-best list of at least one search")
    scores = score_sequences(head, frames, candidates)
    transducer, ctc = scores.transducer.tolist(), scores.ctc.tolist()
    totals = [weights.total(t, c) for t, c in zip(transducer, ctc, strict=True)]
    order = sorted(range(len(candidates)), key=lambda i: -totals[i])
    return [Hypothesis(candidates[i], {"transducer": transducer[i], "ctc": ctc[i]}, total=totals[i]) for i in order]


def _predict_prefixes(head: TransducerHead, parents: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Projected predictions after every prefix of a prefix tree, and the row of each prefix. (M,) -> (R, W), (M,)

    Node 0 is the empty prefix; `parents` precede their children, and `tokens` are the last tokens. Prefixes that the
    prediction network does not distinguish share a row.
    """
    if head.context is None:
        return _predict_all(head, parents, tokens), np.arange(len(parents))
    recent = np.full((len(parents), head.context), BLANK, np.int64)  # last tokens of each prefix
    ancestors = np.arange(len(parents))
    for back in range(head.context - 1, -1, -1):
        recent[:, back] = np.where(ancestors > 0, tokens[ancestors], BLANK)
        ancestors = parents[ancestors]
    distinct, rows = np.unique(recent, axis=0, return_inverse=True)
    before = np.concatenate([distinct[:, :1], distinct[:, :-1]], axis=1)  # the first column is dropped by the step
    return head.step(before, distinct[:, -1])[0], rows.reshape(-1)


def _predict_all(head: TransducerHead, parents: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    depth = np.zeros_like(parents)
    for node in range(1, len(parents)):
        depth[node] = depth[parents[node]] + 1
    predicted, state = head.start(1)
    outputs = np.zeros((len(parents), predicted.shape[1]), predicted.dtype)
    outputs[0], nodes = predicted[0], np.zeros(1, np.int64)
    for length in range(1, int(depth.max()) + 1):  # one batch of prefixes of equal length at a time
        longer = np.flatnonzero(depth == length)
        above = np.searchsorted(nodes, parents[longer])
        predicted, state = head.step(state[above], tokens[longer])
        outputs[longer], nodes = predicted, longer
    return outputs


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
