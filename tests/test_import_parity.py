"""Imported official checkpoints say what the official formulas say.

The formulas are written out here step by step in numpy, from the official layouts and not from the package,
so that a slip in either layout ('24 patches run channel after channel, '25 patches bin after bin) fails.
"""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from arcuate.batches.statistics import BatchStatistics
from arcuate.foreign import import_checkpoint
from arcuate.models.files import load_model

N_CHANNELS, WIDTH, DEPTH, N_SESSIONS, N_CLASSES = 6, 7, 3, 4, 41
SESSIONS = [f"t15.2023.08.{i:02d}" for i in range(N_SESSIONS)]


def draw(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.normal(0, 0.4, shape).astype(np.float32))


def draw_gru(
    rng: np.random.Generator, prefix: str, n_inputs: int, n_directions: int
) -> dict[str, torch.Tensor]:
    state = {}
    for layer in range(DEPTH):
        for suffix in (f"l{layer}", f"l{layer}_reverse")[:n_directions]:
            state[f"{prefix}.weight_ih_{suffix}"] = draw(
                rng, 3 * WIDTH, n_inputs if layer == 0 else WIDTH * n_directions
            )
            state[f"{prefix}.weight_hh_{suffix}"] = draw(rng, 3 * WIDTH, WIDTH)
            state[f"{prefix}.bias_ih_{suffix}"] = draw(rng, 3 * WIDTH)
            state[f"{prefix}.bias_hh_{suffix}"] = draw(rng, 3 * WIDTH)
    return state


def write_nejm(folder: Path, prefix: str = "", **changes) -> dict[str, torch.Tensor]:
    """A checkpoint and args.yaml as the '25 trainer writes them, at a small size."""
    rng = np.random.default_rng(0)
    state = {f"day_weights.{i}": draw(rng, N_CHANNELS, N_CHANNELS) for i in range(N_SESSIONS)}
    state |= {f"day_biases.{i}": draw(rng, 1, N_CHANNELS) for i in range(N_SESSIONS)}
    state |= draw_gru(rng, "gru", N_CHANNELS * 14, 1)
    state |= {
        "out.weight": draw(rng, N_CLASSES, WIDTH),
        "out.bias": draw(rng, N_CLASSES),
        "h0": draw(rng, 1, 1, WIDTH),
    }
    checkpoint = {
        "model_state_dict": {prefix + name: tensor for name, tensor in state.items()},
        "optimizer_state_dict": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.005}]},
        "scheduler_state_dict": {"lr_lambdas": [None, None], "base_lrs": [0.005]},
        "val_PER": 0.101,
        "val_loss": np.float64(17.5),
    }
    args = {
        "model": {
            "n_input_features": N_CHANNELS, "n_units": WIDTH, "n_layers": DEPTH, "rnn_dropout": 0.4,
            "patch_size": 14, "patch_stride": 4, "input_network": {"input_layer_dropout": 0.2},
        },
        "dataset": {
            "n_classes": N_CLASSES, "sessions": SESSIONS,
            "data_transforms": {"smooth_data": True, "smooth_kernel_std": 2, "smooth_kernel_size": 100},
        },
    }  # fmt: skip
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = args
        for key in parents:
            node = node[key]
        node[last] = value
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(checkpoint, folder / "best_checkpoint")
    (folder / "args.yaml").write_text(yaml.safe_dump(args))
    return state


