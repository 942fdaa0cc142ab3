"""Fixtures of the word-search tests."""

from support.word_search import lexicon, model

__all__ = ["lexicon", "model"]
