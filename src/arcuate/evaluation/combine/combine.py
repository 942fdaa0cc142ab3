"""Combine several decoders: one text per trial from their candidates, or the mean of their frame scores."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np

from arcuate.errors import UserError
from arcuate.evaluation.combine.candidates import (
    CandidateList,
    attach_references,
    mark_leakage,
    n_systems,
    oracle_score,
    read_candidates,
    score_candidates,
)
from arcuate.evaluation.combine.frames import FrameCombination, Mean, combine_frames
from arcuate.evaluation.combine.linear import (
    CAUSAL_WEIGHT,
    NGRAM_WEIGHT,
    NGRAM_WEIGHT_WITH_CAUSAL,
    Feature,
    LinearChoice,
    choose_linear,
    feature_weights,
    ngram_feature,
    precomputed_feature,
    read_weights,
    write_weights,
)
from arcuate.evaluation.combine.voting import Votes, mbr, merge_decoders, rover, vote_weights
from arcuate.evaluation.metrics import WordMetrics, score_text, summarise_words, total
from arcuate.evaluation.significance import Difference, score_difference
from arcuate.evaluation.submission import WORDS_LABEL, find_decodings, missing_decodings
from arcuate.files import check_writable, fields_to_dict, read_jsonl, to_frame, write_jsonl
from arcuate.language.ngram.io import open_model
from arcuate.progress import Progress, logger
from arcuate.run import RunLike, open_run

METHODS = ("auto", "linear", "mbr", "rover", "arithmetic", "geometric")


@dataclass(frozen=True)
class SingleSystems:
    """Word error rates of the systems that were combined."""

    single_wer: list[float | None]
    single_wer_mean: float | None
    best_single: int  # number of the system with the lowest WER on these trials, from 1
    best_single_wer: float | None
    against_best_single: Difference | None  # combination minus best system


@dataclass(frozen=True)
class CombinationMetrics:
    """Word error rates of the chosen texts, of the single systems and of the best candidates."""

    words: WordMetrics
    n_candidates: int
    n_empty: int  # trials without candidates
    oracle_wer: float | None
    single: SingleSystems | None  # None: not one candidate per system in every trial

    def to_dict(self) -> dict[str, Any]:
        single = fields_to_dict(self.single) if self.single else {}
        return self.words.to_dict() | fields_to_dict(self, "words", "single") | single


@dataclass(frozen=True)
class LinearWeights:
    """Weights of the linear method and their origin."""

    weights: dict[str, float]
    weights_from: str  # packaged, fitted, or a file
    cross_fitted: bool | None = None
    folds: int | None = None
    wer_fitted_on_same_trials: float | None = None  # with the weights fitted on all trials


@dataclass(frozen=True, eq=False)
class WordCombination:
    """Result of `combine` with a word method."""

    candidates: tuple[CandidateList, ...]
    texts: tuple[str, ...]
    metrics: CombinationMetrics
    method: str
    votes: str
    linear: LinearWeights | None
    out: Path | None

    @property
    def wer(self) -> float | None:
        """Word error rate; None without references."""
        return self.metrics.words.wer

    def rows(self) -> list[dict[str, Any]]:
        """One line per trial, as `out` holds them."""
        return [_make_row(c, text) for c, text in zip(self.candidates, self.texts, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        summary = self.metrics.to_dict() | {"method": self.method, "votes": self.votes, "cross_fitted": None}
        if self.linear:
            fitted = self.linear.cross_fitted
            summary |= {k: v for k, v in vars(self.linear).items() if fitted or k.startswith("weights")}
        return summary | ({} if self.out is None else {"out": str(self.out)})

    def to_frame(self) -> Any:
        """One line per trial as a pandas DataFrame."""
        return to_frame(self.rows())


def combine(
    *sources: RunLike,
    method: str = "auto",
    split: str = "val",
    label: str | None = None,
    votes: str = "equal",
    scale: float = 1.0,
    lm: str | Path | None = None,
    llm: str | Path | None = None,
    fit: bool = False,
    folds: int = 5,
    weights: str | Path | None = None,
    save_weights: str | Path | None = None,
    references: str | Path | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> WordCombination | FrameCombination:
    """Combine one .jsonl file with candidates per trial, or several runs, .jsonl or .npz files.

    `method`: linear, mbr or rover on words, arithmetic or geometric on frame scores, or auto. `votes`: equal, or
    agreement to weight systems by their agreement. `scale`: factor on scores before the softmax. `lm`, `llm`: n-gram
    and causal language model as further features of the linear method. `fit`: fit its weights, cross-fitted over
    `folds`; `weights`, `save_weights`: read and write them. `references`: JSON lines with `id` and `text`.
    """
    paths = [Path(os.fspath(source)) for source in sources]
    linear_only = bool(lm or llm or fit or weights)
    if method not in METHODS:
        raise UserError(f"no method {method!r}; choose one of {', '.join(METHODS)}")
    if votes not in get_args(Votes):
        raise UserError(f"--votes is {votes!r}; choose equal or agreement")
    if (linear_only or save_weights) and method not in ("auto", "linear"):
        raise UserError(f"language models and weights require --method linear, not {method}")
    if fit and weights:
        raise UserError("--fit and --weights are mutually exclusive; use one of the two")
    if save_weights and not fit:
        raise UserError("--save-weights writes fitted weights; add --fit")
    target, save_file = (None if path is None else Path(path) for path in (out, save_weights))
    for file in (target, save_file):
        check_writable(file, *paths, references, weights, lm, llm)
    if method == "auto" and not linear_only and _have_only_frames(paths, split, label):
        logger.info("no words have been decoded yet; averaging the frame scores (--method geometric)")
        method = "geometric"
    if method in get_args(Mean):
        return combine_frames(paths, cast(Mean, method), split, label, target)

    files = [_find_words(path, split, label) if path.is_dir() else path for path in paths]
    check_writable(target, *files)
    if len(files) == 1 and paths[0].is_dir():
        raise UserError("one run alone cannot be combined; give several, or a .jsonl file with candidates")
    lists = [read_candidates(file) for file in files]
    candidates = lists[0] if len(files) == 1 else merge_decoders(files, lists, scale)
    if references:
        candidates = attach_references(candidates, Path(references))
        if (known := sum(c.reference is not None for c in candidates)) < len(candidates):
            logger.info(f"{known} of {len(candidates)} trials have a reference; the others are not scored")
    ngram = open_model(str(lm), progress) if lm else None
    candidates = mark_leakage(candidates, ngram) if ngram else candidates
    if empty := sum(not c.texts for c in candidates):
        logger.info(f"{empty} trials have no candidates; their text is empty")
    if method == "auto":  # the packaged weights are for one candidate per system; scored n-best lists use MBR
        method = "linear" if linear_only or n_systems(candidates) is not None else "mbr"

    trial_weights = vote_weights(candidates, cast(Votes, votes), scale)
    names = _name_models(candidates, lm, llm)
    linear = None
    if method == "linear":
        extra = [ngram_feature(ngram, NGRAM_WEIGHT_WITH_CAUSAL if llm else NGRAM_WEIGHT)] if ngram else []
        extra += [_causal_feature(Path(llm), candidates, progress)] if llm else []
        choice = _choose_linear(candidates, trial_weights, extra, fit, folds, weights)
        texts, linear = choice.texts, _describe_weights(choice, candidates, folds, weights)
        if save_file:
            labelled = sum(c.reference is not None for c in candidates)
            about = {"n_trials": labelled, "lm": names, "fitted_on": [str(path) for path in paths]}
            write_weights(save_file, choice, about)
    else:
        texts = choose_by_vote(mbr if method == "mbr" else rover, candidates, trial_weights)
    metrics = summarise_combination(candidates, texts, names)
    combination = WordCombination(tuple(candidates), tuple(texts), metrics, method, votes, linear, target)
    if warning := metrics.words.leakage_warning:
        logger.info(warning)
    if target:
        write_jsonl(target, combination.rows())
    return combination


def summarise_combination(lists: Sequence[CandidateList], texts: Sequence[str], lm: str | None) -> CombinationMetrics:
    """Score the chosen texts, the single systems and the best candidates."""
    trials = score_candidates(lists, texts)
    labelled = [candidates for candidates in lists if candidates.reference is not None]
    single = None
    if labelled and n_systems(lists) is not None:
        scores = [
            [score_text(c.reference or "", c.texts[system]).words for c in labelled]
            for system in range(len(labelled[0].texts))
        ]
        rates = [total(s).rate for s in scores]
        known = [rate for rate in rates if rate is not None]
        best = min(range(len(rates)), key=lambda system: rates[system] or 0.0)
        difference = score_difference([t.score.words for t in trials], scores[best])
        mean = float(np.mean(known)) if known else None
        single = SingleSystems(rates, mean, best + 1, rates[best], difference)
    return CombinationMetrics(
        summarise_words(trials, lm=lm, n_trials=len(lists)),
        sum(len(candidates.texts) for candidates in lists),
        sum(not candidates.texts for candidates in lists),
        oracle_score(labelled).rate,
        single,
    )


def choose_by_vote(
    vote: Callable[[Sequence[str], np.ndarray], str], lists: Sequence[CandidateList], weights: Sequence[np.ndarray]
) -> list[str]:
    """Text of every trial by `mbr` or `rover`, with the vote weights of its candidates."""
    return [vote(candidates.texts, own) for candidates, own in zip(lists, weights, strict=True)]


def _have_only_frames(paths: Sequence[Path], split: str, label: str | None) -> bool:
    """Whether the sources are runs with frame scores and without words, as `train --seeds` leaves them."""
    if not all(path.is_dir() for path in paths):
        return False
    runs = [open_run(path) for path in paths]
    words = any(run.results_file(split, label or WORDS_LABEL).is_file() for run in runs)
    return not words and all(run.results_file(split, label, "scores.npz").is_file() for run in runs)


def _choose_linear(
    lists: Sequence[CandidateList],
    votes: Sequence[np.ndarray],
    extra: Sequence[Feature],
    fit: bool,
    folds: int,
    weights: str | Path | None,
) -> LinearChoice:
    if not fit:
        names, packaged = feature_weights(extra)
        values = read_weights(Path(weights), names) if weights else np.array(packaged)
        return choose_linear(lists, votes, extra, weights=values)
    labelled = sum(candidates.reference is not None for candidates in lists)
    if labelled < 2 * folds:
        raise UserError(
            f"--fit needs references of at least {2 * folds} trials, there are {labelled};"
            " add --references, or leave out --fit"
        )
    return choose_linear(lists, votes, extra, n_folds=folds)


def _describe_weights(
    choice: LinearChoice, lists: Sequence[CandidateList], folds: int, weights: str | Path | None
) -> LinearWeights:
    by_name = dict(zip(choice.names, choice.weights.tolist(), strict=True))
    if choice.same_trials is None:
        return LinearWeights(by_name, str(weights) if weights else "packaged")
    optimistic = [trial.score.words for trial in score_candidates(lists, choice.same_trials)]
    return LinearWeights(by_name, "fitted", True, folds, total(optimistic).rate)


def _causal_feature(path: Path, lists: Sequence[CandidateList], progress: Progress | None) -> Feature:
    from arcuate.evaluation.rescoring.causal import load_causal, score_sentences

    texts = sorted({text for candidates in lists for text in candidates.texts})
    scores = score_sentences(load_causal(path), texts, progress=progress)
    return precomputed_feature("causal", CAUSAL_WEIGHT, dict(zip(texts, scores.tolist(), strict=True)))


def _name_models(lists: Sequence[CandidateList], lm: str | Path | None, llm: str | Path | None) -> str | None:
    """All language models behind a text: those of the decoders, then those of the combination."""
    decoders = " / ".join(dict.fromkeys(candidates.lm for candidates in lists if candidates.lm))
    names = [decoders, Path(lm).name if lm else None, Path(llm).stem if llm else None]
    return " + ".join(name for name in names if name) or None


def _make_row(candidates: CandidateList, text: str) -> dict[str, Any]:
    """One line in the format of `arcuate decode`."""
    scores = candidates.scores or (None,) * len(candidates.texts)
    nbest = [{"text": t, "score": s} for t, s in zip(candidates.texts, scores, strict=True)]
    known = {
        "session": candidates.session,
        "corpus": candidates.corpus,
        "reference": candidates.reference,
        "lm": candidates.lm,
        "in_lm_text": candidates.in_lm_text,
    }
    return {
        "id": candidates.id,
        "text": text,
        **{key: value for key, value in known.items() if value is not None},
        "nbest": nbest,
    }


def _find_words(path: Path, split: str, label: str | None) -> Path:
    """The word decodings of a run; the results of `evaluate` hold phonemes only."""
    run = open_run(path)
    file = find_decodings(run, split, label)
    if file == run.results_file(split) and not any("nbest" in row for row in read_jsonl(file)[:1]):
        raise missing_decodings(run, split, None)
    return file
