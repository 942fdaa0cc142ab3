"""Numbers and foreign letters in the text of '24 labels."""

from pathlib import Path

import pytest

from arcuate.data.alphabet import token_names
from arcuate.data.prepare import prepare
from arcuate.data.spelling import spell_out
from arcuate.data.store import Store
from arcuate.data.text import text_to_tokens
from support.recordings import noise, write_mat


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("1984.", "nineteen eighty-four."),
        ("In 2007 and 1905", "In two thousand seven and nineteen oh five"),
        ("1,234,567 cats", "one million two hundred thirty-four thousand five hundred sixty-seven cats"),
        ("the 21st, 12th and 30th", "the twenty-first, twelfth and thirtieth"),
        ("3.14 or 50%", "three point one four or fifty percent"),
        ("$1 and $20", "one dollar and twenty dollars"),
        ("at 7:30 or 8:00", "at seven thirty or eight o'clock"),
        ("call 007", "call zero zero seven"),
        ("4x faster", "four x faster"),
        ("naïve café", "naive cafe"),
        ("Straße, œuvre, don’t", "Strasse, oeuvre, don't"),
        ("it's -5 today", "it's minus five today"),
        ("1001 or 100", "one thousand one or one hundred"),
        ("1900, 2010 and 1,984", "nineteen hundred, twenty ten and one thousand nine hundred eighty-four"),
        ("1000000000005", "one trillion five"),
        ("0 and 13", "zero and thirteen"),
    ],
)
def test_spelling(text: str, spelled: str) -> None:
    found = spell_out(text)
    assert (found.text, found.changed, found.unspoken) == (spelled, True, "")


def test_labels_of_numbers_and_foreign_letters() -> None:
    assert text_to_tokens("1984.")[0] == text_to_tokens("nineteen eighty-four.")[0]
    assert text_to_tokens("naïve")[0] == text_to_tokens("naive")[0]
    assert "N AY" in " ".join(token_names(text_to_tokens("naïve")[0]))


def test_what_cannot_be_spelled_is_a_quality_problem(tmp_path: Path) -> None:
    texts = ["Year 1984.", "Привет you", "...", "Plain text."]
    write_mat(tmp_path / "s" / "train" / "t12.2022.04.28.mat", [noise(200, 4)] * 4, texts)
    report = prepare(tmp_path / "s", tmp_path / "store").report
    reasons = {(row.trial[-4:], row.reason, row.action) for row in report.quality}
    assert ("0000", "spelled out", "kept") in reasons
    assert ("0001", "unspoken text", "rejected") in reasons
    assert ("0002", "empty label", "rejected") in reasons
    usable = {info.id[-4:]: info.usable for info in Store.open(tmp_path / "store").trials}
    assert usable == {"0000": True, "0001": False, "0002": False, "0003": True}
