"""Weights of a log-linear choice between candidates, fitted to make few word errors, and judged on other trials.

The score of a candidate is a weighted sum of features; the softmax over a trial's candidates is its probability. The
weights minimise the expected number of word errors, a smooth stand-in for the error count that a search over weights
would overfit. Features enter with their trial's mean removed and in units of their spread, so one penalty fits all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

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
