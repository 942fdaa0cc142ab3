"""Transformer encoder: sizes, context, streams, error messages. Laws are in test_laws_models."""

import math

import pytest
import torch
from torch.nn import functional as F

from arcuate.data.alphabet import CLASSES
from arcuate.data.augmentation import draw_masks
from arcuate.errors import UserError
from arcuate.experiments.recipe import load_recipe
from arcuate.models.config import ModelConfig, ModelSettings, Patch, TransformerSettings
from arcuate.models.model import Model, count_parameters, parameter_groups
from arcuate.models.transformer import (
    Attention,
    RelativePositionBias,
    Transformer,
    relative_position_bucket,
    relative_position_buckets,
)
from arcuate.training.schedule import learning_rate

PATCH = Patch(bins=3, stride=2)


def make(**changes) -> Transformer:
    torch.manual_seed(0)
    sizes = {"width": 16, "depth": 2, "n_heads": 4, "context": 7, "input_dropout": 0.0}
    quiet = {"dropout": 0.0, "attention_dropout": 0.0}
    encoder = Transformer(TransformerSettings(**{**sizes, **quiet, **changes}), PATCH, 5)
    torch.nn.init.normal_(encoder.position_bias.table)
    return encoder


def config_of(recipe: str) -> ModelConfig:
    loaded = load_recipe(recipe)
    size = loaded.data.size
    sessions = tuple(map(str, range(size.n_sessions)))
    return ModelConfig(settings=loaded.model, n_channels=size.n_channels, sessions=sessions, classes=CLASSES)


def test_published_size():
    """9.4 million in the paper, at 24 sessions of 256 channels; sessions add no parameters."""
    block = 384 * 3 * 384 + 384 * 385 + 2 * 4 * 384 * 384 + 5 * 384 + 4 * 384
    embedding = 2 * 1280 + 1281 * 384 + 2 * 384
    around = 6 * 32 + 2 * 384 + 385 * 41
    assert count_parameters(config_of("b2t24-transformer")) == 5 * block + embedding + around == 9_378_537
    assert count_parameters(config_of("b2t25-transformer")) == 9_674_985


@pytest.mark.parametrize(
    ("name", "peak", "epochs"), [("b2t24-transformer", 1e-3, 250), ("b2t25-transformer", 2e-3, 500)]
)
def test_learning_rate_falls_to_a_tenth_after_three_fifths(name, peak, epochs):
    recipe = load_recipe(name)
    n_steps = recipe.train.steps
    assert learning_rate(recipe.schedule, 0, n_steps) == peak
    assert learning_rate(recipe.schedule, int(0.59 * n_steps), n_steps) == peak
    assert learning_rate(recipe.schedule, int(0.61 * n_steps), n_steps) == pytest.approx(peak / 10)
    n_train = {"b2t24-transformer": 8800, "b2t25-transformer": 8072}[name]
    assert n_steps * 64 / n_train == pytest.approx(epochs, rel=0.01)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("b2t24-transformer", 0.47, 0.57),
        ("b2t25-transformer", 0.47, 0.57),
        ("tiny-transformer", 0.22, 0.30),  # trains for ten epochs, for which half is too much
    ],
)
def test_masks_cover_about_half_or_a_quarter_of_a_trial(name, low, high):
    settings = load_recipe(name).augment
    generator = torch.Generator().manual_seed(0)
    shares = []
    for n in [150, 400, 900] * 40:
        masked = torch.zeros(n, dtype=torch.bool)
        draw_masks(masked, torch.zeros(1, dtype=torch.bool), settings, generator)
        shares.append(masked.float().mean())
    assert settings.time_masks.n_masks == 20
    assert low < float(torch.stack(shares).mean()) < high


def reference(encoder: Transformer, frames: torch.Tensor) -> torch.Tensor:
    """The encoder with full attention matrices, one pair of frames at a time. (F, W)"""
    settings, n = encoder.settings, len(frames)
    per_head = settings.n_buckets // 2 if settings.bidirectional else settings.n_buckets
    bias = torch.full((settings.n_heads, n, n), -math.inf)
    for i in range(n):
        for j in range(n):
            d = i - j
            if abs(d) < settings.context and (d >= 0 or settings.bidirectional):
                place = relative_position_bucket(abs(d), settings.context, per_head) + (per_head if d < 0 else 0)
                bias[:, i, j] = encoder.position_bias.table[:, place]
    for block in encoder.blocks:
        q, k, v = block.attention.qkv(block.attention_norm(frames)).chunk(3, dim=-1)
        q, k, v = (x.reshape(n, settings.n_heads, -1).transpose(0, 1) for x in (q, k, v))
        shares = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]) + bias).softmax(-1)
        frames = frames + block.attention.output((shares @ v).transpose(0, 1).reshape(n, -1))
        frames = frames + block.ffn_out(F.gelu(block.ffn_in(block.ffn_norm(frames))))
    return encoder.output_norm(frames)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("context", [1, 7, 90, 1000])
def test_equals_the_definition(context, bidirectional):
    """150 frames need several windows if the context is short."""
    encoder = make(context=context, bidirectional=bidirectional).eval()
    bins = torch.randn(2, 3 + 2 * 149, 5)
    with torch.no_grad():
        frames, _ = encoder(bins, None, encoder.start(2))
        expected = torch.stack([reference(encoder, e) for e in encoder.embedding(bins)])
    torch.testing.assert_close(frames, expected, atol=1e-5, rtol=0)


