"""The work of a frame is bounded; the result depends on the frames alone."""

import numpy as np
import pytest

from arcuate.data.alphabet import CLASSES
from arcuate.decoding.word_search.search import WordSearch
from arcuate.models.layout import Frames
from support.live_parts import SEARCH_SETTINGS, small_search

SMALL = small_search().with_settings(SEARCH_SETTINGS.model_copy(update={"beam": 40, "threshold": 40.0}))
LIMIT = 1_000


def frames(n: int, scale: float, seed: int = 0) -> np.ndarray:
    """Frames from flat (scale 0) to certain."""
    logits = np.random.default_rng(seed).normal(scale=scale, size=(n, len(CLASSES)))
    return (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)


def count_candidates(search: WordSearch, log_probs: np.ndarray) -> list[int]:
    state, counts = search.start(), []
    for frame in log_probs:
        state = search.step(state, Frames(frame[None]))
        counts.append(int(search.workspace.candidates.counts[0]))
    return counts


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0])
def test_the_candidates_of_a_frame_are_bounded(scale: float) -> None:
    """A frame with more is searched again with half the threshold, whatever the chunks."""
    log_probs = frames(25, scale)
    wide = SMALL.with_settings(SMALL.settings.model_copy(update={"beam": 400}))
    assert max(count_candidates(wide, log_probs)) > LIMIT  # else nothing is tested
    assert max(count_candidates(SMALL, log_probs)) <= LIMIT
    state = SMALL.start()
    for part in np.split(log_probs, [1, 2, 9, 20]):
        state = SMALL.step(state, Frames(part))
    assert SMALL.finish(state, 5) == SMALL.search(Frames(log_probs), 5)
    assert SMALL.finish(state)[0].words


def test_the_bound_leaves_room_for_the_beam() -> None:
    """Entries of the beam are candidates too; losing them would lose the sentence."""
    search = SMALL.with_settings(SMALL.settings.model_copy(update={"beam": 2_000}))
    assert len(search.step(search.start(), Frames(frames(20, 0.0))).beam) > LIMIT
