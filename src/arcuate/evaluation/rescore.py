"""Rescore n-best lists: interpolate acoustic, n-gram and causal language-model scores.

score = acoustic weight · acoustic + (1 − α) · n-gram + α · causal + length · words, in nats. α is given, or all weights
are cross-fitted on trials with references: the weights for one fold of sessions are fitted on the other folds.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.decoding.hypothesis import Hypothesis
from arcuate.errors import UserError
from arcuate.evaluation.choose import N_FOLDS, cross_fit, make_candidates
from arcuate.evaluation.metrics import WordMetrics, summarise_words, total
from arcuate.evaluation.sentences import Sentence, attach_references, oracle_score, read_decodings, score_sentences
from arcuate.evaluation.significance import Difference, score_difference
from arcuate.files import DECODINGS, check_writable, fields_to_dict, to_frame, write_jsonl
from arcuate.progress import Progress, logger, percent

_DEFAULT_ALPHA = 0.5  # if alpha is not given and cannot be fitted


@dataclass(frozen=True)
class ScoreWeights:
    """Interpolation weights; the softmax of `scale` × score gives the probabilities of the candidates."""

    acoustic: float
    alpha: float
    length: float = 0.0
    scale: float = 1.0

    @property
    def by_source(self) -> np.ndarray:
        """Weights of (acoustic, n-gram, causal, words)."""
        return self.scale * np.array([self.acoustic, 1 - self.alpha, self.alpha, self.length])

    @classmethod
    def of(cls, by_source: np.ndarray) -> "ScoreWeights":
        """Weights of (acoustic, n-gram, causal, words) in the form of the interpolation formula."""
        acoustic, ngram, causal, length = (float(w) for w in by_source)
        scale = ngram + causal
        if scale <= 1e-9:  # neither language model helps: use the acoustic score alone
            return cls(1.0, 0.0, 0.0, max(acoustic, 1e-9))
        return cls(acoustic / scale, causal / scale, length / scale, scale)


@dataclass(frozen=True)
class RescoringCost:
    """The causal model and the CPU time that it needed."""

    llm: str
    n_texts_scored: int
    load_seconds: float
    seconds_per_sentence: float


@dataclass(frozen=True, eq=False)
class Rescoring:
    """Result of `rescore`."""

    sentences: tuple[Sentence, ...]  # with their hypotheses in the order of the new score
    metrics: WordMetrics
    wer_before: float | None
    oracle_wer: float | None
    against_before: Difference | None  # after minus before
    weights: ScoreWeights  # as given, or fitted on all trials
    weights_from: str  # given, default or fitted
    folds: int | None  # number of folds of cross-fitting
    wer_fitted_on_same_trials: float | None  # with the weights fitted on all trials
    cost: RescoringCost
    out: Path | None

    @property
    def wer(self) -> float | None:
        """Word error rate after rescoring; None without references."""
        return self.metrics.wer

    def rows(self) -> list[dict[str, Any]]:
        """One line per trial, as `out` holds them."""
        return [sentence.to_row() for sentence in self.sentences]

    def summary(self) -> str:
        """Error rates, if there are references, then cost and weights: one line each."""
        weights, cost, rates = self.weights, self.cost, ""
        if self.wer is not None:
            origin = "fitted on other sessions" if self.folds else self.weights_from
            rates = (
                f"WER {percent(self.wer_before)} before, {100 * self.wer:.2f} % after"
                f" ({percent(self.metrics.wer_low)} to {percent(self.metrics.wer_high)}); weights {origin};"
                f" language models: {self.metrics.lm}\n"
            )
        return (
            f"{rates}{len(self.sentences)} trials, {cost.n_texts_scored} texts, {cost.seconds_per_sentence:.2f} s of"
            f" CPU per sentence; alpha {weights.alpha:.2f}, acoustic {weights.acoustic:.2f},"
            f" length {weights.length:.2f}"
        )

    def to_dict(self) -> dict[str, Any]:
        absent = (() if self.folds else ("folds", "wer_fitted_on_same_trials")) + (() if self.out else ("out",))
        own = fields_to_dict(self, "sentences", "metrics", "weights", "cost", *absent)
        weights, cost = fields_to_dict(self.weights, "scale"), fields_to_dict(self.cost)
        return self.metrics.to_dict() | own | weights | cost | {"cross_fitted": True if self.folds else None}

    def to_frame(self) -> Any:
        """One line per trial as a pandas DataFrame."""
        return to_frame(self.rows())


def rescore(
    hyps: str | Path,
    llm: str | Path,
    *,
    references: str | Path | None = None,
    alpha: float | None = None,
    n_best: int | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> Rescoring:
    """Rescore n-best lists with a causal language model.

    Args:
        hyps: File with n-best lists, written by `arcuate decode`.
        llm: Causal language model: a folder or a .gguf file.
        references: JSON lines with id and text for fitting and scoring.
        alpha: Weight of the causal model in the language-model score; default: fitted on the references, together with
            the weights of acoustic score and length.
        n_best: Number of hypotheses per list to rescore, best first; default: all.
        out: JSON lines to write, with the new scores.
    """
    hyps, llm = Path(hyps), Path(llm)
    references, target = (None if p is None else Path(p) for p in (references, out))
    check_writable(target, hyps, references, kind=DECODINGS)
    sentences = read_decodings(hyps, n_best)
    sources = [_sources(s, f"{hyps}: trial {s.id}") for s in sentences]
    if references:
        sentences = attach_references(sentences, references)
    if empty := sum(not s.n_best for s in sentences):
        logger.info(f"{empty} trials have an empty n-best list; their text stays empty")
    causal, cost = _score_causal(llm, sentences, progress)
    initial = ScoreWeights(search_acoustic_weight(sentences), _DEFAULT_ALPHA if alpha is None else alpha)
    fit = alpha is None and sum(s.reference is not None for s in sentences) >= 2 * N_FOLDS
    tables = [np.insert(own, 2, llm_scores, axis=1) for own, llm_scores in zip(sources, causal, strict=True)]
    if fit:
        rescored, weights, same_trials = _fit(sentences, tables, initial)
    else:
        rescored = [_reorder(s, table, initial) for s, table in zip(sentences, tables, strict=True)]
        weights, same_trials = initial, None
    before, after = ([t.score.words for t in score_sentences(s)] for s in (sentences, rescored))
    rescoring = Rescoring(
        tuple(rescored),
        summarise_words(score_sentences(rescored), lm=_name_models(hyps, llm, sentences), n_trials=len(sentences)),
        total(before).rate,
        oracle_score(sentences).rate,
        score_difference(after, before),
        weights,
        "fitted" if fit else "default" if alpha is None else "given",
        N_FOLDS if fit else None,
        same_trials,
        cost,
        target,
    )
    if warning := rescoring.metrics.leakage_warning:
        logger.info(warning)
    if target:
        write_jsonl(target, rescoring.rows())
    return rescoring


def _fit(
    sentences: Sequence[Sentence], tables: Sequence[np.ndarray], initial: ScoreWeights
) -> tuple[list[Sentence], ScoreWeights, float | None]:
    """The sentences under cross-fitted weights, the weights of all trials, and the WER of these on the same trials."""
    trials = [make_candidates(s.texts, table, s.reference) for s, table in zip(sentences, tables, strict=True)]
    choice = cross_fit(trials, [s.session for s in sentences], initial.by_source.tolist(), unbounded=[3])
    chosen = zip(sentences, tables, choice.by_trial, strict=True)
    rescored = [_reorder(s, table, ScoreWeights.of(own)) for s, table, own in chosen]
    same_trials = total(t.score.words for t in score_sentences(sentences, choice.same_trials)).rate
    return rescored, ScoreWeights.of(choice.weights), same_trials


def rank(n_best: Sequence[Hypothesis], causal: np.ndarray, totals: np.ndarray) -> list[Hypothesis]:
    """Hypotheses by their new total, best first, with the causal model's score as `llm`; ties keep their order."""
    scored = [
        replace(hypothesis, scores={**hypothesis.scores, "llm": float(llm)}, total=float(own))
        for hypothesis, llm, own in zip(n_best, causal, totals, strict=True)
    ]
    order = sorted(range(len(scored)), key=lambda i: (-round(float(totals[i]), 9), i))
    return [scored[i] for i in order]


