"""Memory of a live session: it does not grow with the length of the signal."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from arcuate.decoding.options import DecoderOptions
from arcuate.experiments.export import export
from arcuate.live.bench import Sentence, time_stream
from arcuate.live.load import load_decoder
from arcuate.models.io import save_model
from support.live_parts import small_model


def test_an_exported_model_searches_new_words_without_more_memory(tmp_path: Path) -> None:
    """The lookahead cache was filled while decoding, by 1 to 2 MB per minute of signal."""
    save_model(tmp_path / "model", small_model())
    export(tmp_path / "model", tmp_path / "model.arcx")
    decoder = load_decoder(tmp_path / "model.arcx", DecoderOptions())
    assert decoder.word_search is not None
    rng, used, rows = np.random.default_rng(0), [], decoder.word_search.workspace.models.lookahead.n_rows
    cached = int(rows[0])

    def sentences() -> Iterator[Sentence]:
        while True:  # no two are alike, so that new words are searched all the time
            yield Sentence(rng.normal(1.0, rng.uniform(0.5, 4.0), (400, 6)), decoder.reset)

    for _ in range(3):
        time_stream(decoder, sentences(), 60, real_time=False)
        used.append(psutil.Process().memory_info().rss / 1e6)
    assert cached == int(rows[0]) > 1 << 20
    assert used[-1] - used[1] < 1.0, used
