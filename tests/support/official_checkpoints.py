"""Helpers of the official_checkpoints tests."""

import pickle
from pathlib import Path

import numpy as np
import torch
import yaml

N_CHANNELS, WIDTH, DEPTH, N_SESSIONS, N_CLASSES = 6, 7, 3, 4, 41


SESSIONS = [f"t15.2023.08.{i:02d}" for i in range(N_SESSIONS)]


def draw(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.normal(0, 0.4, shape).astype(np.float32))


def draw_gru(rng: np.random.Generator, prefix: str, n_inputs: int, n_directions: int) -> dict[str, torch.Tensor]:
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


def write_cffan(
    folder: Path, bidirectional: bool = True, layer_norm: bool = False, **changes
) -> dict[str, torch.Tensor]:
    """`modelWeights` and `args` as the '24 trainer writes them, unused layers included, at a small size.

    With `layer_norm` as its saat12d fork does: a norm after the activation of the session layer, and input dropout.
    """
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
    if layer_norm:
        state |= {"ln.weight": 1 + draw(rng, N_CHANNELS), "ln.bias": draw(rng, N_CHANNELS)}
        changes = {"use_layer_norm": True, "input_dropout": 0.1} | changes
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
