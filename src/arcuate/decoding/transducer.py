"""Searches of the transducer: greedy, beam, and both heads together.

At a frame a reading emits any number of tokens up to a cap and then takes the blank to the next frame; the prediction
network moves on with tokens only. Frame by frame, `start / step / finish`, the state is a value; a whole trial is one
step. The beam sums over all ways to the same tokens: with a beam wide enough its scores are the exact sums over all
alignments with at most `max_symbols` tokens per frame.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arcuate.data.alphabet import BLANK
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.errors import UserError
from arcuate.losses.config import CTCSettings
from arcuate.losses.ctc import ctc_loss
from arcuate.losses.rnnt import chunked_rnnt_loss
from arcuate.models.interfaces import Joint
from arcuate.models.transducer import Transducer

MAX_SYMBOLS = 4  # tokens at one frame


@dataclass(frozen=True)
class GreedyState:
    tokens: tuple[int, ...]
    score: float  # of the one alignment followed
    predicted: Tensor  # (1, W)
    predictor: Any


@dataclass(frozen=True)
class TransducerGreedySearch:
    """The best class again and again until it is the blank, frame after frame."""

    head: Transducer
    max_symbols: int = MAX_SYMBOLS

    def start(self) -> GreedyState:
        predicted, predictor = self.head.start(1)
        return GreedyState((), 0.0, predicted, predictor)

    def step(self, state: GreedyState, frames: Tensor) -> GreedyState:
        """The next frames (f, D) of the encoder."""
        tokens, score = list(state.tokens), state.score
        predicted, predictor = state.predicted, state.predictor
        for frame in self.head.from_frames(frames):
            for emitted in range(self.max_symbols + 1):
                log_probs = self.head.log_probs(frame, predicted)[0]
                best = int(log_probs.argmax()) if emitted < self.max_symbols else BLANK
                score += float(log_probs[best])
                if best == BLANK:
                    break
                tokens.append(best)
                predicted, predictor = self.head.step(predictor, log_probs.new_tensor([best]).long())
        return GreedyState(tuple(tokens), score, predicted, predictor)

    def finish(self, state: GreedyState) -> list[Hypothesis]:
        return [Hypothesis(state.tokens, {"transducer": state.score})]


@dataclass(frozen=True)
class Readings:
    """Token sequences side by side, with their scores and what the prediction network makes of them."""

    tokens: list[tuple[int, ...]]
    scores: Tensor  # (n,) log of the summed probability
    predicted: Tensor  # (n, W)
    predictor: Any

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class TransducerBeamSearch:
    """At most `width` readings per frame, and on the way through a frame."""

    head: Transducer
    width: int = 8
    max_symbols: int = MAX_SYMBOLS

    def start(self) -> Readings:
        predicted, predictor = self.head.start(1)
        return Readings([()], predicted.new_zeros(1), predicted, predictor)

    def step(self, state: Readings, frames: Tensor) -> Readings:
        """The next frames (f, D) of the encoder."""
        for frame in self.head.from_frames(frames):
            state = self._cross(state, frame)
        return state

    def finish(self, state: Readings) -> list[Hypothesis]:
        """All readings left, best first."""
        order = state.scores.argsort(descending=True, stable=True).tolist()
        scores = state.scores.tolist()
        return [Hypothesis(state.tokens[i], {"transducer": scores[i]}) for i in order]

    def _cross(self, active: Readings, frame: Tensor) -> Readings:
        """Through one frame: after 0, 1, … tokens a reading may take the blank and wait for the next frame."""
        waiting: list[Readings] = []
        for emitted in range(self.max_symbols + 1):
            log_probs = active.scores[:, None] + self.head.log_probs(frame, active.predicted)  # (n, V)
            waiting.append(Readings(active.tokens, log_probs[:, BLANK], active.predicted, active.predictor))
            if emitted == self.max_symbols or self._settled(waiting, log_probs):
                break
            active = self._extend(active, log_probs)
        return self._gather(waiting)

    def _settled(self, waiting: list[Readings], log_probs: Tensor) -> bool:
        """Whether enough readings wait already that are better than any longer one can become."""
        scores = torch.cat([readings.scores for readings in waiting])
        if len(scores) < self.width:
            return False
        return bool(log_probs[:, BLANK + 1 :].max() < scores.topk(self.width).values[-1])

    def _extend(self, active: Readings, log_probs: Tensor) -> Readings:
        """The best readings that are one token longer."""
        log_probs = log_probs.clone()
        log_probs[:, BLANK] = -torch.inf
        n_best = min(self.width, log_probs.numel() - len(log_probs))
        scores, chosen = log_probs.flatten().topk(n_best)
        rows, classes = chosen // log_probs.shape[1], chosen % log_probs.shape[1]
        tokens = [
            (*active.tokens[row], token) for row, token in zip(rows.tolist(), classes.tolist(), strict=True)
        ]
        predicted, predictor = self.head.step(self.head.select(active.predictor, rows), classes)
        return Readings(tokens, scores, predicted, predictor)

    def _gather(self, waiting: list[Readings]) -> Readings:
        """Readings with the same tokens become one, whatever frame each token was emitted at; the best are kept."""
        where: dict[tuple[int, ...], list[tuple[float, int, int]]] = {}
        for level, readings in enumerate(waiting):
            for row, (tokens, score) in enumerate(
                zip(readings.tokens, readings.scores.tolist(), strict=True)
            ):
                where.setdefault(tokens, []).append((score, level, row))
        totals = {t: float(np.logaddexp.reduce([s for s, _, _ in ways])) for t, ways in where.items()}
        kept = sorted(totals, key=lambda t: totals[t], reverse=True)[: self.width]
        places = [max(where[t])[1:] for t in kept]  # the same tokens are the same prediction: any will do
        return self._collect(waiting, kept, [totals[t] for t in kept], places)

    def _collect(
        self,
        waiting: list[Readings],
        kept: list[tuple[int, ...]],
        scores: list[float],
        places: list[tuple[int, int]],
    ) -> Readings:
        """Predictions of the readings kept, from wherever they stand; order follows the levels."""
        order = sorted(range(len(kept)), key=lambda i: places[i])
        parts = []
        for level, readings in enumerate(waiting):
            rows = readings.scores.new_tensor([places[i][1] for i in order if places[i][0] == level]).long()
            if len(rows):
                parts.append((readings.predicted[rows], self.head.select(readings.predictor, rows)))
        return Readings(
            [kept[i] for i in order],
            waiting[0].scores.new_tensor([scores[i] for i in order]),
            torch.cat([predicted for predicted, _ in parts]),
            self.head.concatenate([state for _, state in parts]),
        )


@torch.inference_mode()
def search_transducer(
    searcher: TransducerGreedySearch | TransducerBeamSearch,
    frames: Tensor,  # (F, D) of one trial, padding cut off
) -> list[Hypothesis]:
    """The readings of a whole trial, best first."""
    if isinstance(searcher, TransducerGreedySearch):
        return searcher.finish(searcher.step(searcher.start(), frames))
    return searcher.finish(searcher.step(searcher.start(), frames))


@dataclass(frozen=True)
class HeadWeights:
    """How much each head counts where both are asked."""

    ctc: float = 0.3
    transducer: float = 1.0


@torch.inference_mode()
def rescore(
    head: Transducer,
    frames: Tensor,  # (F, D)
    log_probs: Tensor,  # (F, V) of the CTC head
    readings: Iterable[Sequence[int]],
    weights: HeadWeights = HeadWeights(),
) -> list[Hypothesis]:
    """Readings of either head, each scored exactly by both, best first."""
    candidates = list(dict.fromkeys(tuple(int(t) for t in r) for r in readings))
    if not candidates:
        raise UserError("there is no reading to score; pass the hypotheses of at least one search")
    n, device = len(candidates), frames.device
    n_tokens = torch.tensor([len(c) for c in candidates], device=device)
    tokens = torch.zeros(n, max(1, int(n_tokens.max())), dtype=torch.int64, device=device)
    for row, candidate in zip(tokens, candidates, strict=True):
        row[: len(candidate)] = torch.tensor(candidate, dtype=torch.int64)
    n_frames = torch.full((n,), len(frames), device=device)
    joint: Joint = head(frames[None], tokens)
    every = joint.frames.expand(n, -1, -1)
    transducer = chunked_rnnt_loss(joint.logits, every, joint.predicted, tokens, n_frames, n_tokens, BLANK)
    ctc = ctc_loss(log_probs[None].expand(n, -1, -1).float(), n_frames, tokens, n_tokens, CTCSettings())
    total = -(weights.transducer * transducer + weights.ctc * ctc)
    order = total.argsort(descending=True, stable=True).tolist()
    return [
        Hypothesis(candidates[i], {"transducer": -float(transducer[i]), "ctc": -float(ctc[i])}) for i in order
    ]


def require_transducer(head: Transducer | None, where: str) -> Transducer:
    if head is None:
        raise UserError(f"{where} has no transducer; use --head ctc, or train with transducer.enabled=true")
    return head
