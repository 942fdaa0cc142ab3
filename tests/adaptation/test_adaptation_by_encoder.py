"""Adaptation and calibration for every encoder, with and without session layers, causal and bidirectional."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from arcuate import StreamingDecoder
from arcuate.adaptation.config import Adaptation, Calibration, Safety
from arcuate.adaptation.evaluate import adapt_trial, evaluate_adaptation
from arcuate.adaptation.online import make_adapter
from arcuate.data.alphabet import CLASSES
from arcuate.data.config import AugmentationConfig
from arcuate.data.store import Store
from arcuate.decoding.hypothesis import greedy
from arcuate.errors import UserError
from arcuate.evaluation.trials import decode_trials
from arcuate.experiments.calibrate import calibrate
from arcuate.live.adaptation import make_setup
from arcuate.live.engine import make_engine
from arcuate.models.config import (
    EncoderSettings,
    FrontEndSettings,
    GRUSettings,
    ModelConfig,
    ModelSettings,
    Patch,
    SessionLayerSettings,
    SmoothingSettings,
    SSMSettings,
    TransformerSettings,
)
from arcuate.models.io import load_model, save_model
from arcuate.models.model import Model
from arcuate.run import find_checkpoint
from support.days import DRIFTED, FIRST, N_CHANNELS, SAME, SECOND

GRU = GRUSettings(width=12, depth=1)
SSM = SSMSettings(width=8, depth=1, n_heads=2, state_dim=3, conv_kernel=3)
TRANSFORMER = TransformerSettings(width=8, depth=1, n_heads=2, ffn_expansion=2, context=16, n_buckets=8)
KINDS: list[tuple[EncoderSettings, bool]] = [
    *((encoder, layers) for encoder in (GRU, SSM, TRANSFORMER) for layers in (True, False)),
    (GRU.model_copy(update={"bidirectional": True}), True),
    (TRANSFORMER.model_copy(update={"bidirectional": True}), False),
]
NAMES = [f"{e.kind}{'-bidirectional' if not e.causal else ''}{'' if layers else '-no-layers'}" for e, layers in KINDS]


@pytest.fixture(params=KINDS, ids=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An untrained but confident model."""
    encoder, layers = request.param
    torch.manual_seed(1)
    front_end = FrontEndSettings(
        normalise="none",
        smoothing=SmoothingSettings(sd=0.0),
        session_layer=SessionLayerSettings(enabled=layers),
        patch=Patch(bins=4, stride=2),
    )
    settings = ModelSettings(front_end=front_end, encoder=encoder)
    config = ModelConfig(settings=settings, n_channels=N_CHANNELS, sessions=(FIRST, SECOND), classes=CLASSES)
    model = Model(config)
    with torch.no_grad():
        model.head.weight.mul_(12.0)
    save_model(tmp_path / "model", model)
    return tmp_path / "model"


def test_steps_are_bounded_and_leave_the_model_unchanged(new_days: Path, folder: Path) -> None:
    store, model = Store.open(new_days / "store"), load_model(folder)
    settings = Adaptation(
        method="replay", lr=0.01, max_distance=0.05, copies=2, replay_trials=2, safety=Safety(min_confidence=0)
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapter = make_adapter(model, settings, AugmentationConfig(white_noise_sd=0.2))
    state = adapter.start(DRIFTED)
    for trial in [t for t in store.trials if t.session == DRIFTED][:5]:
        _, after = adapt_trial(adapter, state, store, trial, greedy, False)
        assert float((after.layer.weight - state.layer.weight).abs().max()) <= 0.01 + 1e-6
        assert after.layer.distance(after.initial) <= 0.05 + 1e-5
        state = after
    assert state.n_steps == 5 and state.layer.distance(state.initial) > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_stream_adapts_as_offline(new_days: Path, folder: Path) -> None:
    store, augmentation = Store.open(new_days / "store"), AugmentationConfig(white_noise_sd=0.2)
    settings = Adaptation.model_validate(
        {"method": "one-step", "lr": 0.01, "copies": 2, "safety": {"min_confidence": 0, "full_step_uncertainty": 0.001}}
    )
    if not load_model(folder).config.settings.encoder.causal:
        with pytest.raises(UserError, match="cannot stream"):
            make_engine(load_model(folder), None)
        return
    trials = [t for t in store.trials if t.session == DRIFTED][:3]
    adapter = make_adapter(load_model(folder), settings, augmentation)
    state, decoded = adapter.start(DRIFTED), []
    for trial in trials:
        step, state = adapt_trial(adapter, state, store, trial, greedy, False)
        decoded.append(step.result.tokens)
    engine = make_engine(load_model(folder), None)
    engine = replace(engine, adaptation=make_setup(engine.model, None, settings, augmentation))
    stream = StreamingDecoder(engine, DRIFTED)
    for trial, tokens in zip(trials, decoded, strict=True):
        for chunk in np.array_split(store.read_bins(trial), 5):
            stream.push(chunk)
        assert stream.finish().tokens == tokens
        stream.wait_for_adaptation()
    assert stream.session_state is not None and stream.session_state.n_steps == state.n_steps == 3
    torch.testing.assert_close(stream.session_state.layer.weight, state.layer.weight, atol=0, rtol=0)


def test_a_session_without_drift_is_decoded_as_well_as_without_adaptation(new_days: Path, folder: Path) -> None:
    result = evaluate_adaptation(
        folder, Adaptation(method="one-step", copies=4), data=new_days / "store", sessions=[SAME]
    )
    (session,) = result.sessions
    assert result.metrics.n_trials == 20 and session.init_session == SECOND
    assert session.expected_confidence is not None and session.expected_confidence > 0
    assert result.metrics.per is not None and result.per_unadapted is not None
    assert result.metrics.per <= 1.02 * result.per_unadapted


def test_calibration_adds_a_session_and_leaves_the_others_unchanged(
    new_days: Path, folder: Path, tmp_path: Path
) -> None:
    store, run = Store.open(new_days / "store"), tmp_path / "run"
    few = Calibration(steps=2, other_lr_factor=0, batch_size=4)
    result = calibrate(folder, store, DRIFTED, out=run, sentences=3, curve=(), settings=few)
    assert [point.sentences for point in result.curve] == [0, 3]
    old, new = load_model(folder), load_model(find_checkpoint(run))
    assert new.config.sessions == (FIRST, SECOND, DRIFTED)
    known = [t for t in store.trials if t.session == SECOND][:2]
    for a, b in zip(*(decode_trials(m.eval(), store, known, keep_log_probs=True) for m in (old, new)), strict=True):
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-5)
