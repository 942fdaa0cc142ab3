"""Searches with the transducer: equal to enumeration with a wide beam, exact scores, bounded state.

Independence of chunks is a law of all searches (`tests/laws/test_streaming.py`).
"""

import itertools

import numpy as np
import pytest
import torch

from arcuate.decoding.joint import JointSearch
from arcuate.decoding.transducer import HeadWeights, rescore
from arcuate.errors import UserError
from arcuate.losses import rnnt_loss
from arcuate.losses.combined import ctc_loss
from arcuate.losses.config import CTCSettings
from arcuate.models.layout import Frames
from arcuate.models.transducer import Transducer
from support.transducers import N_CLASSES, SETTINGS, kinds, make

ALONE = HeadWeights(ctc=0.0)


def outputs(encoded: torch.Tensor, n_classes: int = N_CLASSES, seed: int = 0) -> Frames:
    generator = torch.Generator().manual_seed(seed)
    log_probs = (2 * torch.randn(len(encoded), n_classes, generator=generator)).log_softmax(-1)
    return Frames(log_probs.numpy(), encoded.numpy())


def enumerate_alignments(head: Transducer, frames: torch.Tensor, max_symbols: int) -> dict[tuple, float]:
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
def test_a_wide_beam_sums_over_all_alignments(settings, n_frames, max_symbols) -> None:
    head, encoded = make(settings, n_frames)
    search = JointSearch(head.for_search(), 1000, ALONE, max_symbols)
    found = search.beam_hypotheses(search.step(search.start(), outputs(encoded)))
    with torch.no_grad():
        expected = enumerate_alignments(head, encoded, max_symbols)
    assert {h.tokens: h.scores["transducer"] for h in found} == pytest.approx(expected, abs=1e-4)
    assert found[0].tokens == max(expected, key=lambda tokens: expected[tokens])


@kinds
def test_exact_scores_are_the_losses(settings) -> None:
    """All sequences of up to three tokens: ranked by the weighted sum of both losses; a wide beam finds them all."""
    head, encoded = make(settings, 4)
    frames, weights = outputs(encoded), HeadWeights(ctc=0.7, transducer=0.5)
    sequences = [s for n in range(4) for s in itertools.product((1, 2), repeat=n)]
    found = rescore(head.for_search(), frames, [*sequences, *sequences], weights)
    assert len(found) == len(sequences)
    totals = []
    for hypothesis in found:
        target, n = torch.tensor([hypothesis.tokens]).long().reshape(1, -1), len(hypothesis.tokens)
        joint = head(encoded[None], target)
        logits = joint.logits(joint.frames, joint.predicted)
        lengths = torch.tensor([4]), torch.tensor([n])
        transducer = -rnnt_loss(logits, target, *lengths).item()
        log_probs = torch.from_numpy(frames.log_probs)[None]
        ctc = -ctc_loss(log_probs, lengths[0], target, lengths[1], CTCSettings()).item()
        assert hypothesis.scores == pytest.approx({"transducer": transducer, "ctc": ctc}, abs=1e-4)
        totals.append(0.5 * transducer + 0.7 * ctc)
    assert totals == sorted(totals, reverse=True)
    search = JointSearch(head.for_search(), 5000, weights, max_symbols=4)
    for hypothesis in search.beam_hypotheses(search.step(search.start(), frames)):
        if hypothesis.tokens in sequences:
            expected = next(h.scores for h in found if h.tokens == hypothesis.tokens)
            assert hypothesis.scores == pytest.approx(expected, abs=1e-4)


def test_rescoring_needs_hypotheses_and_encoder_outputs() -> None:
    head, encoded = make(SETTINGS[0], 2)
    with pytest.raises(UserError, match="no hypothesis"):
        rescore(head.for_search(), outputs(encoded), [])
    with pytest.raises(UserError, match="only CTC log-probabilities were given"):
        JointSearch(head.for_search()).search(Frames(outputs(encoded).log_probs))


def test_limits_on_symbols_and_beam_are_respected() -> None:
    head, encoded = make(SETTINGS[0], 7, seed=1)
    with torch.no_grad():
        head.output.bias[0] = -50.0  # blank is never the best class
    for width in (1, 4):
        search = JointSearch(head.for_search(), width, ALONE, max_symbols=2)
        found = search.beam_hypotheses(search.step(search.start(), outputs(encoded)))
        assert len(found) <= width and all(0 < len(h.tokens) <= 14 for h in found)


def test_state_of_a_long_stream_stays_small() -> None:
    """Negligible frames and tokens are dropped, and the final scores stay exact."""
    head, encoded = make(SETTINGS[0], 160, seed=3, n_classes=6)
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(160, 6))  # as after training: a token every fourth frame, nearly certain
    logits[np.arange(160), np.where(np.arange(160) % 4 == 0, generator.integers(1, 6, 160), 0)] += 12.0
    log_probs = torch.from_numpy(logits).log_softmax(-1).numpy()
    search = JointSearch(head.for_search(), width=4, weights=HeadWeights(ctc=3.0))
    state = search.start()
    for piece, scores in zip(encoded.split(40), np.split(log_probs, 4), strict=True):
        state = search.step(state, Frames(scores, piece.numpy()))
        assert len(state.log_probs) < 90 and max(len(c.alpha) for c in state.beam.ctc) < 60
    exact = {h.tokens: h.scores for h in search.finish(state, 10)}
    for hypothesis in search.beam_hypotheses(state):
        assert hypothesis.scores["ctc"] == pytest.approx(exact[hypothesis.tokens]["ctc"], abs=1e-6)
    assert all(len(tokens) > 20 for tokens in exact)


def test_ctc_changes_the_result() -> None:
    """A confident CTC head with a large weight determines the result."""
    head, encoded = make(SETTINGS[0], 6, seed=4, n_classes=6)
    log_probs = np.full((6, 6), -20.0)
    log_probs[np.arange(6), [3, 0, 4, 0, 5, 0]] = 0.0
    frames = Frames(log_probs, encoded.numpy())
    best = [JointSearch(head.for_search(), 64, HeadWeights(ctc=w)).search(frames)[0].tokens for w in (10.0, 0.0)]
    assert best[0] == (3, 4, 5) != best[1]
