"""The embedded English 3-gram: the reader equals the query API of pocketsphinx."""

from pathlib import Path

import numpy as np
import pytest

from arcuate.errors import UserError
from arcuate.language.ngram.model import LanguageModel
from arcuate.language.ngram.open import open_model
from arcuate.language.ngram.sphinx import embedded_path, read_sphinx
from arcuate.language.ngram.trie import tables_from_model

UNIT = np.log(1.0001)  # resolution of the query API


@pytest.fixture(scope="module")
def english(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARCUATE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return open_model("default")


def test_sizes(english: LanguageModel) -> None:
    assert english.counts == (72_548, 2_051_541, 1_669_625)  # the words and <unk>, which is missing in the file
    assert english.metadata["added"] == ["<unk>"]


def test_equal_to_the_query_api(english: LanguageModel) -> None:
    """n-grams of every order, and random words that need backing off. The API takes the last word first."""
    from pocketsphinx import Config, LogMath, NGramModel

    api = NGramModel(Config(), LogMath(), str(embedded_path()))
    rng = np.random.default_rng(4)
    strings = [
        row for table in tables_from_model(english).orders for row in table.ids[rng.integers(0, len(table), 700)]
    ]
    strings += list(rng.integers(0, 72_547, (700, 3)))
    for row in strings:
        if english.unk in row:
            continue
        expected = api.prob([english.words[w] for w in reversed(row)]) * UNIT
        assert english.score(row, english.empty)[0][-1] == pytest.approx(expected, abs=1.01 * UNIT)


def test_the_converted_model_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, english: LanguageModel) -> None:
    calls = []
    monkeypatch.setattr("arcuate.language.ngram.open.read_third_party", lambda *a: calls.append(1) or english)
    monkeypatch.setenv("ARCUATE_CACHE", str(tmp_path))
    for _ in range(3):
        assert open_model("pocketsphinx").counts == english.counts
    (kept,) = tmp_path.iterdir()
    damaged = kept.read_bytes()[:1000]
    kept.unlink()
    kept.write_bytes(damaged)
    assert open_model("default").counts == english.counts
    assert len(calls) == 2
    (tmp_path / "file").write_text("not a folder, so the cache cannot be written")
    monkeypatch.setenv("ARCUATE_CACHE", str(tmp_path / "file"))
    assert open_model("default").arrays is english.arrays


def test_damaged_files_are_rejected(tmp_path: Path) -> None:
    complete = embedded_path().with_name("en-us-phone.lm.bin").read_bytes()
    path = tmp_path / "phone.lm.bin"
    for length in (0, 10, 19, 25, 40, 5000, len(complete) // 2, len(complete) - 1):
        path.write_bytes(complete[:length])
        with pytest.raises(UserError, match=r"phone\.lm\.bin"):
            read_sphinx(path)
    rng = np.random.default_rng(1)
    for _ in range(60):
        damaged = bytearray(complete)
        for at in rng.integers(0, len(complete), 40):
            damaged[at] = int(rng.integers(0, 256))
        path.write_bytes(damaged)
        try:
            read_sphinx(path)
        except UserError as error:
            assert "phone.lm.bin" in str(error)  # noqa: PT017


@pytest.mark.shared
def test_perplexity_on_real_sentences(shared: Path, english: LanguageModel) -> None:
    import json

    from arcuate.language.ngram.perplexity import score_text

    lines = (shared / "real" / "words" / "t15" / "dev.jsonl").read_text().splitlines()
    found = score_text(english, [json.loads(line)["text"] for line in lines])
    assert found.n_oov == 3 and found.perplexity == pytest.approx(98.6, abs=0.1)
