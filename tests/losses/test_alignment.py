"""Forced alignment against the best of all paths, and the laws of the losses that use it."""

import itertools

import torch

from arcuate.losses.alignment import alignment_loss, forced_alignment
from arcuate.losses.combined import distillation_loss
from arcuate.losses.config import DistillationSettings

CASES = [(5, [1, 2]), (4, [1, 1]), (5, [2, 2, 1]), (3, []), (2, [1]), (2, [1, 1])]  # the last one does not fit


def make_batch() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    log_probs = torch.randn(len(CASES), max(n for n, _ in CASES), 3).log_softmax(-1)
    tokens = torch.tensor([t + [0] * (4 - len(t)) for _, t in CASES])
    return log_probs, torch.tensor([n for n, _ in CASES]), tokens, torch.tensor([len(t) for _, t in CASES])


def best_path(log_probs: torch.Tensor, tokens: list[int]) -> tuple[int, ...] | None:
    paths = [
        path
        for path in itertools.product(range(3), repeat=len(log_probs))
        if [k for k, _ in itertools.groupby(path) if k] == tokens
    ]
    return max(paths, key=lambda p: float(log_probs[torch.arange(len(p)), list(p)].sum()), default=None)


def test_alignment_is_the_best_of_all_paths() -> None:
    batch = make_batch()
    aligned = forced_alignment(*batch)
    for i, (n, tokens) in enumerate(CASES):
        expected = best_path(batch[0][i, :n], tokens)
        assert aligned[i].tolist() == [*(expected or [-1] * n), *[-1] * (5 - n)]


def test_loss_does_not_depend_on_padding_or_order() -> None:
    log_probs, n_frames, tokens, n_tokens = make_batch()
    losses = alignment_loss(log_probs, n_frames, tokens, n_tokens)
    flipped = alignment_loss(*(part.flip(0) for part in (log_probs, n_frames, tokens, n_tokens)))
    torch.testing.assert_close(flipped.flip(0), losses, rtol=0, atol=0)
    alone = alignment_loss(log_probs[1:2, :4], n_frames[1:2], tokens[1:2, :2], n_tokens[1:2])
    torch.testing.assert_close(alone[0], losses[1], rtol=0, atol=0)
    assert losses[-1] == 0  # cannot be aligned
    path = best_path(log_probs[0], [1, 2])
    assert path is not None
    torch.testing.assert_close(losses[0], -log_probs[0, torch.arange(5), list(path)].sum())


def test_distillation_compares_frames_after_the_delay() -> None:
    own, teacher = (torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(i)).log_softmax(-1) for i in (0, 1))
    n_frames = torch.tensor([6, 4])
    expected = [
        sum(float((teacher[i, t].exp() * (teacher[i, t] - own[i, t + 2])).sum()) for t in range(int(n) - 2))
        for i, n in enumerate(n_frames)
    ]
    losses = distillation_loss(own, teacher, n_frames, DistillationSettings(delay=2))
    torch.testing.assert_close(losses, torch.tensor(expected))
    shifted = torch.cat([own[:, :1], teacher[:, :-1]], dim=1)
    zero = distillation_loss(shifted, teacher, n_frames, DistillationSettings(delay=1, temperature=2.0))
    torch.testing.assert_close(zero, torch.zeros(2), atol=1e-5, rtol=0)
    alone = distillation_loss(own[1:, :4], teacher[1:, :4], n_frames[1:], DistillationSettings(delay=2))
    torch.testing.assert_close(alone[0], losses[1])
    short = distillation_loss(own, teacher, n_frames, DistillationSettings(delay=9))
    assert short.tolist() == [0.0, 0.0]
