"""Labels through a language model: the words that the search hears, said as phonemes."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from arcuate.data.alphabet import CLASSES, SILENCE_NAME, encode
from arcuate.data.pronunciation import pronounce
from arcuate.decoding.hypothesis import Hypothesis
from arcuate.decoding.log_probs import reorder_classes
from arcuate.decoding.word_search.search import WordSearch

AT_ONCE = 1 << 30  # frames of a search that nobody waits for


def word_labels(search: WordSearch, n_frames: int = AT_ONCE) -> Callable[[np.ndarray], Sequence[int]]:
    """Frame scores (F, V) to the tokens of the likeliest words.

    `n_frames` are searched at a time: compiled code lets no other thread in, and one that decodes may be waiting.
    """

    def label(log_probs: np.ndarray) -> Sequence[int]:
        frames, state = reorder_classes(log_probs, CLASSES, "the trial")[0], search.start()
        for first in range(0, len(frames), n_frames):
            state = search.step(state, frames[first : first + n_frames])
        return said_as_tokens(search, search.finish(state))

    return label


def said_as_tokens(search: WordSearch, found: Sequence[Hypothesis]) -> Sequence[int]:
    """The tokens of the first reading, a silence after every word; none where it has no words."""
    return encode(list(say(search, found[0].words))) if found and found[0].words else ()


def say(search: WordSearch, words: Sequence[str]) -> Iterator[str]:
    """Phonemes of words as the labels of trials are made from texts, but never as the lexicon does not say them."""
    usual = iter(split_words(pronounce(" ".join(words)).names))  # words in context: "use" may be two
    for word in words:
        parts = [next(usual, ()) for _ in split_words(pronounce(word).names)]
        known = pronunciations(search, word)
        if known and tuple(phone for part in parts for phone in part) not in known:
            parts = [known[0]]
        for part in parts:
            yield from part
            yield SILENCE_NAME


def split_words(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Phonemes by word; a silence ends each."""
    ends = [i for i, name in enumerate(names) if name == SILENCE_NAME]
    return [tuple(names[a:b]) for a, b in zip([0, *(e + 1 for e in ends)], ends, strict=False)]


def pronunciations(search: WordSearch, word: str) -> list[tuple[str, ...]]:
    """All that the lexicon of a search has for a word, the shortest first."""
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
