"""A small lexicon and n-gram for word-search tests."""

import itertools

import numpy as np
import pytest

from arcuate.language.lexicon import Lexicon, make_lexicon
from arcuate.language.ngram.model import LanguageModel
from arcuate.language.ngram.trie import NGramTable, NGramTables, model_from_tables

CLASSES = ("BLANK", "a", "b", "SIL")


BLANK, BOUNDARY = 0, 3


# two homophones, a word with two pronunciations, a word that begins another, a doubled token
ENTRIES = [("one", "a"), ("won", "a"), ("two", "a b"), ("two", "b"), ("too", "b b"), ("ab", "a b a")]


@pytest.fixture(scope="module")
def lexicon() -> Lexicon:
    return make_lexicon([(word, tuple(phones.split())) for word, phones in ENTRIES], CLASSES, "tiny")


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    """A 3-gram with gaps, so that every kind of back-off occurs."""
    words = ["<unk>", "<s>", "</s>", "one", "won", "two", "too", "ab"]
    rng = np.random.default_rng(3)
    orders = []
    for order, keep in ((1, 1.0), (2, 0.5), (3, 0.3)):
        ids = np.array(list(itertools.product(range(len(words)), repeat=order)), np.int32)
        inner = ids[:, 1:-1] if order > 2 else ids[:, :0]
        allowed = (ids[:, 0] != 2) & ~np.isin(inner, (1, 2)).any(axis=1) if order > 1 else np.ones(len(ids), bool)
        allowed &= ids[:, -1] != 1 if order > 1 else True
        ids = ids[allowed & (rng.random(len(ids)) < keep)]
        scores = rng.normal(-2.0, 1.0, len(ids)).clip(max=-0.05).astype(np.float32)
        backoffs = rng.normal(-0.5, 0.3, len(ids)).astype(np.float32) * (order < 3)
        orders.append(NGramTable(ids, scores, backoffs))
    return model_from_tables(NGramTables(words, tuple(orders)))


def frames(seed: int, n_frames: int, sharp: float = 2.0, n_classes: int = 4) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(scale=sharp, size=(n_frames, n_classes))
    return (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)
