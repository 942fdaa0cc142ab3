"""Weights of the word search from trials with references: lexicon and n-gram are loaded once, only numbers change.

What is minimised is the mean of two rates: the word errors of the best reading, and the expected word errors over the
n-best list under its own scores. The second is smooth in the weights and keeps the few parameters from following
single sentences. First the two weights that leave every reading's sound alone are fitted on n-best lists, without
searching; then all of them on a subset with a search per look; then on all trials, as long as the budget lasts.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.optimize import minimize

from arcuate.data.text import normalise_text
from arcuate.decoding.config import DecodingConfig
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.decoding.word_search.search import WordSearch
from arcuate.errors import UserError
from arcuate.evaluation.metrics import score
from arcuate.evaluation.word_errors import Reference

N_BEST = 20
SUBSET = 150
# the weights that are tuned: how far a first step goes, and between which bounds
STEPS = {
    "lm_weight": 0.15,
    "word_bonus": 0.6,
    "silence_bonus": 1.0,
    "missing_silence_bonus": 2.0,
    "blank_penalty": 0.3,
}
BOUNDS = {
    "lm_weight": (0.0, 20.0),
    "word_bonus": (-20.0, 20.0),
    "silence_bonus": (-20.0, 20.0),
    "missing_silence_bonus": (-60.0, 20.0),
    "blank_penalty": (-10.0, 10.0),
}
Say = Callable[[str], None]


class OutOfTime(Exception):
    """The budget is spent; what was found so far counts."""


@dataclass
class Tuning:
    """One search for weights: what it looks at, how long it may, and the best it has seen."""

    search: WordSearch
    trials: Sequence[np.ndarray]
    references: Sequence[Reference]
    deadline: float
    say: Say
    best: tuple[float, DecodingConfig] | None = None
    n_looks: int = 0
    errors: dict[tuple[int, tuple[str, ...]], int] = field(default_factory=dict)

    def fit(self) -> DecodingConfig:
        """The best weights found within the budget."""
        if not any(r.text for r in self.references):
            raise UserError("none of the trials has a reference with words; there is nothing to tune on")
        every = max(1, len(self.trials) // SUBSET)
        subset = range(0, len(self.trials), every)
        start = self.search.settings
        settings = self.better(start, self.refit(start, subset), subset)
        try:
            settings = self.descend(settings, subset, "subset")
            if every > 1:
                self.best = None  # a rate on the subset is no rate on all
                settings = self.descend(settings, range(len(self.trials)), "all trials", fine=0.35)
        except OutOfTime:
            self.say("the budget is spent; the best weights so far count")
        return self.better(start, self.best[1] if self.best else settings, range(len(self.trials)))

    def better(self, start: DecodingConfig, found: DecodingConfig, chosen: Sequence[int]) -> DecodingConfig:
        """What was found, if it reads the trials better than what was there before; else that."""
        if found == start or self.verdict(found, chosen) < self.verdict(start, chosen):
            return found
        return start

    def verdict(self, settings: DecodingConfig, chosen: Sequence[int]) -> tuple[float, float]:
        """Errors of the best readings under some weights, by a real search; the expected ones where these are equal."""
        searched = self.search.with_settings(settings)
        lists = [searched.search(self.trials[i], N_BEST) for i in chosen]
        counts = [
            self.errors_in(i, listed, [h.total or 0.0 for h in listed])
            for i, listed in zip(chosen, lists, strict=True)
        ]
        return sum(best for best, _ in counts), sum(expected for _, expected in counts)

    def refit(self, settings: DecodingConfig, chosen: Sequence[int]) -> DecodingConfig:
        """n-gram weight and word bonus from n-best lists of one search, without searching again."""
        searched = self.search.with_settings(settings)
        lists = [searched.search(self.trials[i], 5 * N_BEST) for i in chosen]

        def objective(values: np.ndarray) -> float:
            lm, bonus = float(values[0]), float(values[1])
            if not (0.05 <= lm <= BOUNDS["lm_weight"][1] and within(bonus, "word_bonus")):
                return 1e9
            counts = [
                self.rate(
                    i,
                    listed,
                    [h.scores["acoustic"] + lm * h.scores["lm"] + bonus * len(h.words) for h in listed],
                )
                for i, listed in zip(chosen, lists, strict=True)
            ]
            return mean_rate(counts)

        start = np.array([settings.lm_weight, settings.word_bonus])
        options: Any = {"initial_simplex": simplex(start, np.array([0.15, 0.6])), "maxfev": 80, "xatol": 0.01}
        found = minimize(objective, start, method="Nelder-Mead", options=options)
        lm, bonus = (round(float(v), 3) for v in found.x)
        fitted = settings.model_copy(update={"lm_weight": lm, "word_bonus": bonus})
        self.say(f"from n-best lists: lm_weight {lm}, word_bonus {bonus}")
        return fitted if found.fun < objective(start) else settings

    def descend(
        self, start: DecodingConfig, chosen: Sequence[int], where: str, fine: float = 1.0
    ) -> DecodingConfig:
        """Nelder and Mead over all weights, one search of the chosen trials per look."""
        names = [name for name in STEPS if name not in self.fixed]
        values = np.array([getattr(start, name) for name in names])
        steps = fine * np.array([STEPS[name] for name in names])

        def objective(point: np.ndarray) -> float:
            update = {n: float(np.clip(v, *BOUNDS[n])) for n, v in zip(names, point, strict=True)}
            return self.look(start.model_copy(update=update), chosen, where)

        options: Any = {"initial_simplex": simplex(values, steps), "maxfev": 60, "xatol": 0.02, "fatol": 1e-4}
        minimize(objective, values, method="Nelder-Mead", options=options)
        assert self.best is not None
        return self.best[1]

    @property
    def fixed(self) -> frozenset[str]:
        """Weights that change nothing here: silences where no class is the boundary."""
        return (
            frozenset({"silence_bonus", "missing_silence_bonus"}) if self.search.boundary < 0 else frozenset()
        )

    def look(self, settings: DecodingConfig, chosen: Sequence[int], where: str) -> float:
        """The objective under some weights."""
        if time.perf_counter() > self.deadline and self.best is not None:
            raise OutOfTime
        rounded = settings.model_copy(update={n: round(getattr(settings, n), 3) for n in STEPS})
        searched = self.search.with_settings(rounded)
        counts = []
        for i in chosen:
            listed = searched.search(self.trials[i], N_BEST)
            counts.append(self.rate(i, listed, [h.total or 0.0 for h in listed]))
        value = mean_rate(counts)
        self.n_looks += 1
        if self.best is None or value < self.best[0]:
            self.best = (value, rounded)
            self.say(f"{where}, look {self.n_looks}: {100 * value:.2f} % with {shown(rounded)}")
        return value

    def rate(self, i: int, listed: Sequence[Hypothesis], totals: Sequence[float]) -> tuple[float, int]:
        """Errors of trial i (mean of best and expected), and its number of words."""
        reference = self.references[i].text
        if reference is None:
            return 0.0, 0
        return 0.5 * sum(self.errors_in(i, listed, totals)), len(normalise_text(reference).split())

    def errors_in(self, i: int, listed: Sequence[Hypothesis], totals: Sequence[float]) -> tuple[float, float]:
        """Errors of trial i: those of the best reading, and those expected of the list under these totals."""
        reference = self.references[i].text
        if reference is None:
            return 0.0, 0.0
        if not listed:
            missed = float(self.errors_of(i, reference, ()))
            return missed, missed
        errors = np.array([self.errors_of(i, reference, h.words) for h in listed], np.float64)
        ranks = np.array(totals)
        shares = np.exp(ranks - ranks.max())
        return float(errors[int(ranks.argmax())]), float((errors * shares).sum() / shares.sum())

    def errors_of(self, i: int, reference: str, words: tuple[str, ...]) -> int:
        key = (i, words)
        if key not in self.errors:
            self.errors[key] = score(
                normalise_text(reference).split(), normalise_text(" ".join(words)).split()
            ).errors
        return self.errors[key]


def mean_rate(counts: Sequence[tuple[float, int]]) -> float:
    return sum(e for e, _ in counts) / max(1, sum(n for _, n in counts))


def within(value: float, name: str) -> bool:
    low, high = BOUNDS[name]
    return low <= value <= high


def simplex(start: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """A first triangle: the start, and one step along every axis."""
    return np.vstack([start, start + np.diag(steps)])


def shown(settings: DecodingConfig) -> str:
    return ", ".join(f"{name} {getattr(settings, name):g}" for name in STEPS)


def fold_of_sessions(references: Sequence[Reference], n_folds: int) -> np.ndarray:
    """Which fold each trial is in: sessions stay whole, folds get about as many trials each."""
    sessions = [r.session for r in references]
    if None in sessions or len(set(sessions)) < n_folds:
        raise UserError(
            f"--folds {n_folds} needs references with at least {n_folds} sessions; give fewer folds, or add `session`"
        )
    names, counts = np.unique([str(s) for s in sessions], return_counts=True)
    filled, fold = np.zeros(n_folds, np.int64), {}
    for k in np.argsort(-counts, kind="stable"):
        fold[str(names[k])] = int(filled.argmin())
        filled[filled.argmin()] += counts[k]
    return np.array([fold[str(s)] for s in sessions])


def tune(
    search: WordSearch,
    trials: Sequence[np.ndarray],
    references: Sequence[Reference],
    budget: float,
    say: Say,
) -> tuple[DecodingConfig, dict[str, Any]]:
    """Weights for these trials, and how they were found."""
    started = time.perf_counter()
    tuning = Tuning(search, trials, references, started + budget, say)
    settings = tuning.fit()
    if kept := settings == search.settings:
        say("nothing better was found than the weights it began with; they stay")
    seconds = round(time.perf_counter() - started, 1)
    return settings, {"looks": tuning.n_looks, "seconds": seconds, "kept_start": kept}
