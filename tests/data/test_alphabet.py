"""Alphabets: phonemes, characters and others, in stores and in labels derived from texts."""

import shutil
from pathlib import Path

import pytest

from arcuate.data.alphabet import (
    CHARACTERS,
    CLASSES,
    boundary_index,
    check_alphabet,
    encode,
    error_rate_name,
    token_names,
    token_unit,
)
from arcuate.data.prepare import prepare
from arcuate.data.store import Store
from arcuate.data.text import text_to_characters
from arcuate.errors import UserError
from support.stores import edit_manifest


def test_names_and_units() -> None:
    assert [token_unit(c) for c in (CLASSES, CHARACTERS, ("BLANK", "left", "right"))] == [
        "phoneme",
        "character",
        "token",
    ]
    assert [error_rate_name(c) for c in (CLASSES, CHARACTERS, ("BLANK", "left"))] == ["PER", "CER", "TER"]
    assert boundary_index(CHARACTERS) == len(CHARACTERS) - 1
    assert token_names(encode("cab", CHARACTERS), CHARACTERS) == ["c", "a", "b"]


def test_characters_of_a_sentence() -> None:
    tokens, missing = text_to_characters("Hi,  the 2 cats. #", CHARACTERS)
    assert "".join(token_names(tokens, CHARACTERS)) == "hi,>the>two>cats~>"
    assert missing == ("#",)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (("BLANK",), "2 to"),
        (("BLANK", "a", "a"), "distinct"),
        (("a", "BLANK"), "first class"),
        (("BLANK", ""), "printable"),
        (("BLANK", "a\n"), "printable"),
    ],
)
def test_invalid_alphabets(classes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_alphabet(classes)


def test_a_store_keeps_its_alphabet(cohort_store: Path, tmp_path: Path) -> None:
    assert Store.open(cohort_store).classes == CLASSES
    store = prepare(cohort_store.parent / "source", tmp_path / "store", targets="characters")
    assert store.classes == CHARACTERS
    for info in store.trials:
        assert (info.tokens is None) == (info.text is None)
        if info.text is not None and info.tokens is not None:
            spelled = "".join(token_names(info.tokens, CHARACTERS)).replace(">", " ").replace("~", ".")
            assert spelled == info.text.lower()
    with pytest.raises(UserError, match="41 classes"):
        store.check_classes(CLASSES)


@pytest.mark.parametrize("change", [('"BLANK",', ""), ('"AA"', '"BLANK"'), ('"AA"', "1")])
def test_a_damaged_alphabet_is_reported(cohort_store: Path, tmp_path: Path, change: tuple[str, str]) -> None:
    broken = shutil.copytree(cohort_store, tmp_path / "broken")
    edit_manifest(broken, *change)
    with pytest.raises(UserError, match="damaged"):
        Store.open(broken)
