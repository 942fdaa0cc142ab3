"""Sound, n-gram and causal model in one score, with weights that are given or fitted on other trials.

score = a · acoustic + (1 − α) · n-gram + α · causal + length · words
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arcuate.combine.choose import n_words, word_errors
from arcuate.combine.fit import Choice, cross_fit, fold_of
from arcuate.rescore.nbest import NBest


@dataclass(frozen=True)
class Blend:
    """The weights of a score; `scale` turns it into log-probabilities of the candidates."""

    acoustic: float
    alpha: float
    length: float = 0.0
    scale: float = 1.0

    def __call__(self, nbest: NBest, causal: np.ndarray) -> np.ndarray:
        """Scores of all entries: (n,)"""
        total = self.acoustic * nbest.acoustic + (1 - self.alpha) * nbest.ngram + self.alpha * causal
        return self.scale * (total + self.length * word_counts(nbest))


def word_counts(nbest: NBest) -> np.ndarray:
    return np.array([len(text.split()) for text in nbest.found.texts], dtype=np.float64)


def as_blend(weights: np.ndarray) -> Blend:
    """Weights of (acoustic, n-gram, causal, words) in the terms of the formula."""
    acoustic, ngram, causal, length = (float(w) for w in weights)
    scale = ngram + causal
    if scale <= 1e-9:  # neither language model was of use: the sound alone decides
        return Blend(1.0, 0.0, 0.0, max(acoustic, 1e-9))
    return Blend(acoustic / scale, causal / scale, length / scale, scale)


def fit_blends(
    lists: Sequence[NBest], causal: Sequence[np.ndarray], n_folds: int, start: Blend
) -> tuple[list[Blend], Blend]:
    """For each trial the blend fitted on the other folds (whole sessions), and the blend fitted on all."""
    choices = [_choice(nbest, scores) for nbest, scores in zip(lists, causal, strict=True)]
    folds = fold_of([nbest.found.session for nbest in lists], n_folds)
    prior = (start.acoustic, 1 - start.alpha, start.alpha, start.length)
    apart, whole = cross_fit(choices, folds, prior, free=[3])
    return [as_blend(weights) for weights in apart], as_blend(whole)


def _choice(nbest: NBest, causal: np.ndarray) -> Choice | None:
    reference = nbest.found.reference
    if reference is None or not nbest.found.texts:
        return None
    features = np.stack([nbest.acoustic, nbest.ngram, causal, word_counts(nbest)], axis=1)
    return Choice(features, word_errors(reference, nbest.found.texts), n_words(reference))


def best_text(nbest: NBest, scores: np.ndarray) -> str:
    """The highest score; of equals the one the search had put first."""
    return nbest.found.texts[int(np.argmax(np.round(scores, 9)))] if len(scores) else ""
