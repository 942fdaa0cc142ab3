"""Both text normalisations, on cases derived by hand from the official rules."""

import pytest

from arcuate.data.text import label_text, normalise_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Bring it closer.", "bring it closer"),
        ("It's 5 o'clock, isn't it?", "it's o'clock isn't it"),
        ("well-known  facts", "well-known facts"),
        ("I- I mean it", "i i mean it"),
        ("an -- interruption", "an - interruption"),
        ("well--known", "wellknown"),
        ("the dogs ' bowl", "the dogs' bowl"),
        ("  Padded, twice!  ", "padded twice"),
        ("", ""),
        ("?!", ""),
    ],
)
def test_normalisation_for_error_rates(text: str, expected: str) -> None:
    assert normalise_text(text) == expected


def test_normalisation_is_idempotent() -> None:
    for text in ("It's 5 o'clock, isn't it?", "  Padded, twice!  ", "the dogs ' bowl"):
        once = normalise_text(text)
        assert normalise_text(once) == once


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Bring it closer.", "bring it closer"),
        ("An octillion atoms -- now.", "an octillion atoms  now"),
        ("the dogs ' bowl", "the dogs ' bowl"),
        ("Do they make class-biased decisions?", "do they make class-biased decisions"),
    ],
)
def test_normalisation_for_labels(text: str, expected: str) -> None:
    assert label_text(text) == expected
