"""Joint CTC/transducer search for tokens (`JointBeamSearch`) and words (`JointWordSearch`).

Tokens: one beam over token sequences, scored by both heads at every frame. The transducer score is the sum over all
lattice paths so far, as in `TransducerBeamSearch`. The CTC score is the sum over all paths that emit exactly these
tokens up to this frame. Joint decoding usually scores CTC prefixes (Watanabe et al. 2017); here the CTC score is exact
even if a token is appended late: a hypothesis keeps the forward variables of its last two CTC states at every frame,
and an extension is computed from them. Forward variables far below the hypothesis' best are dropped, frames and tokens
alike, so the state of a long stream covers its last words only. During the search the CTC path may lag some tokens
behind the transducer at a cost; at the end it must have emitted all. `start / step / finish` with immutable states.

Words: candidates come from the word search over the CTC log-probabilities, and from the same search over the best
phoneme hypotheses of the joint beam search, each represented by nearly certain frames so that similar words are also
found. Every candidate is converted to phonemes with the lexicon and scored exactly by both heads; its n-gram score is
that of the search.

score = acoustic_scale · (wt · transducer + wc · CTC) / (wt + wc) + silence_bonus · silences
      + lm_weight · n-gram + bonus
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from arcuate.data.alphabet import BLANK
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.decoding.transducer import (
    MAX_SYMBOLS,
    BeamState,
    HeadWeights,
    collect_hypotheses,
    rescore,
    sum_alignments,
)
from arcuate.language.lexicon import Lexicon
from arcuate.models.transducer import Transducer

if TYPE_CHECKING:  # its Numba kernels cost half a second that a search for tokens does not need
    from arcuate.decoding.word_search.search import WordSearch

_LAG_COST = 2.0  # nats per token that the CTC path has not emitted yet
_DROP_BELOW = 100.0  # forward variables this many nats below the best of the hypothesis are dropped
_N_TRIED = 2  # times the beam width: extensions scored by CTC
_SYNTHETIC_ERROR = 0.02  # probability mass of the other classes in a synthetic frame
_N_PHONEME_HYPOTHESES = 3  # searched for words
_N_PRONUNCIATIONS = 4  # per candidate; the best one counts


@dataclass(frozen=True)
class _CtcScore:
    """CTC forward variables (log) of one token sequence of U tokens, after the frames so far."""

    alpha: np.ndarray  # (2u + 1,) of the last u tokens: blank, token, blank, …
    history: np.ndarray  # (t + 1, 2) of the last token and its blank, before the first kept frame and after each

    @property
    def log_prob(self) -> float:
        """Log-probability that exactly these tokens were emitted."""
        return float(np.logaddexp(*self.history[-1]))

    @property
    def partial_score(self) -> float:
        """Score of the best prefix of the token sequence, minus a cost per token that it lacks."""
        emitted = np.logaddexp(self.alpha[2::2], self.alpha[1::2])  # after 1, 2, … tokens
        emitted = np.concatenate([self.alpha[:1], emitted])
        return float((emitted - _LAG_COST * np.arange(len(emitted) - 1, -1, -1)).max())


_EMPTY = _CtcScore(np.zeros(1), np.array([[-np.inf, 0.0]]))
_Level = tuple[BeamState, list[_CtcScore]]  # hypotheses that emitted the same number of tokens at this frame


@dataclass(frozen=True)
class JointState:
    hypotheses: BeamState  # with transducer scores
    ctc: list[_CtcScore]  # one per hypothesis
    log_probs: np.ndarray  # (t, V) CTC log-probabilities of the kept frames


@dataclass(frozen=True)
class JointBeamSearch:
    """Beam search with at most `width` hypotheses per frame, ranked by both heads."""

    head: Transducer
    width: int = 8
    max_symbols: int = MAX_SYMBOLS
    weights: HeadWeights = field(default_factory=HeadWeights)

    @torch.inference_mode()
    def search(self, frames: Tensor, log_probs: np.ndarray) -> list[Hypothesis]:
        """Decode a complete trial, encoder frames (F, D) and CTC log-probabilities (F, V), into an n-best list."""
        return self.finish(self.step(self.start(), frames, log_probs))

    def start(self) -> JointState:
        predicted, predictor = self.head.start(1)
        hypotheses = BeamState([()], predicted.new_zeros(1), predicted, predictor)
        return JointState(hypotheses, [_EMPTY], np.zeros((0, self.head.output.out_features)))

    def step(self, state: JointState, frames: Tensor, log_probs: np.ndarray) -> JointState:
        """Advance the state over further encoder frames (f, D) and their CTC log-probabilities (f, V)."""
        for frame, row in zip(self.head.encoder_proj(frames), np.asarray(log_probs, np.float64), strict=True):
            state = self._step_frame(state, frame, row)
        return state

    def finish(self, state: JointState) -> list[Hypothesis]:
        """N-best list of all hypotheses in the beam; both scores cover the complete trial."""
        found = [
            Hypothesis(
                tokens,
                {"transducer": score, "ctc": ctc.log_prob},
                total=float(self._total(score, ctc.log_prob)),
            )
            for tokens, score, ctc in zip(
                state.hypotheses.tokens, state.hypotheses.scores.tolist(), state.ctc, strict=True
            )
        ]
        return sorted(found, key=lambda h: -(h.total or 0.0))

    def _total(self, transducer: np.ndarray | float, ctc: np.ndarray | float) -> np.ndarray | float:
        if not self.weights.ctc:  # 0 · −inf would be NaN
            return self.weights.transducer * transducer
        return self.weights.transducer * transducer + self.weights.ctc * ctc

    def _step_frame(self, state: JointState, frame: Tensor, row: np.ndarray) -> JointState:
        """Process one frame: emit tokens as long as they help, then the blank to the next frame."""
        kept = np.concatenate([state.log_probs, row[None]])
        active = state.hypotheses
        ctc = [_advance(c, t, row) for c, t in zip(state.ctc, active.tokens, strict=True)]
        levels: list[_Level] = []
        for emitted in range(self.max_symbols + 1):
            log_probs = active.scores[:, None] + self.head.log_probs(frame, active.predicted)  # (n, V)
            waiting = BeamState(active.tokens, log_probs[:, BLANK], active.predicted, active.predictor)
            levels.append((waiting, ctc))
            if emitted == self.max_symbols:
                break
            active, ctc = self._extend(active, ctc, log_probs, kept)
            if self._can_stop(levels, active, ctc):
                break
        return self._merge_levels(levels, kept)

    def _partial_totals(self, hypotheses: BeamState, ctc: list[_CtcScore]) -> np.ndarray:
        partial_scores = np.array([c.partial_score for c in ctc])
        return np.asarray(self._total(hypotheses.scores.double().cpu().numpy(), partial_scores))

    def _can_stop(self, levels: list[_Level], active: BeamState, ctc: list[_CtcScore]) -> bool:
        """Whether `width` waiting hypotheses rank higher than every new extension."""
        waiting = np.sort(np.concatenate([self._partial_totals(*level) for level in levels]))
        return len(waiting) >= self.width and bool(self._partial_totals(active, ctc).max() < waiting[-self.width])

    def _extend(self, active: BeamState, ctc: list[_CtcScore], log_probs: Tensor, kept_frames: np.ndarray) -> _Level:
        """The best extensions by one token: preselected by the transducer, selected by both heads."""
        log_probs = log_probs.clone()
        log_probs[:, BLANK] = -torch.inf
        n_tried = min(_N_TRIED * self.width, log_probs.numel() - len(log_probs))
        scores, chosen = log_probs.flatten().topk(n_tried)
        rows, classes = chosen // log_probs.shape[1], chosen % log_probs.shape[1]
        lasts = [active.tokens[row][-1:] for row in rows.tolist()]
        longer = _append_tokens([ctc[row] for row in rows.tolist()], lasts, classes.tolist(), kept_frames)
        totals = self._total(scores.double().cpu().numpy(), np.array([c.partial_score for c in longer]))
        best = np.argsort(-np.asarray(totals), kind="stable")[: self.width]
        kept = torch.from_numpy(best).to(rows.device)
        rows, classes, scores = rows[kept], classes[kept], scores[kept]
        tokens = [(*active.tokens[r], t) for r, t in zip(rows.tolist(), classes.tolist(), strict=True)]
        predicted, predictor = self.head.step(active.predictor[rows], classes)
        return BeamState(tokens, scores, predicted, predictor), [longer[i] for i in best.tolist()]

    def _merge_levels(self, levels: list[_Level], kept_frames: np.ndarray) -> JointState:
        """Sum the alignments of equal token sequences and keep the best `width` by both heads."""
        waiting = [hypotheses for hypotheses, _ in levels]
        totals, sources = sum_alignments(waiting)
        ctc = {t: levels[level][1][row] for t, (level, row) in sources.items()}
        best = sorted(totals, key=lambda t: -float(self._total(totals[t], ctc[t].partial_score)))[: self.width]
        kept = collect_hypotheses(waiting, totals, {t: sources[t] for t in best})
        return JointState(kept, *_forget([ctc[t] for t in kept.tokens], kept_frames))


def _forget(ctc: list[_CtcScore], frames: np.ndarray) -> tuple[list[_CtcScore], np.ndarray]:
    """Drop the first frames and first tokens that no hypothesis can gain from."""
    n = min(_n_negligible(np.logaddexp(*c.history.T), c.alpha) for c in ctc)
    shorter = [_CtcScore(c.alpha[_n_negligible(c.alpha, c.alpha) // 2 * 2 :], c.history[n:]) for c in ctc]
    return shorter, frames[n:]


def _n_negligible(values: np.ndarray, alpha: np.ndarray) -> int:
    """Number of leading values far below the best forward variable; the last value is always kept."""
    negligible = values < alpha.max() - _DROP_BELOW
    return len(values) - 1 if negligible.all() else int(negligible.argmin())


def _advance(ctc: _CtcScore, tokens: tuple[int, ...], log_probs: np.ndarray) -> _CtcScore:
    """CTC forward recursion over one frame (V,), in O(kept tokens)."""
    alpha, n = ctc.alpha, len(ctc.alpha)
    labels = np.full(n, BLANK)
    labels[1::2] = tokens[len(tokens) - n // 2 :]
    new = alpha.copy()
    new[1:] = np.logaddexp(new[1:], alpha[:-1])
    skips = np.flatnonzero(labels[3::2] != labels[1:-2:2]) * 2 + 3  # different tokens need no blank between them
    new[skips] = np.logaddexp(new[skips], alpha[skips - 2])
    new += log_probs[labels]
    last = new[-2] if n > 1 else -np.inf
    return _CtcScore(new, np.concatenate([ctc.history, [[last, new[-1]]]]))


def _append_tokens(
    ctc: list[_CtcScore], lasts: list[tuple[int, ...]], tokens: list[int], frames: np.ndarray
) -> list[_CtcScore]:
    """Append one token to each sequence, by running its two new states over all kept frames (t, V)."""
    history = np.stack([c.history for c in ctc])  # (n, t + 1, 2)
    repeats = np.array([last == (token,) for last, token in zip(lasts, tokens, strict=True)])
    before = np.where(repeats[:, None], history[..., 1], np.logaddexp(history[..., 0], history[..., 1]))  # (n, t + 1)
    new = np.full(history.shape, -np.inf)
    for k, log_probs in enumerate(frames):
        new[:, k + 1, 0] = np.logaddexp(new[:, k, 0], before[:, k]) + log_probs[tokens]
        new[:, k + 1, 1] = np.logaddexp(new[:, k, 0], new[:, k, 1]) + log_probs[BLANK]
    return [_CtcScore(np.concatenate([c.alpha, states[-1]]), states) for c, states in zip(ctc, new, strict=True)]


@dataclass(frozen=True, eq=False)
class HeadOutputs:
    """Model outputs of one trial."""

    log_probs: np.ndarray  # (F, V) of the CTC head
    frames: Tensor  # (F, D) of the encoder

    def __len__(self) -> int:
        return len(self.log_probs)


@dataclass(frozen=True, eq=False)
class JointWordSearch:
    """A word search whose acoustic score combines CTC and transducer."""

    words: "WordSearch"
    lexicon: Lexicon
    head: Transducer
    weights: HeadWeights = field(default_factory=HeadWeights)

    def search(self, trial: HeadOutputs, n_best: int = 1) -> list[Hypothesis]:
        """Decode a trial into an n-best list of word sequences."""
        candidates = self.candidates(trial, n_best)
        if not candidates:
            return []
        pronunciations = {words: self.pronunciations(words) for words in candidates}
        token_sequences = [tokens for variants in pronunciations.values() for tokens in variants]
        log_probs = torch.from_numpy(np.asarray(trial.log_probs)).to(trial.frames.device)
        rescored = rescore(self.head, trial.frames, log_probs, token_sequences, self.weights)
        acoustic = {h.tokens: h for h in rescored}
        found = [
            max((self._combine(h, acoustic[tokens]) for tokens in pronunciations[words]), key=lambda h: h.total or 0.0)
            for words, h in candidates.items()
        ]
        return sorted(found, key=lambda h: -(h.total or 0.0))[:n_best]

    def candidates(self, trial: HeadOutputs, n_best: int) -> dict[tuple[str, ...], Hypothesis]:
        """Word sequences to score, each with its n-gram score and bonus."""
        found = self.words.search(trial.log_probs, n_best)
        phonemes = JointBeamSearch(self.head, weights=self.weights).search(trial.frames, trial.log_probs)
        for hypothesis in phonemes[:_N_PHONEME_HYPOTHESES]:
            if hypothesis.tokens:
                frames = synthetic_frames(hypothesis.tokens, trial.log_probs.shape[1])
                # Synthetic frames are not frames of the trial, so word times are unknown.
                found += [replace(h, times=()) for h in self.words.search(frames, n_best)]
        return {h.words: h for h in reversed(found)}

    def pronunciations(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Token sequences of the words, in lexicon order, with a silence after each word as in the labels."""
        variants = [list(self._word_tokens(word)) for word in words]
        return [tuple(t for part in variant for t in part) for variant in islice(product(*variants), _N_PRONUNCIATIONS)]

    def _word_tokens(self, word: str) -> Iterator[tuple[int, ...]]:
        index = {name: i for i, name in enumerate(self.lexicon.classes)}
        silence = (self.words.boundary,) if self.words.boundary >= 0 else ()
        for phones in self.lexicon.pronunciations(word):
            yield (*(index[p] for p in phones), *silence)

    def _combine(self, candidate: Hypothesis, heads: Hypothesis) -> Hypothesis:
        settings, weights = self.words.settings, self.weights
        acoustic = weights.transducer * heads.scores["transducer"] + weights.ctc * heads.scores["ctc"]
        acoustic *= settings.acoustic_scale / (weights.transducer + weights.ctc)
        acoustic += settings.silence_bonus * heads.tokens.count(self.words.boundary)
        lm, bonus = candidate.scores["lm"], candidate.scores["bonus"]
        return Hypothesis(
            heads.tokens,
            {"acoustic": acoustic, **heads.scores, "lm": lm, "bonus": bonus},
            candidate.words,
            candidate.times,
            acoustic + settings.lm_weight * lm + bonus,
        )


def synthetic_frames(tokens: Sequence[int], n_classes: int) -> np.ndarray:
    """Log-probabilities (2U, V) of a token sequence: token, blank, token, blank, …, each nearly certain."""
    frames = np.full((2 * len(tokens), n_classes), np.log(_SYNTHETIC_ERROR / (n_classes - 1)), np.float32)
    frames[np.arange(0, len(frames), 2), tokens] = np.log1p(-_SYNTHETIC_ERROR)
    frames[1::2, BLANK] = np.log1p(-_SYNTHETIC_ERROR)
    return frames
