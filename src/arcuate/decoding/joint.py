"""Joint CTC/transducer search for tokens (`JointSearch`) and words (`JointWordSearch`).

Tokens: one beam over token sequences, scored by both heads at every frame. At each frame a hypothesis emits up to
`max_symbols` tokens and then takes the blank to the next frame; the prediction network advances on tokens only. The
transducer score is the sum over all lattice paths so far. Unlike Graves' (2012) beam search this one is synchronous in
frames: hypotheses are expanded level by level (0, 1, … tokens at this frame).

The CTC score is the sum over all paths that emit exactly these tokens up to this frame. Joint decoding usually scores
CTC prefixes (Watanabe et al. 2017); here the CTC score is exact even if a token is appended late: a hypothesis keeps
the forward variables of its last two CTC states at every frame, and an extension is computed from them. Frames and
tokens whose forward variables are far below the best one of the hypothesis are dropped, so the state of a long stream
covers its last words only. During the search the CTC path may lag behind the transducer, at a cost per token; at the
end it must have emitted all tokens. The interface is `start / step / finish` with immutable states.

Words: candidates come from the word search over the CTC log-probabilities, and from the same search over the best
phoneme hypotheses of the joint beam search, each converted to synthetic frames (token, blank, …) that leave some
probability to other classes, so that similar words are found too. Every candidate is converted to phonemes with the
lexicon and scored exactly by both heads; its n-gram score is taken from the search. The word search and the joint beam
advance while frames arrive; candidates are scored at the end of the sentence.

score = (wt · (transducer − ilm_weight · ILM) + wc · CTC) / (wt + wc) + silence_bonus · silences
      + lm_weight · n-gram + bonus

The prediction network of a transducer is a language model over phonemes, which the n-gram would count a second time.
Its estimate (`transducer.py`) is therefore subtracted, as in the hybrid autoregressive transducer (Variani et al. 2020)
and in internal language model estimation (Meng et al. 2021); the density ratio (McDermott et al. 2019) subtracts a
separately trained model of the training labels instead.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import TYPE_CHECKING

import numpy as np

from arcuate.data.alphabet import BLANK, CLASSES
from arcuate.decoding.hypothesis import Hypothesis, Partial, greedy
from arcuate.decoding.transducer import (
    MAX_SYMBOLS,
    TRANSDUCER_BEAM,
    HeadWeights,
    TransducerHead,
    rescore,
    score_sequences,
)
from arcuate.errors import UserError
from arcuate.language.jit import NEG_INF, log_add, njit
from arcuate.language.lexicon import Lexicon
from arcuate.models.layout import Frames, Head, join_frames

if TYPE_CHECKING:  # its Numba kernels take half a second to load, and a search for tokens does not need them
    from arcuate.decoding.config import DecodingConfig
    from arcuate.decoding.word_search.search import WordSearch, WordState

_LAG_COST = 2.0  # nats per token that the CTC path has not emitted yet
_DROP_BELOW = 100.0  # forward variables this many nats below the best of the hypothesis are dropped
_N_TRIED = 2  # extensions scored by CTC, as a multiple of the beam width
_SYNTHETIC_ERROR = 0.02  # probability mass of the other classes in a synthetic frame
_CANDIDATE_BEAM = 4  # beam of the search for phonemes: 8 has the same PER and takes 1.5 times as long
_N_PHONEME_HYPOTHESES = 3  # searched for words
_N_CANDIDATES = 10  # word sequences of each search that are scored by both heads
_N_PRONUNCIATIONS = 4  # per candidate; the best one counts


@dataclass(frozen=True, eq=False)
class _CtcScore:
    """CTC forward variables (log) of one token sequence of U tokens, after the frames so far."""

    alpha: np.ndarray  # (2u + 1,) states of the last u tokens: blank, token, blank, …
    history: np.ndarray  # (t + 1, 2) last token and its blank, before the first kept frame and after each frame
    partial_score: float  # score of the best prefix of the token sequence, minus a cost per missing token

    @property
    def log_prob(self) -> float:
        """Log-probability that exactly these tokens were emitted."""
        return float(np.logaddexp(*self.history[-1]))


_EMPTY = _CtcScore(np.zeros(1), np.array([[-np.inf, 0.0]]), 0.0)


@dataclass(frozen=True, eq=False)
class _Beam:
    """Hypotheses with the scores of both heads and states of the prediction network."""

    tokens: list[tuple[int, ...]]
    scores: np.ndarray  # (n,) transducer log-probabilities
    ctc: list[_CtcScore]
    predicted: np.ndarray  # (n, W)
    predictor: np.ndarray  # one row per hypothesis

    @property
    def partial_scores(self) -> np.ndarray:
        return np.array([c.partial_score for c in self.ctc])


@dataclass(frozen=True, eq=False)
class JointState:
    """Hypotheses after some frames, and all frames so far; the final scores need them."""

    beam: _Beam
    log_probs: np.ndarray  # (t, V) CTC log-probabilities of the kept frames
    frames: tuple[Frames, ...] = ()


@dataclass(frozen=True)
class JointSearch:
    """Beam search with at most `width` hypotheses per frame, ranked by both heads.

    The n-best list, with the greedy CTC hypothesis added, is scored exactly by both heads. With `HeadWeights(ctc=0)`
    only the transducer is used.
    """

    transducer: TransducerHead
    width: int = TRANSDUCER_BEAM
    weights: HeadWeights = field(default_factory=HeadWeights)
    max_symbols: int = MAX_SYMBOLS
    classes: tuple[str, ...] = CLASSES

    @property
    def head(self) -> Head:
        return "both" if self.weights.ctc else "transducer"

    def search(self, frames: Frames, n_best: int = 1) -> list[Hypothesis]:
        """Decode a complete trial into an n-best list."""
        return self.finish(self.step(self.start(), frames), n_best)

    def start(self) -> JointState:
        predicted, predictor = self.transducer.start(1)
        beam = _Beam([()], np.zeros(1), [_EMPTY], predicted, predictor)
        return JointState(beam, np.zeros((0, self.transducer.n_classes)))

    def step(self, state: JointState, frames: Frames) -> JointState:
        """Advance the state over further frames."""
        if not len(frames):
            return state
        beam, kept = state.beam, state.log_probs
        # One frame at a time, so that rounding does not depend on the chunk size.
        for encoded, row in zip(frames.for_transducer, np.asarray(frames.log_probs, np.float64), strict=True):
            beam, kept = self._step_frame(beam, kept, self.transducer.project(encoded[None]), row)
        return JointState(beam, kept, (*state.frames, frames))

    def partial(self, state: JointState) -> Partial:
        """Best tokens so far."""
        tokens = state.beam.tokens[int(np.argmax(self.weights.total(state.beam.scores, state.beam.partial_scores)))]
        return Partial(tuple(self.classes[token] for token in tokens), tokens)

    def beam_hypotheses(self, state: JointState) -> list[Hypothesis]:
        """All hypotheses in the beam with the scores of the search, best first; both cover all frames so far."""
        beam = state.beam
        found = [
            Hypothesis(
                tokens,
                {"transducer": score, "ctc": ctc.log_prob},
                total=self.weights.total(score, ctc.log_prob),
            )
            for tokens, score, ctc in zip(beam.tokens, beam.scores.tolist(), beam.ctc, strict=True)
        ]
        return sorted(found, key=lambda h: -(h.total or 0.0))

    def finish(self, state: JointState, n_best: int = 1) -> list[Hypothesis]:
        """N-best list of all frames so far, scored exactly."""
        found = self.beam_hypotheses(state)
        if not state.frames:
            return found[:n_best]
        trial, candidates = join_frames(state.frames), [h.tokens for h in found]
        if self.weights.ctc:
            candidates.append(tuple(greedy(trial.log_probs)))
        return rescore(self.transducer, trial, candidates, self.weights)[:n_best]

    def _step_frame(
        self, before: _Beam, kept: np.ndarray, frame: np.ndarray, row: np.ndarray
    ) -> tuple[_Beam, np.ndarray]:
        """Process one frame: emit tokens while an extension ranks within the beam, then advance by a blank."""
        kept = np.concatenate([kept, row[None]])
        active = replace(before, ctc=[_advance(c, t, row) for c, t in zip(before.ctc, before.tokens, strict=True)])
        levels: list[_Beam] = []  # hypotheses that emitted 0, 1, … tokens at this frame and take the blank
        waiting = np.zeros(0)
        for emitted in range(self.max_symbols + 1):
            logits, norms = self.transducer.join(frame, active.predicted)
            log_probs = active.scores[:, None] + (logits[0] - norms[0][:, None]).astype(np.float64)
            levels.append(replace(active, scores=log_probs[:, BLANK]))
            waiting = np.concatenate([waiting, self.weights.total(levels[-1].scores, active.partial_scores)])
            if emitted == self.max_symbols:
                break
            extended = self._extend(active, log_probs, kept, waiting)
            if extended is None:
                break
            active = extended
        return self._merge_levels(levels, kept)

    def _extend(
        self, active: _Beam, log_probs: np.ndarray, kept_frames: np.ndarray, waiting: np.ndarray
    ) -> _Beam | None:
        """The best extensions by one token: preselected by the transducer, selected by both heads.

        None if `width` waiting hypotheses rank higher than every extension.
        """
        tokens = log_probs[:, BLANK + 1 :]  # the blank is the first class
        chosen = np.argsort(-tokens, axis=None, kind="stable")[: _N_TRIED * self.width]
        rows, classes = chosen // tokens.shape[1], chosen % tokens.shape[1] + BLANK + 1
        scores, lasts = log_probs[rows, classes], [active.tokens[row][-1:] for row in rows.tolist()]
        longer = _append_tokens([active.ctc[row] for row in rows.tolist()], lasts, classes.tolist(), kept_frames)
        totals = self.weights.total(scores, np.array([c.partial_score for c in longer]))
        if len(waiting) >= self.width and totals.max() < np.partition(waiting, -self.width)[-self.width]:
            return None
        best = np.argsort(-totals, kind="stable")[: self.width]
        rows, classes = rows[best], classes[best]
        predicted, predictor = self.transducer.step(active.predictor[rows], classes)
        sequences = [(*active.tokens[r], t) for r, t in zip(rows.tolist(), classes.tolist(), strict=True)]
        return _Beam(sequences, scores[best], [longer[i] for i in best.tolist()], predicted, predictor)

    def _merge_levels(self, levels: list[_Beam], kept_frames: np.ndarray) -> tuple[_Beam, np.ndarray]:
        """Sum the alignments of equal token sequences and keep the best `width` by both heads."""
        totals: dict[tuple[int, ...], float] = {}
        sources: dict[tuple[int, ...], tuple[int, int]] = {}  # any alignment; their states are equal
        for index, level in enumerate(levels):
            for row, (tokens, score) in enumerate(zip(level.tokens, level.scores.tolist(), strict=True)):
                totals[tokens] = log_add(totals[tokens], score) if tokens in totals else score
                sources.setdefault(tokens, (index, row))
        sequences = list(totals)
        ctc = [levels[level].ctc[row] for level, row in sources.values()]
        ranked = self.weights.total(np.array(list(totals.values())), np.array([c.partial_score for c in ctc]))
        best = sorted(np.argsort(-ranked, kind="stable")[: self.width].tolist())  # grouped by level
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        for index, level in enumerate(levels):
            picked = [sources[sequences[i]][1] for i in best if sources[sequences[i]][0] == index]
            if picked:
                parts.append((level.predicted[picked], level.predictor[picked]))
        shorter, frames = _forget([ctc[i] for i in best], kept_frames)
        beam = _Beam(
            [sequences[i] for i in best],
            np.array([totals[sequences[i]] for i in best]),
            shorter,
            parts[0][0] if len(parts) == 1 else np.concatenate([predicted for predicted, _ in parts]),
            parts[0][1] if len(parts) == 1 else np.concatenate([state for _, state in parts]),
        )
        return beam, frames


def _forget(ctc: list[_CtcScore], frames: np.ndarray) -> tuple[list[_CtcScore], np.ndarray]:
    """Drop leading frames and tokens whose forward variables are negligible for every hypothesis."""
    lowest = [float(c.alpha.max()) - _DROP_BELOW for c in ctc]
    n = min(_n_negligible_frames(c.history, limit) for c, limit in zip(ctc, lowest, strict=True))
    shorter = [
        replace(c, alpha=c.alpha[_n_negligible(c.alpha, limit) // 2 * 2 :], history=c.history[n:])
        for c, limit in zip(ctc, lowest, strict=True)
    ]
    return shorter, frames[n:]


@njit(cache=True)
def _n_negligible(values: np.ndarray, lowest: float) -> int:
    """Number of leading values below `lowest`; the last value is always kept."""
    n = 0
    while n < values.shape[0] - 1 and values[n] < lowest:
        n += 1
    return n


@njit(cache=True)
def _n_negligible_frames(history: np.ndarray, lowest: float) -> int:
    """Number of leading frames whose summed forward variables are below `lowest`; the last frame is always kept."""
    n = 0
    while n < history.shape[0] - 1 and log_add(history[n, 0], history[n, 1]) < lowest:
        n += 1
    return n


def _advance(ctc: _CtcScore, tokens: tuple[int, ...], log_probs: np.ndarray) -> _CtcScore:
    """CTC forward recursion over one frame (V,), in O(kept tokens)."""
    recent = np.array(tokens[len(tokens) - len(ctc.alpha) // 2 :], np.int64)
    return _CtcScore(*_advance_states(ctc.alpha, ctc.history, recent, log_probs))


@njit(cache=True)
def _advance_states(
    alpha: np.ndarray, history: np.ndarray, tokens: np.ndarray, log_probs: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float]:
    n = alpha.shape[0]
    new = np.empty(n)
    new[0] = alpha[0] + log_probs[BLANK]
    for i in range(1, n, 2):
        token = tokens[i // 2]
        before = log_add(alpha[i], alpha[i - 1])
        if i > 1 and tokens[i // 2 - 1] != token:  # different tokens need no blank between them
            before = log_add(before, alpha[i - 2])
        new[i] = before + log_probs[token]
        new[i + 1] = log_add(alpha[i + 1], alpha[i]) + log_probs[BLANK]
    longer = np.empty((history.shape[0] + 1, 2))
    longer[:-1] = history
    longer[-1, 0] = new[n - 2] if n > 1 else NEG_INF
    longer[-1, 1] = new[n - 1]
    return new, longer, _partial_score(new)


@njit(cache=True)
def _partial_score(alpha: np.ndarray) -> float:
    """Score of the best prefix of the tokens, minus a cost per missing token."""
    n = alpha.shape[0] // 2
    best = alpha[0] - _LAG_COST * n
    for i in range(n):
        best = max(best, log_add(alpha[2 * i + 1], alpha[2 * i + 2]) - _LAG_COST * (n - 1 - i))
    return best


def _append_tokens(
    ctc: list[_CtcScore], lasts: list[tuple[int, ...]], tokens: list[int], frames: np.ndarray
) -> list[_CtcScore]:
    """Append one token to each sequence, by running its two new states over all kept frames (t, V)."""
    return [
        _CtcScore(*_append_states(c.alpha, c.history, last == (token,), token, frames))
        for c, last, token in zip(ctc, lasts, tokens, strict=True)
    ]


@njit(cache=True)
def _append_states(
    alpha: np.ndarray, history: np.ndarray, repeats: bool, token: int, frames: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float]:
    new = np.empty(history.shape)
    new[0] = NEG_INF
    for k in range(frames.shape[0]):
        before = history[k, 1] if repeats else log_add(history[k, 0], history[k, 1])
        new[k + 1, 0] = log_add(new[k, 0], before) + frames[k, token]
        new[k + 1, 1] = log_add(new[k, 0], new[k, 1]) + frames[k, BLANK]
    longer = np.empty(alpha.shape[0] + 2)
    longer[:-2] = alpha
    longer[-2:] = new[-1]
    return longer, new, _partial_score(longer)


@dataclass(frozen=True, eq=False)
class JointWordState:
    """States of the word search over the CTC log-probabilities and of the joint search for tokens."""

    words: "WordState"
    tokens: JointState


@dataclass(frozen=True, eq=False)
class JointWordSearch:
    """A word search whose acoustic score combines CTC and transducer."""

    word_search: "WordSearch"
    transducer: TransducerHead
    weights: HeadWeights | None = None  # None: as in the settings
    ranking: "DecodingConfig | None" = None  # settings of the final ranking; None: as in the word search

    @property
    def settings(self) -> "DecodingConfig":
        return self.ranking or self.word_search.settings

    @property
    def lexicon(self) -> Lexicon:
        return self.word_search.lexicon

    @property
    def head_weights(self) -> HeadWeights:
        return self.weights or HeadWeights(ctc=self.settings.ctc_weight)

    @property
    def token_search(self) -> JointSearch:
        weights = self.weights or HeadWeights()
        return JointSearch(self.transducer, _CANDIDATE_BEAM, weights, classes=self.word_search.classes)

    @property
    def head(self) -> Head:
        return "both" if self.head_weights.ctc else "transducer"

    def search(self, frames: Frames, n_best: int = 1) -> list[Hypothesis]:
        """Decode a trial into an n-best list of word sequences."""
        return self.finish(self.step(self.start(), frames), n_best)

    def start(self) -> JointWordState:
        return JointWordState(self.word_search.start(), self.token_search.start())

    def step(self, state: JointWordState, frames: Frames) -> JointWordState:
        """Advance the state over further frames."""
        return JointWordState(self.word_search.step(state.words, frames), self.token_search.step(state.tokens, frames))

    def partial(self, state: JointWordState) -> Partial:
        """Complete words so far, from the CTC head only: at the end the transducer may replace any of them."""
        tokens = self.token_search.partial(state.tokens).tokens
        return replace(self.word_search.partial(state.words), tokens=tokens, n_settled=0)

    def finish(self, state: JointWordState, n_best: int = 1) -> list[Hypothesis]:
        """N-best list of all frames so far, scored exactly by both heads.

        Candidates that have more tokens than fit the frames are impossible for CTC; if all are, they stay as found.
        """
        candidates = self.candidates(state, n_best)
        found = list(candidates.values())
        if candidates and state.tokens.frames:
            ranked = self.rank(self.score(join_frames(state.tokens.frames), candidates))
            found = [h for h in ranked if h.total is not None and h.total > -np.inf] or found
        return found[:n_best]

    def with_settings(self, settings: "DecodingConfig") -> "JointWordSearch":
        """The same models with other settings."""
        return replace(self, word_search=self.word_search.with_settings(settings))

    def with_ranking(self, settings: "DecodingConfig") -> "JointWordSearch":
        """The same candidate search, with candidates ranked by the weights of other settings."""
        return replace(self, ranking=settings)

    def scored_candidates(self, trial: Frames, n_best: int = 1) -> list[list[Hypothesis]]:
        """All candidates of a trial with scores by source; `rank` combines them."""
        state = self.step(self.start(), trial)
        return self.score(trial, self.candidates(state, n_best)) if len(trial) else []

    def score(self, trial: Frames, candidates: Mapping[tuple[str, ...], Hypothesis]) -> list[list[Hypothesis]]:
        """Score the pronunciations of every candidate: one list per candidate, not ranked."""
        pronunciations = {words: self.pronunciations(words) for words in candidates}
        sequences = list(dict.fromkeys(tokens for variants in pronunciations.values() for tokens in variants))
        scores = score_sequences(self.transducer, trial, sequences)
        acoustic = {
            tokens: {"transducer": float(t), "ctc": float(c), "ilm": float(i)}
            for tokens, t, c, i in zip(sequences, scores.transducer, scores.ctc, scores.ilm, strict=True)
        }
        return [
            [replace(h, tokens=tokens, scores={**h.scores, **acoustic[tokens]}) for tokens in pronunciations[words]]
            for words, h in candidates.items()
        ]

    def rank(self, scored: Iterable[Sequence[Hypothesis]]) -> list[Hypothesis]:
        """N-best list of scored candidates under the weights: the best pronunciation of each, best first."""
        found = [max(map(self._combine, variants), key=lambda h: h.total or 0.0) for variants in scored]
        return sorted(found, key=lambda h: -(h.total or 0.0))

    def candidates(self, state: JointWordState, n_best: int) -> dict[tuple[str, ...], Hypothesis]:
        """Word sequences to score, each with its n-gram score and bonus."""
        n_best = max(n_best, _N_CANDIDATES)
        found = self.word_search.finish(state.words, n_best)
        phonemes = self.token_search.beam_hypotheses(state.tokens)
        for hypothesis in phonemes[:_N_PHONEME_HYPOTHESES]:
            if hypothesis.tokens:
                frames = synthetic_frames(hypothesis.tokens, len(self.word_search.classes))
                # Synthetic frames are not frames of the trial, so word times are unknown.
                found += [replace(h, times=()) for h in self.word_search.search(Frames(frames), n_best)]
        return {h.words: h for h in reversed(found)}

    def pronunciations(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Token sequences of the words, in lexicon order, with a silence after each word as in the labels."""
        variants = [list(self._word_tokens(word)) for word in words]
        return [tuple(t for part in variant for t in part) for variant in islice(product(*variants), _N_PRONUNCIATIONS)]

    def _word_tokens(self, word: str) -> Iterator[tuple[int, ...]]:
        index = {name: i for i, name in enumerate(self.lexicon.classes)}
        silence = (self.word_search.boundary,) if self.word_search.boundary >= 0 else ()
        for phones in self.lexicon.pronunciations(word):
            yield (*(index[p] for p in phones), *silence)

    def _combine(self, candidate: Hypothesis) -> Hypothesis:
        settings, weights, scores = self.settings, self.head_weights, candidate.scores
        transducer = scores["transducer"] - settings.ilm_weight * scores["ilm"]
        acoustic = weights.total(transducer, scores["ctc"]) / (weights.transducer + weights.ctc)
        acoustic += settings.silence_bonus * candidate.tokens.count(self.word_search.boundary)
        bonus = scores["bonus"] + (settings.word_bonus - self.word_search.settings.word_bonus) * len(candidate.words)
        total = acoustic + settings.lm_weight * scores["lm"] + bonus
        return replace(candidate, scores={**scores, "acoustic": acoustic, "bonus": bonus}, total=total)


