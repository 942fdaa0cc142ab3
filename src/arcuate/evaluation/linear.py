"""Log-linear choice between candidates: features, weights fitted to minimise word errors, and the weights file.

Weights are fitted by minimum-risk training (Smith & Eisner 2006): the expected word error rate under the softmax of
the weighted sums is minimised. Fitted weights are evaluated on trials of other folds.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy.optimize import minimize

from arcuate.config import read_yaml
from arcuate.data.text import normalise_text
from arcuate.errors import UserError
from arcuate.evaluation.candidates import CandidateList, expected_errors, finite_number, score_candidates
from arcuate.evaluation.metrics import score, total
from arcuate.files import write_text
from arcuate.language.ngram.model import LanguageModel
from arcuate.progress import Progress

# Features of the candidates themselves with their packaged weights, fitted on ten-seed lists of two participants
# (docs/findings.md also gives the result of transferring weights between participants). Decoders delete more
# phonemes than they insert, hence the positive weight of length.
_OWN_FEATURES: tuple[tuple[str, float], ...] = (
    ("agreement", 4.7),
    ("letters", 0.62),
    ("share", 2.45),
    ("length", 0.81),
)
NGRAM_WEIGHT, CAUSAL_WEIGHT = 0.22, 0.2  # per nat, if it is the only language model
NGRAM_WEIGHT_WITH_CAUSAL = 0.04
_L2_PENALTY = 1e-4  # on squared weights of standardised features
_START_SCALES = (0.3, 1.0, 3.0)


@dataclass(frozen=True)
class Feature:
    """An additional feature: name, packaged weight, and its value for every text of a list."""

    name: str
    prior: float
    score: Callable[[Sequence[str]], np.ndarray]  # texts -> (n,)


@dataclass(frozen=True)
class FeatureTable:
    """The distinct candidates of one trial and their features."""

    texts: tuple[str, ...]
    values: np.ndarray  # (n, k)

    def choose(self, weights: np.ndarray) -> str:
        """The text with the highest weighted sum; ties go to the earlier one."""
        return self.texts[int(np.argmax(np.round(self.values @ weights, 9)))] if self.texts else ""


@dataclass(frozen=True)
class FittingExample:
    """The candidates of one trial for fitting."""

    features: np.ndarray  # (n, k)
    errors: np.ndarray  # (n,) word errors
    n_words: int  # of the reference


@dataclass(frozen=True)
class LinearChoice:
    """Texts chosen by weighted features, and the weights."""

    texts: list[str]
    names: tuple[str, ...]
    weights: np.ndarray  # (k,) as given, or fitted on all trials
    cross_fitted: bool
    same_trials: list[str] | None = None  # chosen by the weights fitted on all trials; optimistically biased


@dataclass(frozen=True)
class LinearWeights:
    """Weights of the linear method and their origin."""

    weights: dict[str, float]
    weights_from: str  # packaged, fitted, or a file
    cross_fitted: bool | None = None
    folds: int | None = None
    wer_fitted_on_same_trials: float | None = None  # with the weights fitted on all trials


def choose_or_fit(
    lists: Sequence[CandidateList],
    votes: Sequence[np.ndarray],
    extra: Sequence[Feature],
    fit: bool,
    folds: int,
    file: Path | None,
) -> LinearChoice:
    """Choose with fitted weights, or with those of a file, by default the packaged ones."""
    if not fit:
        names, packaged = feature_weights(extra)
        return choose_linear(lists, votes, extra, weights=read_weights(file, names) if file else np.array(packaged))
    labelled = sum(candidates.reference is not None for candidates in lists)
    if labelled < 2 * folds:
        raise UserError(
            f"--fit needs references of at least {2 * folds} trials, there are {labelled};"
            " add --references, or leave out --fit"
        )
    return choose_linear(lists, votes, extra, n_folds=folds)


def choose_linear(
    lists: Sequence[CandidateList],
    votes: Sequence[np.ndarray],
    extra: Sequence[Feature] = (),
    *,
    weights: np.ndarray | None = None,
    n_folds: int = 5,
) -> LinearChoice:
    """Choose by the given weights, or for each trial by weights fitted on the trials of the other folds."""
    tables = [make_table(candidates, vote, extra) for candidates, vote in zip(lists, votes, strict=True)]
    names, prior = feature_weights(extra)
    if weights is not None:
        return LinearChoice([table.choose(weights) for table in tables], names, weights, False)
    examples = [
        make_example(table.values, table.texts, candidates.reference)
        for candidates, table in zip(lists, tables, strict=True)
    ]
    folds = assign_folds([candidates.session for candidates in lists], n_folds)
    by_trial, overall = cross_fit(examples, folds, prior, unbounded=[names.index("length")])
    texts = [table.choose(own) for table, own in zip(tables, by_trial, strict=True)]
    return LinearChoice(texts, names, overall, True, [table.choose(overall) for table in tables])


def feature_weights(extra: Sequence[Feature]) -> tuple[tuple[str, ...], list[float]]:
    """Names and packaged weights of all features, in the order of the table's columns."""
    pairs = [*_OWN_FEATURES, *((feature.name, feature.prior) for feature in extra)]
    return tuple(name for name, _ in pairs), [weight for _, weight in pairs]


