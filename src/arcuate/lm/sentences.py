"""Which sentences a model has seen: hashes of its training text, so that leakage can be told later."""

import hashlib
from collections.abc import Iterable

import numpy as np

from arcuate.text import normalise_text


def hash_sentence(sentence: str) -> int:
    """64 bits of a sentence as the word error rate sees it."""
    return _hash(normalise_text(sentence))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def hash_sentences(sentences: Iterable[str]) -> np.ndarray:
    """Sorted, distinct hashes; sentences without words do not count."""
    hashes = {_hash(text) for text in map(normalise_text, sentences) if text}
    return np.sort(np.fromiter(hashes, np.uint64, len(hashes)))
