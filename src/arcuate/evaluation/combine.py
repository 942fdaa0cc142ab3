"""Combine several decoders: one text per trial from their candidates, or the mean of their frame scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from arcuate.config import read_yaml
from arcuate.data.alphabet import CLASSES, error_rate_name, token_names
from arcuate.decoding.frame_files import FrameLogProbs, read_frames, write_frames
from arcuate.decoding.hypothesis import Hypothesis, greedy
from arcuate.errors import UserError
from arcuate.evaluation.choose import (
    N_FOLDS,
    Candidates,
    Choice,
    choose,
    cross_fit,
    expected_errors,
    make_candidates,
    mbr,
    softmax,
)
from arcuate.evaluation.metrics import Score, WordMetrics, mean, score, score_text, summarise_words, total
from arcuate.evaluation.sentences import (
    Sentence,
    attach_references,
    find_decodings,
    mark_leakage,
    oracle_score,
    read_decodings,
    score_sentences,
)
from arcuate.evaluation.significance import Difference, bootstrap_interval, score_difference
from arcuate.files import (
    DECODINGS,
    FRAME_SCORES,
    WEIGHTS,
    check_writable,
    fields_to_dict,
    finite_number,
    read_jsonl,
    to_frame,
    write_jsonl,
    write_text,
)
from arcuate.hub import local_path
from arcuate.language.ngram.model import LanguageModel
from arcuate.language.ngram.open import open_model
from arcuate.progress import Progress, logger, percent
from arcuate.run import WORDS_LABEL, RunLike, open_run

METHODS = ("auto", "linear", "mbr", "geometric")
# Features of the linear method with their packaged weights, fitted on ten-seed lists of two participants
# (docs/findings.md also gives the result of transferring weights between participants). Decoders delete more
# phonemes than they insert, hence the positive weight of length. The last feature needs an n-gram model.
FEATURES = {"agreement": 4.7, "letters": 0.62, "share": 2.45, "length": 0.81, "ngram": 0.22}
_UNBOUNDED = (3,)  # length
_FLOOR = -1e4  # replaces −inf, which a single model would force on a geometric mean


@dataclass(frozen=True)
class SingleSystems:
    """Error rates of the systems that were combined."""

    rates: tuple[float | None, ...]
    best: int  # number of the system with the fewest errors on these trials, from 1
    difference: Difference | None  # combination minus best system

    def to_dict(self, name: str) -> dict[str, Any]:
        """The values, with the name of the error rate: wer or per."""
        return {
            f"single_{name}": list(self.rates),
            f"single_{name}_mean": mean(self.rates),
            "best_single": self.best,
            f"best_single_{name}": self.rates[self.best - 1],
            "against_best_single": self.difference and fields_to_dict(self.difference),
        }


@dataclass(frozen=True)
class LinearWeights:
    """Weights of the linear method and their origin."""

    weights: dict[str, float]
    weights_from: str  # packaged, fitted, or a file
    folds: int | None = None  # number of folds of cross-fitting
    wer_fitted_on_same_trials: float | None = None  # with the weights fitted on all trials


@dataclass(frozen=True, eq=False)
class WordCombination:
    """Result of `combine` on words."""

    sentences: tuple[Sentence, ...]  # with the candidates of all systems
    texts: tuple[str, ...]
    metrics: WordMetrics
    oracle_wer: float | None  # of the best candidates
    single: SingleSystems | None  # None: not one candidate per system in every trial, or no references
    method: str
    linear: LinearWeights | None
    out: Path | None

    @property
    def wer(self) -> float | None:
        """Word error rate; None without references."""
        return self.metrics.wer

    def rows(self) -> list[dict[str, Any]]:
        """One line per trial, as `out` holds them."""
        return [sentence.to_row(text) for sentence, text in zip(self.sentences, self.texts, strict=True)]

    def summary(self) -> str:
        """Error rates of the combination and of the single systems."""
        words, n_trials = self.metrics, len(self.texts)
        if words.wer is None:
            return f"{n_trials} trials combined ({self.method}); no references, so no WER"
        fitted = ", cross-validated" if self.linear and self.linear.folds else ""
        lines = [
            f"WER {percent(words.wer)} combined ({self.method}{fitted}; lm: {words.lm or 'none'}), 95 % interval"
            f" {percent(words.wer_low)} to {percent(words.wer_high)} on {words.n_scored} trials;"
            f" CER {percent(words.cer)}"
        ]
        if self.single:
            known = self.single.to_dict("wer")
            lines.append(
                f"single systems {percent(known['single_wer_mean'])} on average, the best of these trials"
                f" {percent(known['best_single_wer'])}"
            )
        lines.append(f"best candidates (oracle) {percent(self.oracle_wer)}")
        if self.single and (gap := self.single.difference):
            lines.append(
                f"against the best system {100 * gap.rate:+.2f} points"
                f" ({100 * gap.low:+.2f} to {100 * gap.high:+.2f}), p = {gap.p:.4f}"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        fitted = self.linear is not None and self.linear.folds is not None
        linear = fields_to_dict(self.linear) if self.linear else {}
        return {
            **self.metrics.to_dict(),
            "n_candidates": sum(len(s.n_best) for s in self.sentences),
            "n_empty": sum(not s.n_best for s in self.sentences),
            "oracle_wer": self.oracle_wer,
            **(self.single.to_dict("wer") if self.single else {}),
            "method": self.method,
            "cross_fitted": fitted or None,
            **{key: value for key, value in linear.items() if value is not None},
            **({} if self.out is None else {"out": str(self.out)}),
        }

    def to_frame(self) -> Any:
        """One line per trial as a pandas DataFrame."""
        return to_frame(self.rows())


@dataclass(frozen=True)
class FrameCombination:
    """Result of `combine` with the mean of the frame scores."""

    n_models: int
    n_trials: int
    per: float | None  # of the greedy search on the mean; None without labels
    interval: tuple[float | None, float | None]
    single: SingleSystems | None  # None without labels
    out: Path | None
    classes: tuple[str, ...] = CLASSES

    def summary(self) -> str:
        """The result in one sentence."""
        name = error_rate_name(self.classes)
        rate = f"no labels, so no {name}" if self.per is None else f"greedy {name} {percent(self.per)}"
        best = "" if self.single is None else f"; best single model {percent(self.single.rates[self.single.best - 1])}"
        return f"geometric mean of {self.n_models} models, {self.n_trials} trials: {rate}{best}"

    def to_dict(self) -> dict[str, Any]:
        own = {"method": "geometric", "n_models": self.n_models, "n_trials": self.n_trials}
        low, high = self.interval
        rates = {"per": self.per, "per_low": low, "per_high": high} | self.single.to_dict("per") if self.single else {}
        return own | rates | ({"out": str(self.out)} if self.out else {})


def combine(
    *sources: RunLike,
    method: str = "auto",
    split: str = "val",
    label: str | None = None,
    lm: str | Path | None = None,
    fit: bool = False,
    weights: str | Path | None = None,
    references: str | Path | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> WordCombination | FrameCombination:
    """Combine several decoders, by words or by frame scores.

    Args:
        sources: Several runs, .jsonl or .npz files; or one .jsonl file with several candidates per trial.
        method: linear or mbr on words, geometric on frame scores, or auto.
        split: With runs: split whose results are combined.
        label: With runs: read `results/<split>.<label>.jsonl`.
        lm: N-gram model whose score is a further feature of the linear method.
        fit: Fit the weights of the linear method, cross-fitted over folds of sessions.
        weights: File of fitted weights to use; with `fit`: file to write those of all trials to.
        references: JSON lines with id and text to score against.
        out: File for the combined texts (.jsonl) or frame scores (.npz).
    """
    paths = [local_path(source) for source in sources]
    target, weights_file = (None if path is None else Path(path) for path in (out, weights))
    linear_only = any((lm, fit, weights))
    _check_method(method, linear_only)
    check_writable(target, *paths, references, weights, lm)
    if fit:
        check_writable(weights_file, *paths, references, lm, kind=WEIGHTS)
    if method == "auto" and not linear_only and _have_only_frames(paths, split, label):
        logger.info("no words have been decoded yet; averaging the frame scores (--method geometric)")
        method = "geometric"
    if method == "geometric":
        check_writable(target, kind=FRAME_SCORES)
        return combine_frames(paths, split, label, target)
    files = [find_decodings(open_run(path), split, label) if path.is_dir() else path for path in paths]
    check_writable(target, *files, kind=DECODINGS)
    sentences = _read_sources(paths, files, references)
    ngram = open_model(str(lm), progress) if lm else None
    sentences = mark_leakage(sentences, ngram) if ngram else sentences
    if method == "auto":  # the packaged weights are for one candidate per system; scored n-best lists use MBR
        method = "linear" if linear_only or n_systems(sentences) is not None else "mbr"
    names = _language_models(sentences, lm)
    if method == "mbr":
        texts, linear = [mbr(s.texts, vote_weights(s)) for s in sentences], None
    else:
        origin = {"lm": names, "fitted_on": list(map(str, paths))}
        texts, linear = _choose_and_write(sentences, ngram, fit, weights_file, origin)
    combination = summarise_combination(sentences, texts, names, method, linear, target)
    if warning := combination.metrics.leakage_warning:
        logger.info(warning)
    if target:
        write_jsonl(target, combination.rows())
    return combination


def _check_method(method: str, linear_only: bool) -> None:
    if method not in METHODS:
        raise UserError(f"no method {method!r}; choose one of {', '.join(METHODS)}")
    if linear_only and method not in ("auto", "linear"):
        raise UserError(f"language models and weights require --method linear, not {method}")


def _choose_and_write(
    sentences: Sequence[Sentence],
    ngram: LanguageModel | None,
    fit: bool,
    weights_file: Path | None,
    origin: Mapping[str, Any],
) -> tuple[list[str], LinearWeights]:
    """The texts chosen by the linear method and its weights; fitted weights are written with their origin."""
    choice = choose_linear(sentences, ngram, fit, None if fit else weights_file)
    linear = _describe(choice, sentences, ngram, fit, weights_file)
    if fit and weights_file:
        labelled = sum(s.reference is not None for s in sentences)
        _write_weights(weights_file, linear, {"n_trials": labelled, **origin})
    return choice.texts, linear


def _language_models(sentences: Sequence[Sentence], lm: str | Path | None) -> str | None:
    """Names of the models that the candidates were decoded with, and of the one that scores them."""
    decoders = " / ".join(dict.fromkeys(s.lm for s in sentences if s.lm))
    return " + ".join(name for name in (decoders, Path(lm).name if lm else "") if name) or None


def summarise_combination(
    sentences: Sequence[Sentence],
    texts: Sequence[str],
    lm: str | None = None,
    method: str = "",
    linear: LinearWeights | None = None,
    out: Path | None = None,
) -> WordCombination:
    """Score the chosen texts, the single systems and the best candidates."""
    trials = score_sentences(sentences, texts)
    labelled = [s for s in sentences if s.reference is not None]
    single = None
    if labelled and (n := n_systems(sentences)) is not None:
        by_system = [[score_text(s.reference or "", s.texts[k]).words for s in labelled] for k in range(n)]
        single = compare_systems(by_system, [t.score.words for t in trials])
    metrics = summarise_words(trials, lm=lm, n_trials=len(sentences))
    oracle = oracle_score(labelled).rate
    return WordCombination(tuple(sentences), tuple(texts), metrics, oracle, single, method, linear, out)


def compare_systems(systems: Sequence[Sequence[Score]], combined: Sequence[Score]) -> SingleSystems:
    """Error rates of single systems, and the difference of the combination from the best of them."""
    sums = [total(scores) for scores in systems]
    best = min(range(len(sums)), key=lambda k: sums[k].errors)
    return SingleSystems(tuple(s.rate for s in sums), best + 1, score_difference(combined, systems[best]))


def n_systems(sentences: Sequence[Sentence]) -> int | None:
    """Number of systems if every trial has one unscored candidate of each, else None."""
    sizes = {len(s.n_best) for s in sentences}
    if len(sizes) != 1 or any(s.totals is not None for s in sentences):
        return None
    return sizes.pop() or None


def vote_weights(sentence: Sentence) -> np.ndarray:
    """Vote weights of the candidates: softmax of their scores, if they have scores, else equal."""
    return np.ones(len(sentence.n_best)) if sentence.totals is None else softmax(sentence.totals)


def _read_sources(paths: Sequence[Path], files: Sequence[Path], references: str | Path | None) -> list[Sentence]:
    """The candidates of all files, with references."""
    if len(files) == 1 and paths[0].is_dir():
        raise UserError("one run alone cannot be combined; give several, or a .jsonl file with candidates")
    lists = [read_decodings(file) for file in files]
    sentences = lists[0] if len(files) == 1 else merge_decoders(files, lists)
    if references:
        sentences = attach_references(sentences, Path(references))
        if (known := sum(s.reference is not None for s in sentences)) < len(sentences):
            logger.info(f"{known} of {len(sentences)} trials have a reference; the others are not scored")
    if empty := sum(not s.n_best for s in sentences):
        logger.info(f"{empty} trials have no candidates; their text is empty")
    return sentences


def merge_decoders(paths: Sequence[Path], decodings: Sequence[Sequence[Sentence]]) -> list[Sentence]:
    """One list per trial from the n-best lists of several decoders.

    Each decoder has one vote, divided over its candidates by the softmax of their scores. The new score of a candidate
    is the logarithm of its fraction.
    """
    for path, sentences in zip(paths[1:], decodings[1:], strict=True):
        check_same_trials(str(paths[0]), [s.id for s in decodings[0]], str(path), [s.id for s in sentences])
    return [_merge_trial(paths[0], sentences) for sentences in zip(*decodings, strict=True)]


def _merge_trial(path: Path, sentences: Sequence[Sentence]) -> Sentence:
    references = {s.reference for s in sentences if s.reference is not None}
    if len(references) > 1:
        raise UserError(
            f"{path} and the others disagree on the reference of trial {sentences[0].id}; they were not scored on the"
            " same data"
        )
    merged: list[Hypothesis] = []
    for sentence in sentences:
        votes = vote_weights(sentence)
        for hypothesis, vote in zip(sentence.n_best, votes / max(votes.sum(), 1e-300), strict=True):
            merged.append(replace(hypothesis, scores={}, total=float(np.log(max(vote, 1e-300)))))
    models = dict.fromkeys(s.lm for s in sentences if s.lm is not None)
    known = [s.in_lm_text for s in sentences if s.in_lm_text is not None]
    return replace(
        sentences[0],
        n_best=tuple(merged),
        reference=next(iter(references), None),
        in_lm_text=any(known) if known else None,
        lm=" / ".join(models) or None,
    )


def check_same_trials(name: str, trials: Sequence[str], other: str, others: Sequence[str]) -> None:
    """Check that two files hold the same trials in the same order."""
    if tuple(trials) == tuple(others):
        return
    unmatched = sorted(set(trials) ^ set(others))
    detail = (
        f"{len(unmatched)} trials are in only one of them, such as {unmatched[0]}"
        if unmatched
        else "their order differs"
    )
    raise UserError(f"{name} and {other} were not scored on the same trials: {detail}")


# --- the linear method -------------------------------------------------------------------------------------------


def choose_linear(
    sentences: Sequence[Sentence], lm: LanguageModel | None = None, fit: bool = False, weights: Path | None = None
) -> Choice:
    """Choose with the weights of a file, by default the packaged ones, or with cross-fitted ones."""
    trials, names = [measure_features(s, lm) for s in sentences], feature_names(lm)
    prior = [FEATURES[name] for name in names]
    if not fit:
        return choose(trials, np.array(prior) if weights is None else read_weights(weights, names))
    labelled = sum(t.errors is not None for t in trials)
    if labelled < 2 * N_FOLDS:
        raise UserError(
            f"--fit needs references of at least {2 * N_FOLDS} trials, there are {labelled};"
            " add --references, or leave out --fit"
        )
    return cross_fit(trials, [s.session for s in sentences], prior, _UNBOUNDED)


def feature_names(lm: LanguageModel | None = None) -> tuple[str, ...]:
    """Names of the features, in the order of the columns."""
    return tuple(name for name in FEATURES if lm is not None or name != "ngram")


def measure_features(sentence: Sentence, lm: LanguageModel | None = None) -> Candidates:
    """The distinct texts of a trial with `FEATURES`.

    They are negative expected word errors and letter errors, log vote share, number of letters, and the natural-log
    probability under an n-gram model.
    """
    if not sentence.n_best:
        return make_candidates((), np.zeros((0, len(feature_names(lm)))), None)
    votes = vote_weights(sentence)
    by_word = expected_errors(sentence.texts, votes, letter_cost=0.0)
    by_letter = expected_errors(sentence.texts, votes, letter_cost=1.0).errors - by_word.errors
    columns = [-by_word.errors, -by_letter, np.log(np.maximum(by_word.weights, 1e-6))]
    columns.append(np.array([len(text) for text in by_word.texts], dtype=np.float64))
    if lm is not None:
        columns.append(np.array([_log_prob(lm, text) for text in by_word.texts]))
    return make_candidates(by_word.texts, np.stack(columns, axis=1), sentence.reference)


def _log_prob(lm: LanguageModel, text: str) -> float:
    """Natural-log probability of a sentence, its end included."""
    log_probs, _ = lm.score(np.array([*(lm.find(word) for word in text.split()), lm.eos], dtype=np.int32))
    return float(log_probs.sum())


def _describe(
    choice: Choice, sentences: Sequence[Sentence], lm: LanguageModel | None, fit: bool, file: Path | None
) -> LinearWeights:
    """The weights behind a choice and where they come from."""
    weights = dict(zip(feature_names(lm), choice.weights.tolist(), strict=True))
    if not fit:
        return LinearWeights(weights, str(file) if file else "packaged")
    optimistic = total(t.score.words for t in score_sentences(sentences, choice.same_trials))
    return LinearWeights(weights, "fitted", N_FOLDS, optimistic.rate)


def _write_weights(path: Path, linear: LinearWeights, about: Mapping[str, Any]) -> None:
    """Write weights as YAML: a number per feature, and where they come from."""
    tree = {"weights": {name: round(w, 6) for name, w in linear.weights.items()}, "about": dict(about)}
    write_text(path, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))


def read_weights(path: Path, names: Sequence[str]) -> np.ndarray:
    """Read the weights of exactly these features: (k,)"""
    tree = read_yaml(path)
    given = tree.get("weights") if isinstance(tree, dict) else None
    if not isinstance(given, dict):
        raise UserError(f"{path} has no table `weights`; write one with --fit --weights {path}")
    if set(given) != set(names):
        raise UserError(
            f"{path} has weights of {', '.join(map(str, given))}, expected {', '.join(names)};"
            " use the same language models as when the weights were fitted"
        )
    found = [finite_number(given[name]) for name in names]
    if None in found:
        name = names[found.index(None)]
        raise UserError(f"{path}: {name} is {given[name]!r:.60}; expected a finite number")
    return np.array(found, dtype=np.float64)


# --- frame scores ------------------------------------------------------------------------------------------------


def combine_frames(sources: Sequence[Path], split: str, label: str | None, out: Path | None) -> FrameCombination:
    """Average the frame log-probabilities of runs or .npz files; score the greedy search if labels are known."""
    if len(sources) < 2:
        raise UserError("averaging needs at least two runs or .npz files of frame scores")
    paths = [_find_scores(path, split, label) if path.is_dir() else path for path in sources]
    models = [replace(read_frames(path), name=str(path)) for path in paths]
    pooled = average(models)
    classes, ids = models[0].classes, models[0].ids or ()
    labels = _read_labels(sources[0], split, label)

    def scores(trials: Sequence[np.ndarray]) -> list[Score]:
        named = zip(ids, trials, strict=True)
        return [score(labels[name], token_names(greedy(p), classes)) for name, p in named if name in labels]

    mean = scores(pooled)
    single = compare_systems([scores(model.trials) for model in models], mean) if labels else None
    if out is not None:
        write_frames(out, replace(models[0], trials=tuple(pooled)))
    return FrameCombination(len(models), len(pooled), total(mean).rate, bootstrap_interval(mean), single, out, classes)


def average(models: Sequence[FrameLogProbs]) -> list[np.ndarray]:
    """Geometric mean of the probabilities of every trial; trials, classes and frame counts must agree."""
    first = models[0]
    for model in models:
        if model.ids is None:
            raise UserError(f"{model.name} does not name its trials; write it with: arcuate evaluate --scores")
        check_same_trials(first.name, first.ids or (), model.name, model.ids)
        if model.classes != first.classes:
            raise UserError(f"the classes of {model.name} and {first.name} differ; they cannot be averaged")
        for trial, expected, frames in zip(model.ids, first.trials, model.trials, strict=True):
            if np.isnan(frames).any() or np.isposinf(frames).any():
                raise UserError(f"{model.name}: trial {trial} contains NaN or +inf; evaluate the model again")
            if len(frames) != len(expected):
                raise UserError(
                    f"trial {trial} has {len(expected)} frames in {first.name} and {len(frames)} in {model.name};"
                    " models with different patches cannot be averaged by frame; combine their words: --method mbr"
                )
    return [mean_frames(frames) for frames in zip(*(model.trials for model in models), strict=True)]


def mean_frames(frames: Sequence[np.ndarray]) -> np.ndarray:
    """Mean log-probabilities of one trial, renormalised in every frame: (F, V)"""
    pooled = np.maximum(np.stack(frames).astype(np.float64), _FLOOR).mean(axis=0)  # (F, V)
    return (pooled - np.logaddexp.reduce(pooled, axis=-1, keepdims=True)).astype(np.float32)


def _have_only_frames(paths: Sequence[Path], split: str, label: str | None) -> bool:
    """Whether the sources are runs with frame scores and without words, as `train --seeds` leaves them."""
    if not all(path.is_dir() for path in paths):
        return False
    runs = [open_run(path) for path in paths]
    words = any(run.results_file(split, label or WORDS_LABEL).is_file() for run in runs)
    return not words and all(run.results_file(split, label, "scores.npz").is_file() for run in runs)


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
    file = open_run(source).results_file(split, label) if source.is_dir() else None
    rows = read_jsonl(file) if file is not None and file.is_file() else []
    return {str(r["trial"]): r["reference"] for r in rows if "trial" in r and isinstance(r.get("reference"), list)}
