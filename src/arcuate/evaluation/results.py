"""Results of phoneme decoding: summary, one line per trial, and the files in the run folder."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from arcuate.data.alphabet import token_names
from arcuate.data.store import Store
from arcuate.evaluation.metrics import total
from arcuate.evaluation.significance import bootstrap_interval
from arcuate.evaluation.trials import TrialResult
from arcuate.files import save_npz, write_json, write_jsonl
from arcuate.models.mode import MODES
from arcuate.run import Run

_OPTIONAL = ("per_greedy", "per_by_mode", "mode_accuracy", "mode_accuracy_pooled")  # absent if None


@dataclass(frozen=True)
class PhonemeMetrics:
    """Error counts and rates over trials, by session, by block and by speaking mode."""

    per: float | None
    per_greedy: float | None  # if the trials were decoded by another search
    per_low: float | None  # 95 % bootstrap interval over trials
    per_high: float | None
    n_trials: int
    n_scored: int
    n_tokens: int
    substitutions: int
    insertions: int
    deletions: int
    loss: float | None
    per_by_session: dict[str, float | None]
    per_by_block: dict[str, float | None]
    per_by_mode: dict[str, float | None] | None  # None: no trial has a known mode
    mode_accuracy: float | None
    mode_accuracy_pooled: float | None  # log-probabilities summed over each block

    @property
    def interval(self) -> tuple[float | None, float | None]:
        return self.per_low, self.per_high

    def to_dict(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if v is not None or k not in _OPTIONAL}


def summarise(results: Sequence[TrialResult], n_resamples: int = 2000) -> PhonemeMetrics:
    """Error counts and rates of decoded trials."""
    scored = [r for r in results if r.score is not None]
    scores = [r.score for r in scored if r.score is not None]
    losses = [r.loss for r in scored if r.loss is not None]
    greedy_scores = [r.greedy_score for r in scored if r.greedy_score is not None]
    with_mode = [r for r in results if r.trial.mode in MODES]
    predicted = bool(with_mode) and all(r.mode is not None for r in with_mode)
    counts = total(scores)
    return PhonemeMetrics(
        counts.rate,
        total(greedy_scores).rate if greedy_scores else None,
        *bootstrap_interval(scores, n_resamples=n_resamples),
        len(results),
        len(scored),
        counts.length,
        counts.substitutions,
        counts.insertions,
        counts.deletions,
        float(np.mean(losses)) if losses else None,
        _rates_by(scored, lambda r: r.trial.session),
        _rates_by(scored, _block),
        _rates_by((r for r in with_mode if r.score), lambda r: str(r.trial.mode)) if with_mode else None,
        float(np.mean([r.predicted_mode == r.trial.mode for r in with_mode])) if predicted else None,
        _pooled_mode_accuracy(with_mode) if predicted else None,
    )


def _pooled_mode_accuracy(results: Sequence[TrialResult]) -> float:
    """Accuracy if one mode is predicted per block, from the summed log-probabilities of its trials."""
    by_block: dict[str, np.ndarray] = {}
    for r in results:
        by_block[_block(r)] = by_block.get(_block(r), 0) + np.array(r.mode)
    return float(np.mean([MODES[int(by_block[_block(r)].argmax())] == r.trial.mode for r in results]))


def _block(result: TrialResult) -> str:
    return f"{result.trial.session}/{result.trial.block}"


def _rates_by(results: Iterable[TrialResult], key: Callable[[TrialResult], str]) -> dict[str, float | None]:
    ordered = sorted(results, key=key)
    return {k: total(r.score for r in group if r.score).rate for k, group in groupby(ordered, key)}


def result_row(result: TrialResult) -> dict[str, Any]:
    """One line of results/<split>.jsonl."""
    trial, counts = result.trial, result.score
    return {
        "trial": trial.id,
        "session": trial.session,
        "block": trial.block,
        "number": trial.number,
        "split": trial.split,
        "corpus": trial.corpus,
        "mode": trial.mode,
        **({"mode_predicted": result.predicted_mode} if result.mode is not None else {}),
        "text": trial.text,
        "reference": token_names(trial.tokens) if trial.tokens is not None else None,
        "hypothesis": token_names(result.tokens),
        "substitutions": counts.substitutions if counts else None,
        "insertions": counts.insertions if counts else None,
        "deletions": counts.deletions if counts else None,
        "n_tokens": counts.length if counts else None,
        "per": counts.rate if counts else None,
        "loss": result.loss,
        "n_bins": trial.n_bins,
        "flags": list(trial.flags),
    }


def write_results(
    run: Run,
    split: str,
    label: str | None,
    results: Sequence[TrialResult],
    summary: Mapping[str, Any],
    store: Store,
) -> None:
    """Write the lines, the summary, and a few trials with their bins for the figures of the report."""
    write_jsonl(run.results_file(split, label), (result_row(r) for r in results))
    write_json(run.results_file(split, label, "json"), summary)
    _write_examples(run.results_file(split, label, "npz"), _choose_examples(results), store)


def _choose_examples(results: Sequence[TrialResult], n_examples: int = 3) -> list[TrialResult]:
    """Typical trials: those closest to the overall error rate and the median length."""
    kept = [r for r in results if r.log_probs is not None]
    scored = [r for r in kept if r.score is not None and r.score.rate is not None]
    if not scored:
        return kept[:n_examples]
    overall = total(r.score for r in scored if r.score).rate or 0.0
    length = float(np.median([r.trial.n_bins for r in scored]))

    def distance(result: TrialResult) -> float:
        rate = result.score.rate if result.score and result.score.rate is not None else 0.0
        return abs(rate - overall) + abs(result.trial.n_bins - length) / max(length, 1.0)

    return sorted(scored, key=distance)[:n_examples]


def _write_examples(path: Path, examples: Sequence[TrialResult], store: Store) -> None:
    arrays: dict[str, np.ndarray] = {"trials": np.array([r.trial.id for r in examples], dtype=np.str_)}
    for i, result in enumerate(examples):
        arrays[f"bins_{i}"] = store.read_bins(result.trial)  # (T, C)
        assert result.log_probs is not None
        arrays[f"log_probs_{i}"] = result.log_probs  # (F, V)
    save_npz(path, arrays)
