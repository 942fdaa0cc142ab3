"""Quality checks: every case is reported with its number, and excludes from training only."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arcuate.data.quality import find_problems, quality_rows
from arcuate.data.readers.source import Problem, ReadResult
from arcuate.data.selection import can_align
from arcuate.data.trial import Split, Trial
from arcuate.models.config import Patch
from support.recordings import LABEL, noise


def trial(bins: np.ndarray, tokens: tuple[int, ...] | None = LABEL, split: Split = "train") -> Trial:
    label = None if tokens is None else np.asarray(tokens, dtype=np.int32)
    return Trial("t15.2023.08.11", split, 0, 1, bins, label, "Bring.")


def with_value(value: float) -> np.ndarray:
    bins = noise(60, 20)
    bins[3, 4] = bins[5, 6] = value
    return bins


def with_constant(n_channels: int) -> np.ndarray:
    bins = noise(60, 20)
    bins[:, :n_channels] = 2.5
    return bins


@pytest.mark.parametrize(
    ("bins", "tokens", "reason", "number"),
    [
        (with_value(np.nan), LABEL, "non-finite", 2),
        (with_value(np.inf), LABEL, "non-finite", 2),
        (with_constant(3), LABEL, "constant channels", 3),
        (noise(2, 20), (7,), "too short", 0.04),
        (noise(1501, 20), LABEL, "too long", 30.02),
        (noise(3, 20), (1, 2, 3, 4), "label too long", 4),
        (noise(3, 20), (1, 2, 2), "label too long", 4),
    ],
    ids=["nan", "inf", "constant", "short", "long", "labels", "repeats"],
)
def test_each_case_is_reported_with_its_number(
    bins: np.ndarray, tokens: tuple[int, ...], reason: str, number: float
) -> None:
    found = {problem.reason: problem.number for problem in find_problems(trial(bins, tokens))}
    assert found == {reason: number}


@pytest.mark.parametrize(
    ("bins", "tokens"),
    [
        (noise(60, 20), LABEL),
        (with_constant(2), LABEL),  # exactly 10 %
        (noise(3, 20), (7,)),  # 60 ms
        (noise(1500, 20), LABEL),  # exactly 30 s
        (noise(3, 20), (1, 2, 3)),  # as many bins as tokens
        (noise(22, 20), None),
    ],
)
def test_limits_are_inclusive(bins: np.ndarray, tokens: tuple[int, ...] | None) -> None:
    assert find_problems(trial(bins, tokens)) == []


def test_an_empty_trial_is_checked_without_failing() -> None:
    reasons = {problem.reason for problem in find_problems(trial(noise(0, 20)))}
    assert reasons == {"constant channels", "too short", "label too long"}


@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, 12))
def test_frames_are_the_windows_that_fit(n_bins: int, size: int, stride: int) -> None:
    patch = Patch(bins=max(size, stride), stride=stride)
    padded = max(n_bins, patch.bins)
    windows = len(range(0, padded - patch.bins + 1, stride))
    assert patch.count_frames(n_bins) == windows
    assert patch.count_frames(np.array([n_bins])).tolist() == [windows]


@given(st.lists(st.integers(1, 3), max_size=6), st.integers(1, 12))
def test_alignment_agrees_with_building_the_shortest_path(tokens: list[int], n_frames: int) -> None:
    path: list[int] = []
    for token in tokens:
        path += [0, token] if path and path[-1] == token else [token]
    assert can_align(tokens, n_frames) == (len(path) <= n_frames)


@pytest.mark.parametrize(("split", "action"), [("train", "rejected"), ("val", "flagged"), ("test", "flagged")])
def test_bad_trials_are_excluded_from_training_only(split: Split, action: str) -> None:
    bad = trial(with_value(np.nan), split=split)
    (row,) = quality_rows(ReadResult(bad.id, bad), find_problems(bad))
    assert (row.trial, row.action) == (f"t15.2023.08.11/{split}/0000", action)


def test_notes_are_kept_and_unreadable_trials_are_missing() -> None:
    problems = (Problem("unknown words", 1, "", "note"), Problem("unreadable", None, "", "unreadable"))
    assert [row.action for row in quality_rows(ReadResult("s/train/0000", None, problems), ())] == ["kept", "missing"]
