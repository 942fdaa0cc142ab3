"""Average the frame log-probabilities of several models: probabilities (arithmetic) or logarithms (geometric)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from arcuate.data.alphabet import token_names
from arcuate.decoding.greedy import greedy
from arcuate.decoding.log_probs import FrameLogProbs, read_log_probs, write_log_probs
from arcuate.errors import UserError
from arcuate.evaluation.combine.candidates import check_same_trials
from arcuate.evaluation.metrics import Score, score, total
from arcuate.evaluation.significance import Difference, bootstrap_interval, score_difference
from arcuate.files import fields_to_dict, read_jsonl
from arcuate.run import open_run

Mean = Literal["arithmetic", "geometric"]
_FLOOR = -1e4  # replaces −inf, which a single model would force on a geometric mean


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

    @property
    def per(self) -> float | None:
        """PER of the greedy search on the mean; None without labels."""
        return self.phonemes.per if self.phonemes else None

    def summary(self) -> str:
        """The result in one sentence."""
        rate = "no labels, so no PER" if self.per is None else f"greedy PER {100 * self.per:.2f} %"
        return f"{self.method} mean of {self.n_models} models, {self.n_trials} trials: {rate}"

    def to_dict(self) -> dict[str, Any]:
        phonemes = fields_to_dict(self.phonemes) if self.phonemes else {}
        return fields_to_dict(self, "phonemes", "out") | phonemes | ({"out": str(self.out)} if self.out else {})


def combine_frames(
    sources: Sequence[Path], mean: Mean, split: str, label: str | None, out: Path | None
) -> FrameCombination:
    """Average the frame log-probabilities of runs or .npz files; score the greedy search if labels are known."""
    if len(sources) < 2:
        raise UserError("averaging needs at least two runs or .npz files of frame scores")
    paths = [_find_scores(path, split, label) if path.is_dir() else path for path in sources]
    models = [replace(read_frames(path), name=str(path)) for path in paths]
    pooled = average(models, mean)
    labels = _read_labels(sources[0], split, label)
    phonemes = _compare_phonemes(models, pooled, labels) if labels else None
    if out is not None:
        write_log_probs(out, replace(models[0], trials=tuple(pooled)))
    return FrameCombination(mean, len(models), len(pooled), phonemes, out)


def read_frames(path: Path) -> FrameLogProbs:
    """Read frame log-probabilities that name their trials."""
    scores = read_log_probs(path)
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
            f" {model.name}; models with different patches cannot be averaged by frame, combine their words:"
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
            score(labels[identity], token_names(greedy(frames)))
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
