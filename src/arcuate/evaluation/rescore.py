"""Rescore n-best lists: interpolate acoustic, n-gram and causal language-model scores.

score = acoustic weight · acoustic + (1 − α) · n-gram + α · causal + length · words, in nats. The weights are given, or
cross-fitted on trials with references: the weights for one fold of sessions are fitted on the other folds.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.errors import UserError
from arcuate.evaluation.candidates import (
    CandidateList,
    attach_references,
    finite_number,
    oracle_score,
    parse_rows,
    score_candidates,
)
from arcuate.evaluation.linear import assign_folds, cross_fit, make_example
from arcuate.evaluation.metrics import WordMetrics, summarise_words, total
from arcuate.evaluation.significance import Difference, score_difference
from arcuate.files import DECODINGS, check_writable, fields_to_dict, read_jsonl, to_frame, write_jsonl
from arcuate.progress import Progress, logger, percent

_DEFAULT_ALPHA = 0.5  # if alpha is not given and cannot be fitted


@dataclass(frozen=True, eq=False)
class NBestList:
    """The n-best list of one trial with its scores by source, in nats."""

    candidates: CandidateList
    acoustic: np.ndarray  # (n,) including the bonuses of the search
    ngram: np.ndarray  # (n,)
    row: Mapping[str, Any]  # the line of the file

    @property
    def n_words(self) -> np.ndarray:
        return np.array([len(text.split()) for text in self.candidates.texts], dtype=np.float64)


@dataclass(frozen=True)
class ScoreWeights:
    """Interpolation weights; the softmax of `scale` × score gives the probabilities of the candidates."""

    acoustic: float
    alpha: float
    length: float = 0.0
    scale: float = 1.0

    def interpolate(
        self, acoustic: np.ndarray, ngram: np.ndarray, causal: np.ndarray, n_words: np.ndarray | float = 0.0
    ) -> np.ndarray:
        """Interpolated scores: (n,)"""
        score = self.acoustic * acoustic + (1 - self.alpha) * ngram + self.alpha * causal
        return self.scale * (score + self.length * n_words)

    def score(self, n_best: NBestList, causal: np.ndarray) -> np.ndarray:
        """Scores of all entries of an n-best list: (n,)"""
        return self.interpolate(n_best.acoustic, n_best.ngram, causal, n_best.n_words)


@dataclass(frozen=True)
class RescoringCost:
    """The causal model and the CPU time that it needed."""

    llm: str
    n_texts_scored: int
    load_seconds: float
    seconds_per_sentence: float
    seconds_per_text: float | None


@dataclass(frozen=True, eq=False)
class Rescoring:
    """Result of `rescore`."""

    texts: tuple[str, ...]
    rows: tuple[dict[str, Any], ...]  # one per trial, as written to `out`
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
            f"{rates}{len(self.texts)} trials, {cost.n_texts_scored} texts, {cost.seconds_per_sentence:.2f} s of CPU"
            f" per sentence; alpha {weights.alpha:.2f}, acoustic {weights.acoustic:.2f}, length {weights.length:.2f}"
        )

    def to_dict(self) -> dict[str, Any]:
        absent = (() if self.folds else ("folds", "wer_fitted_on_same_trials")) + (() if self.out else ("out",))
        own = fields_to_dict(self, "texts", "rows", "metrics", "weights", "cost", *absent)
        weights, cost = fields_to_dict(self.weights, "scale"), fields_to_dict(self.cost)
        return self.metrics.to_dict() | own | weights | cost | {"cross_fitted": True if self.folds else None}

    def to_frame(self) -> Any:
        """One line per trial as a pandas DataFrame."""
        return to_frame(self.rows)


def rescore(
    hyps: str | Path,
    llm: str | Path,
    *,
    references: str | Path | None = None,
    alpha: float | None = None,
    acoustic: float | None = None,
    length: float | None = None,
    n_best: int | None = None,
    context: str | Path | None = None,
    folds: int = 5,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> Rescoring:
    """Rescore the decodings `hyps` of `arcuate decode` with the causal language model `llm`.

    `alpha`: weight of the causal model in the language-model score; `acoustic`: weight of the acoustic score;
    `length`: score per word. With references and none of the three given, they are fitted. `n_best`: use only the first
    entries of each list. `context`: file with a text that precedes every sentence.
    """
    hyps, llm = Path(hyps), Path(llm)
    files = (None if p is None else Path(p) for p in (references, context, out))
    references_file, context_file, target = files
    check_writable(target, hyps, references_file, context_file, kind=DECODINGS)
    lists = read_n_best(hyps, n_best)
    if references_file:
        attached = attach_references([entry.candidates for entry in lists], references_file)
        lists = [replace(entry, candidates=own) for entry, own in zip(lists, attached, strict=True)]
    if empty := sum(not entry.candidates.texts for entry in lists):
        logger.info(f"{empty} trials have an empty n-best list; their text stays empty")
    causal, cost = _score_causal(llm, context_file, lists, progress)
    initial = ScoreWeights(
        search_acoustic_weight(lists) if acoustic is None else acoustic,
        _DEFAULT_ALPHA if alpha is None else alpha,
        length or 0.0,
    )
    fixed = any(value is not None for value in (alpha, acoustic, length))
    labelled = sum(entry.candidates.reference is not None for entry in lists)
    fit = not fixed and labelled >= 2 * folds
    by_trial, overall = fit_score_weights(lists, causal, folds, initial) if fit else ([initial] * len(lists), initial)
    scores = [w.score(entry, own) for w, entry, own in zip(by_trial, lists, causal, strict=True)]
    texts = [best_text(entry, own) for entry, own in zip(lists, scores, strict=True)]
    candidates = [entry.candidates for entry in lists]
    before = score_candidates(candidates, [c.texts[0] if c.texts else "" for c in candidates])
    after = score_candidates(candidates, texts)
    same_trials = None
    if fit:
        optimistic = [best_text(n, overall.score(n, own)) for n, own in zip(lists, causal, strict=True)]
        same_trials = total(t.score.words for t in score_candidates(candidates, optimistic)).rate
    rescoring = Rescoring(
        tuple(texts),
        tuple(_make_row(*parts) for parts in zip(lists, texts, scores, causal, strict=True)),
        summarise_words(after, lm=_name_models(hyps, llm, lists), n_trials=len(lists)),
        total(t.score.words for t in before).rate,
        oracle_score([c for c in candidates if c.reference is not None]).rate,
        score_difference([t.score.words for t in after], [t.score.words for t in before]),
        overall,
        "fitted" if fit else "given" if fixed else "default",
        folds if fit else None,
        same_trials,
        cost,
        target,
    )
    if warning := rescoring.metrics.leakage_warning:
        logger.info(warning)
    if target:
        write_jsonl(target, rescoring.rows)
    return rescoring


def read_n_best(path: Path, limit: int | None = None) -> list[NBestList]:
    """Read lines with `nbest`, each entry with `text`, `acoustic` and `lm` (and `bonus`); the first `limit` entries."""
    rows = read_jsonl(path)
    if not rows:
        raise UserError(f"{path} has no lines; write it with: arcuate decode … --out {path}")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row.get("nbest"), list):
            raise UserError(f"{path} line {number} has no nbest list; write it with: arcuate decode … --out {path}")
    rows = [{**row, "nbest": row["nbest"][:limit]} for row in rows]
    lists = parse_rows(rows, path)
    return [
        NBestList(candidates, *_parse_sources(row["nbest"], f"{path} line {number}"), row)
        for number, (row, candidates) in enumerate(zip(rows, lists, strict=True), start=1)
    ]


def search_acoustic_weight(lists: Sequence[NBestList]) -> float:
    """Acoustic weight of the search relative to its n-gram weight, recovered from its total scores."""
    ratios = [
        (total_score - acoustic) / ngram
        for entry in lists
        if entry.candidates.scores is not None
        for total_score, acoustic, ngram in zip(entry.candidates.scores, entry.acoustic, entry.ngram, strict=True)
        if abs(ngram) > 1e-6
    ]
    lm_weight = float(np.median(ratios)) if ratios else 0.0
    return 1 / lm_weight if lm_weight > 1e-6 else 1.0


def fit_score_weights(
    lists: Sequence[NBestList], causal: Sequence[np.ndarray], n_folds: int, initial: ScoreWeights
) -> tuple[list[ScoreWeights], ScoreWeights]:
    """For each trial the weights fitted on the other folds of sessions, and the weights fitted on all trials."""
    examples = [
        make_example(
            np.stack([entry.acoustic, entry.ngram, scores, entry.n_words], axis=1),
            entry.candidates.texts,
            entry.candidates.reference,
        )
        for entry, scores in zip(lists, causal, strict=True)
    ]
    folds = assign_folds([entry.candidates.session for entry in lists], n_folds)
    prior = (initial.acoustic, 1 - initial.alpha, initial.alpha, initial.length)
    by_trial, overall = cross_fit(examples, folds, prior, unbounded=[3])
    return [to_score_weights(weights) for weights in by_trial], to_score_weights(overall)


def to_score_weights(weights: np.ndarray) -> ScoreWeights:
    """Weights of (acoustic, n-gram, causal, words) in the form of the interpolation formula."""
    acoustic, ngram, causal, length = (float(w) for w in weights)
    scale = ngram + causal
    if scale <= 1e-9:  # neither language model helps: use the acoustic score alone
        return ScoreWeights(1.0, 0.0, 0.0, max(acoustic, 1e-9))
    return ScoreWeights(acoustic / scale, causal / scale, length / scale, scale)


def best_text(n_best: NBestList, scores: np.ndarray) -> str:
    """The text with the highest score; ties go to the one that the search ranked higher."""
    return n_best.candidates.texts[int(np.argmax(np.round(scores, 9)))] if len(scores) else ""


def _score_causal(
    path: Path, context: Path | None, lists: Sequence[NBestList], progress: Progress | None
) -> tuple[list[np.ndarray], RescoringCost]:
    """Causal score of every entry, and the CPU time."""
    if not path.exists():
        raise UserError(f"no language model at {path}; give a model folder or a .gguf file")
    from arcuate.evaluation.causal import load_causal, score_sentences

    texts = [text for entry in lists for text in entry.candidates.texts]
    started = time.process_time()
    options = {"context": _read_context(context)} if context else {}
    lm = load_causal(path, **options)
    loaded = time.process_time()
    scores = score_sentences(lm, texts, progress=progress)
    seconds = time.process_time() - loaded
    distinct = len(set(texts))
    ends = np.cumsum([len(entry.candidates.texts) for entry in lists])[:-1]
    return list(np.split(scores, ends)), RescoringCost(
        lm.name, distinct, loaded - started, seconds / len(lists), seconds / distinct if distinct else None
    )


def _read_context(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text: {error}") from None


def _parse_sources(entries: Sequence[Any], where: str) -> tuple[np.ndarray, np.ndarray]:
    acoustic, ngram = [], []
    for i, entry in enumerate(entries, start=1):
        if not isinstance(entry, dict) or "acoustic" not in entry or "lm" not in entry:
            raise UserError(f"{where}: entry {i} of nbest needs acoustic and lm in addition to its text")
        bonus = finite_number(entry.get("bonus", 0.0), f"{where}: bonus of entry {i}")
        acoustic.append(finite_number(entry["acoustic"], f"{where}: acoustic of entry {i}") + bonus)
        ngram.append(finite_number(entry["lm"], f"{where}: lm of entry {i}"))
    return np.array(acoustic, dtype=np.float64), np.array(ngram, dtype=np.float64)


def _name_models(hyps: Path, llm: Path, lists: Sequence[NBestList]) -> str:
    names = {str(entry.row.get("lm")) for entry in lists}
    ngram = f"n-gram of {hyps.name}" if names == {"None"} else " / ".join(sorted(names))
    return f"{ngram} + {llm.stem}"


def _make_row(n_best: NBestList, text: str, scores: np.ndarray, causal: np.ndarray) -> dict[str, Any]:
    """The line of the input with its entries in the order of the new score."""
    order = sorted(range(len(scores)), key=lambda i: (-round(float(scores[i]), 9), i))
    entries = [
        {
            **n_best.row["nbest"][i],
            "text": n_best.candidates.texts[i],
            "llm": float(causal[i]),
            "score": float(scores[i]),
        }
        for i in order
    ]
    reference = n_best.candidates.reference
    outdated = ("words", "errors", "n_words", "nbest")  # belong to the text that the search ranked first
    return {key: value for key, value in n_best.row.items() if key not in outdated} | {
        "text": text,
        "score": entries[0]["score"] if entries else None,
        **({"reference": reference} if reference is not None else {}),
        "nbest": entries,
    }
