"""A model file read whole and checked number by number: what opening it leaves out for speed."""

from pathlib import Path

import numpy as np
from numba import njit

from arcuate.lm.file import check_crc, damaged
from arcuate.lm.model import LanguageModel
from arcuate.lm.query import NGramArrays


def check_file(path: Path) -> LanguageModel:
    """Open a model and check every part of it; UserError says what is wrong."""
    model = LanguageModel.open(path)
    for name in NGramArrays._fields:
        check_crc(name, getattr(model.arrays, name), model.about, path)
    if model.sentences is not None:
        check_crc("sentences", model.sentences, model.about, path)
        if (model.sentences[1:] <= model.sentences[:-1]).any():
            raise damaged(path, "its sentence hashes are not in order")
    require_links(model)
    if not (np.isfinite(model.arrays.log_probs).all() and np.isfinite(model.arrays.backoffs).all()):
        raise damaged(path, "it contains values that are not numbers")
    if model.arrays.log_probs.max() > 0:
        raise damaged(path, "it contains probabilities above one")
    return model


def require_links(model: LanguageModel) -> None:
    """Refuse a model whose n-grams could not be listed."""
    if not links_fit(model.arrays, len(model.words)):
        raise damaged(Path(model.name), "its n-grams are not linked as they should be")


@njit(cache=True)
def links_fit(arrays: NGramArrays, n_words: int) -> bool:
    """Whether children are in order, and all links point to shorter contexts."""
    n_inner, n_nodes = arrays.backoffs.shape[0], arrays.words.shape[0]
    for node in range(n_inner):
        first, end = arrays.firsts[node], arrays.firsts[node + 1]
        if first > end or first <= node or end > n_nodes:
            return False
        for i in range(first, end):
            if (
                arrays.words[i] < 0
                or arrays.words[i] >= n_words
                or (i > first and arrays.words[i] <= arrays.words[i - 1])
            ):
                return False
        if node > 0 and not 0 <= arrays.suffixes[node] < node:
            return False
    for i in range(arrays.nexts.shape[0]):  # noqa: SIM110 (compiled)
        if not 0 <= arrays.nexts[i] < n_inner:
            return False
    return True
