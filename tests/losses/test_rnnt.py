"""The transducer loss against enumeration of all paths, against finite differences, and in chunks of frames."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from arcuate.errors import UserError
from arcuate.losses import rnnt_loss
from arcuate.losses.rnnt import Lengths, _lattice_loss, _node_log_probs, chunked_rnnt_loss
from support.cases import cases as n_cases

quick = settings(max_examples=n_cases(2))


def sum_of_paths(log_probs: torch.Tensor, tokens: list[int], blank: int, t: int = 0, u: int = 0):
    """Log-probability of all paths from node (t, u) to the end, by recursion without sharing. (T, U + 1, V)"""
    last = t == log_probs.shape[0] - 1
    ways = []
    if last and u == len(tokens):
        ways.append(log_probs[t, u, blank])
    if not last:
        ways.append(log_probs[t, u, blank] + sum_of_paths(log_probs, tokens, blank, t + 1, u))
    if u < len(tokens):
        ways.append(log_probs[t, u, tokens[u]] + sum_of_paths(log_probs, tokens, blank, t, u + 1))
    return torch.logsumexp(torch.stack(ways), 0)


@st.composite
def cases(draw):
    """Batches of tiny trials, including more tokens than frames, no tokens, and one frame."""
    n_trials, n_classes = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    blank = draw(st.integers(0, n_classes - 1))
    token = st.integers(0, n_classes - 1).filter(lambda k: k != blank)
    tokens = [draw(st.lists(token, max_size=3)) for _ in range(n_trials)]
    n_frames = [draw(st.integers(1, 4)) for _ in range(n_trials)]
    longest = max(map(len, tokens)) + draw(st.integers(0, 1))
    torch.manual_seed(draw(st.integers(0, 99)))
    logits = 2 * torch.randn(
        n_trials, max(n_frames) + draw(st.integers(0, 1)), longest + 1, n_classes, dtype=torch.float64
    )
    targets = torch.tensor([t + [blank] * (longest - len(t)) for t in tokens]).reshape(n_trials, longest)
    return logits, targets.long(), torch.tensor(n_frames), torch.tensor([len(t) for t in tokens]), blank


@quick
@given(cases())
def test_equals_enumeration_with_its_gradient(case):
    logits, targets, n_frames, n_tokens, blank = case
    logits.requires_grad_()
    expected = torch.stack(
        [
            -sum_of_paths(logits[i, : n_frames[i], : u + 1].log_softmax(-1), targets[i, :u].tolist(), blank)
            for i, u in enumerate(n_tokens.tolist())
        ]
    )
    losses = rnnt_loss(logits, targets, n_frames, n_tokens, blank)
    torch.testing.assert_close(losses, expected, atol=1e-10, rtol=0)
    weights = torch.arange(1.0, len(losses) + 1, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((x * weights).sum(), logits)[0] for x in (losses, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


@quick
@given(cases(), st.sampled_from([float("nan"), float("inf"), 0.0]))
def test_padding_changes_nothing(case, filling):
    logits, targets, n_frames, n_tokens, blank = case
    clean = rnnt_loss(logits, targets, n_frames, n_tokens, blank)
    dirty = logits.clone()
    for i, (t, u) in enumerate(zip(n_frames, n_tokens, strict=True)):
        dirty[i, t:], dirty[i, :, u + 1 :] = filling, filling
    dirty.requires_grad_()
    losses = rnnt_loss(dirty, targets, n_frames, n_tokens, blank)
    assert torch.equal(losses, clean)
    losses.sum().backward()
    for i, (t, u) in enumerate(zip(n_frames, n_tokens, strict=True)):
        assert dirty.grad[i, t:].abs().sum() + dirty.grad[i, :, u + 1 :].abs().sum() == 0
    assert bool(dirty.grad.isfinite().all())


def test_gradients_against_finite_differences():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    targets, n_frames, n_tokens = torch.tensor([[1, 2], [2, 0]]), torch.tensor([3, 2]), torch.tensor([2, 1])
    assert torch.autograd.gradcheck(lambda x: rnnt_loss(x, targets, n_frames, n_tokens), [logits])


def make_join(n_trials: int, n_frames: int, n_tokens: int, dtype: torch.dtype = torch.float64):
    torch.manual_seed(1)
    frames = torch.randn(n_trials, n_frames, 6, dtype=dtype, requires_grad=True)
    predicted = torch.randn(n_trials, n_tokens + 1, 6, dtype=dtype, requires_grad=True)
    weight = torch.randn(5, 6, dtype=dtype, requires_grad=True)
    return frames, predicted, weight, lambda f, p: torch.tanh(f[:, :, None] + p[:, None]) @ weight.t()


@pytest.mark.parametrize("nodes", [1, 40, 10_000])
def test_chunked_loss_equals_the_loss(nodes):
    """Losses and all gradients, including trials that end within or before a chunk."""
    frames, predicted, weight, join = make_join(3, 9, 4)
    targets = torch.randint(1, 5, (3, 4))
    lengths = torch.tensor([9, 1, 5]), torch.tensor([4, 2, 0])
    results = []
    for losses in (
        rnnt_loss(join(frames, predicted), targets, *lengths),
        chunked_rnnt_loss(join, frames, predicted, targets, *lengths, nodes=nodes),
    ):
        gradients = torch.autograd.grad(losses.square().sum(), [frames, predicted, weight])
        results.append([losses, *gradients])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)
    with torch.no_grad():
        again = chunked_rnnt_loss(join, frames, predicted, targets, *lengths, nodes=nodes)
    torch.testing.assert_close(again, results[0][0], atol=1e-10, rtol=0)


@quick
@given(cases())
def test_all_nodes_at_once_equal_the_nodes_of_each_trial(case):
    """As other devices than a CPU compute them: values and gradients, whatever the nodes beyond a trial hold."""
    logits, targets, n_frames, n_tokens, blank = case
    sizes = list(zip(n_frames.tolist(), n_tokens.tolist(), strict=True))
    results = []
    for given_sizes in (sizes, None):
        own = logits.clone().requires_grad_()
        losses = _lattice_loss(*_node_log_probs(own, targets, given_sizes, blank, False), n_frames, n_tokens)
        results.append((losses, *torch.autograd.grad(losses.square().sum(), own)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


def test_a_device_needs_as_many_kernels_for_many_trials_as_for_one():
    """On the meta device, which computes nothing; a kernel per trial and frame would take seconds to launch."""
    counts = []
    for n_trials in (1, 6):
        frames, predicted, weight = (
            torch.randn(*s, device="meta") for s in ((n_trials, 50, 6), (n_trials, 5, 6), (5, 6))
        )
        predicted.requires_grad_()
        lengths = torch.full((n_trials,), 50), torch.full((n_trials,), 4)
        on_device = [length.to("meta") for length in lengths]
        targets = torch.ones(n_trials, 4, dtype=torch.int64, device="meta")
        join = lambda f, p, w=weight: torch.tanh(f[:, :, None] + p[:, None]) @ w.t()
        with _CountOperations() as counted:
            chunked_rnnt_loss(join, frames, predicted, targets, *on_device, on_host=Lengths(*lengths)).sum().backward()
        counts.append(counted.n)
    assert counts[0] == counts[1] < 2000


class _CountOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.n += 1
        return function(*args, **(kwargs or {}))


def test_single_precision_over_a_long_trial():
    torch.manual_seed(0)
    logits = torch.randn(1, 300, 61, 8)
    targets, n_frames, n_tokens = torch.randint(1, 8, (1, 60)), torch.tensor([300]), torch.tensor([60])
    gradients = []
    for x in (logits.requires_grad_(), logits.detach().double().requires_grad_()):
        loss = rnnt_loss(x, targets, n_frames, n_tokens)
        gradients.append(torch.autograd.grad(loss.sum(), x)[0].double())
    assert (gradients[0] - gradients[1]).abs().max() < 1e-3


def test_impossible_path():
    logits = torch.zeros(1, 2, 2, 3, requires_grad=True)
    with torch.no_grad():
        logits[..., 1] = -torch.inf
    loss = rnnt_loss(logits, torch.tensor([[1]]), torch.tensor([2]), torch.tensor([1]))
    assert loss.item() == float("inf")
    loss.sum().backward()
    assert logits.grad.abs().sum() == 0


@pytest.mark.parametrize(
    ("n_frames", "n_tokens", "targets", "words"),
    [
        ([0], [1], [[1, 2]], "n_frames is .*1 to 3 for each"),
        ([4], [1], [[1, 2]], "n_frames is .*1 to 3 for each"),
        ([3], [3], [[1, 2]], "n_tokens is .*0 to 2 for each"),
        ([3], [-1], [[1, 2]], "n_tokens is .*0 to 2 for each"),
        ([3], [2], [[1, 0]], "true n_tokens"),
        ([3], [1], [[1, 2, 1]], "one position more than targets"),
        ([3], [1], [[1, 2], [1, 2]], "one position more than targets"),
        ([3, 3], [1], [[1, 2]], "n_frames is .3, 3.; expected one integer from 1 to 3 for each of 1 trials"),
        ([3], [[1]], [[1, 2]], "n_tokens is .*; expected one integer"),
        ([3.0], [1], [[1, 2]], "expected one integer"),
        ([3], [2], [[1, 4]], "there are 4"),
        ([3], [2], [[1, -1]], "there are 4"),
        ([3], [2], [[1.0, 2.0]], "expected integers"),
    ],
)
def test_invalid_lengths_and_targets(n_frames, n_tokens, targets, words):
    with pytest.raises(UserError, match=words):
        rnnt_loss(torch.zeros(1, 3, 3, 4), torch.tensor(targets), torch.tensor(n_frames), torch.tensor(n_tokens))


def test_invalid_logits_and_blank():
    targets, lengths = torch.tensor([[1, 2]]), (torch.tensor([3]), torch.tensor([1]))
    for logits in (torch.zeros(3, 3, 4), torch.zeros(1, 3, 3, 4, dtype=torch.int64)):
        with pytest.raises(UserError, match="floating-point numbers of shape"):
            rnnt_loss(logits, targets, *lengths)
    for blank in (4, -1):
        with pytest.raises(UserError, match="is not a class"):
            rnnt_loss(torch.zeros(1, 3, 3, 4), targets, *lengths, blank=blank)
