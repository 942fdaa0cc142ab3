"""Pseudo-labels through a language model: the words of the word search, converted back to phonemes."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from arcuate.data.alphabet import CLASSES, SILENCE_NAME, encode
from arcuate.data.text import pronounce
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.decoding.log_probs import reorder_classes
from arcuate.decoding.word_search.search import WordSearch

_ALL_FRAMES = 1 << 30


def word_labeller(search: WordSearch, chunk_frames: int = _ALL_FRAMES) -> Callable[[np.ndarray], Sequence[int]]:
    """Return a function from log-probabilities (F, V) to the tokens of the best word sequence.

    The search runs in chunks of `chunk_frames`: compiled code holds the interpreter lock, and a thread that decodes in
    real time must not wait for a complete sentence.
    """

    def label(log_probs: np.ndarray) -> Sequence[int]:
        frames, state = reorder_classes(log_probs, CLASSES, "the trial")[0], search.start()
        for first in range(0, len(frames), chunk_frames):
            state = search.step(state, frames[first : first + chunk_frames])
        return hypothesis_tokens(search, search.finish(state))

    return label


def hypothesis_tokens(search: WordSearch, nbest: Sequence[Hypothesis]) -> Sequence[int]:
    """Tokens of the best hypothesis, with a silence after every word; empty if it has no words."""
    return encode(list(word_phonemes(search, nbest[0].words))) if nbest and nbest[0].words else ()


def word_phonemes(search: WordSearch, words: Sequence[str]) -> Iterator[str]:
    """Phonemes of words as in training labels, or from the lexicon if it lacks that pronunciation."""
    in_context = iter(_split_words(pronounce(" ".join(words)).names))  # homographs depend on neighbours
    for word in words:
        parts = [next(in_context, ()) for _ in _split_words(pronounce(word).names)]
        known = _lexicon_pronunciations(search, word)
        if known and tuple(phone for part in parts for phone in part) not in known:
            parts = [known[0]]
        for part in parts:
            yield from part
            yield SILENCE_NAME


def _split_words(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Split phonemes into words at silences."""
    ends = [i for i, name in enumerate(names) if name == SILENCE_NAME]
    return [tuple(names[a:b]) for a, b in zip([0, *(e + 1 for e in ends)], ends, strict=False)]


def _lexicon_pronunciations(search: WordSearch, word: str) -> list[tuple[str, ...]]:
    """All pronunciations of a word in the search's lexicon, shortest first."""
    if word not in search.words:
        return []
    tree, found = search.tree, []
    for node in tree.entry_nodes[tree.entry_words == search.words.index(word)].tolist():
        phones = []
        while node > 0:
            phones.append(search.classes[tree.tokens[node]])
            node = int(tree.parents[node])
        found.append(tuple(reversed(phones)))
    return sorted(found, key=lambda phones: (len(phones), phones))
