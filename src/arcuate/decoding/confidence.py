"""Confidence: the probability that a decoded word, or a whole sentence, is correct.

Word posteriors of an n-best list (Wessel et al. 2001, without a lattice): each hypothesis has a posterior, the softmax
of the totals, and the posterior of a word is the sum over the hypotheses that contain it at overlapping frames. Such
posteriors are over-confident, so a logistic model maps them to probabilities, together with separate features of the
acoustic and language-model scores. The weights are settings (`DecodingConfig.confidence`);
`arcuate tune` fits them (`evaluation/confidence.py`).

Sessions differ in difficulty, so confidences and the acceptance threshold follow the session without labels
(`SessionWords`). The words of the session so far, together with the quantiles of the calibration words, which count as
`_CALIBRATION_WORDS` words, have log-odds with a mean that differs by d from that of the calibration. All are shifted by
`weight` · d |d|: where words look much less certain than in the calibration, the model is over-confident too,
and by more than in proportion. The threshold accepts the largest set of the most confident of these words whose mean
confidence is at least `accuracy`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from arcuate.decoding.hypothesis import Hypothesis
from arcuate.decoding.word_search.search import WordSearch

if TYPE_CHECKING:  # settings need pydantic, which the small runtime does without
    from arcuate.decoding.config import ConfidenceConfig, DecodingConfig

WORD_FEATURES = (
    "posterior",  # log-odds of the word posterior
    "flat_posterior",  # the same with scores divided by 4
    "acoustic_posterior",  # log-odds of the word posterior under the acoustic scores alone
    "lm_posterior",  # log-odds of the word posterior under the language-model scores alone
    "acoustic_margin",  # acoustic score above the best hypothesis without the word, in nats
    "lm_margin",  # language-model score above that hypothesis, in nats
    "frames",  # mean log-probability of the best class over the word's frames
    "worst_frame",  # the lowest of them
    "letters",  # log of the number of letters
    "sentence",  # log-odds of the posterior of the whole hypothesis
)
SENTENCE_FEATURES = (
    "posterior",  # log-odds of the posterior of the hypothesis
    "flat_posterior",  # the same with scores divided by 4
    "words",  # sum of the log-probabilities of its words
    "weakest",  # lowest log-odds of a word
)
_FLAT = 4.0
_MAX_LOG_ODDS = 8.0  # an n-best list of 100 does not resolve more extreme posteriors
_N_SCORED = 10  # length of the n-best list of searches that score every hypothesis with a network
_N_HYPOTHESES = 100  # length of the n-best list of a plain word search, which returns longer lists at no cost
_MAX_MARGIN = 20.0  # nats; also the margin of a word that all hypotheses contain
SESSION_WEIGHT = 0.4  # shift of a session's log-odds, see above; chosen on simulated cohorts (docs/findings.md)
_CALIBRATION_WORDS = 25.0  # weight of the calibration, in words, against the words of the session
_MAX_WORDS = 2000  # latest words of a session that its shift and threshold come from


class SessionWords:
    """The words decoded in a session so far: shift of their log-odds, and threshold of acceptance."""

    def __init__(self, model: "ConfidenceConfig", weight: float = SESSION_WEIGHT) -> None:
        self._model, self._weight = model, weight
        self._known = np.array(model.log_odds)
        self._weights = np.full(len(self._known), _CALIBRATION_WORDS / max(1, len(self._known)))
        self._seen = np.empty(0)

    def add(self, log_odds: np.ndarray) -> tuple[float, float]:
        """Add the words of a sentence, before the shift; return the shift and the threshold of its confidences."""
        model = self._model
        if not len(self._known):
            return 0.0, model.accept_above
        self._seen = np.concatenate([self._seen, log_odds])[-_MAX_WORDS:]
        values = np.concatenate([self._known, self._seen])
        weights = np.concatenate([self._weights, np.ones(len(self._seen))])
        difference = float(np.average(values, weights=weights) - self._known.mean())
        shift = self._weight * difference * abs(difference)
        return shift, mean_threshold(probability(values + shift), weights, model.accuracy)


def mean_threshold(confidences: np.ndarray, weights: np.ndarray, accuracy: float) -> float:
    """Lowest confidence in the largest set of most confident words whose mean is at least `accuracy`; 1 if none is."""
    order = np.argsort(-confidences, kind="stable")
    chosen = confidences[order]
    means = np.cumsum(chosen * weights[order]) / np.cumsum(weights[order])
    enough = np.flatnonzero(means >= accuracy)
    if not len(enough):
        return 1.0
    return 0.0 if enough[-1] == len(chosen) - 1 else float(chosen[enough[-1]])


def with_confidence(
    n_best: Sequence[Hypothesis],
    frames: np.ndarray | None,
    settings: "DecodingConfig",
    scale: float = 1.0,
    session: SessionWords | None = None,
) -> list[Hypothesis]:
    """Add word confidences and the sentence probability to the best hypothesis of a list.

    `frames` are its log-probabilities (F, V), if word times refer to them. `scale` converts totals to nats. `session`
    are the earlier words of the session; those of this sentence are added to it.
    """
    if not n_best or n_best[0].total is None or not n_best[0].words:
        return list(n_best)
    model = settings.confidence
    features = word_features(n_best, frames, settings.lm_weight, scale)
    log_odds = model.word.log_odds(features)
    shift, threshold = (0.0, model.accept_above) if session is None else session.add(log_odds)
    log_odds = log_odds + shift
    sentence = model.sentence.log_odds(sentence_features(totals_of(n_best, scale), log_odds)[None])
    best = replace(
        n_best[0],
        confidences=tuple(float(p) for p in probability(log_odds)),
        probability=float(probability(sentence)[0]),
        accept_above=threshold,
    )
    return [best, *n_best[1:]]


def n_hypotheses(search: object, n_best: int) -> int:
    """Length of the n-best list to compute, from the requested one and the one that confidences need."""
    return max(n_best, _N_HYPOTHESES if isinstance(search, WordSearch) else _N_SCORED)


def word_features(
    n_best: Sequence[Hypothesis], frames: np.ndarray | None, lm_weight: float, scale: float = 1.0
) -> np.ndarray:
    """Features of each word of the best hypothesis. (words, len(WORD_FEATURES))"""
    best = n_best[0]
    totals, acoustic, language = _scores(n_best, lm_weight, scale)
    present = _contains(n_best)  # (hypotheses, words)
    features = np.zeros((len(best.words), len(WORD_FEATURES)))
    for column, scores in enumerate((totals, totals / _FLAT, acoustic, language)):
        features[:, column] = _log_odds(_softmax(scores), present)
    features[:, 4:6] = _MAX_MARGIN
    for word in range(len(best.words)):
        others = np.flatnonzero(~present[:, word])
        if len(others):
            rival = others[int(totals[others].argmax())]
            features[word, 4] = acoustic[0] - acoustic[rival]
            features[word, 5] = language[0] - language[rival]
    features[:, 4:6] = features[:, 4:6].clip(-_MAX_MARGIN, _MAX_MARGIN)
    if frames is not None and len(frames) and best.times:
        highest = np.maximum(np.asarray(frames, np.float64).max(axis=1), -_MAX_MARGIN)
        for word, span in enumerate(best.times):
            spanned = highest[span.first : span.last + 1]
            if len(spanned):
                features[word, 6:8] = spanned.mean(), spanned.min()
    features[:, 8] = [np.log(max(1, len(word))) for word in best.words]
    features[:, 9] = _log_odds(_softmax(totals), np.eye(len(totals), 1, dtype=bool))[0]
    return features


def sentence_features(totals: np.ndarray, word_log_odds: np.ndarray) -> np.ndarray:
    """Features of the best hypothesis as a whole, from the totals of the list in nats. (len(SENTENCE_FEATURES),)"""
    first = np.eye(len(totals), 1, dtype=bool)
    return np.array(
        [
            _log_odds(_softmax(totals), first)[0],
            _log_odds(_softmax(totals / _FLAT), first)[0],
            float(np.log(probability(word_log_odds)).sum()),
            float(word_log_odds.min()),
        ]
    )


def probability(log_odds: np.ndarray) -> np.ndarray:
    """The logistic function."""
    return 1.0 / (1.0 + np.exp(-np.clip(log_odds, -30.0, 30.0)))


def totals_of(n_best: Sequence[Hypothesis], scale: float = 1.0) -> np.ndarray:
    """Totals of all hypotheses in nats."""
    return scale * np.array([h.total or 0.0 for h in n_best])


def _scores(n_best: Sequence[Hypothesis], lm_weight: float, scale: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Total, acoustic and language-model scores of all hypotheses, in nats; totals = acoustic + language model."""
    totals = totals_of(n_best, scale)
    acoustic = np.array([h.scores.get("acoustic", 0.0) + h.scores.get("bonus", 0.0) for h in n_best])
    return totals, acoustic, totals - acoustic


