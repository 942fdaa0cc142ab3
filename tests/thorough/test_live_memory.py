"""Memory of a live session: it does not grow with the length of the signal."""

import gc
from pathlib import Path

import psutil
import pytest

from arcuate.data.store import Store
from arcuate.decoding.options import DecoderOptions
from arcuate.experiments.export import export
from arcuate.live.bench import replay_sentences, time_stream
from arcuate.live.load import load_decoder
from arcuate.live.sources.replay import select_trials
from arcuate.models.io import save_model
from support.live_parts import small_model


@pytest.mark.parametrize("exported", [False, True])
def test_memory_is_flat_after_two_minutes_of_signal(tmp_path: Path, cohort_store: Path, exported: bool) -> None:
    """The lookahead cache of an exported model grew by 1 to 2 MB per minute."""
    store = Store.open(cohort_store)
    model = small_model(store.n_channels, sessions=store.sessions)
    save_model(tmp_path / "model", model)
    path = tmp_path / "model"
    if exported:
        path = tmp_path / "model.arcx"
        export(tmp_path / "model", path)
    decoder = load_decoder(path, DecoderOptions())
    prepared = select_trials(store, store.sessions, "none", False, None)
    used = []
    for _ in range(5):
        time_stream(decoder, replay_sentences(decoder, prepared), 120, real_time=False)
        gc.collect()
        used.append(psutil.Process().memory_info().rss / 1e6)
    assert used[-1] - used[0] < 2.0, used