def make_table(candidates: CandidateList, votes: np.ndarray, extra: Sequence[Feature]) -> FeatureTable:
    """Features: negative expected word errors and letter errors, log vote share, letters, and the extra ones."""
    if not candidates.texts:
        return FeatureTable((), np.zeros((0, len(_OWN_FEATURES) + len(extra))))
    by_word = expected_errors(candidates.texts, votes, letter_cost=0.0)
    by_letter = expected_errors(candidates.texts, votes, letter_cost=1.0).errors - by_word.errors
    columns = [
        -by_word.errors,
        -by_letter,
        np.log(np.maximum(by_word.weights, 1e-6)),
        np.array([len(text) for text in by_word.texts], dtype=np.float64),
        *(feature.score(by_word.texts) for feature in extra),
    ]
    return FeatureTable(by_word.texts, np.stack(columns, axis=1))


def make_example(features: np.ndarray, texts: Sequence[str], reference: str | None) -> FittingExample | None:
    """A fitting example; None for a trial without reference or candidates."""
    if reference is None or not texts:
        return None
    words = normalise_text(reference).split()
    errors = np.array([score(words, text.split()).errors for text in texts], dtype=np.float64)
    return FittingExample(features, errors, len(words))


def ngram_feature(lm: LanguageModel, weight: float = NGRAM_WEIGHT) -> Feature:
    """Natural-log probability under an n-gram model, end of sentence included."""

    def log_prob(text: str) -> float:
        words = np.array([*(lm.find(word) for word in text.split()), lm.eos], dtype=np.int32)
        log_probs, _ = lm.score(words)
        return float(log_probs.sum())

    return Feature("ngram", weight, lambda texts: np.array([log_prob(text) for text in texts]))


def causal_feature(path: Path, texts: Iterable[str], progress: Progress | None = None) -> Feature:
    """Natural-log probability under a causal language model, computed for all `texts` beforehand."""
    from arcuate.evaluation.causal import load_causal, score_sentences

    distinct = sorted(set(texts))
    log_probs = score_sentences(load_causal(path), distinct, progress=progress)
    by_text = dict(zip(distinct, log_probs.tolist(), strict=True))
    return Feature("causal", CAUSAL_WEIGHT, lambda texts: np.array([by_text[text] for text in texts]))


def assign_folds(groups: Sequence[str | None], n_folds: int) -> np.ndarray:
    """Fold of each trial: by group (session) if all are known, else contiguous blocks. (n,)

    Neighbouring trials share the conditions of their session; a random split would be optimistically biased.
    """
    if any(group is None for group in groups) or len(set(groups)) < n_folds:
        return np.arange(len(groups)) * n_folds // max(len(groups), 1)
    order = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    return np.array([order[group] % n_folds for group in groups])


