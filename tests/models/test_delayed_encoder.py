"""The encoder of benchmarks/latency.py that holds back frames."""

import numpy as np
import pytest
import torch

from arcuate.data.alphabet import CLASSES
from arcuate.data.store import TrialInfo
from arcuate.decoding.delay import model_delay
from arcuate.models.check import check_encoder
from arcuate.models.config import ModelConfig, ModelSettings
from arcuate.models.model import Model
from arcuate.plugins import trust_code
from support.benchmarks import BENCHMARKS, load

N_CHANNELS = 6


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def make_model(delay: int) -> Model:
    torch.manual_seed(0)
    encoder = {"kind": "delayed_encoder:DelayedSSM", "width": 16, "n_heads": 2, "state_dim": 8, "delay": delay}
    with trust_code():
        settings = ModelSettings.model_validate(
            {
                "encoder": encoder,
                "front_end": {"normalise": "none", "smoothing": {"sd": 0}, "patch": {"bins": 6, "stride": 3}},
            }
        )
        config = ModelConfig(settings=settings, n_channels=N_CHANNELS, classes=CLASSES, sessions=("s",))
        return Model(config).eval()


@pytest.mark.parametrize("delay", [0, 1, 5])
def test_streams_and_ignores_padding(delay: int) -> None:
    with trust_code():
        check = check_encoder("delayed_encoder:DelayedSSM", {"width": 16, "n_heads": 2, "state_dim": 8, "delay": delay})
    assert check.passed


@pytest.mark.parametrize("delay", [0, 2])
def test_a_frame_depends_on_patches_up_to_the_delay(delay: int) -> None:
    model = make_model(delay)
    bins = torch.randn(1, 60, N_CHANNELS)
    changed = bins.clone()
    changed[:, 30:] = 0  # first in the patch of frame 9, which starts at bin 27 and ends before bin 33
    n_bins, session = torch.tensor([60]), torch.tensor([0])
    with torch.no_grad():
        a, b = (model(x, n_bins, session).log_probs["ctc"][0] for x in (bins, changed))
    differs = (a != b).any(-1)
    assert int(differs.nonzero()[0]) == 9 - delay


@pytest.mark.parametrize("delay", [0, 3])
def test_the_delay_is_measured(delay: int) -> None:
    measured = model_delay(make_model(delay))
    assert (measured.encoder_ms, measured.total_ms) == (delay * 3 * 20, delay * 3 * 20 + 2 * 20)


def test_frames_of_correctly_decoded_tokens() -> None:
    latency = load("latency")
    trial = TrialInfo("t", "s", "val", 0, 0, 60, (5, 6, 7), None, None, None, True, ())
    best = [0, 5, 5, 0, 9, 0, 7, 0]
    log_probs = np.log(np.eye(len(CLASSES))[best] + 1e-3)
    assert latency.emitted_frames(trial, log_probs) == [(0, 1), (2, 6)]
