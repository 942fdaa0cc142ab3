"""Combine several decoders: one text per trial from their candidates, or the mean of their frame scores."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

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
    choose_linear,
    feature_weights,
    ngram_feature,
    precomputed_feature,
    read_weights,
    write_weights,
)
from arcuate.evaluation.combine.voting import mbr, merge_decoders, rover, vote_weights
from arcuate.evaluation.metrics import score_text, total, word_error_rate
from arcuate.evaluation.significance import Difference, score_difference
from arcuate.evaluation.submission import WORDS_LABEL, find_decodings, missing_decodings
from arcuate.evaluation.word_errors import WordMetrics, summarise_words
from arcuate.files import check_writable, read_jsonl, to_frame, write_jsonl
from arcuate.language.ngram.io import open_model
from arcuate.language.ngram.model import LanguageModel
from arcuate.progress import Progress, logger
from arcuate.run import RunLike, open_run

METHODS = ("auto", "linear", "mbr", "rover", "arithmetic", "geometric")


@dataclass(frozen=True)
class SingleSystems:
    """Word error rates of the systems that were combined."""

    wer: list[float | None]
    best: int  # index of the lowest WER on these trials
    difference: Difference | None  # combination minus best system

    def to_dict(self) -> dict[str, Any]:
        known = [rate for rate in self.wer if rate is not None]
        return {
            "single_wer": self.wer,
            "single_wer_mean": float(np.mean(known)) if self.wer[0] is not None else None,
            "best_single": self.best + 1,
            "best_single_wer": self.wer[self.best],
            "against_best_single": vars(self.difference) if self.difference else None,
        }


@dataclass(frozen=True)
class CombinationMetrics:
    """Word error rates of the chosen texts, of the single systems and of the best candidates."""

    words: WordMetrics
    n_candidates: int
    n_empty: int  # trials without candidates
    oracle_wer: float | None
    single: SingleSystems | None  # None: not one candidate per system in every trial

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.words.to_dict(),
            "n_candidates": self.n_candidates,
            "n_empty": self.n_empty,
            "oracle_wer": self.oracle_wer,
            **(self.single.to_dict() if self.single else {}),
        }


@dataclass(frozen=True)
class LinearWeights:
    """Weights of the linear method and their origin."""

    weights: dict[str, float]
    weights_from: str  # packaged, fitted, or a file
    folds: int | None = None  # of cross-fitting
    wer_on_same_trials: float | None = None  # with the weights fitted on all trials

    def to_dict(self) -> dict[str, Any]:
        fitted = {
            "cross_fitted": True,
            "folds": self.folds,
            "wer_fitted_on_same_trials": self.wer_on_same_trials,
        }
        return {"weights": self.weights, "weights_from": self.weights_from} | (fitted if self.folds else {})


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

    @property
    def cross_fitted(self) -> bool:
        return self.linear is not None and self.linear.folds is not None

    def rows(self) -> list[dict[str, Any]]:
        """One line per trial, as `out` holds them."""
        return [_make_row(c, text) for c, text in zip(self.candidates, self.texts, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.metrics.to_dict(),
            "method": self.method,
            "votes": self.votes,
            "cross_fitted": None,
            **(self.linear.to_dict() if self.linear else {}),
            **({} if self.out is None else {"out": str(self.out)}),
        }

    def to_frame(self) -> Any:
        """One line per trial as a pandas DataFrame."""
        return to_frame(self.rows())


@dataclass(frozen=True)
class _Options:
    sources: tuple[Path, ...]
    method: str
    split: str
    label: str | None
    votes: str
    scale: float
    lm: str | None
    llm: Path | None
    fit: bool
    folds: int
    weights: Path | None
    save_weights: Path | None
    references: Path | None
    out: Path | None

    @property
    def needs_linear(self) -> bool:
        return bool(self.lm or self.llm or self.fit or self.weights)


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
    paths = (weights, save_weights, references, out)
    weights_file, save_file, references_file, target = (None if p is None else Path(p) for p in paths)
    options = _Options(
        tuple(Path(os.fspath(source)) for source in sources),
        method,
        split,
        label,
        votes,
        scale,
        None if lm is None else str(lm),
        None if llm is None else Path(llm),
        fit,
        folds,
        weights_file,
        save_file,
        references_file,
        target,
    )
    _check_options(options)
    for file in (target, save_file):
        check_writable(file, *options.sources, references_file, weights_file, options.lm, options.llm)
    if method == "auto" and _has_only_frames(options):
        logger.info("no words were decoded yet; averaging the frame scores (--method geometric)")
        method = "geometric"
    if method in ("arithmetic", "geometric"):
        return combine_frames(options.sources, cast(Mean, method), split, label, target)
    return _combine_words(options, progress)


def summarise_combination(
    lists: Sequence[CandidateList], texts: Sequence[str], lm: str | None
) -> CombinationMetrics:
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
        best = min(range(len(rates)), key=lambda system: rates[system] or 0.0)
        difference = score_difference([t.score.words for t in trials], scores[best])
        single = SingleSystems(rates, best, difference)
    return CombinationMetrics(
        summarise_words(trials, lm=lm, n_trials=len(lists)),
        sum(len(candidates.texts) for candidates in lists),
        sum(not candidates.texts for candidates in lists),
        oracle_score(labelled).rate,
        single,
    )


def choose_mbr(lists: Sequence[CandidateList], votes: Sequence[np.ndarray]) -> list[str]:
    """MBR text of every trial."""
    return [mbr(candidates.texts, weights) for candidates, weights in zip(lists, votes, strict=True)]


def choose_rover(lists: Sequence[CandidateList], votes: Sequence[np.ndarray]) -> list[str]:
    """ROVER text of every trial."""
    return [rover(candidates.texts, weights) for candidates, weights in zip(lists, votes, strict=True)]


def _check_options(options: _Options) -> None:
    if options.method not in METHODS:
        raise UserError(f"there is no method {options.method!r}; choose one of {', '.join(METHODS)}")
    if options.votes not in ("equal", "agreement"):
        raise UserError(f"--votes is {options.votes!r}; choose equal or agreement")
    if (options.needs_linear or options.save_weights) and options.method not in ("auto", "linear"):
        raise UserError(f"language models and weights require --method linear, not {options.method}")
    if options.fit and options.weights:
        raise UserError("--fit and --weights are mutually exclusive; use one of the two")
    if options.save_weights and not options.fit:
        raise UserError("--save-weights writes fitted weights; add --fit")


def _has_only_frames(options: _Options) -> bool:
    """Whether the sources are runs with frame scores and without words, as `train --seeds` leaves them."""
    if options.needs_linear or not all(p.is_dir() for p in options.sources):
        return False
    runs = [open_run(path) for path in options.sources]
    words = any(run.results_file(options.split, options.label or WORDS_LABEL).is_file() for run in runs)
    scores = (run.results_file(options.split, options.label, "scores.npz") for run in runs)
    return not words and all(file.is_file() for file in scores)


def _combine_words(options: _Options, progress: Progress | None) -> WordCombination:
    files = [_find_words(path, options) if path.is_dir() else path for path in options.sources]
    check_writable(options.out, *files)
    lists = _read_sources(options, files)
    if options.references:
        lists = attach_references(lists, options.references)
        if (known := sum(c.reference is not None for c in lists)) < len(lists):
            logger.info(f"{known} of {len(lists)} trials have a reference; the others are not scored")
    lm = open_model(options.lm, progress) if options.lm else None
    lists = mark_leakage(lists, lm) if lm else lists
    if empty := sum(not candidates.texts for candidates in lists):
        logger.info(f"{empty} trials have no candidates; their text is empty")
    method = _choose_method(options, lists)
    votes = vote_weights(lists, "agreement" if options.votes == "agreement" else "equal", options.scale)
    linear = None
    if method == "linear":
        texts, linear = _choose_linear(options, lists, votes, lm, progress)
    else:
        texts = (choose_mbr if method == "mbr" else choose_rover)(lists, votes)
    metrics = summarise_combination(lists, texts, _name_models(options, lists))
    combination = WordCombination(
        tuple(lists), tuple(texts), metrics, method, options.votes, linear, options.out
    )
    if warning := metrics.words.leakage_warning:
        logger.info(warning)
    if options.out:
        write_jsonl(options.out, combination.rows())
    return combination


def _choose_method(options: _Options, lists: Sequence[CandidateList]) -> str:
    """Method auto: the packaged weights are for one candidate per system; scored n-best lists use MBR."""
    if options.method != "auto":
        return options.method
    return "linear" if options.needs_linear or n_systems(lists) is not None else "mbr"


def _choose_linear(
    options: _Options,
    lists: Sequence[CandidateList],
    votes: Sequence[np.ndarray],
    lm: LanguageModel | None,
    progress: Progress | None,
) -> tuple[list[str], LinearWeights]:
    extra = [ngram_feature(lm, NGRAM_WEIGHT_WITH_CAUSAL if options.llm else NGRAM_WEIGHT)] if lm else []
    if options.llm:
        extra.append(_causal_feature(options.llm, lists, progress))
    names, prior = feature_weights(extra)
    if not options.fit:
        weights = read_weights(options.weights, names) if options.weights else np.array(prior)
        choice = choose_linear(lists, votes, extra, weights=weights)
        origin = str(options.weights) if options.weights else "packaged"
        return choice.texts, LinearWeights(dict(zip(names, weights.tolist(), strict=True)), origin)
    labelled = sum(candidates.reference is not None for candidates in lists)
    if labelled < 2 * options.folds:
        raise UserError(
            f"--fit needs references of at least {2 * options.folds} trials, there are {labelled};"
            " add --references, or leave out --fit"
        )
    choice = choose_linear(lists, votes, extra, n_folds=options.folds)
    assert choice.same_trials is not None
    if options.save_weights:
        about = {
            "n_trials": labelled,
            "lm": _name_models(options, lists),
            "fitted_on": [str(path) for path in options.sources],
        }
        write_weights(options.save_weights, choice, about)
    pairs = zip(lists, choice.same_trials, strict=True)
    known = [(c.reference, text) for c, text in pairs if c.reference is not None]
    wer = word_error_rate([reference for reference, _ in known], [text for _, text in known])
    fitted = dict(zip(names, choice.weights.tolist(), strict=True))
    return choice.texts, LinearWeights(fitted, "fitted", options.folds, wer)


def _causal_feature(path: Path, lists: Sequence[CandidateList], progress: Progress | None) -> Feature:
    from arcuate.evaluation.rescoring.causal import load_causal, score_sentences

    texts = sorted({text for candidates in lists for text in candidates.texts})
    scores = score_sentences(load_causal(path), texts, progress=progress)
    return precomputed_feature("causal", CAUSAL_WEIGHT, dict(zip(texts, scores.tolist(), strict=True)))


def _name_models(options: _Options, lists: Sequence[CandidateList]) -> str | None:
    """All language models behind a text: those of the decoders, then those of the combination."""
    decoders = " / ".join(dict.fromkeys(candidates.lm for candidates in lists if candidates.lm))
    models = [
        decoders,
        Path(options.lm).name if options.lm else None,
        options.llm.stem if options.llm else None,
    ]
    return " + ".join(name for name in models if name) or None


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


def _read_sources(options: _Options, files: Sequence[Path]) -> list[CandidateList]:
    """Candidates from one file, or from the decodings of several runs or files."""
    if len(files) == 1:
        if options.sources[0].is_dir():
            raise UserError(
                "one run alone cannot be combined; give several, or a .jsonl file with candidates"
            )
        return read_candidates(files[0])
    return merge_decoders(files, [read_candidates(file) for file in files], options.scale)


def _find_words(path: Path, options: _Options) -> Path:
    """The word decodings of a run; the results of `evaluate` hold phonemes only."""
    run = open_run(path)
    file = find_decodings(run, options.split, options.label)
    if file == run.results_file(options.split) and not any("nbest" in r for r in read_jsonl(file)[:1]):
        raise missing_decodings(run, options.split, None)
    return file
