"""Small transducers for tests."""

import pytest
import torch

from arcuate.models.config import TransducerSettings
from arcuate.models.transducer import Transducer

N_CLASSES, WIDTH = 3, 4


SETTINGS = [
    TransducerSettings(width=WIDTH),
    TransducerSettings(width=WIDTH, predictor="lstm"),
]


kinds = pytest.mark.parametrize("settings", SETTINGS, ids=["two tokens", "lstm"])


def make(settings: TransducerSettings, n_frames: int, seed: int = 0, n_classes: int = N_CLASSES):
    torch.manual_seed(seed)
    head = Transducer(settings, 5, n_classes).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter *= 3.0  # sharper than at the start, so that hypotheses differ
    return head, torch.randn(n_frames, 5)
