"""Quality checks on recordings: what is wrong with a trial and what is done about it, and leakage between splits.

A bad training trial is excluded from training. A bad validation or test trial is flagged and kept, because every one
of them has to be scored. Each case becomes a row of `quality.csv`. The checks judge the recording and its label only;
whether a label fits the frames of a given model is checked in `arcuate.data.selection`.
"""

import csv
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from rapidfuzz.distance import Levenshtein

from arcuate.data.alphabet import BLANK, boundary_index, min_frames, token_names
from arcuate.data.readers.source import Problem, ReadResult
from arcuate.data.text import normalise_text, sentence_tokens
from arcuate.data.trial import BIN_SECONDS, SPLITS, Trial

NON_FINITE = "non-finite"
LABEL_DIFFERS = "label differs from text"
_CONTRADICTS = 0.5  # edit distance / length above which a label does not belong to its sentence
_MAX_CONSTANT_FRACTION = 0.10
_MAX_VALUE = 1e8  # far above any spike count or spike-band power; squares of much larger values overflow
_MIN_SECONDS = 0.05
_MAX_SECONDS = 30.0

Action = Literal["rejected", "flagged", "kept", "ignored", "missing"]


@dataclass(frozen=True)
class QualityRow:
    """One row of `quality.csv`: a case and the action taken.

    rejected: excluded from training; flagged: validation or test trial, still scored; kept: a note without effect;
    ignored: not a file of the layout; missing: could not be read.
    """

    trial: str
    reason: str
    number: float | None
    action: Action
    detail: str


def find_problems(trial: Trial) -> list[Problem]:
    """Problems in a trial's bins, length and label."""
    problems: list[Problem] = []
    bins, (n_bins, n_channels) = trial.bins, trial.bins.shape
    n_bad = bins.size - int(np.isfinite(bins).sum())
    if n_bad:
        bad_bins = int((~np.isfinite(bins)).any(axis=1).sum())
        problems.append(
            Problem(NON_FINITE, n_bad, f"{n_bad} values in {bad_bins} of {n_bins} bins are NaN or infinite")
        )
    n_extreme = int((np.abs(bins) > _MAX_VALUE).sum()) - int(np.isinf(bins).sum())
    if n_extreme:
        detail = (
            f"{n_extreme} values are beyond ±{_MAX_VALUE:g}, the largest is {np.abs(bins[np.isfinite(bins)]).max():.3g}"
        )
        problems.append(Problem("extreme values", n_extreme, detail))
    n_constant = int((bins == bins[0]).all(axis=0).sum()) if n_bins else n_channels
    if n_constant > _MAX_CONSTANT_FRACTION * n_channels:
        detail = f"{n_constant} of {n_channels} channels ({n_constant / n_channels:.0%}) are constant"
        problems.append(Problem("constant channels", n_constant, detail))
    seconds = round(n_bins * BIN_SECONDS, 2)
    if seconds < _MIN_SECONDS:
        problems.append(Problem("too short", seconds, f"{seconds:g} s, shorter than {_MIN_SECONDS * 1000:g} ms"))
    if seconds > _MAX_SECONDS:
        problems.append(Problem("too long", seconds, f"{seconds:g} s, longer than {_MAX_SECONDS:g} s"))
    # A label that needs more frames than there are bins cannot be aligned by any model.
    needed = 0 if trial.tokens is None else min_frames(trial.tokens.tolist())
    if needed > n_bins:
        problems.append(
            Problem("label too long", needed, f"the label needs {needed} frames, the trial has {n_bins} bins")
        )
    return problems


def compare_label(trial: Trial, classes: Sequence[str]) -> list[Problem]:
    """A note if the label of a trial belongs to another sentence than its text."""
    tokens = [] if trial.tokens is None else trial.tokens.tolist()
    if not contradicts_text(tokens, trial.text, classes):
        return []
    names = " ".join(token_names(tokens, classes))
    return [Problem(LABEL_DIFFERS, None, f"{(trial.text or '')[:60]!r} is labelled {names[:80]}", "note")]


def contradicts_text(tokens: Sequence[int], text: str | None, classes: Sequence[str]) -> bool:
    """Whether a label and the tokens of its sentence differ in more than half of the tokens.

    Blanks and boundaries do not count: pauses and padding do not change the sentence.
    """
    of_text = sentence_tokens(text or "", classes)
    if of_text is None:
        return False
    ignored = (BLANK, boundary_index(classes))
    label, expected = ([t for t in found if t not in ignored] for found in (tokens, of_text))
    return bool(Levenshtein.distance(label, expected) > _CONTRADICTS * max(len(label), len(expected), 1))


def quality_rows(result: ReadResult, found: Iterable[Problem]) -> list[QualityRow]:
    """Rows for the problems that the reader reported and those that `find_problems` found."""
    in_training = result.trial is None or result.trial.split == "train"
    actions: dict[str, Action] = {
        "note": "kept",
        "ignored": "ignored",
        "unreadable": "missing",
        "bad": "rejected" if in_training else "flagged",
    }
    return [
        QualityRow(result.id, problem.reason, problem.number, actions[problem.severity], problem.detail)
        for problem in (*result.problems, *found)
    ]


def exclusion_flags(rows: Iterable[QualityRow]) -> tuple[str, ...]:
    """The distinct reasons that exclude a trial from training."""
    return tuple(dict.fromkeys(row.reason for row in rows if row.action in ("rejected", "flagged")))


def write_quality_csv(path: Path, rows: Iterable[QualityRow]) -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(field.name for field in fields(QualityRow))
        table.writerows(astuple(row) for row in rows)


# --- leakage between splits, found by content hashes ------------------------------------------------------


# What splits have in common. "trials": number of identical recordings by pair ("train-val"); "texts": by pair ("val in
# train"), n of the `of` sentences also occur in the other split, as a share that is None without texts to compare.
Leakage: TypeAlias = dict[str, dict[str, Any]]


def hash_bins(bins: np.ndarray) -> bytes:
    """Hash of a recording: its shape and its little-endian float32 values."""
    digest = hashlib.sha256(repr(bins.shape).encode())
    digest.update(np.ascontiguousarray(bins, dtype="<f4").data)
    return digest.digest()


def hash_trial(bins_hash: bytes, tokens: Sequence[int] | None, text: str | None) -> str:
    """Hash of a trial's content: recording, label and sentence."""
    digest = hashlib.sha256(bins_hash)
    digest.update(repr((None if tokens is None else [int(token) for token in tokens], text)).encode())
    return digest.hexdigest()


def find_leakage(bins_hashes: Mapping[str, Sequence[bytes]], texts: Mapping[str, Sequence[str]]) -> Leakage:
    """Recordings and normalised sentences that occur in two splits; both arguments are by split."""
    known = {split: frozenset(bins_hashes.get(split, ())) for split in SPLITS}
    sentences: dict[str, list[str]] = {
        split: [normalise_text(text) for text in texts.get(split, ())] for split in SPLITS
    }
    return {
        "trials": {
            f"{a}-{b}": sum(found in known[a] for found in bins_hashes.get(b, ())) for a, b in combinations(SPLITS, 2)
        },
        "texts": {
            f"{held_out} in {other}": _overlap(sentences[held_out], frozenset(sentences[other]))
            for held_out, other in (("val", "train"), ("test", "train"), ("test", "val"))
        },
    }


def _overlap(texts: Sequence[str], other: frozenset[str]) -> dict[str, Any]:
    n = sum(text in other for text in texts)
    return {"n": n, "of": len(texts), "share": round(n / len(texts), 4) if texts and other else None}
