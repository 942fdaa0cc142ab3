"""Tune the weights of the word search on trials with references.

The objective is the mean of two error rates: the word errors of the best hypothesis, and the expected word errors over
the n-best list under its own scores. The second is smooth in the weights and keeps the few parameters from overfitting
single sentences. The two weights that leave all acoustic scores unchanged are fitted first, on fixed n-best lists;
then all weights on a subset, with one search per evaluation; then on all trials until the time budget is used up.
With a transducer, all weights are fitted on fixed candidate lists, which are searched again after each fit.
Optimisation by the simplex method of Nelder & Mead (1965).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from scipy.optimize import minimize

from arcuate.data.text import normalise_text
from arcuate.decoding.confidence import n_hypotheses
from arcuate.decoding.config import DecodingConfig
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.decoding.options import SearchOptions
from arcuate.decoding.word_search.search import WordSearch
from arcuate.errors import UserError
from arcuate.evaluation.confidence import collect_evidence, fit_confidence
from arcuate.evaluation.decode import DecodingTask, TrialSource, open_task
from arcuate.evaluation.metrics import score
from arcuate.evaluation.transcribe import (
    Reference,
    Transcript,
    TranscriptionMetrics,
    digest_references,
    summarise_transcripts,
    transcribe,
)
from arcuate.files import WEIGHTS, fields_to_dict, write_text
from arcuate.models.layout import Frames, check_head
from arcuate.progress import Progress, logger, percent
from arcuate.run import RunLike

if TYPE_CHECKING:
    from arcuate.decoding.joint import JointWordSearch

_N_BEST = 20
_SUBSET = 150  # trials
_WEIGHTS = {  # the tuned weights: size of the initial simplex along each, lowest and highest value
    "lm_weight": (0.15, 0.0, 20.0),
    "word_bonus": (0.6, -20.0, 20.0),
    "silence_bonus": (1.0, -20.0, 20.0),
    "missing_silence_bonus": (2.0, -60.0, 20.0),
    "blank_penalty": (0.3, -10.0, 10.0),
}
# Weights tuned with a transducer. Every word has one silence there, so silence_bonus would repeat word_bonus.
_JOINT_WEIGHTS = {
    "lm_weight": _WEIGHTS["lm_weight"],
    "word_bonus": (1.5, -20.0, 20.0),
    "ctc_weight": (0.5, 0.0, 20.0),
    "ilm_weight": (0.2, 0.0, 2.0),
}
_JOINT_ROUNDS = 2  # searches and fits, because the candidates depend on the weights


@dataclass(frozen=True)
class CrossFit:
    """Error rates of every fold of sessions under weights tuned on the other folds."""

    folds: int
    wer_cross_fitted: float | None
    cer_cross_fitted: float | None


@dataclass(frozen=True)
class TuningRecord:
    """How weights were found, as noted in the weights file."""

    on: str  # name of the run or file
    digest: str  # hash of the references
    n_trials: int
    lm: str
    lexicon: str
    n_evaluations: int
    seconds: float
    kept_start: bool  # no better weights than the initial ones were found


@dataclass(frozen=True)
class TunedWeights:
    """Result of `tune`."""

    settings: DecodingConfig
    record: TuningRecord
    cross_fit: CrossFit | None
    metrics: TranscriptionMetrics  # on the tuning trials
    out: Path | None
    calibrated: bool = False  # confidences were calibrated on the tuning trials

    @property
    def wer(self) -> float | None:
        """WER on the trials that the weights were tuned on."""
        return self.metrics.words.wer

    def summary(self) -> str:
        """WER on the tuning trials and, if it was measured, the cross-validated WER: one line each."""
        on_tuned = f"WER {percent(self.wer)} on the trials that the weights were tuned on"
        if self.calibrated and self.metrics.confidence is not None:
            on_tuned += f"\n{self.metrics.confidence.summary()}"
        if self.cross_fit is None:
            return on_tuned
        rate = percent(self.cross_fit.wer_cross_fitted)
        return f"{on_tuned}\nWER {rate} cross-validated over {self.cross_fit.folds} folds of sessions"

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.settings.model_dump(mode="json"),
            **fields_to_dict(self.record),
            **(fields_to_dict(self.cross_fit) if self.cross_fit else {}),
            "wer": self.wer,
            "cer": self.metrics.words.cer,
            "n_without_hypothesis": self.metrics.n_without_hypothesis,
            "tuned_on_these": True,
            "confidence_metrics": self.metrics.confidence,
            "seconds_per_sentence": self.metrics.seconds_per_sentence,
            "out": None if self.out is None else str(self.out),
        }


def tune(
    source: RunLike,
    out: str | Path | None = None,
    *,
    lexicon: str | Path = "default",
    lm: str | Path = "default",
    references: str | Path | None = None,
    config: str | Path | None = None,
    beam: int | None = None,
    budget: float = 300.0,
    folds: int = 0,
    split: str = "val",
    data: str | Path | None = None,
    head: str | None = None,
    checkpoint: str = "best",
    confidence: bool = False,
    keep_weights: bool = False,
    accuracy: float = 0.95,
    progress: Progress | None = None,
) -> TunedWeights:
    """Tune the search weights of `decode` on trials with references; write them to the YAML file `out`.

    `budget`: time in seconds. `folds`: also report the cross-validated WER over folds of sessions; 0: do not.
    `config`: initial weights. `head` and `checkpoint` as for `decode`. `confidence`: calibrate the confidences of words
    and sentences too, and the threshold above which a fraction `accuracy` of the words is correct; with `keep_weights`,
    do only that.
    """
    if keep_weights and not confidence:
        raise UserError("--keep-weights leaves nothing to fit; add --confidence")
    if keep_weights and folds:
        raise UserError(
            "--folds cross-validates the search weights, which --keep-weights does not tune; give one of the two"
        )
    if not 0.0 < accuracy < 1.0:
        raise UserError(f"--accuracy must be between 0 and 1, not {accuracy:g}")
    if folds == 1:
        raise UserError("--folds 1 leaves no other fold to tune on; give at least 2, or 0 for no cross-validation")
    target = None if out is None else Path(out)
    trials = TrialSource(source, references, split, data, checkpoint)
    options = SearchOptions(lm=lm, lexicon=lexicon, config=config, beam=beam, head=check_head(head))
    task = open_task(trials, options, target, WEIGHTS, progress)
    if not any(r.text for r in task.references):
        raise UserError("tuning needs reference texts; give them with --references REFS.jsonl")
    fit_budget = budget / (folds + 1)
    cross_fit = _cross_fit(task, folds, fit_budget) if folds else None
    tuner = _make_tuner(task, range(len(task.trials)), time.perf_counter() + fit_budget)
    settings = task.search.settings if keep_weights else tuner.fit()
    if confidence:
        settings = _calibrate(task, settings, accuracy)
    transcripts = _transcribe(task, range(len(task.trials)), settings, measure=confidence)
    record = TuningRecord(
        task.description.scores,
        digest_references(task.references),
        len(task.trials),
        task.description.lm,
        task.description.lexicon,
        tuner.n_evaluations,
        tuner.seconds,
        settings.model_copy(update={"confidence": task.search.settings.confidence}) == task.search.settings,
    )
    metrics = summarise_transcripts(transcripts, confidence=settings.confidence if confidence else None)
    tuned = TunedWeights(settings, record, cross_fit, metrics, target, confidence)
    if target is not None:
        noted = (
            fields_to_dict(record)
            | (fields_to_dict(cross_fit) if cross_fit else {})
            | {"wer_on_tuned_trials": tuned.wer}
        )
        tree = settings.model_dump(mode="json") | {"tuned": noted}
        write_text(target, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
    return tuned


def _cross_fit(task: DecodingTask, n_folds: int, budget: float) -> CrossFit:
    folds = _session_folds(task.references, n_folds)
    transcripts: list[Transcript] = []
    for k in range(n_folds):
        logger.info(f"fold {k + 1} of {n_folds}")
        tuner = _make_tuner(task, np.flatnonzero(folds != k).tolist(), time.perf_counter() + budget)
        transcripts += _transcribe(task, np.flatnonzero(folds == k).tolist(), tuner.fit())
    metrics = summarise_transcripts(transcripts).words
    return CrossFit(n_folds, metrics.wer, metrics.cer)


def _calibrate(task: DecodingTask, settings: DecodingConfig, accuracy: float) -> DecodingConfig:
    """The settings with confidences calibrated on all trials that have a reference."""
    chosen = [i for i, r in enumerate(task.references) if r.text is not None]
    n_best = n_hypotheses(task.search, 2)
    logger.info(f"calibrating confidences on {len(chosen)} trials")
    transcripts = _transcribe(task, chosen, settings, n_best)
    found = [
        collect_evidence(t.n_best, task.trials[i].log_probs, t.reference.text, t.reference.session, settings.lm_weight)
        for i, t in zip(chosen, transcripts, strict=True)
    ]
    fitted = fit_confidence(
        [evidence for evidence in found if evidence is not None],
        settings.confidence,
        accuracy=accuracy,
        calibrated_on=task.description.scores,
    )
    return settings.model_copy(update={"confidence": fitted})


def _transcribe(
    task: DecodingTask, chosen: Sequence[int], settings: DecodingConfig, n_best: int = 2, measure: bool = False
) -> list[Transcript]:
    """Decode the chosen trials with other settings, with confidences if they are to be measured."""
    references = [task.references[i] for i in chosen]
    confidence, trials = settings if measure else None, [task.trials[i] for i in chosen]
    return transcribe(task.search.with_settings(settings), trials, references, n_best, confidence=confidence)


def _make_tuner(task: DecodingTask, chosen: Sequence[int], deadline: float) -> "_Tuner":
    """Tuner over the chosen trials."""
    trials, references = [task.trials[i] for i in chosen], [task.references[i] for i in chosen]
    if isinstance(task.search, WordSearch):
        return _Tuner(task.search, trials, references, deadline)
    return _JointTuner(task.search.word_search, trials, references, deadline, joint=task.search)


def _session_folds(references: Sequence[Reference], n_folds: int) -> np.ndarray:
    """Fold of each trial: all trials of a session in one fold, folds of about equal size."""
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


class _OutOfTime(Exception):
    """The time budget is used up."""


@dataclass
class _Tuner:
    """One optimisation: trials, deadline, and the best weights so far. Lexicon and n-gram are loaded once."""

    search: WordSearch
    trials: Sequence[Frames]
    references: Sequence[Reference]
    deadline: float  # in seconds of time.perf_counter
    best: tuple[float, DecodingConfig] | None = None
    n_evaluations: int = 0
    seconds: float = 0.0
    errors: dict[tuple[int, tuple[str, ...]], int] = field(default_factory=dict)  # cache of word errors

    def fit(self) -> DecodingConfig:
        """The best weights found within the budget; the initial ones if none are better."""
        started = time.perf_counter()
        if not any(r.text for r in self.references):
            raise UserError("none of the trials has a reference with words; tuning needs at least one")
        every = max(1, len(self.trials) // _SUBSET)
        subset = range(0, len(self.trials), every)
        start = self.search.settings
        settings = self._better(start, self._fit_n_best(start, subset), subset)
        try:
            settings = self._optimise(settings, subset, "subset")
            if every > 1:
                self.best = None  # rates on the subset and on all trials are not comparable
                settings = self._optimise(settings, range(len(self.trials)), "all trials", scale=0.35)
        except _OutOfTime:
            logger.info("the time budget is used up; keeping the best weights so far")
        settings = self._better(start, self.best[1] if self.best else settings, range(len(self.trials)))
        if settings == start:
            logger.info("no better weights than the initial ones were found; they are kept")
        self.seconds = round(time.perf_counter() - started, 1)
        return settings

    def _better(self, start: DecodingConfig, found: DecodingConfig, chosen: Sequence[int]) -> DecodingConfig:
        """`found` if a search with it makes fewer errors than one with `start`, else `start`."""
        if found == start or self._count_errors(found, chosen) < self._count_errors(start, chosen):
            return found
        return start

    def _count_errors(self, settings: DecodingConfig, chosen: Sequence[int]) -> tuple[float, float]:
        """Errors of the best hypotheses, then the expected errors, which break ties."""
        counts = self._search_errors(settings, chosen)
        return sum(best for best, _ in counts), sum(expected for _, expected in counts)

    def _search_errors(self, settings: DecodingConfig, chosen: Sequence[int]) -> list[tuple[float, float]]:
        """Errors of the chosen trials, from one search of each."""
        search = self.search.with_settings(settings)
        counts = []
        for i in chosen:
            n_best = search.search(self.trials[i], _N_BEST)
            counts.append(self._trial_errors(i, n_best, [h.total or 0.0 for h in n_best]))
        return counts

    def _objective(self, counts: Sequence[tuple[float, float]], chosen: Sequence[int]) -> float:
        """Errors (mean of best and expected) per reference word of the chosen trials."""
        n_words = sum(len(normalise_text(self.references[i].text or "").split()) for i in chosen)
        return sum(0.5 * (best + expected) for best, expected in counts) / max(1, n_words)

    def _fit_n_best(self, settings: DecodingConfig, chosen: Sequence[int]) -> DecodingConfig:
        """Fit n-gram weight and word bonus on the n-best lists of a single search."""
        search = self.search.with_settings(settings)
        lists = [search.search(self.trials[i], 5 * _N_BEST) for i in chosen]
        (lm_step, _, highest), (bonus_step, low, high) = _WEIGHTS["lm_weight"], _WEIGHTS["word_bonus"]

        def objective(values: np.ndarray) -> float:
            lm, bonus = float(values[0]), float(values[1])
            if not (0.05 <= lm <= highest and low <= bonus <= high):
                return 1e9
            counts = [
                self._trial_errors(
                    i, n_best, [h.scores["acoustic"] + lm * h.scores["lm"] + bonus * len(h.words) for h in n_best]
                )
                for i, n_best in zip(chosen, lists, strict=True)
            ]
            return self._objective(counts, chosen)

        start = np.array([settings.lm_weight, settings.word_bonus])
        simplex = _initial_simplex(start, np.array([lm_step, bonus_step]))
        options: Any = {"initial_simplex": simplex, "maxfev": 80, "xatol": 0.01}
        found = minimize(objective, start, method="Nelder-Mead", options=options)
        lm, bonus = (round(float(v), 3) for v in found.x)
        logger.info(f"from n-best lists: lm_weight {lm}, word_bonus {bonus}")
        fitted = settings.model_copy(update={"lm_weight": lm, "word_bonus": bonus})
        return fitted if found.fun < objective(start) else settings

    def _optimise(self, start: DecodingConfig, chosen: Sequence[int], name: str, scale: float = 1.0) -> DecodingConfig:
        """Optimise all weights by Nelder-Mead, with one search of the chosen trials per evaluation."""
        # Without a boundary class, the weights of silences have no effect.
        names = [name for name in _WEIGHTS if self.search.boundary >= 0 or "silence" not in name]
        values = np.array([getattr(start, name) for name in names])
        steps = scale * np.array([_WEIGHTS[name][0] for name in names])

        def objective(point: np.ndarray) -> float:
            update = {n: float(np.clip(v, *_WEIGHTS[n][1:])) for n, v in zip(names, point, strict=True)}
            return self._evaluate(start.model_copy(update=update), chosen, name)

        simplex = _initial_simplex(values, steps)
        options: Any = {"initial_simplex": simplex, "maxfev": 60, "xatol": 0.02, "fatol": 1e-4}
        minimize(objective, values, method="Nelder-Mead", options=options)
        assert self.best is not None
        return self.best[1]

    def _evaluate(self, settings: DecodingConfig, chosen: Sequence[int], name: str) -> float:
        """The objective under some weights."""
        if time.perf_counter() > self.deadline and self.best is not None:
            raise _OutOfTime
        rounded = settings.model_copy(update={n: round(getattr(settings, n), 3) for n in _WEIGHTS})
        value = self._objective(self._search_errors(rounded, chosen), chosen)
        self.n_evaluations += 1
        if self.best is None or value < self.best[0]:
            self.best = (value, rounded)
            weights = ", ".join(f"{n} {getattr(rounded, n):g}" for n in _WEIGHTS)
            logger.info(f"{name}, evaluation {self.n_evaluations}: {100 * value:.2f} % with {weights}")
        return value

    def _trial_errors(self, i: int, n_best: Sequence[Hypothesis], totals: Sequence[float]) -> tuple[float, float]:
        """Errors of the best hypothesis of trial i, and expected errors of its n-best list, under these totals."""
        reference = self.references[i].text
        if reference is None:
            return 0.0, 0.0
        if not n_best:
            deletions = float(self._word_errors(i, reference, ()))
            return deletions, deletions
        errors = np.array([self._word_errors(i, reference, h.words) for h in n_best], np.float64)
        scores = np.array(totals)
        posteriors = np.exp(scores - scores.max())
        expected = float((errors * posteriors).sum() / posteriors.sum())
        return float(errors[int(scores.argmax())]), expected

    def _word_errors(self, i: int, reference: str, words: tuple[str, ...]) -> int:
        key = (i, words)
        if key not in self.errors:
            self.errors[key] = score(normalise_text(reference).split(), normalise_text(" ".join(words)).split()).errors
        return self.errors[key]


@dataclass
class _JointTuner(_Tuner):
    """Tuner of a search with the transducer: the scores of all candidates are linear in the weights."""

    joint: "JointWordSearch | None" = None

    def fit(self) -> DecodingConfig:
        started = time.perf_counter()
        start = settings = self.search.settings
        every = range(len(self.trials))
        for _ in range(_JOINT_ROUNDS):
            if time.perf_counter() > self.deadline:
                logger.info("the time budget is used up; keeping the best weights so far")
                break
            settings = self._better(settings, self._fit_candidates(settings), every)
        if settings == start:
            logger.info("no better weights than the initial ones were found; they are kept")
        self.seconds = round(time.perf_counter() - started, 1)
        return settings

    def _search_errors(self, settings: DecodingConfig, chosen: Sequence[int]) -> list[tuple[float, float]]:
        assert self.joint is not None
        search = self.joint.with_settings(settings)
        lists = [search.search(self.trials[i], _N_BEST) for i in chosen]
        self.n_evaluations += 1
        return [self._trial_errors(i, n, [h.total or 0.0 for h in n]) for i, n in zip(chosen, lists, strict=True)]

    def _fit_candidates(self, settings: DecodingConfig) -> DecodingConfig:
        """Fit all weights on the candidates of a single search."""
        assert self.joint is not None
        search, every = self.joint.with_settings(settings), range(len(self.trials))
        scored = [search.scored_candidates(outputs) for outputs in self.trials]
        names = list(_JOINT_WEIGHTS) if search.weights is None else [n for n in _JOINT_WEIGHTS if n != "ctc_weight"]
        start = np.array([getattr(settings, name) for name in names])

        def weighted(point: np.ndarray) -> DecodingConfig:
            return settings.model_copy(update={n: round(float(v), 3) for n, v in zip(names, point, strict=True)})

        def objective(point: np.ndarray) -> float:
            bounds = [_JOINT_WEIGHTS[name][1:] for name in names]
            if any(not low <= v <= high for v, (low, high) in zip(point, bounds, strict=True)):
                return 1e9
            ranker = search.with_ranking(weighted(point))
            lists = [ranker.rank(candidates) for candidates in scored]
            return self._objective(
                [self._trial_errors(i, n, [h.total or 0.0 for h in n]) for i, n in zip(every, lists, strict=True)],
                every,
            )

        simplex = _initial_simplex(start, np.array([_JOINT_WEIGHTS[name][0] for name in names]))
        options: Any = {"initial_simplex": simplex, "maxfev": 120, "xatol": 0.01, "fatol": 1e-5}
        found = minimize(objective, start, method="Nelder-Mead", options=options)
        fitted = weighted(found.x)
        logger.info("from candidate lists: " + ", ".join(f"{n} {getattr(fitted, n):g}" for n in names))
        return fitted


def _initial_simplex(start: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """The start, and one step along every axis."""
    return np.vstack([start, start + np.diag(steps)])
