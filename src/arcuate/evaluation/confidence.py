"""Calibrate the confidences of decoded words, and measure their calibration and discrimination.

A word is correct if it matches the reference in a minimum-edit-distance alignment; a sentence is correct if it has no
word error. Metrics: the expected calibration error (ECE, Naeini et al. 2015: mean distance between confidence and
accuracy over bins of equal width), the area under the ROC curve (correct against incorrect words), the Brier score, and
the risk-coverage curve (error rate among the most confident fraction of the words).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from arcuate.decoding.confidence import probability, sentence_features, totals_of, word_features
from arcuate.decoding.config import ConfidenceConfig, Logistic
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.errors import UserError
from arcuate.evaluation.choose import N_FOLDS, session_folds
from arcuate.evaluation.metrics import align_words, score_text
from arcuate.files import Result
from arcuate.progress import percent

_N_BINS = 10
MIN_WORDS = 50  # that a calibration needs
_N_QUANTILES = 20
_PENALTY = 1.0  # L2 penalty on standardised weights, in nats; keeps the weights finite if all words are correct
_COVERAGES = tuple(k / 20 for k in range(1, 21))


@dataclass(frozen=True)
class ReliabilityBin:
    """Words whose confidence lies in one interval."""

    low: float
    high: float
    n: int
    confidence: float | None  # mean
    accuracy: float | None


@dataclass(frozen=True)
class Reliability:
    """Calibration of probabilities, and how well they separate correct from incorrect."""

    n: int
    accuracy: float
    ece: float
    auroc: float | None  # None: all correct, or all incorrect
    brier: float
    bins: tuple[ReliabilityBin, ...]
    risk_coverage: tuple[tuple[float, float], ...]  # coverage, error rate at that coverage


@dataclass(frozen=True)
class ConfidenceMetrics(Result):
    """Quality of word confidences and sentence probabilities on trials with references."""

    words: Reliability
    sentences: Reliability
    accept_above: float  # mean over the words; it depends on the session
    target_accuracy: float  # share of correct words among accepted ones that the threshold was calibrated for
    accepted_share: float
    accepted_accuracy: float | None
    calibrated_on: str

    def summary(self) -> str:
        """Calibration, discrimination and the accepted words: one line each."""
        words = self.words
        accepted = percent(self.accepted_accuracy)
        return (
            f"confidence of {words.n} words, {percent(words.accuracy)} correct: ECE {words.ece:.3f},"
            f" AUROC {_number(words.auroc)}\n"
            f"sentence probability: ECE {self.sentences.ece:.3f}, AUROC {_number(self.sentences.auroc)}\n"
            f"{percent(self.accepted_share)} of the words accepted (confidence at least {self.accept_above:.3f} on"
            f" average),"
            f" {accepted} of them correct; target {percent(self.target_accuracy)}; calibrated on {self.calibrated_on}"
        )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def measure_confidence(
    decoded: Iterable[tuple[Sequence[Hypothesis], str | None]], model: ConfidenceConfig
) -> ConfidenceMetrics | None:
    """Measure the confidences of n-best lists with their reference texts; None if there is nothing to measure."""
    confidences: list[float] = []
    thresholds: list[float] = []
    correct: list[bool] = []
    sentences: list[float] = []
    sentences_correct: list[bool] = []
    for n_best, text in decoded:
        if text is None or not n_best or not n_best[0].confidences:
            continue
        best = n_best[0]
        confidences += best.confidences
        threshold = model.accept_above if best.accept_above is None else best.accept_above
        thresholds += [threshold] * len(best.confidences)
        correct += are_correct(text, best.words)
        sentences.append(best.probability or 0.0)
        sentences_correct.append(score_text(text, " ".join(best.words)).words.errors == 0)
    if not correct:
        return None
    values, outcomes = np.array(confidences), np.array(correct)
    accepted = values >= np.array(thresholds)
    return ConfidenceMetrics(
        measure_reliability(values, outcomes),
        measure_reliability(np.array(sentences), np.array(sentences_correct)),
        float(np.mean(thresholds)),
        model.accuracy,
        float(accepted.mean()),
        float(outcomes[accepted].mean()) if accepted.any() else None,
        model.calibrated_on,
    )


def are_correct(reference: str, words: Sequence[str]) -> list[bool]:
    """Whether each decoded word agrees with the reference."""
    aligned = align_words(reference, words) or []
    return [part["op"] == "correct" for part in aligned if part["op"] != "deletion"]


def measure_reliability(confidences: np.ndarray, correct: np.ndarray) -> Reliability:
    """Compare probabilities with outcomes; both (n,), n >= 1."""
    index = np.minimum((confidences * _N_BINS).astype(int), _N_BINS - 1)
    bins, distance = [], 0.0
    for k in range(_N_BINS):
        chosen = index == k
        n = int(chosen.sum())
        mean, accuracy = (float(confidences[chosen].mean()), float(correct[chosen].mean())) if n else (None, None)
        bins.append(ReliabilityBin(k / _N_BINS, (k + 1) / _N_BINS, n, mean, accuracy))
        distance += n * abs((mean or 0.0) - (accuracy or 0.0))
    order = np.argsort(-confidences, kind="stable")
    n_wrong = np.cumsum(~correct[order])
    curve = [(c, max(1, round(c * len(correct)))) for c in _COVERAGES]
    return Reliability(
        len(correct),
        float(correct.mean()),
        distance / len(correct),
        area_under_roc(confidences, correct),
        float(((confidences - correct) ** 2).mean()),
        tuple(bins),
        tuple((c, float(n_wrong[n - 1] / n)) for c, n in curve),
    )


def area_under_roc(values: np.ndarray, correct: np.ndarray) -> float | None:
    """Probability that a correct item scores above an incorrect one; ties count half (Mann & Whitney 1947)."""
    n_correct, n_wrong = int(correct.sum()), int((~correct).sum())
    if not n_correct or not n_wrong:
        return None
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[correct].sum() - n_correct * (n_correct + 1) / 2) / (n_correct * n_wrong))


# --- calibration --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Evidence:
    """Features and outcomes of the words of one trial."""

    totals: np.ndarray  # of the n-best list
    features: np.ndarray  # (words, features)
    correct: np.ndarray  # (words,) bool
    sentence_correct: bool
    session: str | None


def collect_evidence(
    n_best: Sequence[Hypothesis], frames: np.ndarray | None, text: str | None, session: str | None, lm_weight: float
) -> Evidence | None:
    """Evidence of an n-best list, its frames and reference text; None without words or without a reference."""
    if text is None or not n_best or not n_best[0].words:
        return None
    words = n_best[0].words
    features = word_features(n_best, frames, lm_weight)
    is_correct = score_text(text, " ".join(words)).words.errors == 0
    return Evidence(totals_of(n_best), features, np.array(are_correct(text, words)), is_correct, session)


def fit_confidence(
    evidence: Sequence[Evidence], start: ConfidenceConfig, *, calibrated_on: str = ""
) -> ConfidenceConfig:
    """Fit the logistic models and the acceptance threshold.

    `accept_above` is chosen on cross-fitted confidences (over folds of sessions if there are at least two): it accepts
    the largest set of words in which (errors + 1) / (words + 1) is at most 1 - `start.accuracy` (as in conformal risk
    control, Angelopoulos et al. 2022). `log_odds` are quantiles of the cross-fitted log-odds, with which the words of a
    session are compared; the other settings are those of `start`.
    """
    n_words = sum(len(e.correct) for e in evidence)
    if n_words < MIN_WORDS:
        raise UserError(
            f"{n_words} decoded words with references are too few to calibrate confidences; give at least {MIN_WORDS}"
        )
    sessions = [e.session for e in evidence]
    folds = session_folds(sessions, min(N_FOLDS, max(2, len(set(sessions))))).tolist()
    word = _fit_words(evidence)
    held_out = [np.empty(0)] * len(evidence)
    for fold in set(folds):
        others = [e for e, k in zip(evidence, folds, strict=True) if k != fold]
        model = _fit_words(others) if sum(len(e.correct) for e in others) >= MIN_WORDS // 2 else word
        for i, e in enumerate(evidence):
            if folds[i] == fold:
                held_out[i] = model.log_odds(e.features)
    sentence = fit_logistic(
        np.array([sentence_features(e.totals, log_odds) for e, log_odds in zip(evidence, held_out, strict=True)]),
        np.array([e.sentence_correct for e in evidence]),
    )
    log_odds = np.concatenate(held_out)
    threshold = accept_threshold(probability(log_odds), np.concatenate([e.correct for e in evidence]), start.accuracy)
    quantiles = np.quantile(log_odds, (np.arange(_N_QUANTILES) + 0.5) / _N_QUANTILES)
    return start.model_copy(
        update={
            "word": word,
            "sentence": sentence,
            "accept_above": threshold,
            "log_odds": tuple(round(float(value), 3) for value in quantiles),
            "calibrated_on": calibrated_on,
        }
    )


def _fit_words(evidence: Sequence[Evidence]) -> Logistic:
    return fit_logistic(np.concatenate([e.features for e in evidence]), np.concatenate([e.correct for e in evidence]))


def fit_logistic(features: np.ndarray, correct: np.ndarray) -> Logistic:
    """L2-regularised logistic regression by Newton's method, on standardised features."""
    mean, sd = features.mean(axis=0), np.maximum(features.std(axis=0), 1e-6)
    x = np.column_stack([np.ones(len(features)), (features - mean) / sd])
    n_correct = float(correct.sum())
    targets = np.where(correct, (n_correct + 1) / (n_correct + 2), 1 / (len(correct) - n_correct + 2))  # Platt (1999)
    ridge = np.diag([1e-9, *[_PENALTY] * features.shape[1]])
    w = np.zeros(x.shape[1])
    for _ in range(50):
        p = probability(x @ w)
        gradient = x.T @ (p - targets) + ridge @ w
        step = np.linalg.solve((x * np.maximum(p * (1 - p), 1e-9)[:, None]).T @ x + ridge, gradient)
        w -= step * min(1.0, 5.0 / max(float(np.abs(step).max()), 1e-12))
        if float(np.abs(step).max()) < 1e-8:
            break
    weights = w[1:] / sd
    return Logistic(
        intercept=round(float(w[0] - weights @ mean), 5), weights=tuple(round(float(value), 5) for value in weights)
    )


def accept_threshold(confidences: np.ndarray, correct: np.ndarray, accuracy: float) -> float:
    """Lowest confidence in the largest set of most confident words that reaches `accuracy`; 1 if none does."""
    order = np.argsort(-confidences, kind="stable")
    n = np.arange(1, len(order) + 1)
    kept = (np.cumsum(~correct[order]) + 1) / (n + 1) <= 1 - accuracy + 1e-12
    if not kept.any():
        return 1.0
    last = int(np.flatnonzero(kept)[-1])
    return 0.0 if last == len(order) - 1 else round(float(confidences[order[last]]), 5)