def joint_search(
    transducer: TransducerHead,
    name: Head,
    words: "WordSearch | None" = None,
    classes: tuple[str, ...] = CLASSES,
    width: int = TRANSDUCER_BEAM,
) -> JointSearch | JointWordSearch:
    """Create the search with the transducer (`transducer`) or both heads (`both`), for tokens or for words.

    The weights of both heads are those of the settings for words, and the defaults of `HeadWeights` for tokens.
    """
    if words is None:
        weights = HeadWeights() if name == "both" else HeadWeights(ctc=0.0)
        return JointSearch(transducer, width, weights, classes=classes)
    if not words.order.is_identity:  # the transducer's outputs cannot be reordered
        raise UserError(f"the head {name} needs a model whose classes are in the order of the word search; use ctc")
    return JointWordSearch(words, transducer, None if name == "both" else HeadWeights(ctc=0.0))


def synthetic_frames(tokens: Sequence[int], n_classes: int) -> np.ndarray:
    """Log-probabilities (2U, V) of a token sequence: token, blank, token, blank, …, each nearly certain."""
    frames = np.full((2 * len(tokens), n_classes), np.log(_SYNTHETIC_ERROR / (n_classes - 1)), np.float32)
    frames[np.arange(0, len(frames), 2), tokens] = np.log1p(-_SYNTHETIC_ERROR)
    frames[1::2, BLANK] = np.log1p(-_SYNTHETIC_ERROR)
    return frames
