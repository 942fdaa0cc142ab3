"""State-space encoder: sizes, streams, error messages. Laws are in test_laws_models, the scan in test_scan."""

import pytest
import torch

from arcuate.data.alphabet import CLASSES
from arcuate.errors import UserError
from arcuate.experiments.recipe import load_recipe
from arcuate.models.config import (
    GRUSettings,
    ModelConfig,
    ModelSettings,
    Patch,
    SSMSettings,
    TransformerSettings,
)
from arcuate.models.model import count_parameters, make_encoder
from arcuate.models.ssm import SSM

PATCH = Patch(bins=3, stride=2)


def make(**changes) -> SSM:
    torch.manual_seed(0)
    settings = SSMSettings(**{"width": 16, "depth": 3, "n_heads": 4, "state_dim": 8, "dropout": 0.0, **changes})
    return SSM(settings, PATCH, 5)


def test_full_size_on_meta():
    settings = ModelSettings(encoder=SSMSettings(width=512, depth=8, state_dim=64))
    config = ModelConfig(settings=settings, n_channels=512, sessions=("a",), classes=CLASSES)
    block = 512 * (2 * 512 + 2 * 64 + 8) + 5 * (512 + 128) + 3 * 8 + 512 * 512 + 2 * 2 * 512
    around = 14 * 512 * 512 + 512 + 4 * 512  # patches and two norms
    front_and_head = 512 * 513 + 513 * 41
    assert count_parameters(config) == 8 * block + around + front_and_head


@pytest.mark.parametrize(
    "kind",
    [
        GRUSettings(width=8, depth=2),
        SSMSettings(width=8, depth=2),
        TransformerSettings(width=8, depth=2, n_heads=2, context=9),
    ],
    ids=lambda e: e.kind,
)
def test_all_encoders_stream_frame_by_frame(kind):
    """Steps of one frame, over a stream much longer than one chunk of the scan."""
    torch.manual_seed(0)
    encoder = make_encoder(ModelSettings(encoder=kind), 5).eval()
    bins = torch.randn(2, 14 + 4 * 99, 5)
    with torch.no_grad():
        offline, _ = encoder(bins, None, encoder.start(2))
        state, pieces = encoder.start(2), []
        for first in range(0, 4 * 100, 4):
            frames, state = encoder.step(state, bins[:, first : first + 14])
            pieces.append(frames)
        pieces.append(encoder.finish(state))
    torch.testing.assert_close(torch.cat(pieces, 1), offline, atol=1e-5, rtol=0)


def test_directions_split_the_width():
    encoder = make(bidirectional=True)
    assert (encoder.blocks[0].mixer.width, encoder.blocks[0].reverse_mixer.width) == (8, 8)
    with pytest.raises(UserError, match="cannot stream"):
        encoder.step(encoder.start(1), torch.randn(1, 9, 5))


def test_scan_stays_in_float32_under_autocast():
    encoder = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        frames, state = encoder(torch.randn(1, 41, 5), None, encoder.start(1))
    assert state[0].ssm_state.dtype == torch.float32
    assert bool(frames.isfinite().all())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["encoder.kind=ssm", "encoder.width=20"], "multiple of n_heads 8"),
        (["encoder.kind=ssm", "encoder.n_heads=1", "encoder.bidirectional=true"], "even number of heads"),
        (["encoder.kind=lstm"], "gru"),
        (["encoder.kind=ssm", "encoder.learned_initial_state=true"], "encoder.learned_initial_state"),
    ],
)
def test_invalid_settings(overrides, words):
    with pytest.raises(UserError, match=words):
        load_recipe("tiny", overrides)
