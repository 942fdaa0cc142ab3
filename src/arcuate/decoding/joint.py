"""CTC and transducer in one pass: a beam over token sequences, each scored by both heads at every frame.

The transducer's part is the summed probability of all ways through its lattice so far, as in `transducer.Beam`. The CTC
part is the summed probability of all ways in which exactly these tokens were said up to this frame. It is exact,
however late a token joins: a reading remembers what its last two states scored at every frame, and a longer reading is
worked out from there. What is far less likely than the reading's own beginnings is forgotten, frames and tokens alike,
so that the state of a long stream holds its last words and not its whole past. While the search runs, CTC may be some
tokens behind the transducer at a price; at the end it has to have said them all. `start / step / finish`, the state is
a value.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from arcuate.data.alphabet import BLANK
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.decoding.transducer import MAX_SYMBOLS, HeadWeights, Readings
from arcuate.models.transducer import Transducer

LAG = 2.0  # nat for every token that CTC has not said yet
FORGET = 100.0  # nat below the best of a reading's states: what is less likely is not remembered
TRIED = 2  # so many times the width of the beam are looked at when readings grow by a token


@dataclass(frozen=True)
class Column:
    """Log-probabilities of one reading under CTC, after the frames so far."""

    now: np.ndarray  # (2u + 1,) of its last states, u of U tokens: blank, token, blank, …
    past: (
        np.ndarray
    )  # (t + 1, 2) of the last token and of the blank after it, before the first frame heard and after each

    @property
    def score(self) -> float:
        return float(np.logaddexp(*self.past[-1]))

    @property
    def rank(self) -> float:
        """The score, or that of the first tokens where CTC is still behind with the others."""
        levels = np.logaddexp(self.now[2::2], self.now[1::2])  # after 1, 2, … tokens
        levels = np.concatenate([self.now[:1], levels])
        return float((levels - LAG * np.arange(len(levels) - 1, -1, -1)).max())


EMPTY = Column(np.zeros(1), np.array([[-np.inf, 0.0]]))


@dataclass(frozen=True)
class JointState:
    readings: Readings  # scores are the transducer's
    columns: list[Column]  # one per reading
    heard: np.ndarray  # (t, V) CTC log-probabilities of the last frames


@dataclass(frozen=True)
class JointBeamSearch:
    """At most `width` readings per frame, ranked by both heads."""

    head: Transducer
    width: int = 8
    max_symbols: int = MAX_SYMBOLS
    weights: HeadWeights = field(default_factory=HeadWeights)

    def start(self) -> JointState:
        predicted, predictor = self.head.start(1)
        readings = Readings([()], predicted.new_zeros(1), predicted, predictor)
        return JointState(readings, [EMPTY], np.zeros((0, self.head.output.out_features)))

    def step(self, state: JointState, frames: Tensor, log_probs: np.ndarray) -> JointState:
        """The next frames (f, D) of the encoder, and what CTC says of them (f, V)."""
        for frame, scores in zip(
            self.head.from_frames(frames), np.asarray(log_probs, np.float64), strict=True
        ):
            state = self._cross(state, frame, scores)
        return state

    def finish(self, state: JointState) -> list[Hypothesis]:
        """All readings left, best first; both scores are those of the whole trial."""
        found = [
            self._hypothesis(tokens, score, column.score)
            for tokens, score, column in zip(
                state.readings.tokens, state.readings.scores.tolist(), state.columns, strict=True
            )
        ]
        return sorted(found, key=lambda h: -(h.total or 0.0))

    def _hypothesis(self, tokens: tuple[int, ...], transducer: float, ctc: float) -> Hypothesis:
        return Hypothesis(
            tokens, {"transducer": transducer, "ctc": ctc}, total=float(self._total(transducer, ctc))
        )

    def _total(self, transducer: np.ndarray | float, ctc: np.ndarray | float) -> np.ndarray | float:
        if not self.weights.ctc:  # where CTC says never, nought times that is still nought
            return self.weights.transducer * transducer
        return self.weights.transducer * transducer + self.weights.ctc * ctc

    def _cross(self, state: JointState, frame: Tensor, scores: np.ndarray) -> JointState:
        """Through one frame: tokens as long as they help, then the blank to the next frame."""
        heard = np.concatenate([state.heard, scores[None]])
        active = state.readings
        columns = [advance(c, t, scores) for c, t in zip(state.columns, active.tokens, strict=True)]
        levels: list[tuple[Readings, list[Column]]] = []
        for emitted in range(self.max_symbols + 1):
            log_probs = active.scores[:, None] + self.head.log_probs(frame, active.predicted)  # (n, V)
            waiting = Readings(active.tokens, log_probs[:, BLANK], active.predicted, active.predictor)
            levels.append((waiting, columns))
            if emitted == self.max_symbols:
                break
            active, columns = self._extend(active, columns, log_probs, heard)
            if self._settled(levels, active, columns):
                break
        return self._gather(levels, heard)

    def _ranks(self, readings: Readings, columns: list[Column]) -> np.ndarray:
        ctc = np.array([column.rank for column in columns])
        return np.asarray(self._total(readings.scores.double().cpu().numpy(), ctc))

    def _settled(
        self, levels: list[tuple[Readings, list[Column]]], active: Readings, columns: list[Column]
    ) -> bool:
        """Whether enough readings wait that are better than any that just grew."""
        waiting = np.sort(np.concatenate([self._ranks(*level) for level in levels]))
        return len(waiting) >= self.width and bool(self._ranks(active, columns).max() < waiting[-self.width])

    def _extend(
        self, active: Readings, columns: list[Column], log_probs: Tensor, heard: np.ndarray
    ) -> tuple[Readings, list[Column]]:
        """The best readings that are one token longer: many by the transducer, of those the best by both."""
        log_probs = log_probs.clone()
        log_probs[:, BLANK] = -torch.inf
        n_tried = min(TRIED * self.width, log_probs.numel() - len(log_probs))
        scores, chosen = log_probs.flatten().topk(n_tried)
        rows, classes = chosen // log_probs.shape[1], chosen % log_probs.shape[1]
        lasts = [active.tokens[row][-1:] for row in rows.tolist()]
        longer = grow([columns[row] for row in rows.tolist()], lasts, classes.tolist(), heard)
        ranks = self._total(scores.double().cpu().numpy(), np.array([column.rank for column in longer]))
        best = np.argsort(-np.asarray(ranks), kind="stable")[: self.width]
        kept = torch.from_numpy(best).to(rows.device)
        rows, classes, scores = rows[kept], classes[kept], scores[kept]
        tokens = [(*active.tokens[r], t) for r, t in zip(rows.tolist(), classes.tolist(), strict=True)]
        predicted, predictor = self.head.step(self.head.select(active.predictor, rows), classes)
        return Readings(tokens, scores, predicted, predictor), [longer[i] for i in best.tolist()]

    def _gather(self, levels: list[tuple[Readings, list[Column]]], heard: np.ndarray) -> JointState:
        """Readings with the same tokens become one; the best by both heads are kept."""
        ways: dict[tuple[int, ...], list[tuple[float, int, int]]] = {}
        for level, (readings, _) in enumerate(levels):
            for row, (tokens, score) in enumerate(
                zip(readings.tokens, readings.scores.tolist(), strict=True)
            ):
                ways.setdefault(tokens, []).append((score, level, row))
        totals = {t: float(np.logaddexp.reduce([s for s, _, _ in way])) for t, way in ways.items()}
        places = {t: max(way)[1:] for t, way in ways.items()}  # the same tokens are the same prediction
        columns = {t: levels[level][1][row] for t, (level, row) in places.items()}
        order = sorted(totals, key=lambda t: -float(self._total(totals[t], columns[t].rank)))[: self.width]
        order.sort(key=lambda t: places[t])
        parts = []
        for level, (readings, _) in enumerate(levels):
            picked = [places[t][1] for t in order if places[t][0] == level]
            if picked:
                rows = torch.tensor(picked, device=readings.scores.device)
                parts.append((readings.predicted[rows], self.head.select(readings.predictor, rows)))
        kept = Readings(
            order,
            levels[0][0].scores.new_tensor([totals[t] for t in order]),
            torch.cat([predicted for predicted, _ in parts]),
            self.head.concatenate([state for _, state in parts]),
        )
        return JointState(kept, *forget([columns[t] for t in order], heard))


def forget(columns: list[Column], heard: np.ndarray) -> tuple[list[Column], np.ndarray]:
    """First frames and first tokens that no reading can gain anything from, left out."""
    n = min(n_faint(np.logaddexp(*c.past.T), c.now) for c in columns)
    shorter = [Column(c.now[n_faint(c.now, c.now) // 2 * 2 :], c.past[n:]) for c in columns]
    return shorter, heard[n:]


def n_faint(values: np.ndarray, states: np.ndarray) -> int:
    """How many values at the beginning are below everything that counts; the last one always stays."""
    faint = values < states.max() - FORGET
    return len(values) - 1 if faint.all() else int(faint.argmin())


def advance(column: Column, tokens: tuple[int, ...], scores: np.ndarray) -> Column:
    """A reading one frame later."""
    now, n = column.now, len(column.now)
    labels = np.full(n, BLANK)
    labels[1::2] = tokens[len(tokens) - n // 2 :]
    new = now.copy()
    new[1:] = np.logaddexp(new[1:], now[:-1])
    skips = np.flatnonzero(labels[3::2] != labels[1:-2:2]) * 2 + 3  # a token may follow another one at once
    new[skips] = np.logaddexp(new[skips], now[skips - 2])
    new += scores[labels]
    last = new[-2] if n > 1 else -np.inf
    return Column(new, np.concatenate([column.past, [[last, new[-1]]]]))


def grow(
    columns: list[Column], lasts: list[tuple[int, ...]], tokens: list[int], heard: np.ndarray
) -> list[Column]:
    """Readings with one more token each, as if it had been there from the start."""
    past = np.stack([column.past for column in columns])  # (n, t + 1, 2)
    repeats = np.array([last == (token,) for last, token in zip(lasts, tokens, strict=True)])
    before = np.where(repeats[:, None], past[..., 1], np.logaddexp(past[..., 0], past[..., 1]))  # (n, t + 1)
    new = np.full(past.shape, -np.inf)
    for k, scores in enumerate(heard):
        new[:, k + 1, 0] = np.logaddexp(new[:, k, 0], before[:, k]) + scores[tokens]
        new[:, k + 1, 1] = np.logaddexp(new[:, k, 0], new[:, k, 1]) + scores[BLANK]
    return [
        Column(np.concatenate([column.now, states[-1]]), states)
        for column, states in zip(columns, new, strict=True)
    ]


@torch.inference_mode()
def search_joint(
    searcher: JointBeamSearch,
    frames: Tensor,  # (F, D) of one trial, padding cut off
    log_probs: np.ndarray,  # (F, V) of the CTC head
) -> list[Hypothesis]:
    """The readings of a whole trial, best first."""
    return searcher.finish(searcher.step(searcher.start(), frames, log_probs))
