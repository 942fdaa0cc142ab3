"""Tune the weights of the word search on trials with references.

The objective is the mean of two error rates: the word errors of the best hypothesis, and the expected word errors over
the n-best list under its own scores. The second is smooth in the weights and keeps the few parameters from overfitting
single sentences. It is minimised by the simplex method of Nelder & Mead (1965), with one search of up to 150 trials per
evaluation; with a transducer, the candidates of one search are ranked again. Weights that make no fewer errors than the
initial ones on all trials are not taken. Confidences are then calibrated with the weights.
"""

import time
from collections.abc import Callable, Mapping, Sequence
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
from arcuate.evaluation.choose import session_folds
from arcuate.evaluation.confidence import collect_evidence, fit_confidence
from arcuate.evaluation.decode import (
    DecodingTask,
    TranscriptionMetrics,
    TrialSource,
    open_task,
    summarise_transcripts,
    transcribe,
)
from arcuate.evaluation.metrics import score
from arcuate.evaluation.sentences import Sentence, digest_references
from arcuate.files import WEIGHTS, fields_to_dict, write_text
from arcuate.models.layout import Frames
from arcuate.progress import Progress, logger, percent
from arcuate.run import RunLike

if TYPE_CHECKING:
    from arcuate.decoding.joint import JointWordSearch

