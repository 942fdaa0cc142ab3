"""The quality gate: what is wrong with a trial, and what follows from it.

A bad trial stays out of training and nothing else: validation and test trials are flagged and kept, for every
one of them needs an answer. Nothing is decided silently; each case becomes a row of `quality.csv`.
"""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np

from arcuate.data.alphabet import min_frames
from arcuate.data.frames import PATCH_BINS, PATCH_STRIDE, count_frames
from arcuate.data.readers.source import Problem, Reading
from arcuate.data.trial import BIN_S, Trial

MAX_CONSTANT_SHARE = 0.10
MIN_S = 0.05
MAX_S = 30.0
NON_FINITE = "non-finite"

Action = Literal["rejected", "flagged", "kept", "ignored", "missing"]


@dataclass(frozen=True)
class QualityRow:
    """One line of `quality.csv`: a case and what was done about it.

    rejected: not trained on; flagged: val or test, kept; kept: a remark; ignored: no file of the layout, left
    alone; missing: could not be read.
    """

    trial: str
    reason: str
    number: float | None
    action: Action
    detail: str


def inspect(trial: Trial, patch_bins: int = PATCH_BINS, stride: int = PATCH_STRIDE) -> list[Problem]:
    """Everything about a trial's own values that training should not see."""
    return [
        *_check_values(trial.bins),
        *_check_length(len(trial.bins)),
        *_check_alignment(len(trial.bins), trial.tokens, patch_bins, stride),
    ]


def can_align(n_bins: int, tokens: Sequence[int], patch_bins: int, stride: int) -> bool:
    """Whether CTC has a path: one frame per token and one more between equal neighbours."""
    return bool(count_frames(n_bins, patch_bins, stride) >= min_frames(tokens))


def judge(reading: Reading, found: Iterable[Problem]) -> list[QualityRow]:
    """Rows for the table, from what the reader said and what the gate found."""
    in_training = reading.trial is None or reading.trial.split == "train"
    rows = []
    for problem in (*reading.problems, *found):
        action: Action = "rejected" if in_training else "flagged"
        if problem.severity == "note":
            action = "kept"
        elif problem.severity == "ignored":
            action = "ignored"
        elif problem.severity == "unreadable":
            action = "missing"
        rows.append(QualityRow(reading.id, problem.reason, problem.number, action, problem.detail))
    return rows


def flags_of(rows: Iterable[QualityRow]) -> tuple[str, ...]:
    """The reasons that keep a trial out of training, each once."""
    return tuple(dict.fromkeys(row.reason for row in rows if row.action in ("rejected", "flagged")))


def write_table(path: Path, rows: Iterable[QualityRow]) -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(field.name for field in fields(QualityRow))
        table.writerows(astuple(row) for row in rows)


def _check_values(bins: np.ndarray) -> Iterable[Problem]:
    n_bins, n_channels = bins.shape
    n_bad = bins.size - int(np.isfinite(bins).sum())
    if n_bad:
        bad_bins = int((~np.isfinite(bins)).any(axis=1).sum())
        yield Problem(NON_FINITE, n_bad, f"{n_bad} values in {bad_bins} of {n_bins} bins are NaN or infinite")
    n_constant = int((bins == bins[0]).all(axis=0).sum()) if n_bins else n_channels
    if n_constant > MAX_CONSTANT_SHARE * n_channels:
        share = n_constant / n_channels
        detail = f"{n_constant} of {n_channels} channels ({share:.0%}) never change"
        yield Problem("constant channels", n_constant, detail)


def _check_length(n_bins: int) -> Iterable[Problem]:
    seconds = round(n_bins * BIN_S, 2)
    if seconds < MIN_S:
        yield Problem("too short", seconds, f"{seconds:g} s, shorter than {MIN_S * 1000:g} ms")
    if seconds > MAX_S:
        yield Problem("too long", seconds, f"{seconds:g} s, longer than {MAX_S:g} s")


def _check_alignment(
    n_bins: int, tokens: np.ndarray | None, patch_bins: int, stride: int
) -> Iterable[Problem]:
    if tokens is None:
        return
    label = [int(token) for token in tokens]
    if not can_align(n_bins, label, patch_bins, stride):
        n_frames, needed = count_frames(n_bins, patch_bins, stride), min_frames(label)
        detail = (
            f"{len(label)} tokens need {needed} frames, patches of {patch_bins}/{stride} bins give {n_frames}"
        )
        yield Problem("cannot align", n_frames, detail)