def search_acoustic_weight(sentences: Sequence[Sentence]) -> float:
    """Acoustic weight of the search relative to its n-gram weight, recovered from its total scores."""
    ratios = [
        (h.total - h.scores["acoustic"] - h.scores.get("bonus", 0.0)) / h.scores["lm"]
        for sentence in sentences
        for h in sentence.n_best
        if h.total is not None and abs(h.scores["lm"]) > 1e-6
    ]
    lm_weight = float(np.median(ratios)) if ratios else 0.0
    return 1 / lm_weight if lm_weight > 1e-6 else 1.0


def _sources(sentence: Sentence, where: str) -> np.ndarray:
    """Acoustic score with the bonuses of the search, n-gram score and number of words of every hypothesis: (n, 3)"""
    for i, hypothesis in enumerate(sentence.n_best, start=1):
        if not {"acoustic", "lm"} <= hypothesis.scores.keys():
            raise UserError(
                f"{where}: entry {i} of nbest needs acoustic and lm in addition to its text; write it with:"
                " arcuate decode … --out FILE"
            )
    rows = [(h.scores["acoustic"] + h.scores.get("bonus", 0.0), h.scores["lm"], len(h.words)) for h in sentence.n_best]
    return np.array(rows, dtype=np.float64).reshape(-1, 3)


def _reorder(sentence: Sentence, table: np.ndarray, weights: ScoreWeights) -> Sentence:
    """The sentence with its hypotheses in the order of the new score."""
    return replace(sentence, n_best=tuple(rank(sentence.n_best, table[:, 2], table @ weights.by_source)))


def _score_causal(
    path: Path, sentences: Sequence[Sentence], progress: Progress | None
) -> tuple[list[np.ndarray], RescoringCost]:
    """Causal score of every hypothesis, and the CPU time."""
    if not path.exists():
        raise UserError(f"no language model at {path}; give a model folder or a .gguf file")
    from arcuate.evaluation import causal

    texts = [text for sentence in sentences for text in sentence.texts]
    started = time.process_time()
    lm = causal.load_causal(path)
    loaded = time.process_time()
    scores = causal.score_sentences(lm, texts, progress=progress)
    seconds = time.process_time() - loaded
    ends = np.cumsum([len(sentence.n_best) for sentence in sentences])[:-1]
    cost = RescoringCost(lm.name, len(set(texts)), loaded - started, seconds / len(sentences))
    return list(np.split(scores, ends)), cost


def _name_models(hyps: Path, llm: Path, sentences: Sequence[Sentence]) -> str:
    names = {str(sentence.lm) for sentence in sentences}
    ngram = f"n-gram of {hyps.name}" if names == {"None"} else " / ".join(sorted(names))
    return f"{ngram} + {llm.stem}"
