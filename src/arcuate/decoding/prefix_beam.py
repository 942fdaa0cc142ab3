"""CTC prefix beam search (Hannun et al. 2014): the most probable token sequences, summed over all alignments.

Different here: prefixes are rows of a structured array that point into a shared back-pointer buffer, and the next beam
is selected with a bounded heap, so a frame costs O(beam · V + beam · log beam) without sorting all candidates.

Recurrence for a prefix with log-scores b (alignments ending in blank) and k (ending in its last token a), and class
log-probabilities p:

    stay     b' = log(e^b + e^k) + p(blank)
             k' = k + p(a), plus the extension of its parent by a if the parent is in the beam too
    extend   k' = log(e^b + e^k) + p(c) for c ≠ a;  b + p(a) for c = a, because CTC needs a blank between equal tokens

An extension that equals a prefix of the beam is added to that prefix and not offered again. Scores are float64 logs;
`log_add` handles −inf, so impossible classes need no special case.
"""

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from arcuate.data.alphabet import BLANK, CLASSES
from arcuate.decoding.class_order import check_log_probs
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.decoding.word_search.beam import Backpointers
from arcuate.language.jit import NEG_INF, Row, hash_append, log_add, njit

_BLOCK = 64  # frames per compiled call

_PREFIX = np.dtype(
    [
        ("log_blank", np.float64),  # all alignments that end in blank
        ("log_token", np.float64),  # all alignments that end in the last token
        ("sequence_hash", np.uint64),  # of all tokens
        ("parent_hash", np.uint64),  # of all tokens but the last
        ("backpointer", np.int64),  # row of the last token, -1 for the empty prefix
        ("last_token", np.int32),  # -1 for the empty prefix
    ],
    align=True,
)
_BACKPOINTER = np.dtype([("previous", np.int32), ("token", np.int32)])


@dataclass(frozen=True, eq=False)
class PrefixState:
    """The beam after some frames. `step` returns a new one and leaves the old one valid."""

    beam: np.ndarray  # (n,) _PREFIX, best first
    backpointers: Backpointers
    n_frames: int = 0


@dataclass(frozen=True, eq=False)
class PrefixBeamSearch:
    """Prefix beam search over tokens. Holds no state of a trial."""

    beam: int = 20
    classes: tuple[str, ...] = CLASSES
    blank: int = BLANK

    def search(self, log_probs: np.ndarray, n_best: int = 1) -> list[Hypothesis]:
        """Decode a complete trial (F, V)."""
        return self.finish(self.step(self.start(), log_probs), n_best)

    def tokens(self, log_probs: np.ndarray) -> list[int]:
        """Best token sequence of one trial."""
        return list(self.search(log_probs)[0].tokens)

    def start(self) -> PrefixState:
        beam = np.zeros(1, _PREFIX)
        beam["log_token"], beam["last_token"], beam["backpointer"] = -np.inf, -1, -1
        return PrefixState(beam, Backpointers.empty(_BACKPOINTER, self.beam * _BLOCK))

    def step(self, state: PrefixState, log_probs: np.ndarray) -> PrefixState:
        """Advance the state over further frames: (F, V) natural-log probabilities."""
        frames = check_log_probs(log_probs, self.classes)
        for first in range(0, len(frames), _BLOCK):
            state = self._step(state, frames[first : first + _BLOCK])
        return state

    def _step(self, state: PrefixState, frames: np.ndarray) -> PrefixState:
        backpointers = state.backpointers.reserve(self.beam * len(frames))
        beam, n = _run_frames(frames, state.beam, backpointers.rows, backpointers.n, self.blank, self.beam)
        return PrefixState(beam, backpointers.appended(n), state.n_frames + len(frames))

    def partial(self, state: PrefixState) -> tuple[int, ...]:
        """Best prefix so far."""
        return tuple(_trace_tokens(state.backpointers.rows, state.beam["backpointer"][0]).tolist())

    def finish(self, state: PrefixState, n_best: int = 1) -> list[Hypothesis]:
        """N-best list of token sequences."""
        beam, rows = state.beam, state.backpointers.rows
        totals = np.logaddexp(beam["log_blank"], beam["log_token"])
        best = np.argsort(-totals, kind="stable")[:n_best]
        tokens = [tuple(_trace_tokens(rows, beam["backpointer"][i]).tolist()) for i in best]
        scores = totals[best].tolist()
        return [Hypothesis(t, {"acoustic": s}, total=s) for t, s in zip(tokens, scores, strict=True)]


class _Scratch(NamedTuple):
    """Work memory of one compiled call."""

    log_blank: np.ndarray  # (beam,) after this frame, of prefixes that stay
    log_token: np.ndarray
    totals: np.ndarray  # (beam,) before this frame
    merged_at: np.ndarray  # (beam, V) last frame in which this extension was added to a prefix of the beam


