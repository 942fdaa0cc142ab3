"""Combine several decoders: one text per trial from their candidates, or the mean of their frame scores."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np

from arcuate.data.alphabet import CLASSES, error_rate_name, token_names
from arcuate.decoding.frame_files import FrameLogProbs, read_frames, write_frames
from arcuate.decoding.hypothesis import greedy
from arcuate.errors import UserError
from arcuate.evaluation.candidates import (
    CandidateList,
    Votes,
    attach_references,
    check_same_trials,
    mark_leakage,
    mbr,
    merge_decoders,
    n_systems,
    oracle_score,
    read_candidates,
    rover,
    score_candidates,
    vote_weights,
)
from arcuate.evaluation.linear import (
    NGRAM_WEIGHT,
    NGRAM_WEIGHT_WITH_CAUSAL,
    LinearWeights,
    causal_feature,
    choose_or_fit,
    describe_weights,
    ngram_feature,
    write_weights,
)
from arcuate.evaluation.metrics import Score, WordMetrics, score, score_text, summarise_words, total
from arcuate.evaluation.significance import Difference, bootstrap_interval, score_difference
from arcuate.evaluation.submission import find_decodings, missing_decodings
from arcuate.files import (
    DECODINGS,
    FRAME_SCORES,
    WEIGHTS,
    check_writable,
    fields_to_dict,
    read_jsonl,
    to_frame,
    write_jsonl,
)
from arcuate.hub import local_path
from arcuate.language.ngram.open import open_model
from arcuate.progress import Progress, logger
from arcuate.run import WORDS_LABEL, RunLike, open_run

Mean = Literal["arithmetic", "geometric"]
METHODS = ("auto", "linear", "mbr", "rover", "arithmetic", "geometric")
_FLOOR = -1e4  # replaces −inf, which a single model would force on a geometric mean


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


@dataclass(frozen=True)
class PhonemeComparison:
    """PER of the greedy search on the mean, against the single models."""

    per: float | None
    per_low: float | None
    per_high: float | None
    single_per: list[float | None]
    best_single: int  # number of the model with the fewest errors, from 1
    against_best_single: Difference | None  # mean minus best single model


@dataclass(frozen=True)
class FrameCombination:
    """Result of `combine` with method arithmetic or geometric."""

    method: Mean
    n_models: int
    n_trials: int
    phonemes: PhonemeComparison | None  # None: no labels
    out: Path | None
    classes: tuple[str, ...] = CLASSES

    @property
    def per(self) -> float | None:
        """PER of the greedy search on the mean; None without labels."""
        return self.phonemes.per if self.phonemes else None

    def summary(self) -> str:
        """The result in one sentence."""
        name = error_rate_name(self.classes)
        rate = f"no labels, so no {name}" if self.per is None else f"greedy {name} {100 * self.per:.2f} %"
        return f"{self.method} mean of {self.n_models} models, {self.n_trials} trials: {rate}"

    def to_dict(self) -> dict[str, Any]:
        phonemes = fields_to_dict(self.phonemes) if self.phonemes else {}
        return (
            fields_to_dict(self, "phonemes", "out", "classes") | phonemes | ({"out": str(self.out)} if self.out else {})
        )


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
    paths = [local_path(source) for source in sources]
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
    check_writable(target, *paths, references, weights, lm, llm)
    check_writable(save_file, *paths, references, weights, lm, llm, kind=WEIGHTS)
    if method == "auto" and not linear_only and _have_only_frames(paths, split, label):
        logger.info("no words have been decoded yet; averaging the frame scores (--method geometric)")
        method = "geometric"
    if method in get_args(Mean):
        check_writable(target, kind=FRAME_SCORES)
        return combine_frames(paths, cast(Mean, method), split, label, target)

    files = [_find_words(path, split, label) if path.is_dir() else path for path in paths]
    check_writable(target, *files, kind=DECODINGS)
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
        if llm:
            extra.append(causal_feature(Path(llm), [text for c in candidates for text in c.texts], progress))
        weights_file = Path(weights) if weights else None
        choice = choose_or_fit(candidates, trial_weights, extra, fit, folds, weights_file)
        texts, linear = choice.texts, describe_weights(choice, candidates, folds, weights_file)
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


# --- Frame scores ------------------------------------------------------------------------------------------


def combine_frames(
    sources: Sequence[Path], mean: Mean, split: str, label: str | None, out: Path | None
) -> FrameCombination:
    """Average the frame log-probabilities of runs or .npz files; score the greedy search if labels are known."""
    if len(sources) < 2:
        raise UserError("averaging needs at least two runs or .npz files of frame scores")
    paths = [_find_scores(path, split, label) if path.is_dir() else path for path in sources]
    models = [replace(_read_named_frames(path), name=str(path)) for path in paths]
    pooled = average(models, mean)
    labels = _read_labels(sources[0], split, label)
    phonemes = _compare_phonemes(models, pooled, labels) if labels else None
    if out is not None:
        write_frames(out, replace(models[0], trials=tuple(pooled)))
    return FrameCombination(mean, len(models), len(pooled), phonemes, out, models[0].classes)


def _read_named_frames(path: Path) -> FrameLogProbs:
    """Read frame log-probabilities that name their trials."""
    scores = read_frames(path)
    if scores.ids is None:
        raise UserError(f"{path} does not name its trials; write it with: arcuate evaluate --scores")
    for trial, frames in zip(scores.ids, scores.trials, strict=True):
        if np.isnan(frames).any() or np.isposinf(frames).any():
            raise UserError(f"{path}: trial {trial} contains NaN or +inf; evaluate the model again")
    return scores


def average(models: Sequence[FrameLogProbs], mean: Mean) -> list[np.ndarray]:
    """Mean log-probabilities of every trial; trials, classes and frame counts must agree."""
    first = models[0]
    for other in models[1:]:
        check_same_trials(first.name, first.ids or (), other.name, other.ids or ())
        if other.classes != first.classes:
            raise UserError(f"the classes of {other.name} and {first.name} differ; they cannot be averaged")
    return [mean_frames([_check_length(first, model, i) for model in models], mean) for i in range(len(first.trials))]


def mean_frames(frames: Sequence[np.ndarray], mean: Mean) -> np.ndarray:
    """Mean of one trial, renormalised in every frame: (F, V)"""
    stacked = np.maximum(np.stack(frames).astype(np.float64), _FLOOR)  # (models, F, V)
    if mean == "arithmetic":
        pooled = np.logaddexp.reduce(stacked, axis=0) - np.log(len(frames))
    else:
        pooled = stacked.mean(axis=0)
    return (pooled - np.logaddexp.reduce(pooled, axis=-1, keepdims=True)).astype(np.float32)


def _check_length(first: FrameLogProbs, model: FrameLogProbs, index: int) -> np.ndarray:
    expected, frames = first.trials[index], model.trials[index]
    if len(frames) != len(expected):
        raise UserError(
            f"trial {(first.ids or ())[index]} has {len(expected)} frames in {first.name} and {len(frames)} in"
            f" {model.name}; models with different patches cannot be averaged by frame; combine their words:"
            " --method mbr"
        )
    return frames


def _find_scores(path: Path, split: str, label: str | None) -> Path:
    file = open_run(path).results_file(split, label, "scores.npz")
    if not file.is_file():
        raise UserError(
            f"{path} has no frame scores of {split}; write them with:"
            f" arcuate evaluate {path} --split {split} --scores {file}"
        )
    return file


def _read_labels(source: Path, split: str, label: str | None) -> dict[str, list[str]]:
    """Reference phonemes by trial, from the results of the first run."""
    if not source.is_dir():
        return {}
    file = open_run(source).results_file(split, label)
    if not file.is_file():
        return {}
    rows = read_jsonl(file)
    return {str(r["trial"]): r["reference"] for r in rows if "trial" in r and isinstance(r.get("reference"), list)}


def _compare_phonemes(
    models: Sequence[FrameLogProbs], pooled: Sequence[np.ndarray], labels: Mapping[str, list[str]]
) -> PhonemeComparison:
    ids = models[0].ids or ()

    def score_frames(trials: Sequence[np.ndarray]) -> list[Score]:
        return [
            score(labels[identity], token_names(greedy(frames), models[0].classes))
            for identity, frames in zip(ids, trials, strict=True)
            if identity in labels
        ]

    single, mean = [score_frames(model.trials) for model in models], score_frames(pooled)
    best = min(range(len(single)), key=lambda i: total(single[i]).errors)
    return PhonemeComparison(
        total(mean).rate,
        *bootstrap_interval(mean),
        [total(scores).rate for scores in single],
        best + 1,
        score_difference(mean, single[best]),
    )
