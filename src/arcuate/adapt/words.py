"""Labels through a language model: the words that the search hears, said as phonemes."""

from collections.abc import Callable, Sequence

import numpy as np

from arcuate.decode.scores import arrange
from arcuate.decode.words import WordSearch
from arcuate.pronounce import to_tokens
from arcuate.tokens import CLASSES


def word_labels(search: WordSearch) -> Callable[[np.ndarray], Sequence[int]]:
    """Frame scores (F, V) to the tokens of the likeliest words, as the labels of trials are made from texts."""

    def label(log_probs: np.ndarray) -> Sequence[int]:
        found = search.search(arrange(log_probs, CLASSES, "the trial")[0])
        return to_tokens(" ".join(found[0].words))[0] if found and found[0].words else ()

    return label
