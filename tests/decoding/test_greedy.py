"""Greedy CTC decoding."""

import numpy as np
import pytest
import torch

from arcuate.decoding.hypothesis import GreedyState, greedy


def log_probs(classes: list[int]) -> np.ndarray:
    return np.log(np.eye(4)[classes] * 0.9 + 0.025)


@pytest.mark.parametrize(
    ("classes", "tokens"),
    [
        ([0, 0, 0], []),
        ([1, 1, 2, 2, 2], [1, 2]),
        ([1, 0, 1], [1, 1]),
        ([0, 3, 3, 0, 0, 3, 1, 0], [3, 3, 1]),
        ([2], [2]),
    ],
)
def test_repeats_are_merged_before_blanks_are_removed(classes, tokens):
    assert greedy(log_probs(classes)) == tokens
    assert greedy(torch.from_numpy(log_probs(classes))) == tokens
    for cut in range(len(classes) + 1):
        stream = GreedyState().extend(log_probs(classes[:cut])).extend(log_probs(classes[cut:]))
        assert list(stream.tokens) == tokens


def test_no_frames_give_no_tokens():
    assert greedy(np.zeros((0, 4))) == []