def write_cffan(folder: Path, bidirectional: bool = True, **changes) -> dict[str, torch.Tensor]:
    """`modelWeights` and `args` as the '24 trainer writes them, unused layers included, at a small size."""
    rng = np.random.default_rng(1)
    taps = np.exp(-0.5 * ((np.arange(20) - 9.5) / 2.0) ** 2)
    kernel = torch.tensor(taps / taps.sum(), dtype=torch.float32).repeat(N_CHANNELS, 1, 1)
    state = {
        "dayWeights": draw(rng, N_SESSIONS, N_CHANNELS, N_CHANNELS),
        "dayBias": draw(rng, N_SESSIONS, 1, N_CHANNELS),
    }
    state |= {"gaussianSmoother.weight": kernel}
    state |= draw_gru(rng, "gru_decoder", N_CHANNELS * 32, 1 + bidirectional)
    for i in range(N_SESSIONS):
        state |= {
            f"inpLayer{i}.weight": draw(rng, N_CHANNELS, N_CHANNELS),
            f"inpLayer{i}.bias": draw(rng, N_CHANNELS),
        }
    state["fc_decoder_out.weight"] = draw(rng, N_CLASSES, WIDTH * (1 + bidirectional))
    state["fc_decoder_out.bias"] = draw(rng, N_CLASSES)
    args = {
        "nInputFeatures": N_CHANNELS, "nUnits": WIDTH, "nLayers": DEPTH, "nClasses": N_CLASSES - 1,
        "dropout": 0.4, "strideLen": 4, "kernelLen": 32, "gaussianSmoothWidth": 2.0, "bidirectional": bidirectional,
    } | changes  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / "modelWeights")
    (folder / "args").write_bytes(pickle.dumps(args))
    return state


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


def official_25(state: dict[str, np.ndarray], bins: np.ndarray, day: int) -> np.ndarray:
    """(T, C) -> logits (F, 41)"""
    n_bins = len(bins)
    weights = {d: np.exp(-(d**2) / 8) for d in range(-4, 5)}
    smoothed = np.zeros_like(bins)
    for t in range(n_bins):
        for d, weight in weights.items():
            if 0 <= t + d < n_bins:
                smoothed[t] += weight / sum(weights.values()) * bins[t + d]
    x = softsign(smoothed @ state[f"day_weights.{day}"] + state[f"day_biases.{day}"])
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


def official_24(state: dict[str, np.ndarray], bins: np.ndarray, day: int) -> np.ndarray:
    """(T, C) block-normalised -> logits (F, 41)"""
    n_bins = len(bins)
    weights = np.exp(-0.5 * ((np.arange(20) - 9.5) / 2.0) ** 2)
    smoothed = np.zeros_like(bins)
    for t in range(n_bins):
        for j in range(20):
            if 0 <= t + j - 9 < n_bins:  # nine bins to the left, ten to the right
                smoothed[t] += weights[j] / weights.sum() * bins[t + j - 9]
    x = softsign(smoothed @ state["dayWeights"][day] + state["dayBias"][day])
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


def as_arrays(state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.double().numpy() for name, tensor in state.items()}


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_parity_25(tmp_path, prefix):
    state = write_nejm(tmp_path / "trained" / "checkpoint", prefix)
    model = load_model(import_checkpoint(tmp_path / "trained", tmp_path / "model", "nejm"))
    assert model.card.sessions == tuple(SESSIONS)
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
    model = load_model(import_checkpoint(tmp_path / "trained", tmp_path / "model", "cffan", names))
    rng = np.random.default_rng(3)
    bins = rng.normal(5, 3, size=(2, 71, N_CHANNELS)).astype(np.float32)
    mean, sd = rng.normal(5, 1, (2, N_CHANNELS)), rng.uniform(1, 3, (2, N_CHANNELS))
    statistics = BatchStatistics(
        torch.tensor(mean).float(), torch.tensor(sd).float(), torch.tensor([999, 999])
    )
    with torch.inference_mode():
        outputs = model(torch.from_numpy(bins), torch.tensor([71, 71]), torch.tensor([0, 2]), statistics)
        logits = model.head(outputs.frames)
    for i, day in enumerate((0, 2)):
        normalised = (bins[i] - mean[i]) / (sd[i] + 1e-8)
        np.testing.assert_allclose(
            logits[i].numpy(), official_24(as_arrays(state), normalised, day), atol=1e-4
        )
