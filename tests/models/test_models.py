"""Parts of the model against reference implementations, parameter counts, and error messages."""

import math
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from arcuate.data.alphabet import CLASSES
from arcuate.data.batching import BatchStatistics
from arcuate.errors import UserError
from arcuate.models.config import (
    ConvStemSettings,
    FrontEndSettings,
    GRUSettings,
    ModelConfig,
    ModelSettings,
    Patch,
    SessionLayerSettings,
    SmoothingSettings,
)
from arcuate.models.convolution import extract_patches, project_patches
from arcuate.models.front_end import gaussian_kernel, normalise, smooth
from arcuate.models.gru import GRU, gru_recurrence, recurs_in_full_precision
from arcuate.models.io import load_model, save_model
from arcuate.models.model import (
    Model,
    count_parameters,
    parameter_groups,
)

B2T25 = ModelSettings(
    front_end=FrontEndSettings(session_layer=SessionLayerSettings(dropout=0.2)),
    encoder=GRUSettings(),
    output_init="xavier",
)
B2T24 = ModelSettings(
    front_end=FrontEndSettings(
        normalise="block", smoothing=SmoothingSettings(sd=2.0, taps=20), patch=Patch(bins=32, stride=4)
    ),
    encoder=GRUSettings(width=1024, depth=5, bidirectional=True, learned_initial_state=False),
)


def make_model_config(settings: ModelSettings, n_channels: int, n_sessions: int) -> ModelConfig:
    sessions = tuple(f"s{i}" for i in range(n_sessions))
    return ModelConfig(settings=settings, n_channels=n_channels, sessions=sessions, classes=CLASSES)


def make_model(n_channels: int = 5, n_sessions: int = 3, width: int = 6, depth: int = 2, **changes) -> Model:
    torch.manual_seed(1)
    encoder = GRUSettings(width=width, depth=depth, **changes.pop("encoder", {}))
    front_end = FrontEndSettings(**({"patch": Patch(bins=5, stride=2)} | changes))
    settings = ModelSettings(front_end=front_end, encoder=encoder)
    return Model(make_model_config(settings, n_channels, n_sessions)).eval()


def test_official_sizes():
    assert count_parameters(make_model_config(B2T25, 512, 45)) == 44_315_177
    assert count_parameters(make_model_config(B2T24, 256, 24)) == 133_845_033


@pytest.mark.parametrize(("n_bins", "n_frames"), [(0, 1), (13, 1), (14, 1), (17, 1), (18, 2), (800, 197)])
def test_count_frames(n_bins, n_frames):
    patch = Patch(bins=14, stride=4)
    assert patch.count_frames(n_bins) == n_frames
    assert patch.count_frames(torch.tensor([n_bins])).tolist() == [n_frames]


def test_parameter_groups_hold_every_parameter_once():
    model = make_model()
    groups = parameter_groups(model)
    assert sorted(id(p) for group in groups.values() for p in group) == sorted(id(p) for p in model.parameters())
    assert {k: len(v) for k, v in groups.items()} == {"bias": 5, "session": 6, "rest": 6}


def test_initial_weights():
    model = make_model(width=8)
    recurrent = model.encoder.gru.weight_hh_l1
    assert torch.allclose(recurrent.T @ recurrent, torch.eye(8), atol=1e-5)
    bound = math.sqrt(6 / (model.encoder.gru.weight_ih_l0.shape[1] + 24))
    assert 0.9 * bound < model.encoder.gru.weight_ih_l0.abs().max() <= bound
    assert torch.equal(model.front_end.session_layer.weights[2], torch.eye(5))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
