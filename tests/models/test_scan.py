"""The chunked scan against the plain recurrence: outputs, final states and all gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arcuate.models.convolution import depthwise_conv
from arcuate.models.ssm import ssd_scan


def plain_recurrence(x, dt, log_decay, b, c, skip, state):
    outputs = []
    for t in range(x.shape[1]):
        added = (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, None, None]  # (B, H, P, N)
        state = state * log_decay[:, t].exp()[..., None, None] + added
        outputs.append((state * c[:, t, None, None]).sum(-1) + skip[:, None] * x[:, t])
    return torch.stack(outputs, 1), state


def draw_inputs(n_frames: int, dtype: torch.dtype = torch.float64, strength: float = 1.0, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    step = make(2, n_frames, 3).abs()
    inputs = [make(2, n_frames, 3, 4), step, -strength * step, make(2, n_frames, 5), make(2, n_frames, 5)]
    return [t.requires_grad_() for t in (*(i.detach() for i in inputs), make(3), make(2, 3, 4, 5))]


def outputs_and_gradients(run, inputs):
    """Outputs, final state, and the gradients of a random weighted sum of both."""
    y, state = run(*inputs)
    generator = torch.Generator().manual_seed(9)
    draw = lambda t: torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype)
    weights = [draw(y), draw(state)]
    loss = (y * weights[0]).sum() + (state * weights[1]).sum()
    return [y, state, *torch.autograd.grad(loss, inputs)]


@given(st.integers(1, 70), st.integers(1, 40), st.sampled_from([0.0, 1.0, 50.0]))
def test_chunks_equal_the_recurrence(n_frames, chunk, strength):
    inputs = draw_inputs(n_frames, strength=strength, seed=n_frames)
    ours = outputs_and_gradients(lambda *i: ssd_scan(*i, chunk=chunk), inputs)
    for a, b in zip(ours, outputs_and_gradients(plain_recurrence, inputs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("strength", [0.01, 1.0, 16.0])
def test_single_precision(strength):
    """Relative error of 1e-5 against the recurrence in double precision, over a long trial."""
    inputs = draw_inputs(600, torch.float32, strength)
    exact = outputs_and_gradients(plain_recurrence, [t.detach().double().requires_grad_() for t in inputs])
    for a, b in zip(outputs_and_gradients(ssd_scan, inputs), exact, strict=True):
        assert (a - b).abs().max() <= 1e-5 * max(1.0, b.abs().max().item())


def test_extreme_decays():
    """A decay to zero within one frame gives zeros and zero gradients, not NaN."""
    inputs = draw_inputs(50, torch.float32, strength=1e6)
    assert all(bool(t.isfinite().all()) for t in outputs_and_gradients(ssd_scan, inputs))


def test_gradients_against_finite_differences():
    inputs = draw_inputs(5)
    assert torch.autograd.gradcheck(lambda *i: ssd_scan(*i, chunk=2), inputs)


@pytest.mark.parametrize("taps", [1, 2, 4, 7])
def test_depthwise_conv_equals_a_grouped_convolution(taps):
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 9, 3), (taps, 3), (3,)))
    expected = torch.conv1d(x.transpose(1, 2), weight.t()[:, None], bias, groups=3).transpose(1, 2)
    torch.testing.assert_close(depthwise_conv(x, weight, bias), expected)
    assert torch.autograd.gradcheck(depthwise_conv, [x, weight, bias])


@pytest.mark.parametrize("every", [2, 3, 6, 20])
def test_depthwise_conv_of_every_nth_bin_equals_the_sampled_complete_one(every):
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 12, 3), (4, 3), (3,)))
    assert torch.equal(depthwise_conv(x, weight, bias, every), depthwise_conv(x, weight, bias)[:, ::every])
    assert torch.autograd.gradcheck(lambda *inputs: depthwise_conv(*inputs, every), [x, weight, bias])
