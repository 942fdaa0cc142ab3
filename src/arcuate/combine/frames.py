"""Frame scores of several models averaged: their probabilities (arithmetic) or their logarithms (geometric)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from zipfile import BadZipFile

import numpy as np

from arcuate.errors import UserError
from arcuate.run import save_npz

Mean = Literal["arithmetic", "geometric"]
MAX_VALUES = 2_000_000_000
FLOOR = -1e4  # instead of minus infinity, which one model alone could force on a geometric mean


@dataclass(frozen=True)
class FrameScores:
    """All trials of one file of frame scores."""

    path: Path
    trials: tuple[str, ...]
    classes: tuple[str, ...]
    frames: tuple[np.ndarray, ...]  # (F, V) natural logs, one per trial


def read_frames(path: Path) -> FrameScores:
    """`logp` (sum F, V), `lengths` (n,), `classes` (V,), `trials` (n,), as `arcuate evaluate --scores` writes them."""
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = {"logp", "lengths", "classes", "trials"} - set(file.files)
            if missing:
                raise UserError(
                    f"{path} lacks {', '.join(sorted(missing))}; write it with: arcuate evaluate --scores"
                )
            logp, lengths = file["logp"], file["lengths"]
            classes, trials = file["classes"], file["trials"]
    except (OSError, ValueError, BadZipFile, EOFError, KeyError) as error:
        raise UserError(f"{path} cannot be read as frame scores: {str(error).splitlines()[0]:.200}") from None
    _check(path, logp, lengths, classes, trials)
    ends = np.cumsum(lengths, dtype=np.int64)
    parts = tuple(
        np.maximum(logp[end - n : end].astype(np.float32), FLOOR)
        for end, n in zip(ends, lengths, strict=True)
    )
    return FrameScores(path, tuple(map(str, trials)), tuple(map(str, classes)), parts)


def _check(
    path: Path, logp: np.ndarray, lengths: np.ndarray, classes: np.ndarray, trials: np.ndarray
) -> None:
    if logp.ndim != 2 or logp.dtype.kind != "f" or logp.shape[1] != len(classes) or logp.size > MAX_VALUES:
        raise UserError(f"{path}: logp has shape {logp.shape}; it should be (frames, {len(classes)})")
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or trials.shape != lengths.shape:
        raise UserError(f"{path}: lengths and trials should hold one entry per trial")
    if (len(lengths) and lengths.min() < 0) or int(lengths.sum(dtype=np.int64)) != len(logp):
        raise UserError(f"{path}: the lengths add up to {lengths.sum()} frames but there are {len(logp)}")
    if np.isnan(logp).any() or np.isposinf(logp).any():
        raise UserError(f"{path}: logp contains NaN or +inf; score the model again")
    if len(set(trials.tolist())) != len(trials):
        raise UserError(f"{path} holds a trial twice")


def average(files: Sequence[FrameScores], mean: Mean) -> list[np.ndarray]:
    """Mean frame scores of every trial; refuses files of other trials, classes or frame counts."""
    first = files[0]
    for other in files[1:]:
        refuse_other_trials(first.path, first.trials, other.path, other.trials)
        if other.classes != first.classes:
            raise UserError(f"{other.path} has other classes than {first.path}; they cannot be averaged")
    return [mean_of([_same_frames(first, file, i) for file in files], mean) for i in range(len(first.trials))]


def refuse_other_trials(path: Path, trials: Sequence[str], other_path: Path, others: Sequence[str]) -> None:
    """Both must hold the same trials in the same order."""
    if tuple(trials) == tuple(others):
        return
    strange = sorted(set(trials) ^ set(others))
    detail = (
        f"{len(strange)} trials are in one only, such as {strange[0]}" if strange else "their order differs"
    )
    raise UserError(f"{path} and {other_path} were not scored on the same trials: {detail}")


def _same_frames(first: FrameScores, file: FrameScores, index: int) -> np.ndarray:
    if len(file.frames[index]) != len(first.frames[index]):
        raise UserError(
            f"trial {first.trials[index]} has {len(first.frames[index])} frames in {first.path} and"
            f" {len(file.frames[index])} in {file.path}; models with other patches cannot be averaged frame by"
            " frame, combine their words: --method mbr"
        )
    return file.frames[index]


def mean_of(frames: Sequence[np.ndarray], mean: Mean) -> np.ndarray:
    """Log-probabilities of the mean, adding up to one in every frame: (F, V)"""
    stacked = np.stack(frames).astype(np.float64)  # (models, F, V)
    if mean == "arithmetic":
        pooled = _log_sum_exp(stacked, axis=0) - np.log(len(frames))
    else:
        pooled = stacked.mean(axis=0)
    return (pooled - _log_sum_exp(pooled, axis=-1)[..., None]).astype(np.float32)


def _log_sum_exp(values: np.ndarray, axis: int) -> np.ndarray:
    highest = values.max(axis=axis, keepdims=True)
    safe = np.where(np.isfinite(highest), highest, 0.0)
    with np.errstate(divide="ignore"):
        return np.squeeze(np.log(np.exp(values - safe).sum(axis=axis, keepdims=True)) + safe, axis=axis)


def write_frames(path: Path, scores: FrameScores) -> None:
    """In the layout that `read_frames` reads, whole or not at all."""
    n_classes = len(scores.classes)
    logp = np.concatenate(scores.frames) if scores.frames else np.zeros((0, n_classes), np.float32)
    arrays: dict[str, np.ndarray] = {
        "logp": np.maximum(logp, np.finfo(np.float16).min).astype(np.float16),
        "lengths": np.array([len(f) for f in scores.frames], dtype=np.int32),
        "classes": np.array(scores.classes, dtype=np.str_),
        "trials": np.array(scores.trials, dtype=np.str_),
    }
    save_npz(path, arrays)
