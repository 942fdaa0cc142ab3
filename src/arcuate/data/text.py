"""Text normalisation for error rates and for labels, as in both benchmarks."""

import re

_NOT_SPEECH = re.compile(r"[^a-zA-Z\- ']")
_SPACES = re.compile(r" +")


def normalise_text(text: str) -> str:
    """Normalise a sentence for the word error rate: lower-case letters, hyphens, apostrophes, single spaces."""
    kept = _NOT_SPEECH.sub("", text).replace("- ", " ").lower().replace("--", "").replace(" '", "'")
    return _SPACES.sub(" ", kept).strip()


def label_text(text: str) -> str:
    """Normalise a sentence for grapheme-to-phoneme conversion, as in the official label preparation.

    Weaker than `normalise_text`: every space that is kept here becomes one silence in the labels.
    """
    return _NOT_SPEECH.sub("", text.strip()).replace("--", "").lower()
