"""The compiled loop of the prefix beam search: Python to read, machine code to run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

from arcuate.data.alphabet import BLANK, CLASSES
from arcuate.decoding.backpointers import NEVER, Log, Row, empty_log, log_add, mix, power_of_two
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.decoding.log_probs import check_log_probs
from arcuate.errors import UserError
from arcuate.language.ngram.model import LanguageModel
from arcuate.language.ngram.query import NGramArrays, advance

PREFIX = np.dtype(
    [
        ("log_blank", np.float64),  # all alignments that end in blank
        ("log_token", np.float64),  # all alignments that end in the last token
        ("lm", np.float64),  # n-gram score so far, unweighted
        ("prior", np.float64),  # weighted n-gram score and bonus so far
        ("identity", np.uint64),  # of the token sequence
        ("parent", np.uint64),  # of the sequence without its last token
        ("lm_state", np.int64),
        ("entry", np.int64),  # its row in the log, -1 for the empty prefix
        ("last", np.int32),  # its last token, -1 for the empty prefix
        ("n_tokens", np.int32),
    ],
    align=True,
)
ENTRY = np.dtype([("before", np.int32), ("token", np.int32)])


class Prior(NamedTuple):
    """What token sequences are worth before anything is heard."""

    arrays: NGramArrays
    words: np.ndarray  # (V,) int64: token to word of the n-gram; empty where there is none
    lm_weight: float
    token_bonus: float


class Work(NamedTuple):
    """Scratch space of one call."""

    log_blank: np.ndarray  # (width,) after this frame, for prefixes that stay
    log_token: np.ndarray
    totals: np.ndarray  # (width,) before this frame
    taken: np.ndarray  # (width, V) the frame in which an extension was merged into a prefix of the beam
    table: np.ndarray  # (power of two,) prefixes by identity
    heap: np.ndarray  # (width,) ranks of the chosen, the worst first
    codes: np.ndarray  # (width,) who they are


@njit(cache=True)
def step_frames(
    frames: np.ndarray,  # (F, V) float32
    beam: np.ndarray,  # (n,) PREFIX
    entries: np.ndarray,  # (room,) ENTRY, appended to
    n_entries: int,
    prior: Prior,
    blank: int,
    width: int,
) -> tuple[np.ndarray, int]:
    """The beam after all frames, best first, and how many entries are written."""
    work = Work(
        np.empty(width),
        np.empty(width),
        np.empty(width),
        np.full((width, frames.shape[1]), -1, np.int32),
        np.empty(power_of_two(4 * width), np.int32),
        np.empty(width),
        np.empty(width, np.int64),
    )
    for t in range(frames.shape[0]):
        stay(beam, frames[t], blank, t, work)
        n_chosen = choose(beam, frames[t], blank, t, prior, width, work)
        beam, n_entries = rebuild(beam, frames[t], n_chosen, entries, n_entries, prior, work)
    return beam, n_entries


@njit(cache=True)
def stay(beam: np.ndarray, logp: np.ndarray, blank: int, t: int, work: Work) -> None:
    """Scores of the prefixes that remain as they are, also by way of a shorter prefix that grows into them."""
    for i in range(beam.shape[0]):
        here = beam[i]
        work.totals[i] = log_add(here.log_blank, here.log_token)
        work.log_blank[i] = work.totals[i] + logp[blank]
        work.log_token[i] = here.log_token + logp[here.last] if here.last >= 0 else NEVER
    fill(beam, work.table)
    for i in range(beam.shape[0]):
        before = find(beam, work.table, beam[i].parent) if beam[i].last >= 0 else -1
        if before >= 0:
            token = beam[i].last
            work.taken[before, token] = t
            work.log_token[i] = log_add(work.log_token[i], extended(beam, before, token, logp, work.totals))


@njit(cache=True)
def extended(beam: np.ndarray, i: int, token: int, logp: np.ndarray, totals: np.ndarray) -> float:
    """A prefix and one token more; its own last token comes again only after a blank."""
    before = beam[i].log_blank if beam[i].last == token else totals[i]
    return before + logp[token]


@njit(cache=True)
def choose(
    beam: np.ndarray, logp: np.ndarray, blank: int, t: int, prior: Prior, width: int, work: Work
) -> int:
    """The best candidates of this frame in a heap; an n-gram is asked only where the sound alone would do."""
    n, n_classes = 0, logp.shape[0]
    for i in range(beam.shape[0]):
        rank = log_add(work.log_blank[i], work.log_token[i]) + beam[i].prior
        n = offer(work.heap, work.codes, n, width, rank, i * (n_classes + 1))
    bonus = prior.token_bonus
    for i in range(beam.shape[0]):
        for token in range(n_classes):
            if token == blank or work.taken[i, token] == t:
                continue
            rank = extended(beam, i, token, logp, work.totals) + beam[i].prior + bonus
            if rank == NEVER or (n == width and rank <= work.heap[0]):
                continue
            if prior.words.shape[0]:
                rank += prior.lm_weight * advance(prior.arrays, beam[i].lm_state, prior.words[token])[0]
            n = offer(work.heap, work.codes, n, width, rank, i * (n_classes + 1) + 1 + token)
    return n


@njit(cache=True)
def rebuild(
    beam: np.ndarray,
    logp: np.ndarray,
    n_chosen: int,
    entries: np.ndarray,
    n_entries: int,
    prior: Prior,
    work: Work,
) -> tuple[np.ndarray, int]:
    """The chosen candidates as the next beam, best first."""
    n_classes = logp.shape[0]
    new = np.empty(n_chosen, beam.dtype)
    for place in range(n_chosen - 1, -1, -1):
        code = pop(work.heap, work.codes, place + 1)
        i, token = code // (n_classes + 1), code % (n_classes + 1) - 1
        new[place] = beam[i]
        if token < 0:
            new[place].log_blank, new[place].log_token = work.log_blank[i], work.log_token[i]
            continue
        entries[n_entries].before, entries[n_entries].token = beam[i].entry, token
        lengthen(new[place], token, extended(beam, i, token, logp, work.totals), n_entries, prior)
        n_entries += 1
    return new, n_entries


@njit(cache=True)
def lengthen(prefix: Row, token: int, log_token: float, entry: int, prior: Prior) -> None:
    prefix.log_blank, prefix.log_token = NEVER, log_token
    prefix.parent = prefix.identity
    prefix.identity = mix(prefix.identity, np.uint64(token + 1))
    prefix.entry, prefix.last = entry, token
    prefix.n_tokens += 1
    prefix.prior += prior.token_bonus
    if prior.words.shape[0]:
        lm, after = advance(prior.arrays, prefix.lm_state, prior.words[token])
        prefix.lm += lm
        prefix.prior += prior.lm_weight * lm
        prefix.lm_state = after


@njit(cache=True)
def offer(heap: np.ndarray, codes: np.ndarray, n: int, width: int, rank: float, code: int) -> int:
    """Put a candidate into the heap of the best, whose worst stands first; how many it holds then."""
    if n == width:
        if rank <= heap[0]:
            return n
        sift(heap, codes, n, 0, rank, code)
        return n
    at = n
    while at > 0 and heap[(at - 1) >> 1] > rank:
        above = (at - 1) >> 1
        heap[at], codes[at] = heap[above], codes[above]
        at = above
    heap[at], codes[at] = rank, code
    return n + 1


@njit(cache=True)
def pop(heap: np.ndarray, codes: np.ndarray, n: int) -> int:
    """Take the worst of n."""
    worst = codes[0]
    sift(heap, codes, n - 1, 0, heap[n - 1], codes[n - 1])
    return worst


@njit(cache=True)
def sift(heap: np.ndarray, codes: np.ndarray, n: int, at: int, rank: float, code: int) -> None:
    while 2 * at + 1 < n:
        below = 2 * at + 1
        if below + 1 < n and heap[below + 1] < heap[below]:
            below += 1
        if heap[below] >= rank:
            break
        heap[at], codes[at] = heap[below], codes[below]
        at = below
    heap[at], codes[at] = rank, code


@njit(cache=True)
def fill(beam: np.ndarray, table: np.ndarray) -> None:
    table[:] = -1
    for i in range(beam.shape[0]):
        at = np.int64(beam[i].identity & np.uint64(table.shape[0] - 1))
        while table[at] >= 0:
            at = (at + 1) & (table.shape[0] - 1)
        table[at] = i


@njit(cache=True)
def find(beam: np.ndarray, table: np.ndarray, identity: np.uint64) -> int:
    at = np.int64(identity & np.uint64(table.shape[0] - 1))
    while table[at] >= 0:
        if beam[table[at]].identity == identity:
            return table[at]
        at = (at + 1) & (table.shape[0] - 1)
    return -1


@njit(cache=True)
def read_back(entries: np.ndarray, entry: int) -> np.ndarray:
    """The tokens of a prefix from its last entry."""
    n, at = 0, entry
    while at >= 0:
        n, at = n + 1, entries[at].before
    tokens = np.empty(n, np.int64)
    at = entry
    while at >= 0:
        n -= 1
        tokens[n], at = entries[at].token, entries[at].before
    return tokens


# CTC prefix beam search: the most probable token sequences, summed over all their alignments.

BLOCK = 64  # frames per compiled call


@dataclass(frozen=True, eq=False)
class TokenLM:
    """An n-gram over tokens, with the word of the n-gram that each class is."""

    arrays: NGramArrays
    words: np.ndarray  # (V,) int64; empty: no model
    start: int = 0
    end: int = 0  # the word </s>

    def endings(self, states: np.ndarray) -> np.ndarray:
        """What ending here is worth, by state."""
        if not len(self.words):
            return np.zeros(len(states))
        return np.array([advance(self.arrays, state, self.end)[0] for state in states])


def read_only(values: Sequence[float], dtype: type) -> np.ndarray:
    array: np.ndarray = np.array(values, dtype)
    array.flags.writeable = False  # as arrays of a mapped file are: one compiled version serves both
    return array


NO_NGRAM = NGramArrays(
    words=read_only([-1], np.int32),
    log_probs=read_only([0.0], np.float32),
    backoffs=read_only([0.0], np.float32),
    firsts=read_only([1, 1], np.int32),
    suffixes=read_only([0], np.int32),
    nexts=read_only([], np.int32),
)
NO_MODEL = TokenLM(NO_NGRAM, np.empty(0, np.int64))


def token_lm(model: LanguageModel, classes: Sequence[str] = CLASSES, blank: int = BLANK) -> TokenLM:
    """An n-gram whose words are the names of the classes; every class but blank must be among them."""
    words = np.array([model.words.find(name) for name in classes], np.int64)
    missing = [name for i, name in enumerate(classes) if words[i] < 0 and i != blank]
    if missing:
        raise UserError(
            f"the phoneme n-gram does not know {', '.join(missing)}; build it from lines of phoneme names"
        )
    return TokenLM(model.arrays, words, model.start, model.eos)


@dataclass(frozen=True, eq=False)
class PrefixState:
    """The beam after some frames. A value: `step` returns a new one and leaves the old one as it was."""

    beam: np.ndarray  # (n,) PREFIX, best first
    log: Log
    n_frames: int = 0


@dataclass(frozen=True, eq=False)
class PrefixBeamSearch:
    """What a search needs to know; nothing of a trial is in it."""

    beam: int = 20
    classes: tuple[str, ...] = CLASSES
    blank: int = BLANK
    model: TokenLM = NO_MODEL
    lm_weight: float = 0.0
    token_bonus: float = 0.0

    def start(self) -> PrefixState:
        beam = np.zeros(1, PREFIX)
        beam["log_token"], beam["last"], beam["entry"] = -np.inf, -1, -1
        beam["lm_state"] = self.model.start
        return PrefixState(beam, empty_log(ENTRY, self.beam * BLOCK))

    def step(self, state: PrefixState, log_probs: np.ndarray) -> PrefixState:
        """The state after more frames: (F, V) natural-log probabilities."""
        frames = check_log_probs(log_probs, self.classes)
        for first in range(0, len(frames), BLOCK):
            state = self._step(state, frames[first : first + BLOCK])
        return state

    def _step(self, state: PrefixState, frames: np.ndarray) -> PrefixState:
        log = state.log.with_room(self.beam * len(frames))
        prior = Prior(self.model.arrays, self.model.words, self.lm_weight, self.token_bonus)
        beam, n = step_frames(frames, state.beam, log.rows, log.n, prior, self.blank, self.beam)
        return PrefixState(beam, log.appended(n), state.n_frames + len(frames))

    def partial(self, state: PrefixState) -> tuple[int, ...]:
        """The best prefix so far."""
        return tuple(read_back(state.log.rows, state.beam["entry"][0]).tolist())

    def finish(self, state: PrefixState, n_best: int = 1) -> list[Hypothesis]:
        """The best token sequences, best first, with their scores by source."""
        beam, endings = state.beam, self.model.endings(state.beam["lm_state"])
        acoustic = np.logaddexp(beam["log_blank"], beam["log_token"])
        totals = acoustic + beam["prior"] + self.lm_weight * endings
        best = np.argsort(-totals, kind="stable")[:n_best]
        return [
            Hypothesis(
                tuple(read_back(state.log.rows, beam["entry"][i]).tolist()),
                {
                    "acoustic": float(acoustic[i]),
                    "lm": float(beam["lm"][i] + endings[i]),
                    "bonus": self.token_bonus * int(beam["n_tokens"][i]),
                },
                total=float(totals[i]),
            )
            for i in best
        ]

    def search(self, log_probs: np.ndarray, n_best: int = 1) -> list[Hypothesis]:
        """A whole trial: streaming with one chunk."""
        return self.finish(self.step(self.start(), log_probs), n_best)

    def tokens(self, log_probs: np.ndarray) -> list[int]:
        """The best token sequence of one trial."""
        return list(self.search(log_probs)[0].tokens)