def test_streams_frame_by_frame_over_many_contexts():
    encoder = make().eval()
    bins = torch.randn(2, 3 + 2 * 199, 5)
    with torch.no_grad():
        offline, _ = encoder(bins, None, encoder.start(2))
        state, pieces = encoder.start(2), []
        for first in range(0, 2 * 200, 2):
            frames, state = encoder.step(state, bins[:, first : first + 3])
            pieces.append(frames)
    torch.testing.assert_close(torch.cat(pieces, 1), offline, atol=1e-5, rtol=0)


def test_cache_is_bounded():
    encoder = make(context=7)
    for n_frames, kept in ((1, 1), (5, 5), (6, 6), (7, 6), (300, 6)):
        _, state = encoder.step(encoder.start(1), torch.randn(1, 3 + 2 * (n_frames - 1), 5))
        assert [m.keys.shape for m in state] == [m.values.shape for m in state] == [(1, 4, kept, 4)] * 2


def test_long_trials_are_processed_in_windows():
    """The cost of a long trial grows linearly with its length."""
    distances = RelativePositionBias(TransformerSettings(width=2, n_heads=2, context=100))
    n_scores = [sum(w.bias.numel() for w in distances.windows(0, n)) for n in (1000, 2000, 4000)]
    assert n_scores[2] - n_scores[1] == 2 * (n_scores[1] - n_scores[0])


@pytest.mark.parametrize(("context", "n"), [(125, 32), (250, 32), (10, 32), (1, 2), (1000, 2)])
def test_buckets_are_exact_near_and_logarithmic_far(context, n):
    back = [relative_position_bucket(d, context, n) for d in range(context)]
    assert back == sorted(back)
    assert back[: min(n // 2, context)] == list(range(min(n // 2, context)))
    assert max(back) < n
    both = relative_position_buckets(context, 2 * n, bidirectional=True)
    assert len(both) == 2 * context - 1
    assert both[:context] == tuple(reversed(back))
    assert set(both[context:]).isdisjoint(both[:context])


def test_padding_of_short_trials_gives_no_nan():
    """Frames far beyond the end of a trial attend to padding only."""
    encoder = make(context=2, bidirectional=True)
    bins = torch.randn(2, 3 + 2 * 99, 5)
    frames, _ = encoder(bins, torch.tensor([100, 3]), encoder.start(2))
    frames.sum().backward()
    assert bool(frames.isfinite().all())
    assert all(bool(p.grad.isfinite().all()) for p in encoder.parameters())


def test_only_bidirectional_attention_uses_the_future():
    for bidirectional in (False, True):
        encoder = make(context=4, depth=1, bidirectional=bidirectional).eval()
        bins = torch.randn(1, 3 + 2 * 19, 5, requires_grad=True)
        frames, _ = encoder(bins, None, encoder.start(1))
        (frames[0, 10] * torch.arange(16)).sum().backward()
        touched = bins.grad[0].abs().sum(-1).nonzero()[:, 0]
        first, last = 2 * (10 - 3), 2 * (10 + (3 if bidirectional else 0)) + 2
        assert (int(touched.min()), int(touched.max())) == (first, last)


def test_bidirectional_encoder_cannot_stream():
    encoder = make(bidirectional=True)
    with pytest.raises(UserError, match=r"cannot stream; .*encoder\.bidirectional=false$"):
        encoder.step(encoder.start(1), torch.randn(1, 9, 5))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_every_parameter_gets_a_gradient(bidirectional):
    encoder = TransformerSettings(width=16, depth=2, n_heads=4, context=8, bidirectional=bidirectional)
    settings = ModelSettings(encoder=encoder)
    model = Model(ModelConfig(settings=settings, n_channels=4, sessions=("a",), classes=CLASSES))
    outputs = model(torch.randn(2, 60, 4), torch.tensor([60, 33]), torch.tensor([0, 0]))
    (outputs.log_probs["ctc"] * torch.randn(outputs.log_probs["ctc"].shape)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    groups = parameter_groups(model)
    assert sum(len(g) for g in groups.values()) == len(list(model.parameters()))


def test_low_precision():
    encoder = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, state = encoder(torch.randn(1, 41, 5), None, encoder.start(1))
        frames, _ = encoder(torch.randn(1, 3, 5), None, state)
    assert bool(frames.isfinite().all())


def test_attention_dropout_only_in_training():
    attention = Attention(8, 2, context=4, dropout=0.5)
    windows = RelativePositionBias(TransformerSettings(width=2, n_heads=2, context=4)).windows(0, 6)
    frames, start = torch.randn(1, 6, 8), attention.start(1)
    assert not torch.equal(attention(frames, windows, start)[0], attention(frames, windows, start)[0])
    attention.eval()
    assert torch.equal(attention(frames, windows, start)[0], attention(frames, windows, start)[0])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["encoder.n_heads=5"], "width 128 must be a multiple of n_heads 5"),
        (["encoder.context=0"], "encoder.context = 0 is invalid: .*greater than or equal to 1"),
        (["encoder.context=20000"], "encoder.context = 20000 is invalid: .*less than or equal to 10000"),
        (["encoder.dropout=1.0"], "encoder.dropout = 1.0 is invalid"),
        (["encoder.attention_dropout=-0.1"], "encoder.attention_dropout = -0.1 is invalid"),
        (["encoder.depth=0"], "encoder.depth = 0 is invalid"),
        (["encoder.state_dim=8"], "'encoder.state_dim' belongs to a different encoder.kind"),
        (["encoder.kind=transfomer"], "did you mean transformer"),
    ],
)
def test_invalid_settings(overrides, words):
    with pytest.raises(UserError, match=words):
        load_recipe("tiny-transformer", overrides)
