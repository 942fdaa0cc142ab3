"""Frame scores of several models averaged: their probabilities (arithmetic) or their logarithms (geometric)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from arcuate.decoding.log_probs import FrameLogProbs, read_log_probs
from arcuate.errors import UserError
from arcuate.files import save_npz

Mean = Literal["arithmetic", "geometric"]
FLOOR = -1e4  # instead of minus infinity, which one model alone could force on a geometric mean


def read_named(path: Path) -> FrameLogProbs:
    """A file of frame scores that says which trials it holds, none of them twice."""
    scores = read_log_probs(path)
    if scores.ids is None:
        raise UserError(f"{path} does not name its trials; write it with: arcuate evaluate --scores")
    if len(set(scores.ids)) != len(scores.ids):
        raise UserError(f"{path} holds a trial twice")
    for name, frames in zip(scores.ids, scores.trials, strict=True):
        if np.isnan(frames).any() or np.isposinf(frames).any():
            raise UserError(f"{path}: trial {name} contains NaN or +inf; score the model again")
    return scores


def average(files: Sequence[FrameLogProbs], mean: Mean) -> list[np.ndarray]:
    """Mean frame scores of every trial; refuses files of other trials, classes or frame counts."""
    first = files[0]
    for other in files[1:]:
        refuse_other_trials(first.name, first.ids or (), other.name, other.ids or ())
        if other.classes != first.classes:
            raise UserError(f"{other.name} has other classes than {first.name}; they cannot be averaged")
    return [mean_of([_same_frames(first, file, i) for file in files], mean) for i in range(len(first.trials))]


def refuse_other_trials(name: str, trials: Sequence[str], other: str, others: Sequence[str]) -> None:
    """Both must hold the same trials in the same order."""
    if tuple(trials) == tuple(others):
        return
    strange = sorted(set(trials) ^ set(others))
    detail = (
        f"{len(strange)} trials are in one only, such as {strange[0]}" if strange else "their order differs"
    )
    raise UserError(f"{name} and {other} were not scored on the same trials: {detail}")


def _same_frames(first: FrameLogProbs, file: FrameLogProbs, index: int) -> np.ndarray:
    wanted, found = first.trials[index], file.trials[index]
    if len(found) != len(wanted):
        raise UserError(
            f"trial {(first.ids or ())[index]} has {len(wanted)} frames in {first.name} and {len(found)} in"
            f" {file.name}; models with other patches cannot be averaged frame by frame, combine their words:"
            " --method mbr"
        )
    return found


def mean_of(frames: Sequence[np.ndarray], mean: Mean) -> np.ndarray:
    """Log-probabilities of the mean, adding up to one in every frame: (F, V)"""
    stacked = np.maximum(np.stack(frames).astype(np.float64), FLOOR)  # (models, F, V)
    if mean == "arithmetic":
        pooled = np.logaddexp.reduce(stacked, axis=0) - np.log(len(frames))
    else:
        pooled = stacked.mean(axis=0)
    return (pooled - np.logaddexp.reduce(pooled, axis=-1, keepdims=True)).astype(np.float32)


def write_frames(path: Path, scores: FrameLogProbs) -> None:
    """In the layout that searches read, whole or not at all."""
    n_classes = len(scores.classes)
    logp = np.concatenate(scores.trials) if scores.trials else np.zeros((0, n_classes), np.float32)
    arrays: dict[str, np.ndarray] = {
        "logp": np.maximum(logp, np.finfo(np.float16).min).astype(np.float16),
        "lengths": np.array([len(f) for f in scores.trials], dtype=np.int32),
        "classes": np.array(scores.classes, dtype=np.str_),
        "trials": np.array(scores.ids or (), dtype=np.str_),
    }
    save_npz(path, arrays)
