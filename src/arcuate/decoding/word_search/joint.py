"""Words from both heads: candidates of the word search, each scored by what CTC and transducer say of its sounds.

Candidates come from the word search over the CTC scores, and from the same search over what both heads read together:
a reading in phonemes is laid out as frames that are nearly certain of it, so that words near it are found too. Every
candidate is spelt by the lexicon and scored exactly by both heads; the n-gram's score is the one of the search.

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

DOUBT = 0.02  # probability that a token of a reading is another one, or none
N_READINGS = 3  # in phonemes that words are looked for in
N_SPELLINGS = 4  # of a candidate that are scored; the best one counts


@dataclass(frozen=True, eq=False)
class HeadOutputs:
    """A trial as the model hears it."""

    log_probs: np.ndarray  # (F, V) of the CTC head
    frames: Tensor  # (F, D) of the encoder

    def __len__(self) -> int:
        return len(self.log_probs)


@dataclass(frozen=True, eq=False)
class JointWordSearch:
    """A word search that asks the transducer too."""

    words: WordSearch
    lexicon: Lexicon
    head: Transducer
    weights: HeadWeights = field(default_factory=HeadWeights)

    def search(self, trial: HeadOutputs, n_best: int = 1) -> list[Hypothesis]:
        """The best readings in words, best first."""
        candidates = self.candidates(trial, n_best)
        if not candidates:
            return []
        spelt = {words: self.spellings(words) for words in candidates}
        every = [tokens for spellings in spelt.values() for tokens in spellings]
        log_probs = torch.from_numpy(np.asarray(trial.log_probs)).to(trial.frames.device)
        scored = {h.tokens: h for h in rescore(self.head, trial.frames, log_probs, every, self.weights)}
        found = [
            max((self._weigh(h, scored[tokens]) for tokens in spelt[words]), key=lambda h: h.total or 0.0)
            for words, h in candidates.items()
        ]
        return sorted(found, key=lambda h: -(h.total or 0.0))[:n_best]

    def candidates(self, trial: HeadOutputs, n_best: int) -> dict[tuple[str, ...], Hypothesis]:
        """Sequences of words worth scoring, each with its n-gram score and bonus."""
        found = self.words.search(trial.log_probs, n_best)
        beam = JointBeamSearch(self.head, weights=self.weights)
        for reading in search_joint(beam, trial.frames, trial.log_probs)[:N_READINGS]:
            if reading.tokens:
                frames = lay_out(reading.tokens, trial.log_probs.shape[1])
                # These frames are no frames of the trial, so that nobody knows when a word was said.
                found += [replace(h, times=()) for h in self.words.search(frames, n_best)]
        return {h.words: h for h in reversed(found)}

    def spellings(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """The sounds of a candidate, a silence after each word as in the labels; the likeliest ways to say it."""
        ways = [list(self._sounds(word)) for word in words]
        return [tuple(t for part in way for t in part) for way in islice(product(*ways), N_SPELLINGS)]

    def _sounds(self, word: str) -> Iterator[tuple[int, ...]]:
        index = {name: i for i, name in enumerate(self.lexicon.classes)}
        silence = (self.words.boundary,) if self.words.boundary >= 0 else ()
        for phones in self.lexicon.pronunciations(word):
            yield (*(index[p] for p in phones), *silence)

    def _weigh(self, candidate: Hypothesis, heard: Hypothesis) -> Hypothesis:
        settings, weights = self.words.settings, self.weights
        acoustic = weights.transducer * heard.scores["transducer"] + weights.ctc * heard.scores["ctc"]
        acoustic *= settings.acoustic_scale / (weights.transducer + weights.ctc)
        acoustic += settings.silence_bonus * heard.tokens.count(self.words.boundary)
        lm, bonus = candidate.scores["lm"], candidate.scores["bonus"]
        return Hypothesis(
            heard.tokens,
            {"acoustic": acoustic, **heard.scores, "lm": lm, "bonus": bonus},
            candidate.words,
            candidate.times,
            acoustic + settings.lm_weight * lm + bonus,
        )


def lay_out(tokens: Sequence[int], n_classes: int) -> np.ndarray:
    """A reading as frame scores: a token, a blank, a token, …, each nearly certain. (2U, V)"""
    frames = np.full((2 * len(tokens), n_classes), np.log(DOUBT / (n_classes - 1)), np.float32)
    frames[np.arange(0, len(frames), 2), tokens] = np.log1p(-DOUBT)
    frames[1::2, BLANK] = np.log1p(-DOUBT)
    return frames
