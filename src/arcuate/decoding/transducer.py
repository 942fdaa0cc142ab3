"""Transducer (RNN-T) decoding: greedy search and beam search (Graves 2012).

At each frame a hypothesis emits up to `max_symbols` tokens and then takes the blank to the next frame; the prediction
network advances on tokens only. Unlike Graves' algorithm the beam is synchronous in frames: hypotheses are expanded
level by level (0, 1, … tokens at this frame), and alignments of the same token sequence are summed. With a wide enough
beam the scores are exact sums over all alignments with at most `max_symbols` tokens per frame. All searches have
`start / step / finish` with immutable states; decoding a complete trial is one `step`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from arcuate.data.alphabet import BLANK
from arcuate.decoding.heads import MAX_SYMBOLS
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.errors import UserError
from arcuate.models.transducer import Transducer


@dataclass(frozen=True)
class GreedyState:
    """Tokens so far and the state of the prediction network."""

    tokens: tuple[int, ...]
    score: float  # log-probability of the greedy alignment
    predicted: Tensor  # (1, W)
    predictor: Tensor  # state of the prediction network, one row per hypothesis


@dataclass(frozen=True)
class TransducerGreedySearch:
    """At each frame, emit the best class until it is the blank."""

    head: Transducer
    max_symbols: int = MAX_SYMBOLS

    @torch.inference_mode()
    def search(self, frames: Tensor) -> list[Hypothesis]:
        """Decode the encoder frames (F, D) of a complete trial."""
        return self.finish(self.step(self.start(), frames))

    def start(self) -> GreedyState:
        predicted, predictor = self.head.start(1)
        return GreedyState((), 0.0, predicted, predictor)

    def step(self, state: GreedyState, frames: Tensor) -> GreedyState:
        """Advance the state over further encoder frames (f, D)."""
        tokens, score = list(state.tokens), state.score
        predicted, predictor = state.predicted, state.predictor
        for frame in self.head.encoder_proj(frames):
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
class BeamState:
    """Hypotheses of the beam, with their scores and states of the prediction network."""

    tokens: list[tuple[int, ...]]
    scores: Tensor  # (n,) log of the summed probability
    predicted: Tensor  # (n, W)
    predictor: Tensor  # state of the prediction network, one row per hypothesis


@dataclass(frozen=True)
class TransducerBeamSearch:
    """Beam search with at most `width` hypotheses after each frame and after each token within a frame."""

    head: Transducer
    width: int = 8
    max_symbols: int = MAX_SYMBOLS

    @torch.inference_mode()
    def search(self, frames: Tensor) -> list[Hypothesis]:
        """Decode the encoder frames (F, D) of a complete trial into an n-best list."""
        return self.finish(self.step(self.start(), frames))

    def start(self) -> BeamState:
        predicted, predictor = self.head.start(1)
        return BeamState([()], predicted.new_zeros(1), predicted, predictor)

    def step(self, state: BeamState, frames: Tensor) -> BeamState:
        """Advance the state over further encoder frames (f, D)."""
        for frame in self.head.encoder_proj(frames):
            state = self._step_frame(state, frame)
        return state

    def finish(self, state: BeamState) -> list[Hypothesis]:
        """N-best list of all hypotheses in the beam."""
        order = state.scores.argsort(descending=True, stable=True).tolist()
        scores = state.scores.tolist()
        return [Hypothesis(state.tokens[i], {"transducer": scores[i]}) for i in order]

    def _step_frame(self, active: BeamState, frame: Tensor) -> BeamState:
        """Process one frame: after 0, 1, … tokens a hypothesis may take the blank and wait for the next frame."""
        waiting: list[BeamState] = []
        for emitted in range(self.max_symbols + 1):
            log_probs = active.scores[:, None] + self.head.log_probs(frame, active.predicted)  # (n, V)
            waiting.append(BeamState(active.tokens, log_probs[:, BLANK], active.predicted, active.predictor))
            if emitted == self.max_symbols or self._can_stop(waiting, log_probs):
                break
            active = self._extend(active, log_probs)
        return self._merge_levels(waiting)

    def _can_stop(self, waiting: list[BeamState], log_probs: Tensor) -> bool:
        """Whether `width` waiting hypotheses already score higher than any longer one can."""
        scores = torch.cat([level.scores for level in waiting])
        if len(scores) < self.width:
            return False
        return bool(log_probs[:, BLANK + 1 :].max() < scores.topk(self.width).values[-1])

    def _extend(self, active: BeamState, log_probs: Tensor) -> BeamState:
        """The best extensions by one token."""
        log_probs = log_probs.clone()
        log_probs[:, BLANK] = -torch.inf
        n_best = min(self.width, log_probs.numel() - len(log_probs))
        scores, chosen = log_probs.flatten().topk(n_best)
        rows, classes = chosen // log_probs.shape[1], chosen % log_probs.shape[1]
        tokens = [(*active.tokens[row], token) for row, token in zip(rows.tolist(), classes.tolist(), strict=True)]
        predicted, predictor = self.head.step(active.predictor[rows], classes)
        return BeamState(tokens, scores, predicted, predictor)

    def _merge_levels(self, waiting: list[BeamState]) -> BeamState:
        """Sum the alignments of equal token sequences and keep the best `width` sequences."""
        totals, sources = sum_alignments(waiting)
        kept = sorted(totals, key=lambda t: totals[t], reverse=True)[: self.width]
        return collect_hypotheses(waiting, totals, {t: sources[t] for t in kept})


def sum_alignments(
    levels: Sequence[BeamState],
) -> tuple[dict[tuple[int, ...], float], dict[tuple[int, ...], tuple[int, int]]]:
    """Score of every token sequence over all its alignments, and the (level, row) of the best one.

    Equal tokens give equal predictor states, so any alignment could provide the state.
    """
    alignments: dict[tuple[int, ...], list[tuple[float, int, int]]] = {}
    for index, level in enumerate(levels):
        for row, (tokens, score) in enumerate(zip(level.tokens, level.scores.tolist(), strict=True)):
            alignments.setdefault(tokens, []).append((score, index, row))
    totals = {t: float(np.logaddexp.reduce([s for s, _, _ in found])) for t, found in alignments.items()}
    return totals, {t: max(found)[1:] for t, found in alignments.items()}


def collect_hypotheses(
    levels: Sequence[BeamState],
    totals: Mapping[tuple[int, ...], float],
    sources: Mapping[tuple[int, ...], tuple[int, int]],
) -> BeamState:
    """Collect the hypotheses of `sources`, token sequence to (level, row), in order of level and row."""
    order = sorted(sources, key=lambda t: sources[t])
    parts = []
    for index, level in enumerate(levels):
        picked = [sources[t][1] for t in order if sources[t][0] == index]
        if picked:
            rows = torch.tensor(picked, device=level.scores.device)
            parts.append((level.predicted[rows], level.predictor[rows]))
    return BeamState(
        order,
        levels[0].scores.new_tensor([totals[t] for t in order]),
        torch.cat([predicted for predicted, _ in parts]),
        torch.cat([state for _, state in parts]),
    )


def require_transducer(head: Transducer | None, where: str) -> Transducer:
    """Return the head, or raise UserError if the model has none."""
    if head is None:
        raise UserError(f"{where} has no transducer; use --head ctc, or train with transducer.enabled=true")
    return head