def test_gru_equals_torch(bidirectional, depth):
    """Outputs, final states and every gradient, on the same parameters."""
    torch.manual_seed(0)
    settings = GRUSettings(width=7, depth=depth, bidirectional=bidirectional, dropout=0.0)
    ours = GRU(settings, Patch(bins=3, stride=2), 4).double()
    bins = torch.randn(5, 14, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 6, ours.n_outputs, dtype=torch.float64)
    results = []
    for run in (ours.forward_with_layers, ours._forward_torch):
        frames, state, _ = run(bins, None, ours.start(5), ())
        parameters = [bins, *ours.parameters()]
        results.append([frames, state, *torch.autograd.grad((frames * weight).sum() + state.sum(), parameters)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_dropout_of_the_gru_on_a_gpu_is_drawn_by_torch(bidirectional, monkeypatch):
    """cuDNN's own dropout has a state that `torch.manual_seed` does not reset: a resumed run would differ."""
    encoder = GRU(GRUSettings(width=5, depth=2, bidirectional=bidirectional, dropout=0.5), Patch(bins=2, stride=1), 3)
    bins, n_frames = torch.randn(3, 9, 3), torch.tensor([8, 1, 5])
    monkeypatch.setattr(encoder.gru, "forward", lambda *args: pytest.fail("all layers in one call, with dropout"))
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(encoder.train()._forward_torch(bins, n_frames, encoder.start(3), (), (8, 1, 5))[0])
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_trials_are_packed_once_for_all_layers_of_a_gru_on_a_gpu():
    """Packing copies the batch in many small parts: per layer, it was most of the copies of a step with dropout."""
    encoder = GRU(GRUSettings(width=5, depth=4, bidirectional=True, dropout=0.5), Patch(bins=2, stride=1), 3).train()
    counts = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            counts[function.overloadpacket._qualified_op_name] += 1
            return function(*args, **(kwargs or {}))

    with Count():
        encoder._forward_torch(torch.randn(3, 9, 3), torch.tensor([8, 1, 5]), encoder.start(3), (), (8, 1, 5))
    assert counts["aten::_pack_padded_sequence"] == 1


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("lengths", [None, (8, 1, 5)])
@pytest.mark.parametrize(("dropout", "layers"), [(0.5, ()), (0.0, ()), (0.0, (1,))])
def test_gru_on_a_gpu_is_called_for_training_if_gradients_are_needed(training, lengths, dropout, layers, monkeypatch):
    """cuDNN: "RNN backward can only be called in training mode", the mode of the call to the kernel."""
    is_train = []

    def record(kernel):
        def run(*args):
            is_train.append(args[-2 if isinstance(args[3], list) else -3])  # packed calls lack batch_first
            return kernel(*args)

        return run

    for module in (torch, torch._VF):
        monkeypatch.setattr(module, "gru", record(module.gru))
    settings = GRUSettings(width=5, depth=2, bidirectional=lengths is not None, dropout=dropout)
    encoder = GRU(settings, Patch(bins=2, stride=1), 3).train(training)
    n_frames = None if lengths is None else torch.tensor(lengths)
    encoder._forward_torch(torch.randn(3, 9, 3), n_frames, encoder.start(3), layers, lengths)
    assert is_train and all(is_train)


@pytest.mark.parametrize(
    ("device", "dtype", "full"), [("cuda", torch.bfloat16, True), ("cuda", torch.float16, False), ("cpu", None, True)]
)
def test_recurrent_layers_do_not_run_in_fp16_without_a_loss_scaler(device, dtype, full):
    """torch's autocast of cuDNN's recurrent layers casts to fp16 whatever its dtype is."""
    before = torch.get_autocast_dtype(device)
    assert not recurs_in_full_precision(device)
    try:
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, dtype or before)
        assert recurs_in_full_precision(device) is full
    finally:
        torch.set_autocast_enabled(device, False)
        torch.set_autocast_dtype(device, before)


def test_gru_with_lengths_equals_torch_packed(monkeypatch):
    torch.manual_seed(0)
    encoder = GRU(GRUSettings(width=5, depth=2, bidirectional=True), Patch(bins=2, stride=1), 3).double().eval()
    bins, n_frames = torch.randn(3, 9, 3, dtype=torch.float64), torch.tensor([8, 1, 5])
    ours, _ = encoder(bins, n_frames, encoder.start(3))
    lengths = tuple(n_frames.tolist())
    with monkeypatch.context() as patch:  # torch's own sorting by length reads the order back from the device
        patch.setattr(torch.Tensor, "cpu", lambda tensor: pytest.fail("a read of the device"))
        packed, *_ = encoder._forward_torch(bins, n_frames, encoder.start(3), (), lengths)
        encoder._forward_torch(bins, n_frames, encoder.start(3), (1,), lengths)
    for i, n in enumerate(n_frames):
        torch.testing.assert_close(ours[i, :n], packed[i, :n], atol=1e-10, rtol=0)
    for parameter in encoder.parameters():
        a, b = (
            torch.autograd.grad(
                sum(y[i, :n].square().sum() for i, n in enumerate(n_frames)), parameter, retain_graph=True
            )
            for y in (ours, packed)
        )
        torch.testing.assert_close(a[0], b[0], atol=1e-9, rtol=0)


@pytest.mark.parametrize("reverse", [False, True])
def test_recurrence_gradients(reverse):
    torch.manual_seed(0)
    shapes = ((3, 2, 6), (2, 2), (6, 2), (2,))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lambda *x: gru_recurrence(*x, reverse=reverse), inputs)


@pytest.mark.parametrize(("n_bins", "size", "stride"), [(7, 3, 2), (9, 5, 5), (6, 6, 4), (8, 4, 1)])
def test_project_patches_equals_a_product_of_patches(n_bins, size, stride):
    torch.manual_seed(0)
    patch = Patch(bins=size, stride=stride)
    bins, weight, bias = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, n_bins, 3), (4, size * 3), (4,))
    )
    expected = torch.nn.functional.linear(extract_patches(bins, patch), weight, bias).transpose(0, 1)
    torch.testing.assert_close(project_patches(bins, weight, bias, patch), expected)
    assert torch.autograd.gradcheck(lambda *x: project_patches(*x, patch), [bins, weight, bias])