@njit(cache=True)
def _run_frames(
    frames: np.ndarray,  # (F, V) float32
    beam: np.ndarray,  # (n,) _PREFIX
    backpointers: np.ndarray,  # (capacity,) _BACKPOINTER, appended to
    n_rows: int,
    blank: int,
    width: int,
) -> tuple[np.ndarray, int]:
    """Advance the beam over the frames; return it, best first, and the number of back-pointer rows."""
    scratch = _Scratch(
        np.empty(width),
        np.empty(width),
        np.empty(width),
        np.full((width, frames.shape[1]), -1, np.int32),
    )
    for t in range(frames.shape[0]):
        _stay(beam, frames[t], blank, t, scratch)
        selected = _select(beam, frames[t], blank, t, width, scratch)
        beam, n_rows = _collect_beam(beam, frames[t], selected, backpointers, n_rows, scratch)
    return beam, n_rows


@njit(cache=True)
def _stay(beam: np.ndarray, log_probs: np.ndarray, blank: int, t: int, scratch: _Scratch) -> None:
    """Scores of unchanged prefixes, including the extension of a parent that is in the beam as well."""
    for i in range(beam.shape[0]):
        prefix = beam[i]
        scratch.totals[i] = log_add(prefix.log_blank, prefix.log_token)
        scratch.log_blank[i] = scratch.totals[i] + log_probs[blank]
        scratch.log_token[i] = prefix.log_token + log_probs[prefix.last_token] if prefix.last_token >= 0 else NEG_INF
    order = np.argsort(beam["sequence_hash"])
    hashes = beam["sequence_hash"][order]
    for i in range(beam.shape[0]):
        at = np.searchsorted(hashes, beam[i].parent_hash)
        if beam[i].last_token >= 0 and at < hashes.shape[0] and hashes[at] == beam[i].parent_hash:
            parent, token = order[at], beam[i].last_token
            scratch.merged_at[parent, token] = t
            scratch.log_token[i] = log_add(
                scratch.log_token[i], _extended(beam, parent, token, log_probs, scratch.totals)
            )


@njit(cache=True)
def _extended(beam: np.ndarray, i: int, token: int, log_probs: np.ndarray, totals: np.ndarray) -> float:
    """Score of a prefix extended by a token; a repeated token needs a blank before it."""
    before = beam[i].log_blank if beam[i].last_token == token else totals[i]
    return before + log_probs[token]


@njit(cache=True)
def _select(
    beam: np.ndarray, log_probs: np.ndarray, blank: int, t: int, width: int, scratch: _Scratch
) -> list[tuple[float, np.int64]]:
    """The best candidates of this frame, a heap of (score, −code) with the worst first.

    The code of a candidate is prefix · (V + 1) + 1 + token, or + 0 for staying; among equal scores the lower one wins.
    """
    n_classes = log_probs.shape[0]
    heap = [(log_add(scratch.log_blank[0], scratch.log_token[0]), np.int64(0))]
    for i in range(1, beam.shape[0]):
        total = log_add(scratch.log_blank[i], scratch.log_token[i])
        heapq.heappush(heap, (total, np.int64(-i * (n_classes + 1))))
    for i in range(beam.shape[0]):
        for token in range(n_classes):
            if token == blank or scratch.merged_at[i, token] == t:
                continue
            total = _extended(beam, i, token, log_probs, scratch.totals)
            code = np.int64(-(i * (n_classes + 1) + 1 + token))
            if len(heap) < width and total > NEG_INF:
                heapq.heappush(heap, (total, code))
            elif total > heap[0][0]:
                heapq.heapreplace(heap, (total, code))
    return heap


@njit(cache=True)
def _collect_beam(
    beam: np.ndarray,
    log_probs: np.ndarray,
    selected: list[tuple[float, np.int64]],
    backpointers: np.ndarray,
    n_rows: int,
    scratch: _Scratch,
) -> tuple[np.ndarray, int]:
    """Build the next beam, best first, from the selected candidates."""
    n_classes = log_probs.shape[0]
    new = np.empty(len(selected), beam.dtype)
    for rank in range(len(selected) - 1, -1, -1):  # the heap returns the worst first
        code = -heapq.heappop(selected)[1]
        i, token = code // (n_classes + 1), code % (n_classes + 1) - 1
        new[rank] = beam[i]
        if token < 0:
            new[rank].log_blank, new[rank].log_token = scratch.log_blank[i], scratch.log_token[i]
            continue
        backpointers[n_rows].previous, backpointers[n_rows].token = beam[i].backpointer, token
        log_token = _extended(beam, i, token, log_probs, scratch.totals)
        _append_token(new[rank], token, log_token, n_rows)
        n_rows += 1
    return new, n_rows


@njit(cache=True)
def _append_token(prefix: Row, token: int, log_token: float, backpointer: int) -> None:
    prefix.log_blank, prefix.log_token = NEG_INF, log_token
    prefix.parent_hash = prefix.sequence_hash
    prefix.sequence_hash = hash_append(prefix.sequence_hash, np.uint64(token + 1))
    prefix.backpointer, prefix.last_token = backpointer, token


@njit(cache=True)
def _trace_tokens(rows: np.ndarray, backpointer: int) -> np.ndarray:
    """Tokens of a prefix, first token first."""
    n, at = 0, backpointer
    while at >= 0:
        n, at = n + 1, rows[at].previous
    tokens = np.empty(n, np.int64)
    at = backpointer
    while at >= 0:
        n -= 1
        tokens[n], at = rows[at].token, rows[at].previous
    return tokens
