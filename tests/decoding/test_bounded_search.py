"""`max_candidates`: the work of a frame is bounded and reported; the result depends on the frames alone."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arcuate.data.alphabet import CLASSES
from arcuate.decoding.config import DecodingConfig
from arcuate.decoding.word_search.search import WordSearch
from arcuate.live.engine import load_search
from support.live_parts import SEARCH_SETTINGS, small_decoder, small_model, small_search, write_words

WIDE = SEARCH_SETTINGS.model_copy(update={"beam": 200, "threshold": 40.0})
LIMIT = 1_000
FREE = small_search().with_settings(WIDE)
BOUNDED = FREE.with_settings(WIDE.model_copy(update={"max_candidates": LIMIT}))


def frames(n: int, scale: float, seed: int = 0) -> np.ndarray:
    """Frames from flat (scale 0) to certain."""
    logits = np.random.default_rng(seed).normal(scale=scale, size=(n, len(CLASSES)))
    return (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)


def count_candidates(search: WordSearch, log_probs: np.ndarray) -> list[int]:
    state, counts = search.start(), []
    for frame in log_probs:
        state = search.step(state, frame[None])
        counts.append(int(search.workspace.candidates.counts[0]))
    return counts


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0])
def test_the_candidates_of_a_frame_are_bounded(scale: float) -> None:
    log_probs = frames(25, scale)
    assert max(count_candidates(FREE, log_probs)) > LIMIT  # else nothing is tested
    assert max(count_candidates(BOUNDED, log_probs)) <= LIMIT
    state = BOUNDED.step(BOUNDED.start(), log_probs)
    assert 0 < state.n_narrowed <= 25 and state.n_frames == 25
    assert BOUNDED.finish(state)[0].words


def test_a_bound_that_is_not_reached_changes_nothing() -> None:
    log_probs = frames(25, 1.0)
    high = FREE.with_settings(WIDE.model_copy(update={"max_candidates": max(count_candidates(FREE, log_probs))}))
    state = high.step(high.start(), log_probs)
    assert state.n_narrowed == 0
    assert high.finish(state, 5) == FREE.search(log_probs, 5) != BOUNDED.search(log_probs, 5)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from([0.0, 0.3, 2.0]), st.integers(0, 3))
def test_a_narrowed_search_does_not_depend_on_chunks(sizes: list[int], scale: float, seed: int) -> None:
    log_probs = frames(sum(sizes), scale, seed)
    whole, state = BOUNDED.step(BOUNDED.start(), log_probs), BOUNDED.start()
    for part in np.split(log_probs, np.cumsum(sizes)[:-1]):
        state = BOUNDED.step(state, part)
    assert BOUNDED.finish(state, 5) == BOUNDED.finish(whole, 5) and state.n_narrowed == whole.n_narrowed


def test_the_bound_leaves_room_for_the_beam() -> None:
    """Entries of the beam are candidates too; losing them would lose the sentence."""
    search = FREE.with_settings(WIDE.model_copy(update={"beam": 2_000, "max_candidates": LIMIT}))
    state = search.step(search.start(), frames(20, 0.0))
    assert len(search.workspace.candidates.entries) <= 8_000 and len(state.beam) > LIMIT


def test_a_stream_reports_narrowed_frames() -> None:
    decoder = small_decoder(BOUNDED)
    decoder.push(np.zeros((4, 6), np.float32))
    assert decoder.n_narrowed == 0
    decoder.reset()
    decoder.push_log_probs(frames(25, 0.0))
    assert decoder.n_narrowed == BOUNDED.step(BOUNDED.start(), frames(25, 0.0)).n_narrowed > 0
    decoder.finish()
    assert decoder.n_narrowed == 0


def test_offline_decoding_is_unbounded_and_live_is_not(tmp_path: Path) -> None:
    lexicon, lm = write_words(tmp_path)
    assert DecodingConfig().max_candidates is None
    live = load_search(small_model(), str(lm), str(lexicon), DecodingConfig(beam=100))
    assert live.settings.max_candidates == 2_000
    chosen = load_search(small_model(), str(lm), str(lexicon), DecodingConfig(beam=100, max_candidates=9_000))
    assert chosen.settings.max_candidates == 9_000