@pytest.mark.parametrize("changes", [{}, {"stem": ConvStemSettings(enabled=True)}])
def test_a_dilated_patch_is_a_patch_whose_other_weights_are_zero(changes):
    patch = Patch(bins=9, stride=4, dilation=4)
    dilated = make_model(patch=patch, session_layer=SessionLayerSettings(dropout=0.0), **changes)
    dense = make_model(patch=Patch(bins=9, stride=4), session_layer=SessionLayerSettings(dropout=0.0), **changes)
    weights = dilated.state_dict()
    sparse = torch.zeros(3 * 6, 9, 5)
    sparse[:, ::4] = weights["encoder.gru.weight_ih_l0"].unflatten(1, (3, 5))
    dense.load_state_dict({**weights, "encoder.gru.weight_ih_l0": sparse.flatten(1)})
    for n_bins in (1, 9, 12, 13, 30, 40, 77):
        inputs = torch.randn(2, n_bins, 5), torch.full((2,), n_bins), torch.tensor([0, 1])
        a, b = dilated(*inputs), dense(*inputs)
        assert a.n_frames.tolist() == b.n_frames.tolist() == [a.frames.shape[1]] * 2
        torch.testing.assert_close(a.frames, b.frames)


@pytest.mark.parametrize(
    ("bins", "stride", "message"), [(13, 6, "multiple of dilation 4"), (14, 4, "set bins to 13 or 17")]
)
def test_dilation_must_fit(bins, stride, message):
    with pytest.raises(ValueError, match=message):
        Patch(bins=bins, stride=stride, dilation=4)


def test_a_loaded_model_is_aligned_like_a_new_one(tmp_path):
    """Tensors in a mapped file begin at any multiple of 4 bytes, and products round differently there."""
    model = make_model(n_channels=4, width=5, depth=1)
    save_model(tmp_path, model)
    loaded, given = load_model(tmp_path).state_dict(), model.state_dict()
    assert {n: t.data_ptr() % 64 for n, t in loaded.items()} == {n: t.data_ptr() % 64 for n, t in given.items()}
    assert all(torch.equal(loaded[name], given[name]) for name in given)


@pytest.mark.parametrize("taps", [9, 20])
def test_smoothing_is_a_convolution(taps):
    weights = gaussian_kernel(SmoothingSettings(sd=2.0, taps=taps))
    assert sum(weights) == pytest.approx(1.0)
    bins = torch.randn(2, 75 + taps, 3)
    expected = torch.stack([(bins[:, t : t + taps] * torch.tensor(weights)[:, None]).sum(1) for t in range(76)], 1)
    for every in (1, 2, 3):
        torch.testing.assert_close(smooth(bins, weights, every), expected[:, ::every], atol=1e-6, rtol=0)


def test_rolling_normalisation_is_the_causal_estimate():
    torch.manual_seed(0)
    settings = FrontEndSettings(normalise="rolling")
    past = torch.randn(200, 2, dtype=torch.float64) * 3 + 7
    statistics = BatchStatistics(past.mean(0)[None], past.std(0, correction=0)[None], torch.tensor([200]))
    bins = torch.randn(1, 30, 2) * 2 + 5
    scores, _ = normalise(bins, statistics, settings)
    for t in (0, 11, 29):
        seen = bins[0, : t + 1].double()
        mean = (200 * past.mean(0) + seen.sum(0)) / (200 + t + 1)
        square = (200 * past.square().mean(0) + seen.square().sum(0)) / (200 + t + 1)
        expected = (seen[-1] - mean) / (square - mean.square()).sqrt()
        torch.testing.assert_close(scores[0, t].double(), expected, atol=1e-5, rtol=0)


def test_log1p_precedes_block_normalisation():
    statistics = BatchStatistics(torch.full((1, 1), 0.5), torch.full((1, 1), 2.0), torch.tensor([9]))
    scores, _ = normalise(torch.tensor([[[math.e - 1.0]]]), statistics, FrontEndSettings(normalise="block", log1p=True))
    assert scores.item() == pytest.approx((1.0 - 0.5) / 2.0)


def test_errors_name_the_remedy():
    with pytest.raises(UserError, match="5 channels"):
        make_model()(torch.zeros(1, 20, 4), torch.tensor([20]), torch.tensor([0]))
    with pytest.raises(UserError, match="pass the statistics of the block"):
        make_model(normalise="block")(torch.zeros(1, 20, 5), torch.tensor([20]), torch.tensor([0]))
    with pytest.raises(UserError, match="bidirectional model cannot stream"):
        make_model(encoder={"bidirectional": True}).start(0)
    with pytest.raises(UserError, match="3 sessions"):
        make_model()(torch.zeros(1, 20, 5), torch.tensor([20]), torch.tensor([3]))
    with pytest.raises(ValueError, match="stride must not exceed bins"):
        Patch(bins=3, stride=4)
