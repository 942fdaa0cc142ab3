"""Model files: mapped and shared, written atomically, never trusted."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from arcuate.errors import UserError
from arcuate.language.ngram.arpa import write_arpa
from arcuate.language.ngram.model import LanguageModel, check_model_file, write_model
from arcuate.language.ngram.trie import tables_from_model
from support.backoff import SMALL, model_of, walk

TEXT = ["a", "b", "c", "zebra", "b", "</s>"]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    write_model(model_of(SMALL), tmp_path / "m.alm")
    return tmp_path / "m.alm"


def test_round_trip(stored: Path) -> None:
    model, original = check_model_file(stored), model_of(SMALL)
    assert all(np.array_equal(a, b) for a, b in zip(model.arrays, original.arrays, strict=True))
    assert walk(model, TEXT) == walk(original, TEXT)
    assert model.words == original.words and model.name == "m.alm"


def test_arrays_are_mapped_read_only_and_aligned(stored: Path) -> None:
    for array in LanguageModel.open(stored).arrays:
        base = array
        while base is not None and not isinstance(base, np.memmap):
            base = base.base
        assert isinstance(base, np.memmap)
        assert array.flags.aligned and not array.flags.writeable


def test_any_safetensors_reader_opens_it(stored: Path) -> None:
    parts = load_file(stored)
    assert parts["log_probs"].dtype == np.float32 and len(parts["words"]) == 12


def test_a_truncated_file_is_rejected_at_any_length(stored: Path) -> None:
    complete = stored.read_bytes()
    for length in range(0, len(complete), 13):
        stored.write_bytes(complete[:length])
        with pytest.raises(UserError):
            LanguageModel.open(stored)
    stored.write_bytes(complete + b"x")
    with pytest.raises(UserError, match="size"):
        LanguageModel.open(stored)


def test_damage_never_crashes(stored: Path) -> None:
    """Any changed byte is detected on opening or by the check, and queries are safe in between."""
    complete = bytearray(stored.read_bytes())
    rng = np.random.default_rng(3)
    header = int.from_bytes(complete[:8], "little") + 8
    places = [*rng.integers(0, header, 60), *rng.integers(header, len(complete), 240)]
    for at in map(int, places):
        damaged = bytearray(complete)
        damaged[at] ^= int(rng.integers(1, 256))
        stored.write_bytes(damaged)
        try:
            model = LanguageModel.open(stored)
            for word in (*range(len(model.words)), *range(len(model.words))):
                for state in (model.start, model.empty, len(model.arrays.backoffs) - 1):
                    model.advance(state, word)
        except UserError:
            continue
        if at >= header:
            with pytest.raises(UserError, match="damaged"):
                check_model_file(stored)


def _with_header(path: Path, edit: dict[str, object]) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + length]) | edit
    text = json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    "edit",
    [
        {"__metadata__": None},
        {"__metadata__": {"arcuate-lm": '{"version": 99}'}},
        {"__metadata__": {"arcuate-lm": "[" * 100_000}},
        {"words": {"dtype": "I32", "shape": [10**18], "data_offsets": [0, 4 * 10**18]}},
        {"words": {"dtype": "F32", "shape": [12], "data_offsets": [0, 48]}},
        {"words": {"dtype": "I32", "shape": [-12], "data_offsets": [0, 48]}},
        {"__metadata__": {"arcuate-lm": '{"version": 2, "order": 1000000000000}'}},
        {"words": [1, 2]},
        {"further": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}},
    ],
)
def test_malicious_headers_are_rejected(stored: Path, edit: dict[str, object]) -> None:
    _with_header(stored, edit)
    with pytest.raises(UserError, match=r"m\.alm"):
        LanguageModel.open(stored)


def test_a_damaged_trie_is_not_listed(stored: Path) -> None:
    model = LanguageModel.open(stored)
    firsts = model.arrays.firsts.copy()
    firsts[3] = 10**6
    broken = LanguageModel(model.arrays._replace(firsts=firsts), model.words, model.order)
    with pytest.raises(UserError, match="links"):
        tables_from_model(broken)


def test_only_language_models_are_replaced(stored: Path) -> None:
    before = stored.read_bytes()
    write_model(model_of(SMALL), stored)
    assert stored.read_bytes() == before
    stored.write_text("notes")
    with pytest.raises(UserError, match="not an earlier words"):
        write_model(model_of(SMALL), stored)
    assert stored.read_text() == "notes"


@pytest.mark.parametrize("write", [write_model, write_arpa])
def test_a_full_disk_leaves_no_file(write: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="disk is full"):
        write(model_of(SMALL), tmp_path / "m.alm")  # type: ignore[operator]
    assert list(tmp_path.iterdir()) == []
