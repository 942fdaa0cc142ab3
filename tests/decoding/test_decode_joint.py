"""Both heads in one pass: exact with a wide beam, in chunks, and better informed than either alone."""

import itertools

import numpy as np
import pytest
import torch

from arcuate.decoding import joint
from arcuate.decoding.joint import _EMPTY, JointBeamSearch, _advance, _append_tokens, search_joint
from arcuate.decoding.transducer import HeadWeights, TransducerBeamSearch, rescore, search_transducer
from support.transducers import N_CLASSES, SETTINGS, kinds, make


def ctc_scores(n_frames: int, n_classes: int = N_CLASSES, seed: int = 0) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(n_frames, n_classes, generator=generator)).log_softmax(-1).numpy()


def exact(tokens: tuple[int, ...], log_probs: np.ndarray) -> float:
    """Every path of classes, one by one, that reads as these tokens."""
    total = -np.inf
    for path in itertools.product(range(log_probs.shape[1]), repeat=len(log_probs)):
        read = [c for c, _ in itertools.groupby(path) if c]
        if tuple(read) == tokens:
            total = np.logaddexp(total, sum(log_probs[t, c] for t, c in enumerate(path)))
    return float(total)


@pytest.mark.parametrize("tokens", [(), (1,), (1, 1), (1, 2), (2, 2, 1), (1, 2, 1, 2)])
@pytest.mark.parametrize("joined_at", [0, 2, 5])
def test_the_ctc_score_is_exact_whenever_a_token_joins(tokens: tuple[int, ...], joined_at: int) -> None:
    log_probs = ctc_scores(5).astype(np.float64)
    column = _EMPTY
    said: tuple[int, ...] = ()
    for t in range(6):
        if t == joined_at:
            for token in tokens:
                (column,) = _append_tokens([column], [said[-1:]], [token], log_probs[:t])
                said = (*said, token)
        if t < 5:
            column = _advance(column, said, log_probs[t])
    assert column.log_prob == pytest.approx(exact(tokens, log_probs), abs=1e-9)


@kinds
def test_a_wide_beam_is_exact(settings) -> None:
    """Every reading that the cap allows, with the scores that both losses give it."""
    head, frames = make(settings, 3)
    log_probs, weights = ctc_scores(3), HeadWeights(ctc=0.7, transducer=0.5)
    found = search_joint(JointBeamSearch(head, 5000, max_symbols=3, weights=weights), frames, log_probs)
    readings = [r for n in range(4) for r in itertools.product((1, 2), repeat=n)]
    expected = {
        h.tokens: h.scores for h in rescore(head, frames, torch.from_numpy(log_probs), readings, weights)
    }
    for hypothesis in found:
        if hypothesis.tokens in expected:
            assert hypothesis.scores == pytest.approx(expected.pop(hypothesis.tokens), abs=1e-4)
    assert not expected
    totals = [h.total for h in found]
    assert totals == sorted(totals, reverse=True)


@kinds
def test_chunks_equal_the_whole_and_states_are_values(settings) -> None:
    head, frames = make(settings, 9, seed=1, n_classes=6)
    log_probs, searcher = ctc_scores(9, 6), JointBeamSearch(head)
    with torch.no_grad():
        whole = searcher.finish(searcher.step(searcher.start(), frames, log_probs))
        for cuts in ([4], list(range(1, 9)), [0, 0, 9]):
            state = searcher.start()
            for piece, scores in zip(
                torch.tensor_split(frames, cuts), np.split(log_probs, cuts), strict=True
            ):
                searcher.step(state, piece.flip(0), scores)  # another continuation disturbs nothing
                state = searcher.step(state, piece, scores)
            chunked = searcher.finish(state)
            assert [h.tokens for h in chunked] == [h.tokens for h in whole]
            assert [h.total for h in chunked] == pytest.approx([h.total for h in whole], abs=1e-4)


def sure_scores(n_frames: int, n_classes: int) -> np.ndarray:
    """CTC as it is after training: a token at every fourth frame, the blank elsewhere, hardly a doubt."""
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(n_frames, n_classes))
    best = np.where(np.arange(n_frames) % 4 == 0, generator.integers(1, n_classes, n_frames), 0)
    logits[np.arange(n_frames), best] += 12.0
    return torch.from_numpy(logits).log_softmax(-1).numpy()


def test_a_long_stream_remembers_its_last_words_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state stops growing, and what is said is what a search says that forgets nothing."""
    head, frames = make(SETTINGS[0], 160, seed=3, n_classes=6)
    log_probs, sizes, found = sure_scores(160, 6), [], []
    searcher = JointBeamSearch(head, width=4, weights=HeadWeights(ctc=3.0))
    for limit in (joint._FORGET_BELOW, np.inf):
        monkeypatch.setattr(joint, "_FORGET_BELOW", limit)
        with torch.inference_mode():
            state = searcher.start()
            for piece, scores in zip(frames.split(40), np.split(log_probs, 4), strict=True):
                state = searcher.step(state, piece, scores)
                longest = max(len(c.alpha) for c in state.ctc)
                sizes.append((len(state.log_probs), max(len(c.history) for c in state.ctc), longest))
        found.append(searcher.finish(state))
    assert all(heard < 90 and past == heard + 1 and now < 60 for heard, past, now in sizes[:4])
    assert sizes[7][:2] == (160, 161)
    assert [h.tokens for h in found[0]] == [h.tokens for h in found[1]]
    assert len(found[0][0].tokens) > 20
    for ours, theirs in zip(*found, strict=True):
        assert ours.scores == pytest.approx(theirs.scores, abs=1e-9)


def test_without_ctc_it_is_the_transducers_beam() -> None:
    head, frames = make(SETTINGS[1], 8, seed=2, n_classes=6)
    alone = search_transducer(TransducerBeamSearch(head, 64), frames)[0]
    both = search_joint(JointBeamSearch(head, 64, weights=HeadWeights(ctc=0.0)), frames, ctc_scores(8, 6))[0]
    assert both.tokens == alone.tokens
    assert both.scores["transducer"] == pytest.approx(alone.scores["transducer"], abs=1e-3)


def test_ctc_changes_what_is_read() -> None:
    """Where CTC is certain of other tokens and weighs much, they are what is read."""
    head, frames = make(SETTINGS[0], 6, seed=4, n_classes=6)
    log_probs = np.full((6, 6), -20.0)
    log_probs[np.arange(6), [3, 0, 4, 0, 5, 0]] = 0.0
    found = search_joint(JointBeamSearch(head, 64, weights=HeadWeights(ctc=10.0)), frames, log_probs)
    assert found[0].tokens == (3, 4, 5)
    assert search_transducer(TransducerBeamSearch(head, 64), frames)[0].tokens != (3, 4, 5)


def test_one_frame_and_no_frame() -> None:
    head, frames = make(SETTINGS[0], 1)
    assert search_joint(JointBeamSearch(head), frames, ctc_scores(1))
    (empty,) = search_joint(JointBeamSearch(head), frames[:0], ctc_scores(1)[:0])
    assert empty.tokens == ()
    assert empty.scores == {"transducer": 0.0, "ctc": 0.0}
