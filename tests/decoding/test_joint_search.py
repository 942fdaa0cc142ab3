"""Joint CTC/transducer beam search: exact with a wide beam, independent of chunking, different from either head."""

import itertools

import numpy as np
import pytest
import torch

from arcuate.decoding import joint
from arcuate.decoding.heads import HeadWeights
from arcuate.decoding.joint import _EMPTY, JointBeamSearch, _advance, _append_tokens
from arcuate.decoding.lattice import rescore
from arcuate.decoding.transducer import TransducerBeamSearch
from support.transducers import N_CLASSES, SETTINGS, kinds, make


def ctc_log_probs(n_frames: int, n_classes: int = N_CLASSES, seed: int = 0) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(n_frames, n_classes, generator=generator)).log_softmax(-1).numpy()


def enumerate_paths(tokens: tuple[int, ...], log_probs: np.ndarray) -> float:
    """Sum over every class path that collapses to these tokens."""
    total = -np.inf
    for path in itertools.product(range(log_probs.shape[1]), repeat=len(log_probs)):
        collapsed = [c for c, _ in itertools.groupby(path) if c]
        if tuple(collapsed) == tokens:
            total = np.logaddexp(total, sum(log_probs[t, c] for t, c in enumerate(path)))
    return float(total)


@pytest.mark.parametrize("tokens", [(), (1,), (1, 1), (1, 2), (2, 2, 1), (1, 2, 1, 2)])
@pytest.mark.parametrize("appended_at", [0, 2, 5])
def test_ctc_score_is_exact_whenever_a_token_is_appended(tokens: tuple[int, ...], appended_at: int) -> None:
    log_probs = ctc_log_probs(5).astype(np.float64)
    ctc = _EMPTY
    prefix: tuple[int, ...] = ()
    for t in range(6):
        if t == appended_at:
            for token in tokens:
                (ctc,) = _append_tokens([ctc], [prefix[-1:]], [token], log_probs[:t])
                prefix = (*prefix, token)
        if t < 5:
            ctc = _advance(ctc, prefix, log_probs[t])
    assert ctc.log_prob == pytest.approx(enumerate_paths(tokens, log_probs), abs=1e-9)


@kinds
def test_a_wide_beam_is_exact(settings) -> None:
    """Every token sequence within `max_symbols`, with the scores of both losses."""
    head, frames = make(settings, 3)
    log_probs, weights = ctc_log_probs(3), HeadWeights(ctc=0.7, transducer=0.5)
    found = JointBeamSearch(head, 5000, max_symbols=3, weights=weights).search(frames, log_probs)
    sequences = [s for n in range(4) for s in itertools.product((1, 2), repeat=n)]
    expected = {h.tokens: h.scores for h in rescore(head, frames, torch.from_numpy(log_probs), sequences, weights)}
    for hypothesis in found:
        if hypothesis.tokens in expected:
            assert hypothesis.scores == pytest.approx(expected.pop(hypothesis.tokens), abs=1e-4)
    assert not expected
    totals = [h.total for h in found]
    assert totals == sorted(totals, reverse=True)


@kinds
def test_chunks_equal_the_complete_trial_and_states_are_values(settings) -> None:
    head, frames = make(settings, 9, seed=1, n_classes=6)
    log_probs, searcher = ctc_log_probs(9, 6), JointBeamSearch(head)
    with torch.no_grad():
        complete = searcher.finish(searcher.step(searcher.start(), frames, log_probs))
        for cuts in ([4], list(range(1, 9)), [0, 0, 9]):
            state = searcher.start()
            for piece, scores in zip(torch.tensor_split(frames, cuts), np.split(log_probs, cuts), strict=True):
                searcher.step(state, piece.flip(0), scores)  # another continuation changes nothing
                state = searcher.step(state, piece, scores)
            chunked = searcher.finish(state)
            assert [h.tokens for h in chunked] == [h.tokens for h in complete]
            assert [h.total for h in chunked] == pytest.approx([h.total for h in complete], abs=1e-4)


def confident_log_probs(n_frames: int, n_classes: int) -> np.ndarray:
    """CTC log-probabilities as after training: a token every fourth frame, blank elsewhere, nearly certain."""
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(n_frames, n_classes))
    best = np.where(np.arange(n_frames) % 4 == 0, generator.integers(1, n_classes, n_frames), 0)
    logits[np.arange(n_frames), best] += 12.0
    return torch.from_numpy(logits).log_softmax(-1).numpy()


def test_state_of_a_long_stream_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state stops growing, and the result equals that of a search that drops nothing."""
    head, frames = make(SETTINGS[0], 160, seed=3, n_classes=6)
    log_probs, sizes, found = confident_log_probs(160, 6), [], []
    searcher = JointBeamSearch(head, width=4, weights=HeadWeights(ctc=3.0))
    for limit in (joint._DROP_BELOW, np.inf):
        monkeypatch.setattr(joint, "_DROP_BELOW", limit)
        with torch.inference_mode():
            state = searcher.start()
            for piece, scores in zip(frames.split(40), np.split(log_probs, 4), strict=True):
                state = searcher.step(state, piece, scores)
                longest = max(len(c.alpha) for c in state.ctc)
                sizes.append((len(state.log_probs), max(len(c.history) for c in state.ctc), longest))
        found.append(searcher.finish(state))
    assert all(n_frames < 90 and n_past == n_frames + 1 and n_alpha < 60 for n_frames, n_past, n_alpha in sizes[:4])
    assert sizes[7][:2] == (160, 161)
    assert [h.tokens for h in found[0]] == [h.tokens for h in found[1]]
    assert len(found[0][0].tokens) > 20
    for bounded, unbounded in zip(*found, strict=True):
        assert bounded.scores == pytest.approx(unbounded.scores, abs=1e-9)


def test_without_ctc_equals_transducer_beam_search() -> None:
    head, frames = make(SETTINGS[1], 8, seed=2, n_classes=6)
    alone = TransducerBeamSearch(head, 64).search(frames)[0]
    joint_best = JointBeamSearch(head, 64, weights=HeadWeights(ctc=0.0)).search(frames, ctc_log_probs(8, 6))[0]
    assert joint_best.tokens == alone.tokens
    assert joint_best.scores["transducer"] == pytest.approx(alone.scores["transducer"], abs=1e-3)


def test_ctc_changes_the_result() -> None:
    """A confident CTC head with a large weight determines the result."""
    head, frames = make(SETTINGS[0], 6, seed=4, n_classes=6)
    log_probs = np.full((6, 6), -20.0)
    log_probs[np.arange(6), [3, 0, 4, 0, 5, 0]] = 0.0
    found = JointBeamSearch(head, 64, weights=HeadWeights(ctc=10.0)).search(frames, log_probs)
    assert found[0].tokens == (3, 4, 5)
    assert TransducerBeamSearch(head, 64).search(frames)[0].tokens != (3, 4, 5)


def test_one_frame_and_no_frame() -> None:
    head, frames = make(SETTINGS[0], 1)
    assert JointBeamSearch(head).search(frames, ctc_log_probs(1))
    (empty,) = JointBeamSearch(head).search(frames[:0], ctc_log_probs(1)[:0])
    assert empty.tokens == ()
    assert empty.scores == {"transducer": 0.0, "ctc": 0.0}