def _contains(n_best: Sequence[Hypothesis]) -> np.ndarray:
    """Whether each hypothesis contains each word of the best one, at overlapping frames. (hypotheses, words) bool

    Hypotheses without times are compared by position, counted from both ends.
    """
    best = n_best[0]
    present = np.zeros((len(n_best), len(best.words)), bool)
    present[0] = True
    for row, other in enumerate(n_best[1:], start=1):
        timed = bool(best.times and other.times)
        places: dict[str, list[int]] = {}
        for k, word in enumerate(other.words):
            places.setdefault(word, []).append(k)
        shift = len(other.words) - len(best.words)
        for k, word in enumerate(best.words):
            for at in places.get(word, ()):
                if timed:
                    a, b = best.times[k], other.times[at]
                    found = a.first <= b.last and b.first <= a.last
                else:
                    found = at in (k, k + shift)
                if found:
                    present[row, k] = True
                    break
    return present


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights: np.ndarray = np.exp(scores - scores.max())
    return weights / weights.sum()


def _log_odds(posteriors: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Log-odds of the summed posteriors of the hypotheses that are present; (n,), (n, m) -> (m,)."""
    inside, outside = posteriors @ present, posteriors @ ~present
    tiny = np.exp(-_MAX_LOG_ODDS)
    return np.clip(np.log((inside + tiny * 1e-3) / (outside + tiny * 1e-3)), -_MAX_LOG_ODDS, _MAX_LOG_ODDS)
