"""Imported official checkpoints against the official formulas.

The formulas are written out step by step in numpy, from the official layouts and not from the package, so that an error
in either layout ('24 patches are channel-major, '25 patches time-major) fails.
"""

import numpy as np
import pytest
import torch

from arcuate.data.alphabet import CLASSES
from arcuate.data.batching import BatchStatistics
from arcuate.errors import UserError
from arcuate.experiments.recipe import load_recipe
from arcuate.models.config import ModelConfig
from arcuate.models.import_checkpoint import import_checkpoint
from arcuate.models.io import load_model
from arcuate.models.model import count_parameters
from support.official_checkpoints import (
    DEPTH,
    N_CHANNELS,
    N_SESSIONS,
    SESSIONS,
    WIDTH,
    write_cffan,
    write_nejm,
)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def run_gru_direction(
    x: np.ndarray, state: dict[str, np.ndarray], prefix: str, suffix: str, h: np.ndarray
) -> np.ndarray:
    w_ih, w_hh, b_ih, b_hh = (
        state[f"{prefix}.{name}_{suffix}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    out = []
    for frame in x[::-1] if suffix.endswith("reverse") else x:
        i_r, i_z, i_n = np.split(w_ih @ frame + b_ih, 3)
        h_r, h_z, h_n = np.split(w_hh @ h + b_hh, 3)
        r, z = sigmoid(i_r + h_r), sigmoid(i_z + h_z)
        h = (1 - z) * np.tanh(i_n + r * h_n) + z * h
        out.append(h)
    return np.array(out[::-1] if suffix.endswith("reverse") else out)


def softsign(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.abs(x))


def official_25(state: dict[str, np.ndarray], bins: np.ndarray, session: int) -> np.ndarray:
    """(T, C) -> logits (F, 41)"""
    n_bins = len(bins)
    weights = {d: np.exp(-(d**2) / 8) for d in range(-4, 5)}
    smoothed = np.zeros_like(bins)
    for t in range(n_bins):
        for d, weight in weights.items():
            if 0 <= t + d < n_bins:
                smoothed[t] += weight / sum(weights.values()) * bins[t + d]
    x = softsign(smoothed @ state[f"day_weights.{session}"] + state[f"day_biases.{session}"])
    frames = []
    for first in range(0, n_bins - 14 + 1, 4):
        patch = np.empty(14 * N_CHANNELS)
        for b in range(14):
            for c in range(N_CHANNELS):
                patch[b * N_CHANNELS + c] = x[first + b, c]
        frames.append(patch)
    x = np.array(frames)
    for layer in range(DEPTH):
        x = run_gru_direction(x, state, "gru", f"l{layer}", state["h0"].reshape(-1))
    return x @ state["out.weight"].T + state["out.bias"]


def official_24(state: dict[str, np.ndarray], bins: np.ndarray, session: int) -> np.ndarray:
    """(T, C) block-normalised -> logits (F, 41)"""
    n_bins = len(bins)
    weights = np.exp(-0.5 * ((np.arange(20) - 9.5) / 2.0) ** 2)
    smoothed = np.zeros_like(bins)
    for t in range(n_bins):
        for j in range(20):
            if 0 <= t + j - 9 < n_bins:  # nine bins to the left, ten to the right
                smoothed[t] += weights[j] / weights.sum() * bins[t + j - 9]
    x = softsign(smoothed @ state["dayWeights"][session] + state["dayBias"][session])
    frames = []
    for first in range(0, n_bins - 32 + 1, 4):
        patch = np.empty(32 * N_CHANNELS)
        for c in range(N_CHANNELS):
            for b in range(32):
                patch[c * 32 + b] = x[first + b, c]
        frames.append(patch)
    x = np.array(frames)
    reverse = "gru_decoder.weight_ih_l0_reverse" in state
    for layer in range(DEPTH):
        both = [
            run_gru_direction(x, state, "gru_decoder", suffix, np.zeros(WIDTH))
            for suffix in (f"l{layer}", f"l{layer}_reverse")[: 1 + reverse]
        ]
        x = np.concatenate(both, axis=1)
    return x @ state["fc_decoder_out.weight"].T + state["fc_decoder_out.bias"]


def fork_of_24(state: dict[str, torch.Tensor], bins: torch.Tensor, session: int) -> torch.Tensor:
    """(T, C) block-normalised -> logits (F, 41), in the modules of torch that the fork is made of."""
    kernel = state["gaussianSmoother.weight"]
    padded = torch.nn.functional.pad(bins.T[None], (9, 10))  # padding "same" of an even kernel
    smoothed = torch.nn.functional.conv1d(padded, kernel, groups=N_CHANNELS)[0].T
    x = torch.nn.functional.softsign(smoothed @ state["dayWeights"][session] + state["dayBias"][session])
    x = torch.nn.functional.layer_norm(x, (N_CHANNELS,), state["ln.weight"], state["ln.bias"])
    patches = torch.nn.functional.unfold(x.T[None, :, :, None], (32, 1), stride=(4, 1)).transpose(1, 2)
    gru = torch.nn.GRU(32 * N_CHANNELS, WIDTH, DEPTH, batch_first=True, bidirectional=True)
    gru.load_state_dict({n.removeprefix("gru_decoder."): t for n, t in state.items() if n.startswith("gru_decoder.")})
    return gru(patches)[0][0] @ state["fc_decoder_out.weight"].T + state["fc_decoder_out.bias"]


def as_arrays(state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.double().numpy() for name, tensor in state.items()}


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_parity_25(tmp_path, prefix):
    state = write_nejm(tmp_path / "trained" / "checkpoint", prefix)
    model = load_model(import_checkpoint(tmp_path / "trained", tmp_path / "model", "nejm").model)
    assert model.config.sessions == tuple(SESSIONS)
    bins = np.random.default_rng(2).normal(size=(2, 61, N_CHANNELS)).astype(np.float32)
    session = torch.tensor([3, 1])
    with torch.inference_mode():
        outputs = model(torch.from_numpy(bins), torch.tensor([61, 61]), session)
        logits = model.head(outputs.frames)
    for i, day in enumerate(session.tolist()):
        expected = official_25(as_arrays(state), bins[i].astype(np.float64), day)
        np.testing.assert_allclose(logits[i].numpy(), expected, atol=1e-4)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_parity_24(tmp_path, bidirectional):
    state = write_cffan(tmp_path / "trained", bidirectional)
    names = [f"day{i}" for i in range(N_SESSIONS)]
    model = load_model(import_checkpoint(tmp_path / "trained", tmp_path / "model", "cffan", names).model)
    rng = np.random.default_rng(3)
    bins = rng.normal(5, 3, size=(2, 71, N_CHANNELS)).astype(np.float32)
    mean, sd = rng.normal(5, 1, (2, N_CHANNELS)), rng.uniform(1, 3, (2, N_CHANNELS))
    statistics = BatchStatistics(torch.tensor(mean).float(), torch.tensor(sd).float(), torch.tensor([999, 999]))
    with torch.inference_mode():
        outputs = model(torch.from_numpy(bins), torch.tensor([71, 71]), torch.tensor([0, 2]), statistics)
        logits = model.head(outputs.frames)
    for i, day in enumerate((0, 2)):
        normalised = (bins[i] - mean[i]) / (sd[i] + 1e-8)
        np.testing.assert_allclose(logits[i].numpy(), official_24(as_arrays(state), normalised, day), atol=1e-4)


def test_parity_of_the_fork_with_layer_norm(tmp_path):
    state = write_cffan(tmp_path / "trained", layer_norm=True)
    names = [f"s{i}" for i in range(N_SESSIONS)]
    imported = import_checkpoint(tmp_path / "trained", tmp_path / "model", "cffan", names)
    model = load_model(imported.model)
    assert sum(name.startswith("inpLayer") for name in imported.ignored) == len(imported.ignored)
    layer = model.config.settings.front_end.session_layer
    assert (layer.layer_norm, layer.dropout) == (True, 0.1)
    normalised = torch.from_numpy(np.random.default_rng(4).normal(size=(71, N_CHANNELS)).astype(np.float32))
    zeros, ones = torch.zeros(1, N_CHANNELS), torch.ones(1, N_CHANNELS)
    statistics = BatchStatistics(zeros, ones, torch.tensor([999]))
    with torch.inference_mode():
        outputs = model(normalised[None], torch.tensor([71]), torch.tensor([1]), statistics)
        logits, expected = model.head(outputs.frames)[0], fork_of_24(state, normalised, 1)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert expected.std() > 0.5


def test_parameters_of_the_fork_at_its_full_size():
    """135,424,553 in its log, of which 24 x 256 x 257 belong to layers that it does not use."""
    recipe = load_recipe("diary-run12")
    sessions = tuple(f"s{i}" for i in range(24))
    config = ModelConfig(settings=recipe.model, n_channels=256, sessions=sessions, classes=CLASSES)
    assert count_parameters(config) == 135_424_553 - 24 * 256 * 257


def test_layer_norm_must_match_the_settings_of_the_fork(tmp_path):
    write_cffan(tmp_path / "trained", layer_norm=True, use_layer_norm=False)
    with pytest.raises(UserError, match="use_layer_norm is False"):
        import_checkpoint(tmp_path / "trained", tmp_path / "model", "cffan")
