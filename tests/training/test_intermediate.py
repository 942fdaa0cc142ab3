"""Intermediate CTC losses: shared head, every kind of encoder, training only."""

import pytest
import torch

from arcuate.data.alphabet import CLASSES
from arcuate.errors import UserError
from arcuate.experiments.recipe import load_recipe
from arcuate.experiments.train import train
from arcuate.losses.combined import compute_losses, ctc_loss, weighted_loss
from arcuate.losses.config import CTCSettings, IntermediateSettings, LossSettings
from arcuate.models.config import (
    EncoderSettings,
    GRUSettings,
    ModelConfig,
    ModelSettings,
    SSMSettings,
    TransformerSettings,
)
from arcuate.models.interfaces import ModelInputs
from arcuate.models.model import Model
from arcuate.run import Run

KINDS = [
    GRUSettings(width=8, depth=3, dropout=0.0),
    GRUSettings(width=8, depth=3, dropout=0.0, bidirectional=True),
    SSMSettings(width=8, depth=3, n_heads=2, state_dim=4, dropout=0.0),
    TransformerSettings(width=8, depth=3, n_heads=2, dropout=0, attention_dropout=0, input_dropout=0),
]
each_kind = pytest.mark.parametrize("encoder", KINDS, ids=lambda e: f"{e.kind}-{e.causal}")


def make(encoder: EncoderSettings) -> Model:
    torch.manual_seed(0)
    settings = ModelSettings(encoder=encoder)
    return Model(ModelConfig(settings=settings, n_channels=4, sessions=("a",), classes=CLASSES))


def make_batch() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return torch.randn(2, 90, 4), torch.tensor([90, 61]), torch.tensor([0, 0])


@each_kind
def test_layer_outputs_equal_those_of_a_shallower_encoder(encoder):
    """The log-probabilities after layer 2 are those of the same encoder with two layers."""
    deep = make(encoder).eval()
    shallow = make(encoder.model_copy(update={"depth": 2})).eval()
    own = shallow.state_dict()
    shallow.load_state_dict({name: t for name, t in deep.state_dict().items() if name in own})
    batch = make_batch()
    with torch.no_grad():
        outputs = deep.encode(ModelInputs(*batch, layers=(2,)))
        expected = shallow.encode(ModelInputs(*batch))
        plain = deep.encode(ModelInputs(*batch))
    real = torch.arange(outputs.frames.shape[1]) < outputs.n_frames[:, None]
    torch.testing.assert_close(outputs.intermediate[2][real], expected.log_probs["ctc"][real], atol=1e-5, rtol=0)
    assert torch.equal(outputs.log_probs["ctc"], plain.log_probs["ctc"])
    assert plain.intermediate == {}


@pytest.mark.parametrize("bidirectional", [False, True])
def test_layer_by_layer_with_torchs_kernels(bidirectional):
    """The implementation for other devices, run on this one."""
    encoder = make(GRUSettings(width=8, depth=3, dropout=0.0, bidirectional=bidirectional)).encoder
    bins, n_frames = torch.randn(3, 14 + 4 * 9, 4), torch.tensor([4, 10, 7])
    state = torch.randn(3 * (2 if bidirectional else 1), 3, 8)
    with torch.no_grad():
        ours = encoder.forward_with_layers(bins, n_frames, state, (1, 2))
        theirs = encoder._forward_torch(bins, n_frames, state, (1, 2))
    real = torch.arange(10) < n_frames[:, None]
    for a, b in [(ours[0], theirs[0]), *((ours[2][i], theirs[2][i]) for i in (1, 2))]:
        torch.testing.assert_close(a[real], b[real], atol=1e-5, rtol=0)
    if bidirectional:
        torch.testing.assert_close(ours[1][1::2], theirs[1][1::2], atol=1e-5, rtol=0)
    else:
        torch.testing.assert_close(ours[1], theirs[1], atol=1e-5, rtol=0)


@each_kind
def test_loss_is_the_mean_over_layers_and_reaches_them(encoder):
    model, (bins, n_bins, session) = make(encoder), make_batch()
    tokens, n_tokens = torch.tensor([[3, 4, 5], [6, 7, 0]]), torch.tensor([3, 2])
    settings = LossSettings(ctc=CTCSettings(weight=2.0), intermediate=IntermediateSettings(layers=(1, 2)))
    outputs = model.encode(ModelInputs(bins, n_bins, session, tokens, layers=settings.intermediate.layers))
    losses = compute_losses(outputs, tokens, n_tokens, settings)
    one, two = (ctc_loss(outputs.intermediate[i], outputs.n_frames, tokens, n_tokens, settings.ctc) for i in (1, 2))
    torch.testing.assert_close(losses["intermediate"], (one + two) / 2)
    torch.testing.assert_close(weighted_loss(losses, settings), 2 * losses["ctc"] + 0.3 * losses["intermediate"])
    losses["intermediate"].sum().backward()
    third = [p for name, p in model.encoder.named_parameters() if "blocks.2." in name or "_l2" in name]
    assert third
    assert all(p.grad is None or p.grad.abs().sum() == 0 for p in third)
    assert model.head.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("recipe", ["tiny", "mode-ssm-small", "tiny-transformer"])
def test_every_kind_of_encoder_trains(recipe, cohort_store, tmp_path):
    small = ["encoder.width=16", "train.steps=2", "train.log_every=1", "data.batching.batch_size=4"]
    small.append("loss.intermediate.layers=[1]")
    train(recipe, cohort_store, tmp_path / "run", overrides=small)
    rows = Run(tmp_path / "run").metrics()
    trained = [r for r in rows if r["split"] == "train"]
    assert all(r["losses"].keys() == {"ctc", "intermediate"} for r in trained)
    assert all(
        r["loss"] == pytest.approx(r["losses"]["ctc"] + 0.3 * r["losses"]["intermediate"], rel=1e-5) for r in trained
    )
    validated = [r for r in rows if r["split"] != "train"]
    assert validated
    assert all(r["losses"].keys() == {"ctc"} for r in validated)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["loss.intermediate.layers=[3]"], "must name layers 1 to 2 of this encoder of depth 3"),
        (["loss.intermediate.layers=[0]"], "greater than or equal to 1"),
        (["loss.intermediate.layers=[1,1]"], "twice"),
        (["loss.intermediate.layers=1"], r"loss\.intermediate\.layers=\[1\]"),
    ],
)
def test_invalid_layers_are_rejected(overrides, words):
    with pytest.raises(UserError, match=words):
        load_recipe("tiny-transformer", overrides)
