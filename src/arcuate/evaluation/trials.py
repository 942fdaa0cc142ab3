"""Decode the trials of a store to phonemes: scores, their summary, and the result files in the run folder."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from arcuate.data.alphabet import CLASSES, token_names
from arcuate.data.batching import Batch, evaluation_batches, group_by_length
from arcuate.data.store import Store, TrialInfo
from arcuate.decoding.hypothesis import greedy
from arcuate.decoding.transducer import TransducerHead, require_transducer
from arcuate.evaluation.metrics import Score, mean, rates_by_group, score, total
from arcuate.evaluation.significance import bootstrap_interval
from arcuate.files import atomic_group, fields_to_dict, save_npz, write_json, write_jsonl
from arcuate.losses.combined import LOSS_NAMES, compute_losses, weighted_loss
from arcuate.losses.config import LossSettings
from arcuate.models.interfaces import Outputs
from arcuate.models.layout import Frames, Head
from arcuate.models.mode import MODES
from arcuate.models.model import Model
from arcuate.progress import Progress, percent
from arcuate.run import Run

if TYPE_CHECKING:
    from arcuate.decoding.prefix_beam import PrefixBeamSearch

_OPTIONAL = ("per_greedy", "per_by_mode", "mode_accuracy", "mode_accuracy_pooled")  # absent if None
# Columns of `session_sums`, before the losses by head.
_COUNTS = ("substitutions", "insertions", "deletions", "n_tokens", "loss", "n_trials", "n_right", "n_modes")


@dataclass(frozen=True)
class TrialResult:
    """Decoding result of one trial."""

    trial: TrialInfo
    tokens: tuple[int, ...]
    score: Score | None  # None for a trial without a label
    loss: float | None = None
    log_probs: np.ndarray | None = None  # (F, V) of the CTC head, with keep_log_probs
    losses: dict[str, float] | None = None  # by head
    greedy_score: Score | None = None  # score of the greedy search, if `score` is of another search
    encoded: np.ndarray | None = None  # (F, D) encoder outputs, with keep_frames
    mode: tuple[float, ...] | None = None  # log-probabilities of MODES, if the model predicts the mode

    @property
    def predicted_mode(self) -> str | None:
        return None if self.mode is None else MODES[int(np.argmax(self.mode))]


@dataclass(frozen=True, eq=False)
class TokenSearch:
    """Search for the tokens of a trial with one or both heads; without a beam the greedy search."""

    head: Head = "ctc"
    beam: int | None = None
    classes: tuple[str, ...] = CLASSES
    transducer: TransducerHead | None = None  # None with the CTC head

    @property
    def is_ctc_beam(self) -> bool:
        """Whether this is a beam search of the CTC head, whose results are compared with the greedy search."""
        return self.head == "ctc" and self.beam is not None

    def __call__(self, frames: Frames) -> tuple[int, ...]:
        """Tokens of a trial. The greedy search with a transducer is its beam search of width 1."""
        if self.is_ctc_beam:
            return tuple(self._prefix_beam.tokens(frames.log_probs))
        if self.transducer is None or frames.encoded is None:
            return tuple(greedy(frames.log_probs))
        from arcuate.decoding.joint import joint_search  # its Numba kernels take half a second to load

        search = joint_search(self.transducer, self.head, None, self.classes, self.beam or 1)
        return search.search(frames)[0].tokens

    @cached_property
    def _prefix_beam(self) -> "PrefixBeamSearch":
        from arcuate.decoding.prefix_beam import PrefixBeamSearch  # for the same reason

        return PrefixBeamSearch(self.beam or 1, self.classes)


def token_search(model: Model, head: Head = "ctc", beam: int | None = None) -> TokenSearch:
    """Search over the heads of a model; `beam` None: the greedy search."""
    transducer = None if head == "ctc" else require_transducer(model.transducer, "this model").for_search()
    return TokenSearch(head, beam, model.config.classes, transducer)


def decode_trials(
    model: Model,
    store: Store,
    trials: Sequence[TrialInfo],
    *,
    batch_size: int = 32,
    loss: LossSettings | None = None,
    keep_log_probs: bool = False,
    keep_frames: bool = False,
    search: TokenSearch | None = None,
    progress: Progress | None = None,
) -> list[TrialResult]:
    """Decode and score trials; results are in the order of `trials`, batches are formed by length.

    `search`: default, the greedy search of the CTC head. `loss`: also compute the losses.
    """
    search = search or TokenSearch()
    device = next(model.parameters()).device
    front_end = model.config.settings.front_end
    results: dict[int, TrialResult] = {}
    training = model.training
    model.eval()
    with torch.inference_mode():
        plan = group_by_length(trials, batch_size)
        for chosen, batch in evaluation_batches(store, trials, model.config.sessions, front_end.statistics_spec, plan):
            batch = batch.to(device)
            targets = batch.tokens if loss is not None else None
            outputs = model(batch.bins, batch.n_bins, batch.session, batch.statistics, targets)
            losses, by_head = _batch_losses(outputs, batch, loss)
            modes = None if outputs.mode is None else outputs.mode.float().log_softmax(-1).tolist()
            log_probs = outputs.log_probs["ctc"].float().cpu().numpy()
            needs_frames = keep_frames or search.transducer is not None
            encoded = outputs.frames.float().cpu().numpy() if needs_frames else None
            for row, (index, n) in enumerate(zip(chosen, outputs.n_frames.tolist(), strict=True)):
                frames = Frames(log_probs[row, :n], None if encoded is None else encoded[row, :n])
                found = search_trial(search, trials[index], frames)
                results[index] = replace(
                    found,
                    loss=None if losses is None or found.score is None else losses[row],
                    losses={head: float(values[row]) for head, values in by_head.items()},
                    mode=None if modes is None else tuple(modes[row]),
                    log_probs=frames.log_probs.copy() if keep_log_probs else None,
                    encoded=frames.encoded.copy() if keep_frames and frames.encoded is not None else None,
                )
            if progress:
                progress(len(results), len(trials), "scoring trials")
    model.train(training)
    return [results[i] for i in range(len(trials))]


def _batch_losses(
    outputs: Outputs, batch: Batch, settings: LossSettings | None
) -> tuple[list[float] | None, dict[str, torch.Tensor]]:
    """The loss of every trial of a batch and its parts by head; None without settings or labels."""
    by_head = {} if settings is None else compute_losses(outputs, batch.tokens, batch.n_tokens, settings)
    return (weighted_loss(by_head, settings).tolist() if settings is not None and by_head else None), by_head


def search_trial(search: TokenSearch, trial: TrialInfo, frames: Frames) -> TrialResult:
    """Decode and score the frames of one trial."""
    tokens, reference = search(frames), trial.tokens
    if reference is None:
        return TrialResult(trial, tokens, None, log_probs=frames.log_probs)
    by_greedy = score(reference, greedy(frames.log_probs)) if search.is_ctc_beam else None
    return TrialResult(trial, tokens, score(reference, tokens), log_probs=frames.log_probs, greedy_score=by_greedy)


@dataclass(frozen=True)
class PhonemeMetrics:
    """Error counts and rates over trials, by session, by block and by speaking mode."""

    per: float | None
    per_greedy: float | None  # PER of the greedy search, if the trials were decoded by a different one
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

    @property
    def interval_text(self) -> str:
        if self.per_low is None:
            return "no interval from a single trial"
        return f"95 % interval {percent(self.per_low)} to {percent(self.per_high)}"

    def to_dict(self) -> dict[str, Any]:
        return fields_to_dict(self, *(name for name in _OPTIONAL if getattr(self, name) is None))


def summarise(results: Sequence[TrialResult], n_resamples: int = 2000) -> PhonemeMetrics:
    """Error counts and rates of decoded trials."""
    scored = [(r, r.score) for r in results if r.score is not None]
    scores = [counts for _, counts in scored]
    greedy_scores = [r.greedy_score for r, _ in scored if r.greedy_score is not None]
    with_mode = [(r, counts) for r, counts in scored if r.trial.mode in MODES]
    any_mode = any(r.trial.mode in MODES for r in results)
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
        mean(r.loss for r, _ in scored),
        rates_by_group((r.trial.session, counts) for r, counts in scored),
        rates_by_group((_block(r), counts) for r, counts in scored),
        rates_by_group((r.trial.mode, counts) for r, counts in with_mode) if any_mode else None,
        *_mode_accuracy(results),
    )


def _mode_accuracy(results: Sequence[TrialResult]) -> tuple[float | None, float | None]:
    """Accuracy of the predicted modes, by trial and by block from the summed log-probabilities of its trials."""
    known = [r for r in results if r.trial.mode in MODES]
    if not known or any(r.mode is None for r in known):
        return None, None
    by_block: dict[str, np.ndarray] = {}
    for r in known:
        by_block[_block(r)] = by_block.get(_block(r), 0) + np.array(r.mode)
    right = [r.predicted_mode == r.trial.mode for r in known]
    return float(np.mean(right)), float(
        np.mean([MODES[int(by_block[_block(r)].argmax())] == r.trial.mode for r in known])
    )


def _block(result: TrialResult) -> str:
    return f"{result.trial.session}/{result.trial.block}"


def result_row(result: TrialResult, classes: Sequence[str] = CLASSES) -> dict[str, Any]:
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
        "reference": token_names(trial.tokens, classes) if trial.tokens is not None else None,
        "hypothesis": token_names(result.tokens, classes),
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
    classes: Sequence[str],
) -> None:
    """Write the lines, the summary, and a few trials with their bins for the figures of the report."""
    files = (run.results_file(split, label, ending) for ending in ("jsonl", "npz", "json"))
    with atomic_group(*files) as (rows_file, examples_file, summary_file):
        write_jsonl(rows_file, (result_row(r, classes) for r in results))
        _write_examples(examples_file, _choose_examples(results), store, classes)
        write_json(summary_file, summary)


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


def _write_examples(path: Path, examples: Sequence[TrialResult], store: Store, classes: Sequence[str]) -> None:
    arrays: dict[str, np.ndarray] = {"trials": np.array([r.trial.id for r in examples], dtype=np.str_)}
    arrays["classes"] = np.array(classes, dtype=np.str_)
    for i, result in enumerate(examples):
        arrays[f"bins_{i}"] = store.read_bins(result.trial)  # (T, C)
        assert result.log_probs is not None
        arrays[f"log_probs_{i}"] = result.log_probs  # (F, V)
    save_npz(path, arrays)


def session_sums(results: Sequence[TrialResult], sessions: Sequence[str]) -> torch.Tensor:
    """Counts and summed losses by session (sessions, 8 + heads); tensors of several processes can be added."""
    sums = torch.zeros(len(sessions), len(_COUNTS) + len(LOSS_NAMES), dtype=torch.float64)
    for result in results:
        if result.score is not None:
            row = (
                *astuple(result.score),
                float("nan") if result.loss is None else result.loss,
                1,
                result.mode is not None and result.predicted_mode == result.trial.mode,
                result.mode is not None and result.trial.mode in MODES,
                *((result.losses or {}).get(head, 0.0) for head in LOSS_NAMES),
            )
            sums[sessions.index(result.trial.session)] += torch.tensor(row, dtype=torch.float64)
    return sums


def summarise_sums(sums: torch.Tensor, sessions: Sequence[str]) -> dict[str, Any]:
    """The validation row of metrics.jsonl, from `session_sums`."""
    overall = dict(zip((*_COUNTS, *LOSS_NAMES), sums.sum(0).tolist(), strict=True))
    errors, lengths = sums[:, :3].sum(1).tolist(), sums[:, 3].tolist()
    return {
        "loss": overall["loss"] / overall["n_trials"]
        if overall["n_trials"] and overall["loss"] == overall["loss"]
        else None,
        "losses": {head: overall[head] / overall["n_trials"] for head in LOSS_NAMES if overall[head]},
        "per": sum(errors) / overall["n_tokens"] if overall["n_tokens"] else None,
        **({"mode_accuracy": overall["n_right"] / overall["n_modes"]} if overall["n_modes"] else {}),
        **{name: int(overall[name]) for name in _COUNTS[:4]},
        "per_by_session": {s: e / n for s, e, n in zip(sessions, errors, lengths, strict=True) if n},
    }
