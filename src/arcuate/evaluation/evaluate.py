"""Score a model on a split: one line per trial, sums divided once at the end."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from arcuate.data.alphabet import CLASSES, token_names
from arcuate.data.batching import by_length, length_batches
from arcuate.data.store import Store, TrialInfo
from arcuate.decoding.greedy import greedy
from arcuate.decoding.joint import JointBeamSearch, search_joint
from arcuate.decoding.transducer import (
    TransducerBeamSearch,
    TransducerGreedySearch,
    require_transducer,
    rescore,
    search_transducer,
)
from arcuate.evaluation.metrics import Score, bootstrap_interval, score, total
from arcuate.losses.combined import HEADS, head_losses, weigh
from arcuate.losses.config import Loss
from arcuate.models.mode import MODES
from arcuate.models.model import Model
from arcuate.progress import Progress
from arcuate.run import Run, save_npz, write_json, write_lines
from arcuate.training.config import Validate

Head = Literal["ctc", "transducer", "both"]  # which head is read
HEAD_BEAM = 8  # readings kept where a transducer is read
HEAD_NAMES: tuple[Head, ...] = ("ctc", "transducer", "both")
Search = Callable[[np.ndarray], Sequence[int]]  # (F, V) log-probabilities to tokens


@dataclass(frozen=True)
class TrialResult:
    """What the model made of one trial."""

    trial: TrialInfo
    tokens: tuple[int, ...]
    score: Score | None  # None where the trial has no label
    loss: float | None
    log_probs: np.ndarray | None  # (F, V), kept only where asked for
    losses: dict[str, float] | None = None  # by head
    greedy_score: Score | None = None  # beside `score`, where another search than the greedy one made that
    frames: torch.Tensor | None = None  # (F, D) of the encoder, kept only where asked for
    mode: tuple[float, ...] | None = None  # log-probabilities of MODES, where the model tells them

    @property
    def said_mode(self) -> str | None:
        return None if self.mode is None else MODES[int(np.argmax(self.mode))]


def phoneme_search(settings: Validate) -> Search:
    """The search that the settings ask for."""
    if settings.search == "greedy":
        return greedy
    # Compiled code: half a second that the greedy search need not pay.
    from arcuate.decoding.prefix_beam import PrefixBeamSearch

    return PrefixBeamSearch(settings.beam).tokens


def decode_trials(
    model: Model,
    store: Store,
    trials: Sequence[TrialInfo],
    *,
    batch_size: int = 32,
    loss: Loss | None = None,
    keep_scores: bool = False,
    keep_frames: bool = False,
    search: Search = greedy,
    head: Head = "ctc",
    head_beam: int | None = HEAD_BEAM,
    progress: Progress | None = None,
) -> list[TrialResult]:
    """Decodings in the order of the trials given, whatever batches they were computed in.

    `search` reads the CTC head; another head is read with a beam of `head_beam`, greedily where that is None.
    """
    device = next(model.parameters()).device
    front_end = model.config.settings.front_end
    results: dict[int, TrialResult] = {}
    training = model.training
    model.eval()
    with torch.inference_mode():
        plan = by_length(trials, batch_size)
        for chosen, batch in length_batches(store, trials, model.config.sessions, front_end.wanted, plan):
            batch = batch.to(device)
            said = batch.tokens if loss is not None else None
            outputs = model(batch.bins, batch.n_bins, batch.session, batch.statistics, said)
            losses, by_head = None, {}
            if loss is not None:
                by_head = head_losses(outputs, batch.tokens, batch.n_tokens, loss)
                losses = weigh(by_head, loss).tolist() if by_head else None
            modes = None if outputs.mode is None else outputs.mode.float().log_softmax(-1).tolist()
            frames = outputs.log_probs["ctc"].float().cpu().numpy()
            n_frames = outputs.n_frames.tolist()
            for row, index in enumerate(chosen):
                trial, logp = trials[index], frames[row, : n_frames[row]]
                tokens = tuple(search(logp))
                if head != "ctc":
                    inner = outputs.frames[row, : len(logp)]
                    tokens = read_transducer(model, inner, logp, tokens, head, head_beam)
                results[index] = TrialResult(
                    trial,
                    tokens,
                    score(trial.tokens, tokens) if trial.tokens is not None else None,
                    losses[row] if losses is not None and trial.tokens is not None else None,
                    logp.copy() if keep_scores else None,
                    {head: float(values[row]) for head, values in by_head.items()},
                    score(trial.tokens, greedy(logp))
                    if search is not greedy and trial.tokens is not None
                    else None,
                    outputs.frames[row, : len(logp)].clone() if keep_frames else None,
                    tuple(modes[row]) if modes is not None else None,
                )
            if progress:
                progress(len(results), len(trials), "scoring trials")
    model.train(training)
    return [results[i] for i in range(len(trials))]


def read_transducer(
    model: Model,
    frames: torch.Tensor,
    log_probs: np.ndarray,
    ctc_tokens: tuple[int, ...],
    head: Head,
    beam: int | None,
) -> tuple[int, ...]:
    """Tokens of one trial by its transducer, or by both heads in one pass and what CTC alone had read."""
    network = require_transducer(model.transducer, "this model")
    if head == "transducer":
        searcher = TransducerGreedySearch(network) if beam is None else TransducerBeamSearch(network, beam)
        return search_transducer(searcher, frames)[0].tokens
    found = search_joint(JointBeamSearch(network, beam or HEAD_BEAM), frames, log_probs)
    readings = [ctc_tokens, *(h.tokens for h in found)]
    found = rescore(network, frames, torch.from_numpy(log_probs).to(frames.device), readings)
    return found[0].tokens


def summarise(results: Sequence[TrialResult], n_resamples: int = 2000) -> dict[str, Any]:
    """Error counts and rates over all trials, by session and by block, with a bootstrap interval."""
    scored = [r for r in results if r.score is not None]
    whole = total(r.score for r in scored if r.score)
    low, high = bootstrap_interval([r.score for r in scored if r.score], n_resamples=n_resamples)
    losses = [r.loss for r in scored if r.loss is not None]
    plain = [r.greedy_score for r in scored if r.greedy_score is not None]
    return {
        "per": whole.rate,
        **({"per_greedy": total(plain).rate} if plain else {}),
        "per_low": low,
        "per_high": high,
        "n_trials": len(results),
        "n_scored": len(scored),
        "n_tokens": whole.length,
        "substitutions": whole.substitutions,
        "insertions": whole.insertions,
        "deletions": whole.deletions,
        "loss": float(np.mean(losses)) if losses else None,
        "per_by_session": rates(scored, lambda r: r.trial.session),
        "per_by_block": rates(scored, block_of),
        **summarise_modes(results),
    }


def block_of(result: TrialResult) -> str:
    return f"{result.trial.session}/{result.trial.block}"


def summarise_modes(results: Sequence[TrialResult]) -> dict[str, Any]:
    """PER by speaking mode where that is known; how often the model tells it, trial by trial and block by block."""
    known = [r for r in results if r.trial.mode in MODES]
    if not known:
        return {}
    summary: dict[str, Any] = {
        "per_by_mode": rates([r for r in known if r.score], lambda r: str(r.trial.mode))
    }
    if all(r.mode is not None for r in known):
        right = [r.said_mode == r.trial.mode for r in known]
        by_block: dict[str, np.ndarray] = {}
        for r in known:
            by_block[block_of(r)] = by_block.get(block_of(r), 0) + np.array(r.mode)
        pooled = [MODES[int(by_block[block_of(r)].argmax())] == r.trial.mode for r in known]
        summary |= {"mode_accuracy": float(np.mean(right)), "mode_accuracy_pooled": float(np.mean(pooled))}
    return summary


COUNTS = ("substitutions", "insertions", "deletions", "n_tokens", "loss", "n_trials", "n_right", "n_modes")


def session_sums(results: Sequence[TrialResult], sessions: Sequence[str]) -> torch.Tensor:
    """Counts and summed losses by session, in a form that adds up over processes. (sessions, 8 + heads)"""
    sums = torch.zeros(len(sessions), len(COUNTS) + len(HEADS), dtype=torch.float64)
    for result in results:
        if result.score is not None:
            counted = result.score
            row = (
                counted.substitutions,
                counted.insertions,
                counted.deletions,
                counted.length,
                float("nan") if result.loss is None else result.loss,
                1,
                result.mode is not None and result.said_mode == result.trial.mode,
                result.mode is not None and result.trial.mode in MODES,
                *((result.losses or {}).get(head, 0.0) for head in HEADS),
            )
            sums[sessions.index(result.trial.session)] += torch.tensor(row, dtype=torch.float64)
    return sums


def summarise_sums(sums: torch.Tensor, sessions: Sequence[str]) -> dict[str, Any]:
    """What a validation row of metrics.jsonl says."""
    whole = dict(zip((*COUNTS, *HEADS), sums.sum(0).tolist(), strict=True))
    errors, lengths = sums[:, :3].sum(1).tolist(), sums[:, 3].tolist()
    return {
        "loss": whole["loss"] / whole["n_trials"]
        if whole["n_trials"] and whole["loss"] == whole["loss"]
        else None,
        "losses": {head: whole[head] / whole["n_trials"] for head in HEADS if whole[head]},
        "per": sum(errors) / whole["n_tokens"] if whole["n_tokens"] else None,
        **({"mode_accuracy": whole["n_right"] / whole["n_modes"]} if whole["n_modes"] else {}),
        **{name: int(whole[name]) for name in COUNTS[:4]},
        "per_by_session": {s: e / n for s, e, n in zip(sessions, errors, lengths, strict=True) if n},
    }


def rates(results: Iterable[TrialResult], key: Callable[[TrialResult], str]) -> dict[str, float | None]:
    ordered = sorted(results, key=key)
    return {k: total(r.score for r in group if r.score).rate for k, group in groupby(ordered, key)}


def result_row(result: TrialResult) -> dict[str, Any]:
    """One line of results/<split>.jsonl."""
    trial, counted = result.trial, result.score
    return {
        "trial": trial.id,
        "session": trial.session,
        "block": trial.block,
        "number": trial.number,
        "split": trial.split,
        "corpus": trial.corpus,
        "mode": trial.mode,
        **({"mode_said": result.said_mode} if result.mode is not None else {}),
        "text": trial.text,
        "reference": token_names(trial.tokens) if trial.tokens is not None else None,
        "hypothesis": token_names(result.tokens),
        "substitutions": counted.substitutions if counted else None,
        "insertions": counted.insertions if counted else None,
        "deletions": counted.deletions if counted else None,
        "n_tokens": counted.length if counted else None,
        "per": counted.rate if counted else None,
        "loss": result.loss,
        "n_bins": trial.n_bins,
        "flags": list(trial.flags),
    }


def write_results(
    run: Run,
    split: str,
    label: str | None,
    results: Sequence[TrialResult],
    summary: dict[str, Any],
    store: Store,
) -> None:
    """Decodings, their summary, and a few whole trials for the pictures of the report."""
    write_lines(run.results_file(split, label), (result_row(r) for r in results))
    write_json(run.results_file(split, label, "json"), summary)
    write_examples(run.results_file(split, label, "npz"), choose_examples(results), store)


def choose_examples(results: Sequence[TrialResult], n_examples: int = 3) -> list[TrialResult]:
    """Trials of middling length and difficulty: the ones that show a reader what is typical."""
    kept = [r for r in results if r.log_probs is not None]
    scored = [r for r in kept if r.score is not None and r.score.rate is not None]
    if not scored:
        return kept[:n_examples]
    middle = total(r.score for r in scored if r.score).rate or 0.0
    length = float(np.median([r.trial.n_bins for r in scored]))

    def distance(result: TrialResult) -> float:
        rate = result.score.rate if result.score and result.score.rate is not None else 0.0
        return abs(rate - middle) + abs(result.trial.n_bins - length) / max(length, 1.0)

    return sorted(scored, key=distance)[:n_examples]


def write_examples(path: Path, examples: Sequence[TrialResult], store: Store) -> None:
    arrays: dict[str, np.ndarray] = {"trials": np.array([r.trial.id for r in examples], dtype=np.str_)}
    for i, result in enumerate(examples):
        arrays[f"bins_{i}"] = store.read_bins(result.trial)  # (T, C)
        assert result.log_probs is not None
        arrays[f"log_probs_{i}"] = result.log_probs  # (F, V)
    save_npz(path, arrays)


def write_scores(path: Path, results: Sequence[TrialResult]) -> None:
    """All frame scores in one file: `logp` (sum F, V) float16, `lengths` (n,), `classes`, `trials`."""
    frames = [r.log_probs for r in results if r.log_probs is not None]
    logp = np.concatenate(frames) if frames else np.zeros((0, len(CLASSES)))
    save_npz(
        path,
        {
            "logp": np.maximum(logp, np.finfo(np.float16).min).astype(np.float16),
            "lengths": np.array([len(f) for f in frames], dtype=np.int32),
            "classes": np.array(CLASSES, dtype=np.str_),
            "trials": np.array([r.trial.id for r in results], dtype=np.str_),
        },
    )
