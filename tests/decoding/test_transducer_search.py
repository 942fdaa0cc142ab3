"""Transducer searches: equal to enumeration, independent of chunking, and within their limits."""

import itertools

import pytest
import torch

from arcuate.decoding.heads import HeadWeights
from arcuate.decoding.lattice import rescore
from arcuate.decoding.transducer import TransducerBeamSearch, TransducerGreedySearch
from arcuate.errors import UserError
from arcuate.losses import rnnt_loss
from arcuate.losses.combined import ctc_loss
from arcuate.losses.config import CTCSettings
from arcuate.models.transducer import Transducer
from support.transducers import N_CLASSES, SETTINGS, kinds, make


def enumerate_sequences(head: Transducer, frames: torch.Tensor, max_symbols: int) -> dict[tuple, float]:
    """Sum over every alignment with at most `max_symbols` tokens per frame, by token sequence."""
    totals: dict[tuple, torch.Tensor] = {}
    groups = [g for n in range(max_symbols + 1) for g in itertools.product(range(1, N_CLASSES), repeat=n)]
    projected = head.encoder_proj(frames)
    for alignment in itertools.product(groups, repeat=len(frames)):
        tokens: tuple[int, ...] = ()
        score = torch.zeros(())
        for frame, group in zip(projected, alignment, strict=True):
            for token in (*group, 0):
                predicted = head.predictor_proj(head.predictor(torch.tensor([tokens]).long().reshape(1, -1)))
                score = score + head.log_probs(frame, predicted[:, -1])[0, token]
                tokens = (*tokens, token) if token else tokens
        totals[tokens] = torch.logaddexp(totals.get(tokens, torch.tensor(-torch.inf)), score)
    return {tokens: float(total) for tokens, total in totals.items()}


@kinds
@pytest.mark.parametrize(("n_frames", "max_symbols"), [(1, 2), (2, 2), (3, 1)])
def test_a_wide_beam_is_exact(settings, n_frames, max_symbols):
    head, frames = make(settings, n_frames)
    found = TransducerBeamSearch(head, width=1000, max_symbols=max_symbols).search(frames)
    with torch.no_grad():
        expected = enumerate_sequences(head, frames, max_symbols)
    assert {h.tokens for h in found} == set(expected)
    for hypothesis in found:
        assert hypothesis.scores["transducer"] == pytest.approx(expected[hypothesis.tokens], abs=1e-4)
    assert found[0].tokens == max(expected, key=lambda tokens: expected[tokens])
    scores = [h.scores["transducer"] for h in found]
    assert scores == sorted(scores, reverse=True)


def test_without_a_limit_the_beam_score_is_the_loss():
    """If max_symbols exceeds the number of tokens, the score is the negative transducer loss."""
    head, frames = make(SETTINGS[2], 3)
    found = {h.tokens: h.scores["transducer"] for h in TransducerBeamSearch(head, 5000, max_symbols=3).search(frames)}
    for tokens in [(), (1,), (2, 1), (2, 2, 1)]:
        target = torch.tensor([tokens]).long().reshape(1, -1)
        joint = head(frames[None], target)
        logits = joint.logits(joint.frames, joint.predicted)
        loss = rnnt_loss(logits, target, torch.tensor([3]), torch.tensor([len(tokens)]))
        assert found[tokens] == pytest.approx(-loss.item(), abs=1e-4)


@kinds
def test_greedy_follows_the_best_class(settings):
    head, frames = make(settings, 12, seed=3, n_classes=6)
    tokens: list[int] = []
    with torch.no_grad():
        for frame in head.encoder_proj(frames):
            for _ in range(3):
                predicted = head.predictor_proj(head.predictor(torch.tensor([tokens]).long().reshape(1, -1)))
                best = int(head.log_probs(frame, predicted[:, -1]).argmax())
                if best == 0:
                    break
                tokens.append(best)
    (found,) = TransducerGreedySearch(head, max_symbols=3).search(frames)
    assert found.tokens == tuple(tokens)
    assert tokens  # an empty result would prove nothing


def test_max_symbols_is_respected():
    head, frames = make(SETTINGS[0], 7)
    with torch.no_grad():
        head.output.bias[0] = -50.0  # blank is never the best class
    assert len(TransducerGreedySearch(head, max_symbols=2).search(frames)[0].tokens) == 14
    assert all(len(h.tokens) <= 14 for h in TransducerBeamSearch(head, 4, max_symbols=2).search(frames))


def test_blanks_do_not_advance_the_predictor():
    head, frames = make(SETTINGS[2], 5)
    with torch.no_grad():
        head.output.bias[0] = 50.0
        state = TransducerGreedySearch(head).step(TransducerGreedySearch(head).start(), frames)
    assert state.tokens == () and torch.equal(state.predicted, TransducerGreedySearch(head).start().predicted)


@kinds
@pytest.mark.parametrize("kind", [TransducerGreedySearch, TransducerBeamSearch])
def test_chunks_equal_the_complete_trial_and_states_are_values(settings, kind):
    head, frames = make(settings, 9, seed=1, n_classes=6)
    searcher = kind(head)
    with torch.no_grad():
        complete = searcher.finish(searcher.step(searcher.start(), frames))
        for cuts in ([4], list(range(1, 9)), [0, 0, 9]):
            state = searcher.start()
            for piece in torch.tensor_split(frames, cuts):
                before = state
                searcher.step(before, piece.flip(0))  # another continuation changes nothing
                state = searcher.step(before, piece)
            chunked = searcher.finish(state)
            assert [h.tokens for h in chunked] == [h.tokens for h in complete]
            scores = [[h.scores["transducer"] for h in found] for found in (chunked, complete)]
            assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_a_wider_beam_is_not_worse():
    for seed in range(5):
        head, frames = make(SETTINGS[1], 10, seed=seed, n_classes=6)
        best = [TransducerBeamSearch(head, width).search(frames)[0].scores["transducer"] for width in (1, 4, 64)]
        assert best[1] >= best[0] - 1e-4 and best[2] >= best[1] - 1e-4


@kinds
def test_rescoring_is_exact(settings):
    """All sequences of up to three tokens: ranked by the weighted sum of both losses."""
    head, frames = make(settings, 4)
    log_probs = torch.randn(4, N_CLASSES).log_softmax(-1)
    sequences = [s for n in range(4) for s in itertools.product((1, 2), repeat=n)]
    weights = HeadWeights(ctc=0.7, transducer=0.5)
    found = rescore(head, frames, log_probs, [*sequences, *sequences], weights)
    assert len(found) == len(sequences)
    totals = []
    for hypothesis in found:
        target, n = torch.tensor([hypothesis.tokens]).long().reshape(1, -1), len(hypothesis.tokens)
        joint = head(frames[None], target)
        logits = joint.logits(joint.frames, joint.predicted)
        lengths = torch.tensor([4]), torch.tensor([n])
        transducer = -rnnt_loss(logits, target, *lengths).item()
        ctc = -ctc_loss(log_probs[None], lengths[0], target, lengths[1], CTCSettings()).item()
        assert hypothesis.scores == pytest.approx({"transducer": transducer, "ctc": ctc}, abs=1e-4)
        totals.append(0.5 * transducer + 0.7 * ctc)
    assert totals == sorted(totals, reverse=True)


def test_rescoring_needs_hypotheses():
    head, frames = make(SETTINGS[0], 2)
    with pytest.raises(UserError, match="no hypothesis"):
        rescore(head, frames, torch.zeros(2, N_CLASSES), [])
