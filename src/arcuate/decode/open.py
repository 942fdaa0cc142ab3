"""A word search from its parts: a lexicon, a language model, weights, and words added on the way."""

from collections.abc import Mapping

import numpy as np

from arcuate.decode.settings import Decoding
from arcuate.decode.tree import grow_tree
from arcuate.decode.words import WordSearch
from arcuate.errors import UserError
from arcuate.lexicon import Lexicon
from arcuate.lm.model import LanguageModel


def word_search(
    lexicon: Lexicon,
    model: LanguageModel,
    settings: Decoding | None = None,
    *,
    boundary: int | None = None,
    weights: Mapping[str, float] | None = None,
) -> WordSearch:
    """A search over the words of a lexicon; `weights` in nat make some words likelier (hot words, names).

    Blank is class 0 and the boundary the last class, as `FrameScores` arranges them; `boundary=-1` for alphabets
    without one. Words that the model does not know are scored as its unknown word.
    """
    if not len(lexicon):
        raise UserError("the lexicon is empty; a search needs at least one word")
    classes = lexicon.classes
    edge = len(classes) - 1 if boundary is None else boundary
    said = set(np.unique(lexicon.tokens).tolist())
    if 0 in said or edge in said:
        raise UserError(f"{lexicon.name}: pronunciations must not contain the blank or the word boundary")
    ids = model.words.find_all(lexicon.words).astype(np.int32)
    outside = tuple(lexicon.words[i] for i in np.flatnonzero(ids < 0))
    extra = np.array([(weights or {}).get(word, 0.0) for word in lexicon.words], np.float32)
    absent = [word for word in weights or {} if word not in lexicon]
    if absent:
        raise UserError(f"{absent[0]!r} has a weight but no pronunciation; add it to the lexicon first")
    tree = grow_tree(
        lexicon.word_of, lexicon.tokens, lexicon.offsets, np.where(ids < 0, model.unk, ids), extra
    )
    return WordSearch(tree, lexicon.words, model, classes, edge, settings or Decoding(), outside)


def with_words(
    search: WordSearch,
    lexicon: Lexicon,
    words: Mapping[str, float],
    pronunciations: Mapping[str, list[tuple[str, ...]]] | None = None,
) -> tuple[WordSearch, Lexicon]:
    """The search with further words, each with its weight; said as given, else as the dictionary or a rule says."""
    given = pronunciations or {}
    longer = lexicon.with_entries((word, phones) for word in given for phones in given[word])
    longer = longer.with_words(word for word in words if word not in longer)
    known = {word: float(w) for word, w in zip(search.words, search.tree.weights, strict=True) if w}
    boundary = search.boundary
    return word_search(
        longer, search.model, search.settings, boundary=boundary, weights=known | dict(words)
    ), longer
