"""Text normalisation. Scores and labels of both benchmarks rest on these two functions and on no others."""

import re

_NOT_SPEECH = re.compile(r"[^a-zA-Z\- ']")
_SPACES = re.compile(r" +")


def normalise_text(text: str) -> str:
    """A sentence as the word error rate sees it: lower-case letters, hyphens, apostrophes, single spaces."""
    kept = _NOT_SPEECH.sub("", text).replace("- ", " ").lower().replace("--", "").replace(" '", "'")
    return _SPACES.sub(" ", kept).strip()


def label_text(text: str) -> str:
    """A sentence as the official label preparation hands it to its grapheme-to-phoneme step.

    Weaker than `normalise_text` on purpose: every space kept here becomes one silence in the labels.
    """
    return _NOT_SPEECH.sub("", text.strip()).replace("--", "").lower()
