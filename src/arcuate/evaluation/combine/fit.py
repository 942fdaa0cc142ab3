"""What a candidate is judged by when the weights between criteria are fitted."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy.optimize import minimize

from arcuate.errors import UserError
from arcuate.evaluation.combine.lists import CandidateList, finite_number
from arcuate.evaluation.combine.mbr import expected_errors
from arcuate.files import write_text
from arcuate.language.ngram.model import LanguageModel

# with what weights from one of them do for the other). Decoders lose sounds more often than they invent them, hence
# the reward of length.
OWN: tuple[tuple[str, float], ...] = (
    ("agreement", 4.7),
    ("letters", 0.62),
    ("share", 2.45),
    ("length", 0.81),
)
NGRAM_WEIGHT, CAUSAL_WEIGHT = 0.22, 0.2  # per nat, each alone
NGRAM_BESIDE_CAUSAL = 0.04


@dataclass(frozen=True)
class Feature:
    """One more criterion: a name, the weight to start from, and a number for every text of a list."""

    name: str
    prior: float
    score: Callable[[Sequence[str]], np.ndarray]  # texts -> (n,)


@dataclass(frozen=True)
class Table:
    """The distinct candidates of one trial and their criteria."""

    texts: tuple[str, ...]
    values: np.ndarray  # (n, k)

    def choose(self, weights: np.ndarray) -> str:
        """The highest weighted sum; of equals the earlier."""
        return self.texts[int(np.argmax(np.round(self.values @ weights, 9)))] if self.texts else ""


def prior_of(extra: Sequence[Feature]) -> tuple[tuple[str, ...], list[float]]:
    """Names and starting weights of all criteria, in the order of the table's columns."""
    pairs = [*OWN, *((feature.name, feature.prior) for feature in extra)]
    return tuple(name for name, _ in pairs), [weight for _, weight in pairs]


def features_of(found: CandidateList, votes: np.ndarray, extra: Sequence[Feature]) -> Table:
    """Nearness to the others by word and by letter, share of the votes, letters, and the extra criteria."""
    if not found.texts:
        return Table((), np.zeros((0, len(OWN) + len(extra))))
    by_word = expected_errors(found.texts, votes, letter_share=0.0)
    by_letter = expected_errors(found.texts, votes, letter_share=1.0).risks - by_word.risks
    columns = [
        -by_word.risks,
        -by_letter,
        np.log(np.maximum(by_word.weights, 1e-6)),
        np.array([len(text) for text in by_word.texts], dtype=np.float64),
        *(feature.score(by_word.texts) for feature in extra),
    ]
    return Table(by_word.texts, np.stack(columns, axis=1))


def ngram_feature(lm: LanguageModel, weight: float = NGRAM_WEIGHT) -> Feature:
    """Log-probability under an n-gram model."""
    return Feature("ngram", weight, lambda texts: np.array([sentence_log_prob(lm, text) for text in texts]))


def known_feature(name: str, weight: float, scores: Mapping[str, float]) -> Feature:
    """Scores that were computed beforehand, all texts in one go."""
    return Feature(name, weight, lambda texts: np.array([scores[text] for text in texts]))


def sentence_log_prob(lm: LanguageModel, text: str) -> float:
    """Natural-log probability of the words and of the sentence's end."""
    words = np.array([*(lm.find(word) for word in text.split()), lm.eos], dtype=np.int32)
    log_probs, _ = lm.score(words)
    return float(log_probs.sum())


# Weights of a log-linear choice between candidates, fitted to make few word errors, and judged on other trials.

PENALTY = 1e-4  # on squared weights, in error rate per squared unit of spread
STARTS = (0.3, 1.0, 3.0)


@dataclass(frozen=True)
class Choice:
    """The candidates of one trial."""

    features: np.ndarray  # (n, k)
    errors: np.ndarray  # (n,) word edits against the reference
    n_words: int  # of the reference


@dataclass(frozen=True)
class _Stack:
    """All trials' candidates under each other."""

    features: np.ndarray  # (N, k), centred by trial and scaled
    errors: np.ndarray  # (N,)
    starts: np.ndarray  # (trials,) first row of each trial
    sizes: np.ndarray  # (trials,)
    n_words: int