def cross_fit(
    examples: Sequence[FittingExample | None], folds: np.ndarray, prior: Sequence[float], unbounded: Sequence[int] = ()
) -> tuple[list[np.ndarray], np.ndarray]:
    """For each trial the weights fitted on the other folds, and the weights fitted on all (None: no reference)."""
    known = [(fold, example) for fold, example in zip(folds, examples, strict=True) if example is not None]
    overall = fit_weights([example for _, example in known], prior, unbounded)
    by_fold = {
        int(fold): fit_weights([example for other, example in known if other != fold], prior, unbounded)
        for fold in np.unique(folds)
    }
    return [by_fold[int(fold)] for fold in folds], overall


def fit_weights(
    examples: Sequence[FittingExample], prior: Sequence[float], unbounded: Sequence[int] = ()
) -> np.ndarray:
    """Weights (k,) that minimise the expected word error rate, by L-BFGS-B from three scalings of the prior.

    Only `unbounded` weights may become negative: a feature that favours errors is noise.
    """
    k = len(prior)
    useful = [e for e in examples if len(e.errors) > 1 and np.ptp(e.errors) > 0]
    n_words = sum(e.n_words for e in examples)
    start = np.asarray(prior, dtype=np.float64)
    if not useful or not n_words:
        return start
    centred = [e.features - e.features.mean(axis=0) for e in useful]
    spread = np.sqrt(np.mean(np.concatenate(centred) ** 2, axis=0))
    spread[spread < 1e-12] = np.inf  # a constant feature gets weight 0
    sizes = np.array([len(e.errors) for e in useful])
    stack = _Stack(
        np.concatenate(centred) / spread,
        np.concatenate([e.errors for e in useful]).astype(np.float64),
        np.concatenate([[0], np.cumsum(sizes)[:-1]]),
        sizes,
        n_words,
    )
    direction = np.where(np.isfinite(spread), start * np.where(np.isfinite(spread), spread, 0), 0)
    length = float(np.linalg.norm(direction)) or 1.0
    bounds = [(None if i in unbounded else 0.0, None) for i in range(k)]
    starts = [scale * direction / length * np.sqrt(k) for scale in _START_SCALES]
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


def describe_weights(
    choice: LinearChoice, lists: Sequence[CandidateList], folds: int, file: Path | None
) -> LinearWeights:
    """The weights behind a choice and where they come from."""
    by_name = dict(zip(choice.names, choice.weights.tolist(), strict=True))
    if choice.same_trials is None:
        return LinearWeights(by_name, str(file) if file else "packaged")
    optimistic = [trial.score.words for trial in score_candidates(lists, choice.same_trials)]
    return LinearWeights(by_name, "fitted", True, folds, total(optimistic).rate)


def write_weights(path: Path, choice: LinearChoice, about: Mapping[str, Any]) -> None:
    """Write weights as YAML: a number per feature, and where they come from."""
    tree = {
        "weights": {name: round(float(w), 6) for name, w in zip(choice.names, choice.weights, strict=True)},
        "about": dict(about),
    }
    write_text(path, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))


def read_weights(path: Path, names: Sequence[str]) -> np.ndarray:
    """Read the weights of exactly these features: (k,)"""
    tree = read_yaml(path)
    given = tree.get("weights") if isinstance(tree, dict) else None
    if not isinstance(given, dict):
        raise UserError(f"{path} has no table `weights`; write one with --save-weights")
    if set(given) != set(names):
        raise UserError(
            f"{path} has weights of {', '.join(map(str, given))}, expected {', '.join(names)};"
            " use the same language models as when the weights were fitted"
        )
    return np.array([finite_number(given[name], f"{path}: {name}") for name in names])