# Hypotheses of a trial by its number, under some settings.
_Searcher = Callable[[DecodingConfig], Callable[[int], Sequence[Hypothesis]]]
_N_BEST = 20
_N_TRIALS = 150  # searched in every evaluation
_MAX_EVALUATIONS = 80
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

    @property
    def wer(self) -> float | None:
        """WER on the trials that the weights were tuned on."""
        return self.metrics.words.wer

    def summary(self) -> str:
        """WER on the tuning trials and, if it was measured, the cross-validated WER: one line each."""
        lines = [f"WER {percent(self.wer)} on the trials that the weights were tuned on"]
        if self.metrics.confidence is not None:
            lines.append(self.metrics.confidence.summary())
        if self.cross_fit is not None:
            rate = percent(self.cross_fit.wer_cross_fitted)
            lines.append(f"WER {rate} cross-validated over {self.cross_fit.folds} folds of sessions")
        return "\n".join(lines)

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
    options: SearchOptions | None = None,
    *,
    split: str = "val",
    data: str | Path | None = None,
    references: str | Path | None = None,
    budget: float = 300.0,
    folds: int = 0,
    confidence: bool = False,
    progress: Progress | None = None,
) -> TunedWeights:
    """Tune the search weights of `decode` on trials with references; write them to the YAML file `out`.

    Args:
        source: RUN or RUN@CHECKPOINT, an exported model, or a file of frame scores.
        out: YAML file of weights to write.
        options: Language model, lexicon, initial weights and head.
        split: Of a run or an exported model.
        data: Store of a run or an exported model; default: that of the training run.
        references: JSON lines with `text`, and with `id` if the trials have ids.
        budget: Time budget in seconds; 0: keep the weights.
        folds: Also report the cross-validated WER over this many folds of sessions; 0: do not.
        confidence: Also calibrate confidences, for the `confidence.accuracy` of the initial weights: the fraction of
            accepted words that should be correct.
    """
    if folds == 1:
        raise UserError("--folds 1 leaves no other fold to tune on; give at least 2, or 0 for no cross-validation")
    target = None if out is None else Path(out)
    task = open_task(
        TrialSource(source, references, split, data), options or SearchOptions(), target, WEIGHTS, progress
    )
    if not any(normalise_text(s.reference or "") for s in task.sentences):
        raise UserError("tuning needs reference texts with words; give them with --references REFS.jsonl")
    every, fit_budget = range(len(task.trials)), budget / (folds + 1)
    cross_fit = _cross_fit(task, folds, fit_budget) if folds else None
    tuner = _Tuner(task, every, time.perf_counter() + fit_budget)
    start = task.search.settings
    settings = start if budget <= 0 else tuner.fit()
    kept_start = settings == start
    settings = _calibrate(task, settings) if confidence else settings
    sentences = _transcribe(task, every, settings, measure=confidence)
    record = TuningRecord(
        task.description.scores,
        digest_references(task.sentences),
        len(task.trials),
        task.description.lm,
        task.description.lexicon,
        tuner.n_evaluations,
        tuner.seconds,
        kept_start,
    )
    metrics = summarise_transcripts(sentences, settings=settings if confidence else None)
    tuned = TunedWeights(settings, record, cross_fit, metrics, target)
    if target is not None:
        noted = fields_to_dict(record) | (fields_to_dict(cross_fit) if cross_fit else {})
        tree = settings.model_dump(mode="json") | {"tuned": noted | {"wer_on_tuned_trials": tuned.wer}}
        write_text(target, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
    return tuned


def _cross_fit(task: DecodingTask, n_folds: int, budget: float) -> CrossFit:
    sessions = [s.session for s in task.sentences]
    if None in sessions or len(set(sessions)) < n_folds:
        raise UserError(
            f"--folds {n_folds} needs references with at least {n_folds} sessions; give fewer folds, or add `session`"
        )
    folds = session_folds(sessions, n_folds)
    sentences: list[Sentence] = []
    for k in range(n_folds):
        logger.info(f"fold {k + 1} of {n_folds}")
        tuner = _Tuner(task, np.flatnonzero(folds != k).tolist(), time.perf_counter() + budget)
        sentences += _transcribe(task, np.flatnonzero(folds == k).tolist(), tuner.fit())
    metrics = summarise_transcripts(sentences).words
    return CrossFit(n_folds, metrics.wer, metrics.cer)


def _calibrate(task: DecodingTask, settings: DecodingConfig) -> DecodingConfig:
    """The settings with confidences calibrated on all trials that have a reference."""
    chosen = [i for i, s in enumerate(task.sentences) if s.reference is not None]
    sentences = _transcribe(task, chosen, settings, n_hypotheses(task.search, 2))
    found = [
        collect_evidence(s.n_best, task.trials[i].log_probs, s.reference, s.session, settings.lm_weight)
        for i, s in zip(chosen, sentences, strict=True)
    ]
    evidence = [e for e in found if e is not None]
    fitted = fit_confidence(evidence, settings.confidence, calibrated_on=task.description.scores)
    return settings.model_copy(update={"confidence": fitted})


def _transcribe(
    task: DecodingTask, chosen: Sequence[int], settings: DecodingConfig, n_best: int = 2, measure: bool = False
) -> list[Sentence]:
    """Decode the chosen trials with other settings, with confidences if they are to be measured."""
    sentences, trials = [task.sentences[i] for i in chosen], [task.trials[i] for i in chosen]
    confidence = settings if measure else None
    return transcribe(task.search.with_settings(settings), trials, sentences, n_best, confidence=confidence)


@dataclass
class _Tuner:
    """One optimisation: trials, deadline, and the best weights so far. Lexicon and n-gram are loaded once."""

    task: DecodingTask
    chosen: Sequence[int]  # trials
    deadline: float  # in seconds of time.perf_counter
    best: tuple[float, DecodingConfig] | None = None
    n_evaluations: int = 0
    seconds: float = 0.0
    errors: dict[tuple[int, tuple[str, ...]], int] = field(default_factory=dict)  # cache of word errors

    def fit(self) -> DecodingConfig:
        """The best weights found within the budget; the initial ones if none are better."""
        started = time.perf_counter()
        start, subset = self.task.search.settings, self.chosen[:: max(1, len(self.chosen) // _N_TRIALS)]
        if isinstance(self.task.search, WordSearch):
            self._minimise(start, subset, self._searcher, _WEIGHTS)
        else:
            ranked, weights = _ranked_candidates(self.task.search, self.task.trials, subset)
            self._minimise(start, subset, ranked, weights)
        found = self.best[1] if self.best else start
        if found != start and self._n_errors(found) >= self._n_errors(start):
            found = start
        if found == start:
            logger.info("no better weights than the initial ones were found; they are kept")
        self.seconds = round(time.perf_counter() - started, 1)
        return found

    def _minimise(
        self,
        start: DecodingConfig,
        chosen: Sequence[int],
        searcher: _Searcher,
        weights: Mapping[str, tuple[float, float, float]],
    ) -> None:
        """Minimise the objective over the weights."""
        references = [normalise_text(self.task.sentences[i].reference or "").split() for i in chosen]
        n_words = sum(map(len, references))
        # Without a boundary class, the weights of silences have no effect.
        names = [name for name in weights if self.task.search.word_search.boundary >= 0 or "silence" not in name]

        def objective(point: np.ndarray) -> float:
            """Errors (mean of best and expected) per reference word."""
            if self.best is not None and time.perf_counter() > self.deadline:
                return np.inf
            settings = start.model_copy(update={n: round(float(v), 3) for n, v in zip(names, point, strict=True)})
            n_best = searcher(settings)
            counts = [self._trial_errors(i, n_best(i)) for i in chosen]
            value = sum(0.5 * (best + expected) for best, expected in counts) / max(1, n_words)
            self.n_evaluations += 1
            if self.best is None or value < self.best[0]:
                self.best = (value, settings)
                tried = ", ".join(f"{n} {getattr(settings, n):g}" for n in names)
                logger.info(f"evaluation {self.n_evaluations}: {100 * value:.2f} % with {tried}")
            return value

        def stop_at_deadline(_: np.ndarray) -> None:
            if time.perf_counter() > self.deadline:
                logger.info("the time budget is used up; keeping the best weights so far")
                raise StopIteration

        point, steps = np.array([getattr(start, n) for n in names]), np.diag([weights[n][0] for n in names])
        options: Any = {"initial_simplex": np.vstack([point, point + steps]), "maxfev": _MAX_EVALUATIONS}
        minimize(
            objective,
            point,
            method="Nelder-Mead",
            bounds=[(min(v, weights[n][1]), max(v, weights[n][2])) for n, v in zip(names, point, strict=True)],
            callback=stop_at_deadline,
            options=options | {"xatol": 0.02, "fatol": 1e-4},
        )

    def _searcher(self, settings: DecodingConfig) -> Callable[[int], Sequence[Hypothesis]]:
        search = self.task.search.with_settings(settings)  # once for all trials: it prepares the lexicon
        return lambda i: search.search(self.task.trials[i], _N_BEST)

    def _n_errors(self, settings: DecodingConfig) -> tuple[float, float]:
        """Errors of the best hypotheses of all trials, then the expected errors, which break ties."""
        n_best = self._searcher(settings)
        counts = [self._trial_errors(i, n_best(i)) for i in self.chosen]
        return sum(best for best, _ in counts), sum(expected for _, expected in counts)

    def _trial_errors(self, i: int, n_best: Sequence[Hypothesis]) -> tuple[float, float]:
        """Errors of the best hypothesis of trial i, and expected errors of its n-best list under its scores."""
        reference = self.task.sentences[i].reference
        if reference is None:
            return 0.0, 0.0
        errors = np.array([self._word_errors(i, reference, h.words) for h in n_best or [Hypothesis(())]], np.float64)
        scores = np.array([h.total or 0.0 for h in n_best or [Hypothesis(())]])
        posteriors = np.exp(scores - scores.max())
        return float(errors[int(scores.argmax())]), float((errors * posteriors).sum() / posteriors.sum())

    def _word_errors(self, i: int, reference: str, words: tuple[str, ...]) -> int:
        key = (i, words)
        if key not in self.errors:
            self.errors[key] = score(normalise_text(reference).split(), normalise_text(" ".join(words)).split()).errors
        return self.errors[key]


def _ranked_candidates(
    search: "JointWordSearch", trials: Sequence[Frames], chosen: Sequence[int]
) -> tuple[_Searcher, Mapping[str, tuple[float, float, float]]]:
    """The candidates of one search by both heads, ranked by any settings, and the weights that rank them."""
    scored = {i: search.scored_candidates(trials[i]) for i in chosen}
    names = list(_JOINT_WEIGHTS) if search.weights is None else [n for n in _JOINT_WEIGHTS if n != "ctc_weight"]

    def rank(settings: DecodingConfig) -> Callable[[int], Sequence[Hypothesis]]:
        ranker = search.with_ranking(settings)
        return lambda i: ranker.rank(scored[i])

    return rank, {name: _JOINT_WEIGHTS[name] for name in names}
