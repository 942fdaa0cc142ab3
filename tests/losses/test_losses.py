"""The CTC loss against the sum over all alignments, and both official reductions."""

import itertools

import pytest
import torch

from arcuate.losses.combined import ctc_loss
from arcuate.losses.config import CTCSettings


def collapse(path: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(k for k, _ in itertools.groupby(path) if k)


def enumerate_alignments(log_probs: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Negative log of the summed probability of all paths that collapse to the tokens. (F, V)"""
    n_frames, n_classes = log_probs.shape
    scores = [
        sum(log_probs[t, k] for t, k in enumerate(path))
        for path in itertools.product(range(n_classes), repeat=n_frames)
        if collapse(path) == tuple(tokens)
    ]
    return -torch.logsumexp(torch.stack(scores), 0) if scores else torch.tensor(torch.inf)


def make_batch(cases: list[tuple[int, list[int]]]):
    torch.manual_seed(0)
    log_probs = torch.randn(len(cases), max(n for n, _ in cases), 3).double().log_softmax(-1)
    n_frames = torch.tensor([n for n, _ in cases])
    n_tokens = torch.tensor([len(t) for _, t in cases])
    tokens = torch.tensor([t + [0] * (4 - len(t)) for _, t in cases], dtype=torch.int32)
    return log_probs, n_frames, tokens, n_tokens


CASES = [(5, [1, 2]), (4, [1, 1]), (5, [2, 2, 1]), (3, []), (2, [1])]


def test_equals_enumeration():
    batch = make_batch(CASES)
    losses = ctc_loss(*batch, CTCSettings(reduction="sum_per_trial"))
    expected = [enumerate_alignments(batch[0][i, :n], tokens) for i, (n, tokens) in enumerate(CASES)]
    torch.testing.assert_close(losses, torch.stack(expected).double())


def test_padding_frames_get_no_gradient():
    log_probs, *rest = make_batch(CASES)
    log_probs.requires_grad_()
    ctc_loss(log_probs, *rest, CTCSettings()).sum().backward()
    for i, (n, _) in enumerate(CASES):
        assert log_probs.grad[i, n:].abs().sum() == 0


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_trials_that_cannot_be_aligned(zero_infinity):
    batch = make_batch([(2, [1, 1]), (3, [1])])
    losses = ctc_loss(*batch, CTCSettings(zero_infinity=zero_infinity))
    assert losses[0].item() == (0.0 if zero_infinity else float("inf"))
    assert bool(losses[1].isfinite())


def test_official_reductions():
    log_probs, n_frames, tokens, n_tokens = make_batch([c for c in CASES if c[1]])
    official = log_probs.transpose(0, 1), tokens, n_frames, n_tokens
    ours = {
        r: ctc_loss(log_probs, n_frames, tokens, n_tokens, CTCSettings(reduction=r)).mean()
        for r in ("mean_per_token", "sum_per_trial")
    }
    torch.testing.assert_close(ours["mean_per_token"], torch.nn.CTCLoss(reduction="mean")(*official))
    torch.testing.assert_close(ours["sum_per_trial"], torch.nn.CTCLoss(reduction="none")(*official).mean())
