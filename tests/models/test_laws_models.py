"""Laws of the model: invariance to padding, batch composition and chunking."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arcuate.data.alphabet import CLASSES
from arcuate.data.batching import BatchStatistics
from arcuate.models import transformer as attention
from arcuate.models.config import (
    FrontEndSettings,
    GRUSettings,
    ModelConfig,
    ModelSettings,
    SessionLayerSettings,
    SSMSettings,
    TransformerSettings,
)
from arcuate.models.interfaces import Outputs
from arcuate.models.model import Model
from support.cases import cases
from support.encoders import N_CHANNELS, lengths, make_batch, models

TOLERANCE = 1e-5
quick = settings(max_examples=cases(2))


@pytest.fixture(autouse=True, scope="module")
def short_windows():
    """Small attention blocks, so that short trials need several of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_MIN_BLOCK", 3)
        yield


def select_rows(batch: tuple, rows: list[int], n_bins: int | None = None) -> tuple:
    bins, lengths, session, past = batch
    past = BatchStatistics(past.mean[rows], past.sd[rows], past.n_bins[rows])
    return bins[rows, :n_bins], lengths[rows], session[rows], past


def assert_same(a, b, n: int) -> None:
    """Check that row 0 of two outputs agrees on its n true frames."""
    torch.testing.assert_close(a.log_probs["ctc"][0, :n], b.log_probs["ctc"][0, :n], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(a.frames[0, :n], b.frames[0, :n], atol=TOLERANCE, rtol=0)


def assert_same_mode(a, b) -> None:
    if b is not None:
        torch.testing.assert_close(a[:1], b[:1], atol=TOLERANCE, rtol=0)


@quick
@given(models(), lengths, st.integers(0, 9), st.sampled_from([float("nan"), 0.0, 1e6]))
def test_padding_changes_nothing(model, lengths, extra, filling):
    """A trial has the same outputs alone and in a batch with arbitrary values as padding."""
    batch = make_batch(lengths, seed=extra)
    bins = torch.nn.functional.pad(batch[0], (0, 0, 0, extra))
    for i, n in enumerate(lengths):
        bins[i, n:] = filling
    given_bins = bins.clone()
    with torch.no_grad():
        together = model(bins, *batch[1:])
        assert torch.equal(bins.nan_to_num(), given_bins.nan_to_num())  # the inputs are not modified
        for i, n in enumerate(lengths):
            alone = model(*select_rows(batch, [i], n))
            n_frames = int(together.n_frames[i])
            assert alone.n_frames.tolist() == [n_frames] == [alone.frames.shape[1]]
            mine = type(together)(
                together.frames[i : i + 1], alone.n_frames, {"ctc": together.log_probs["ctc"][i : i + 1]}
            )
            assert_same(mine, alone, n_frames)
            assert_same_mode(None if together.mode is None else together.mode[i : i + 1], alone.mode)


@quick
@given(models(), lengths, st.randoms(use_true_random=False))
def test_batch_order_changes_nothing(model, lengths, random):
    batch = make_batch(lengths, seed=7)
    order = list(range(len(lengths)))
    random.shuffle(order)
    with torch.no_grad():
        straight, shuffled = model(*batch), model(*select_rows(batch, order))
    torch.testing.assert_close(
        straight.log_probs["ctc"][order], shuffled.log_probs["ctc"], atol=TOLERANCE, rtol=0, equal_nan=True
    )


def stream(model: Model, bins: torch.Tensor, session: int, past: BatchStatistics, cuts: list[int]):
    state, pieces = model.start(session, past), []
    for first, last in zip([0, *cuts], [*cuts, bins.shape[1]], strict=True):
        outputs, state = model.step(state, bins[:, first:last])
        assert outputs.n_frames.tolist() == [outputs.frames.shape[1]]
        pieces.append(outputs)
    pieces.append(model.finish(state))
    log_probs, frames = [p.log_probs["ctc"] for p in pieces], [p.frames for p in pieces]
    return torch.cat(log_probs, 1), torch.cat(frames, 1), pieces[-1].mode


@quick
@given(models(bidirectional=st.just(False)), st.integers(0, 60), st.lists(st.integers(0, 60), max_size=5))
def test_chunked_equals_offline(model, n, cuts):
    bins, lengths, session, past = make_batch([max(n, 1)], seed=n)
    bins, lengths = bins[:, :n], torch.tensor([n])
    with torch.no_grad():
        offline = model(bins, lengths, session, past)
        for chosen in (sorted(min(c, n) for c in cuts), list(range(1, n))):
            log_probs, frames, mode = stream(model, bins, int(session), past, chosen)
            assert_same_mode(mode, offline.mode)
            assert frames.shape[1] == int(offline.n_frames)
            torch.testing.assert_close(log_probs, offline.log_probs["ctc"], atol=TOLERANCE, rtol=0)
            torch.testing.assert_close(frames, offline.frames, atol=TOLERANCE, rtol=0)


@quick
@given(models(bidirectional=st.just(False)), st.integers(1, 60), st.lists(st.booleans(), min_size=60))
def test_precomputation_changes_nothing(model, n, when):
    bins, _, session, past = make_batch([n], seed=n)
    pieces, state = [], model.start(int(session), past)
    with torch.no_grad():
        offline = model(bins, torch.tensor([n]), session, past)
        for t in range(n):
            outputs, state = model.step(state, bins[:, t : t + 1])
            state = model.precompute(state) if when[t] else state
            pieces.append(outputs)
        pieces.append(model.finish(state))
    assert_same(offline, Outputs(*joined(pieces)), int(offline.n_frames))


def joined(pieces):
    frames = torch.cat([p.frames for p in pieces], 1)
    log_probs = torch.cat([p.log_probs["ctc"] for p in pieces], 1)
    return frames, torch.tensor([frames.shape[1]]), {"ctc": log_probs}


@quick
@given(models(bidirectional=st.just(False)))
def test_states_are_immutable(model):
    """Two continuations of one state are independent."""
    bins, _, session, past = make_batch([24], seed=3)
    with torch.no_grad():
        _, middle = model.step(model.start(int(session), past), bins[:, :12])
        first = model.step(middle, bins[:, 12:])[0].frames
        model.step(middle, bins[:, 12:] + 100.0)
        again = model.step(middle, bins[:, 12:])[0].frames
    assert torch.equal(first, again)


@quick
@given(models(bidirectional=st.just(False)), st.integers(1, 40))
def test_causal_models_do_not_use_the_future(model, n):
    """A frame does not depend on bins after those it needs."""
    bins, _, session, past = make_batch([48], seed=n)
    other = torch.cat([bins[:, :n], torch.randn(1, 48 - n, N_CHANNELS)], 1)
    patch = model.config.settings.front_end.patch
    certain = max(n - model.front_end.right - patch.bins, -1) // patch.stride + 1
    with torch.no_grad():
        a, b = (model(x, torch.tensor([48]), session, past) for x in (bins, other))
    assert_same(a, b, certain)


@quick
@given(models(), lengths)
def test_padding_gets_no_gradient(model, lengths):
    batch = make_batch(lengths, seed=5)
    bins = batch[0].requires_grad_()
    outputs = model(bins, *batch[1:])
    real = torch.arange(outputs.frames.shape[1]) < outputs.n_frames[:, None]
    outputs.log_probs["ctc"][real].square().sum().backward()
    for i, n in enumerate(lengths):
        assert bins.grad[i, n:].abs().sum() == 0


def test_non_finite_bins_give_finite_outputs():
    model = Model(
        ModelConfig(
            settings=ModelSettings(encoder=GRUSettings(width=5, depth=1)),
            n_channels=2,
            sessions=("s",),
            classes=CLASSES,
        )
    ).eval()
    bins = torch.randn(1, 30, 2)
    bins[0, 4, 1] = float("inf")
    bins[0, 9, 0] = float("nan")
    outputs = model(bins, torch.tensor([30]), torch.tensor([0]))
    assert bool(outputs.log_probs["ctc"].isfinite().all())


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    "encoder",
    [
        GRUSettings(width=5, depth=2, dropout=0.5),
        SSMSettings(width=8, n_heads=2, depth=1, dropout=0.5),
        TransformerSettings(width=8, n_heads=2, depth=1, dropout=0.5),
    ],
    ids=lambda e: e.kind,
)
def test_dropout_only_in_training(mode, encoder):
    torch.manual_seed(0)
    front_end = FrontEndSettings(session_layer=SessionLayerSettings(dropout=0.5))
    config = ModelConfig(
        settings=ModelSettings(
            front_end=front_end,
            encoder=encoder,
        ),
        n_channels=2,
        sessions=("s",),
        classes=CLASSES,
    )
    model = getattr(Model(config), mode)()
    batch = torch.randn(1, 30, 2), torch.tensor([30]), torch.tensor([0])
    assert torch.equal(model(*batch).frames, model(*batch).frames) == (mode == "eval")
