"""The greedy rule."""

import numpy as np
import pytest
import torch

from arcuate.decoding.greedy import greedy


def scores(classes: list[int]) -> np.ndarray:
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
def test_merges_repeats_before_it_drops_blanks(classes, tokens):
    assert greedy(scores(classes)) == tokens
    assert greedy(torch.from_numpy(scores(classes))) == tokens


def test_no_frames_no_tokens():
    assert greedy(np.zeros((0, 4))) == []
