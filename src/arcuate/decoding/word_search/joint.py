"""Word search with both heads: candidates of the word search, rescored jointly by CTC and transducer.

Candidates come from the word search over the CTC log-probabilities, and from the same search over the best phoneme
hypotheses of the joint beam search, each represented by nearly certain frames so that similar words are also found.
Every candidate is converted to phonemes with the lexicon and scored exactly by both heads; its n-gram score is that of
the search.

score = acoustic_scale · (wt · transducer + wc · CTC) / (wt + wc) + silence_bonus · silences
      + lm_weight · n-gram + bonus
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product

import numpy as np
import torch
from torch import Tensor

from arcuate.data.alphabet import BLANK
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.decoding.joint import JointBeamSearch, search_joint
from arcuate.decoding.transducer import HeadWeights, rescore
from arcuate.decoding.word_search.search import WordSearch
from arcuate.language.lexicon import Lexicon
from arcuate.models.transducer import Transducer

_SYNTHETIC_ERROR = 0.02  # probability mass of the other classes in a synthetic frame
_N_PHONEME_HYPOTHESES = 3  # searched for words
_N_PRONUNCIATIONS = 4  # per candidate; the best one counts


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

    words: WordSearch
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
        beam = JointBeamSearch(self.head, weights=self.weights)
        for hypothesis in search_joint(beam, trial.frames, trial.log_probs)[:_N_PHONEME_HYPOTHESES]:
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
