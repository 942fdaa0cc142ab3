"""Unusual trials: all losses finite or 0, finite gradients, one trial or many."""

import math

import pytest
import torch

from arcuate.data.alphabet import CLASSES
from arcuate.decoding.joint import JointSearch
from arcuate.experiments.recipe import load_recipe
from arcuate.losses.combined import compute_losses, weighted_loss
from arcuate.models.config import ModelConfig
from arcuate.models.interfaces import ModelInputs
from arcuate.models.layout import Frames
from arcuate.models.model import Model
from arcuate.training.step import encode_for_training

SMALL = [
    "encoder.width=8",
    "encoder.depth=1",
    "encoder.n_heads=2",
    "encoder.state_dim=4",
    "transducer.width=8",
]
ODD = {
    "more tokens than frames": ([20], [list(range(1, 13))]),
    "no tokens": ([60, 40], [[], []]),
    "no tokens beside some": ([60, 40], [[], [3, 3, 4]]),
    "one bin": ([1], [[5]]),
    "one frame": ([14], [[5]]),
    "one frame beside many": ([14, 200], [[5], [1, 2, 3]]),
    "a batch of one": ([120], [[1, 1, 2]]),
}


def make_model(*overrides: str) -> tuple[Model, object]:
    recipe = load_recipe("mode-ssm-small", [*SMALL, *overrides])
    torch.manual_seed(0)
    config = ModelConfig(settings=recipe.model, n_channels=4, sessions=("s",), classes=CLASSES)
    return Model(config), recipe.loss


def padded(references: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.zeros(len(references), max(1, *map(len, references)), dtype=torch.int64)
    for row, u in zip(tokens, references, strict=True):
        row[: len(u)] = torch.tensor(u, dtype=torch.int64)
    return tokens, torch.tensor([len(u) for u in references])


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("bidirectional", ["false", "true"])
def test_all_losses_and_gradients_are_finite(odd: str, bidirectional: str) -> None:
    model, loss = make_model(f"encoder.bidirectional={bidirectional}", "front_end.normalise=none")
    n_bins, references = ODD[odd]
    tokens, n_tokens = padded(references)
    clean = torch.randn(len(references), max(n_bins), 4)
    session = torch.zeros(len(references), dtype=torch.int64)
    outputs = encode_for_training(
        model,
        ModelInputs(clean + torch.randn_like(clean), torch.tensor(n_bins), session, tokens, clean),
        match_flow=True,
    )
    losses = compute_losses(outputs, tokens, n_tokens, loss, torch.full((len(references), 2), 0.5))
    assert tuple(losses) == ("ctc", "rnnt", "mode", "denoise")
    assert all(bool(values.isfinite().all()) for values in losses.values())
    assert (losses["rnnt"] > 0).all()  # a transducer can emit more tokens than there are frames
    weighted_loss(losses, loss).sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("odd", ["one bin", "one frame", "a batch of one"])
def test_unusual_trials_are_decoded(odd: str) -> None:
    model, _ = make_model("front_end.normalise=none")
    n_bins = ODD[odd][0]
    with torch.inference_mode():
        outputs = model.eval()(torch.randn(1, n_bins[0], 4), torch.tensor(n_bins), torch.tensor([0]))
    frames = Frames(outputs.log_probs["ctc"][0].numpy(), outputs.frames[0].numpy())
    found = JointSearch(model.transducer.for_search()).search(frames)
    assert found and math.isfinite(found[0].scores["transducer"])
    assert outputs.mode.shape == (1, 2)