def fit_weights(choices: Sequence[Choice], prior: Sequence[float], free: Sequence[int] = ()) -> np.ndarray:
    """Weights (k,) of least expected error rate; the search starts from the prior's direction.

    Only the `free` ones may become negative: a source that speaks for errors is noise, not advice.
    """
    k = len(prior)
    useful = [c for c in choices if len(c.errors) > 1 and np.ptp(c.errors) > 0]
    n_words = sum(c.n_words for c in choices)
    start = np.asarray(prior, dtype=np.float64)
    if not useful or not n_words:
        return start
    centred = [c.features - c.features.mean(axis=0) for c in useful]
    spread = np.sqrt(np.mean(np.concatenate(centred) ** 2, axis=0))
    spread[spread < 1e-12] = np.inf  # a feature that never differs gets no weight
    sizes = np.array([len(c.errors) for c in useful])
    stack = _Stack(
        np.concatenate(centred) / spread,
        np.concatenate([c.errors for c in useful]).astype(np.float64),
        np.concatenate([[0], np.cumsum(sizes)[:-1]]),
        sizes,
        n_words,
    )
    direction = np.where(np.isfinite(spread), start * np.where(np.isfinite(spread), spread, 0), 0)
    length = float(np.linalg.norm(direction)) or 1.0
    bounds = [(None if i in free else 0.0, None) for i in range(k)]
    starts = [scale * direction / length * np.sqrt(k) for scale in STARTS]
    runs = [minimize(_expected, x, args=(stack,), jac=True, method="L-BFGS-B", bounds=bounds) for x in starts]
    best = min(runs, key=lambda run: float(run.fun))
    return best.x / spread


def _expected(weights: np.ndarray, stack: _Stack) -> tuple[float, np.ndarray]:
    """Expected error rate and its gradient."""
    raw = stack.features @ weights  # (N,)
    raw -= np.repeat(np.maximum.reduceat(raw, stack.starts), stack.sizes)
    raised = np.exp(raw)
    p = raised / np.repeat(np.add.reduceat(raised, stack.starts), stack.sizes)
    means = np.add.reduceat(p * stack.errors, stack.starts)  # (trials,)
    pull = p * (stack.errors - np.repeat(means, stack.sizes))
    value = means.sum() / stack.n_words + PENALTY * weights @ weights
    return float(value), stack.features.T @ pull / stack.n_words + 2 * PENALTY * weights


def fold_of(groups: Sequence[str | None], n_folds: int) -> np.ndarray:
    """A fold for each trial: whole groups (sessions) where they are known, else neighbours together. (n,)

    Neighbouring trials share their session's difficulties, so a random split would flatter.
    """
    if any(group is None for group in groups) or len(set(groups)) < n_folds:
        return np.arange(len(groups)) * n_folds // max(len(groups), 1)
    order = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    return np.array([order[group] % n_folds for group in groups])


def cross_fit(
    choices: Sequence[Choice | None], folds: np.ndarray, prior: Sequence[float], free: Sequence[int] = ()
) -> tuple[list[np.ndarray], np.ndarray]:
    """For each trial weights fitted on the other folds, and the weights fitted on all. None: no reference."""
    known = [(fold, c) for fold, c in zip(folds, choices, strict=True) if c is not None]
    whole = fit_weights([c for _, c in known], prior, free)
    apart = {
        int(fold): fit_weights([c for other, c in known if other != fold], prior, free)
        for fold in np.unique(folds)
    }
    return [apart[int(fold)] for fold in folds], whole


# Fitted weights as a YAML file: a number per criterion, and where they come from.


def write_weights(path: Path, names: Sequence[str], weights: np.ndarray, about: Mapping[str, Any]) -> None:
    tree = {
        "weights": {name: round(float(w), 6) for name, w in zip(names, weights, strict=True)},
        "about": dict(about),
    }
    write_text(path, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))


def read_weights(path: Path, names: Sequence[str]) -> np.ndarray:
    """One weight for each of the criteria at hand, no more and no fewer: (k,)"""
    try:
        tree = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as weights: {str(error).splitlines()[0]}") from None
    given = tree.get("weights") if isinstance(tree, dict) else None
    if not isinstance(given, dict):
        raise UserError(f"{path} has no table `weights`; write one with --save-weights")
    if set(given) != set(names):
        raise UserError(
            f"{path} weighs {', '.join(map(str, given))}, but here there are {', '.join(names)};"
            " use the same language models as when the weights were fitted"
        )
    return np.array([finite_number(given[name], f"{path}: {name}") for name in names])
