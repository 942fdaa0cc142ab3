"""Which sentences a model has seen: hashes of its training text, so that leakage can be told later."""

from collections.abc import Iterable

import numpy as np

from arcuate.lm.vocabulary import hash_bytes
from arcuate.text import normalise_text


def hash_sentence(sentence: str) -> np.uint64:
    """64 bits of a sentence as the word error rate sees it."""
    text = np.frombuffer(normalise_text(sentence).encode(), np.uint8)
    return np.uint64(hash_bytes(text, 0, len(text)))


def hash_sentences(sentences: Iterable[str]) -> np.ndarray:
    """Sorted, distinct hashes; empty lines do not count."""
    hashes = {int(hash_sentence(sentence)) for sentence in sentences if normalise_text(sentence)}
    return np.array(sorted(hashes), np.uint64)
