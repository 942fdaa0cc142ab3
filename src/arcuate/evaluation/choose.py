"""Choice between the candidate texts of a trial: minimum Bayes risk, and weighted features with fitted weights.

Weights are fitted by minimum-risk training (Smith & Eisner 2006): the expected word error rate under the softmax of
the weighted sums is minimised. Fitted weights are evaluated on trials of other folds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist
from scipy.optimize import minimize

from arcuate.data.text import normalise_text
from arcuate.errors import UserError
from arcuate.evaluation.metrics import score

# Cost of a letter edit relative to a word edit. Word edits alone leave many ties, and where two words differ, the
# candidate that is closer in letters is more often correct.
LETTER_COST = 0.02
N_FOLDS = 5
_FIRST_CODE_POINT = 0x10000  # above the surrogates, so that every word can be one character
_L2_PENALTY = 1e-4  # on squared weights of standardised features
_START_SCALES = (0.3, 1.0, 3.0)


# --- minimum Bayes risk ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpectedErrors:
    """Distinct texts of one list, in order of appearance, with their weight and expected word errors."""

    texts: tuple[str, ...]
    weights: np.ndarray  # (n,), sums to one
    errors: np.ndarray  # (n,)

    @property
    def best(self) -> int:
        """Index of the fewest expected errors; ties go to the larger weight, then to the earlier text."""
        rounded = np.round(self.errors, 9)  # the order of summation must not decide
        return min(range(len(self.texts)), key=lambda i: (rounded[i], -round(float(self.weights[i]), 9), i))


def expected_errors(
    texts: Sequence[str], weights: Sequence[float] | np.ndarray, letter_cost: float = LETTER_COST
) -> ExpectedErrors:
    """Expected word errors of every distinct text if each text is the reference with the probability of its weight.

    Costs O(n²) edit distances for n distinct texts.
    """
    distinct = list(dict.fromkeys(texts))
    index = {text: i for i, text in enumerate(distinct)}
    mass = np.zeros(len(distinct))
    for text, weight in zip(texts, weights, strict=True):
        mass[index[text]] += weight
    mass = mass / mass.sum() if mass.sum() > 0 else np.full(len(distinct), 1 / max(len(distinct), 1))
    edits = _edit_distances(_words_as_characters(distinct)).astype(np.float64)  # (n, n)
    if letter_cost:
        edits += letter_cost * _edit_distances(distinct)
    return ExpectedErrors(tuple(distinct), mass, edits @ mass)


def mbr(
    texts: Sequence[str], weights: Sequence[float] | np.ndarray | None = None, letter_cost: float = LETTER_COST
) -> str:
    """Minimum-Bayes-risk text (Goel & Byrne 2000): fewest expected word errors over the candidates themselves.

    A text that one system decoded but that is close to all others can win against a text that two systems decoded.
    Empty for no texts.
    """
    if not texts:
        return ""
    found = expected_errors(texts, np.ones(len(texts)) if weights is None else weights, letter_cost)
    return found.texts[found.best]


def softmax(scores: Sequence[float] | np.ndarray) -> np.ndarray:
    """Scores as probabilities: (n,)"""
    with np.errstate(over="ignore", invalid="ignore"):  # scores may be infinitely far apart
        values = np.nan_to_num(np.asarray(scores, dtype=np.float64))
        raised = np.exp(values - values.max()) if len(values) else values
    return raised / raised.sum() if len(values) else raised


def _words_as_characters(texts: Sequence[str]) -> list[str]:
    """Each text with one character per word, so that string distances are word distances."""
    codes: dict[str, str] = {}
    return [
        "".join(codes.setdefault(word, chr(_FIRST_CODE_POINT + len(codes))) for word in text.split()) for text in texts
    ]


def _edit_distances(strings: Sequence[str]) -> np.ndarray:
    """Edit distances between all pairs: (n, n)."""
    return cdist(strings, strings, scorer=Levenshtein.distance, dtype=np.int32)


# --- weighted features ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Candidates:
    """The candidates of one trial with their features and, with a reference, their word errors."""

    texts: tuple[str, ...]
    features: np.ndarray  # (n, k)
    errors: np.ndarray | None = None  # (n,) word errors; None without a reference or candidates
    n_words: int = 0  # of the reference

    def choose(self, weights: np.ndarray) -> str:
        """The text with the highest weighted sum; ties go to the earlier one."""
        return self.texts[int(np.argmax(np.round(self.features @ weights, 9)))] if self.texts else ""


@dataclass(frozen=True, eq=False)
class Choice:
    """The chosen text of every trial, and the weights."""

    texts: list[str]
    by_trial: list[np.ndarray]  # weights (k,) of every trial
    weights: np.ndarray  # (k,) as given, or fitted on all trials
    same_trials: list[str] | None = None  # chosen by the weights fitted on all trials; optimistically biased


def make_candidates(texts: Sequence[str], features: np.ndarray, reference: str | None) -> Candidates:
    """Candidates with their word errors, if there is a reference."""
    if reference is None or not texts:
        return Candidates(tuple(texts), features)
    words = normalise_text(reference).split()
    errors = np.array([score(words, text.split()).errors for text in texts], dtype=np.float64)
    return Candidates(tuple(texts), features, errors, len(words))


def choose(trials: Sequence[Candidates], weights: np.ndarray) -> Choice:
    """Choose with the given weights."""
    return Choice([trial.choose(weights) for trial in trials], [weights] * len(trials), weights)


def cross_fit(
    trials: Sequence[Candidates],
    sessions: Sequence[str | None],
    prior: Sequence[float],
    unbounded: Sequence[int] = (),
    n_folds: int = N_FOLDS,
) -> Choice:
    """Choose for each trial with weights fitted on the trials of the other folds of sessions."""
    labelled = sum(trial.errors is not None for trial in trials)
    if labelled < 2 * n_folds:
        raise UserError(f"fitting needs references of at least {2 * n_folds} trials, there are {labelled}")
    folds = session_folds(sessions, n_folds)
    overall = fit_weights(trials, prior, unbounded)
    by_fold = {
        int(fold): fit_weights([t for t, own in zip(trials, folds, strict=True) if own != fold], prior, unbounded)
        for fold in np.unique(folds)
    }
    by_trial = [by_fold[int(fold)] for fold in folds]
    texts = [trial.choose(own) for trial, own in zip(trials, by_trial, strict=True)]
    return Choice(texts, by_trial, overall, [trial.choose(overall) for trial in trials])


def session_folds(sessions: Sequence[str | None], n_folds: int) -> np.ndarray:
    """Fold of each trial: by session if all are known and there are enough, else contiguous blocks. (n,)

    Neighbouring trials share the conditions of their session; a random split would be optimistically biased.
    """
    if any(session is None for session in sessions) or len(set(sessions)) < n_folds:
        return np.arange(len(sessions)) * n_folds // max(len(sessions), 1)
    order = {session: i for i, session in enumerate(dict.fromkeys(sessions))}
    return np.array([order[session] % n_folds for session in sessions])


def fit_weights(trials: Sequence[Candidates], prior: Sequence[float], unbounded: Sequence[int] = ()) -> np.ndarray:
    """Weights (k,) that minimise the expected word error rate, by L-BFGS-B from three scalings of the prior.

    Only `unbounded` weights may become negative: a feature that favours errors is noise.
    """
    known = [(t.features, t.errors) for t in trials if t.errors is not None]
    useful = [(features, errors) for features, errors in known if len(errors) > 1 and np.ptp(errors) > 0]
    n_words = sum(t.n_words for t in trials)
    start = np.asarray(prior, dtype=np.float64)
    if not useful or not n_words:
        return start
    centred = np.concatenate([features - features.mean(axis=0) for features, _ in useful])
    spread = np.sqrt(np.mean(centred**2, axis=0))
    spread[spread < 1e-12] = np.inf  # a constant feature gets weight 0
    sizes = np.array([len(errors) for _, errors in useful])
    errors = np.concatenate([errors for _, errors in useful])
    stack = _Stack(centred / spread, errors, np.concatenate([[0], np.cumsum(sizes)[:-1]]), sizes, n_words)
    direction = np.where(np.isfinite(spread), start * np.where(np.isfinite(spread), spread, 0), 0)
    length = float(np.linalg.norm(direction)) or 1.0
    bounds = [(None if i in unbounded else 0.0, None) for i in range(len(start))]
    starts = [scale * direction / length * np.sqrt(len(start)) for scale in _START_SCALES]
    runs = [minimize(_expected_rate, x, args=(stack,), jac=True, method="L-BFGS-B", bounds=bounds) for x in starts]
    best = min(runs, key=lambda run: float(run.fun))
    return best.x / spread


@dataclass(frozen=True)
class _Stack:
    """The candidates of all trials in one array."""

    features: np.ndarray  # (N, k), centred by trial and scaled
    errors: np.ndarray  # (N,)
    starts: np.ndarray  # (trials,) first row of each trial
    sizes: np.ndarray  # (trials,)
    n_words: int


def _expected_rate(weights: np.ndarray, stack: _Stack) -> tuple[float, np.ndarray]:
    """Expected word error rate with L2 penalty, and its gradient.

    With p = softmax of the weighted sums within a trial, d E[errors] / d weights = Σ p (errors − E[errors]) features.
    """
    raw = stack.features @ weights  # (N,)
    raw -= np.repeat(np.maximum.reduceat(raw, stack.starts), stack.sizes)  # largest exponent 0
    unnormalised = np.exp(raw)
    p = unnormalised / np.repeat(np.add.reduceat(unnormalised, stack.starts), stack.sizes)
    means = np.add.reduceat(p * stack.errors, stack.starts)  # (trials,)
    d_raw = p * (stack.errors - np.repeat(means, stack.sizes))
    value = means.sum() / stack.n_words + _L2_PENALTY * weights @ weights
    return float(value), stack.features.T @ d_raw / stack.n_words + 2 * _L2_PENALTY * weights
